"""The gate: it passes what rounding explains, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engines.backend import FakeBackend, Floats, Ids, Mask
from engines.errors import BackendError
from engines.precision import FULL_PRECISION
from exporter.denoiser import Denoiser
from exporter.folder import Export
from exporter.framework import TorchBackend
from exporter.parity import (
    Parity,
    check_parity,
    check_serve_tail,
    compare,
    states_from_requests,
)
from tests.exporter.test_calibrate import info, requests
from tests.tiny_export import random_denoiser


def fake(denoiser: Denoiser, change: float) -> FakeBackend:
    """Return the denoiser with noise of a size on its logits."""
    plain = TorchBackend(denoiser)
    rng = np.random.default_rng(0)

    def logits(ids: Ids, mask: Mask, positions: Ids) -> Floats:
        exact = plain.logits(ids, mask, positions, np.zeros(len(ids), np.float32))
        return exact + rng.uniform(-change, change, exact.shape).astype(np.float32)

    return FakeBackend(FULL_PRECISION, logits)


def test_states_are_all_passes_of_one_ragged_batch(denoiser: Denoiser) -> None:
    states = states_from_requests(requests(5), TorchBackend(denoiser), info(denoiser))
    assert [state.step for state in states] == [1, 2, 3, 4]
    assert len(set(states[0].lengths.tolist())) > 1
    assert (states[2].ids != states[0].ids).any()


@pytest.mark.parametrize(("noise", "passes"), [(0.0, True), (1e-5, True), (0.1, False)])
def test_the_gate_passes_rounding_only(noise: float, passes: bool, denoiser: Denoiser) -> None:
    model = info(denoiser)
    reference = TorchBackend(denoiser)
    states = states_from_requests(requests(5), reference, model)
    parity = compare(states, reference, fake(denoiser, noise), model.mask_id)
    assert parity.positions == sum(state.positions.size for state in states)
    if passes:
        check_parity(parity)
    else:
        with pytest.raises(BackendError, match="differs from the framework"):
            check_parity(parity)


def test_one_wrong_weight_does_not_pass(denoiser: Denoiser) -> None:
    model = info(denoiser)
    reference = TorchBackend(denoiser)
    states = states_from_requests(requests(3), reference, model)
    wrong = random_denoiser(denoiser.config)
    with torch.no_grad():
        wrong.blocks[1].ff_up.weight[3, 3] += 0.05
    with pytest.raises(BackendError, match="differs"):
        check_parity(compare(states, reference, TorchBackend(wrong), model.mask_id))


def test_a_swapped_token_that_the_error_does_not_explain_does_not_pass() -> None:
    parity = Parity(
        max_error=1e-6, largest=10, agreement=0.99, explained=False, positions=9, passes=1
    )
    with pytest.raises(BackendError):
        check_parity(parity)
    check_parity(replace(parity, explained=True))


def test_logits_that_are_not_finite_are_an_error(denoiser: Denoiser) -> None:
    model, reference = info(denoiser), TorchBackend(denoiser)
    states = states_from_requests(requests(2), reference, model)

    def nan(ids: Ids, mask: Mask, positions: Ids) -> Floats:
        return np.full((*positions.shape, model.vocab), np.nan, np.float32)

    with pytest.raises(BackendError, match="not finite in step 1"):
        compare(states, reference, FakeBackend(FULL_PRECISION, nan), model.mask_id)


def test_a_tail_that_predicts_the_mask_token_is_an_error(denoiser: Denoiser) -> None:
    model, reference = info(denoiser), TorchBackend(denoiser)
    states = states_from_requests(requests(2), reference, model)
    check_serve_tail(states, reference, model.vocab, model.mask_id)

    def mask_wins(ids: Ids, mask: Mask, positions: Ids) -> Floats:
        logits = np.zeros((*positions.shape, model.vocab), np.float32)
        logits[..., model.mask_id] = 5
        return logits

    with pytest.raises(BackendError, match="impossible token"):
        check_serve_tail(
            states, FakeBackend(FULL_PRECISION, mask_wins), model.vocab, model.mask_id
        )


def test_the_export_says_how_its_graphs_compare(exported: Export) -> None:
    full = exported.parity["fp32"]
    assert isinstance(full, dict)
    assert full["agreement"] > 0.999
    precisions = exported.parity["precisions"]
    assert isinstance(precisions, dict)
    error = {name: entry["max_error"] for name, entry in precisions.items()}
    assert error["fp32.trace"] == 0
    assert error["w16a16.trace"] < error["w8a8.trace"] < error["w4a4.trace"]
