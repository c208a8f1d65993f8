"""The torch model as a backend, and what it lets calibration see."""

from __future__ import annotations

import numpy as np
import torch

from exporter.denoiser import Denoiser
from exporter.framework import TorchBackend
from tests.tiny_export import random_denoiser


def test_padding_is_never_counted(denoiser: Denoiser) -> None:
    seen: list[np.ndarray] = []
    backend = TorchBackend(denoiser, lambda largest, progress: seen.append(largest))
    ids = np.full((1, 12), 5)
    mask = np.arange(12)[None] < 6
    positions, progress = np.array([[4, 5]]), np.zeros(1, np.float32)
    with torch.no_grad():
        loud = random_denoiser(denoiser.config)
        loud.load_state_dict(denoiser.state_dict())
        loud.embed.weight[33] *= 1000
    for filler in (5, 7, 33):
        TorchBackend(loud, lambda largest, progress: seen.append(largest)).logits(
            np.where(mask, ids, filler), mask, positions, progress
        )
    backend.logits(ids, mask, positions, progress)
    for largest in seen[1:]:
        np.testing.assert_allclose(largest, seen[0], rtol=1e-5)


def test_watching_leaves_no_trace_on_the_module(denoiser: Denoiser) -> None:
    given = (np.full((1, 3), 5), np.ones((1, 3), bool), np.array([[1]]), np.zeros(1, np.float32))
    plain = TorchBackend(denoiser).logits(*given)
    calls: list[int] = []
    watched = TorchBackend(denoiser, lambda largest, progress: calls.append(largest.shape[1]))
    np.testing.assert_array_equal(watched.logits(*given), plain)
    TorchBackend(denoiser).logits(*given)
    assert calls == [8]
    assert all(not module._forward_pre_hooks for module in denoiser.modules())
