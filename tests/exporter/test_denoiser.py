"""The denoiser: only what is asked is computed, and nothing else changes it."""

from __future__ import annotations

import pytest
import torch

from exporter.denoiser import Denoiser
from tests.tiny_export import random_denoiser, tiny_config


def test_asking_for_some_positions_gives_what_asking_for_all_does(denoiser: Denoiser) -> None:
    ids = torch.randint(0, 40, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(9) < torch.tensor([[9], [4], [7]])
    every = denoiser(ids, mask, torch.arange(9).expand(3, -1))
    some = torch.tensor([[3, 3, 0], [1, 2, 3], [6, 0, 5]])
    picked = torch.gather(every, 1, some[:, :, None].expand(-1, -1, 64))
    torch.testing.assert_close(denoiser(ids, mask, some), picked)


def test_shifted_logits_are_those_of_the_position_before() -> None:
    plain, shifted = (random_denoiser(tiny_config(shifted=s)) for s in (False, True))
    ids, mask = torch.arange(6)[None], torch.ones((1, 6), dtype=torch.bool)
    wanted = plain(ids, mask, torch.tensor([[0, 0, 3]]))
    torch.testing.assert_close(shifted(ids, mask, torch.tensor([[0, 1, 4]])), wanted)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"layers": 0}, "layers >= 1"),
        ({"heads": 3}, "heads must divide hidden"),
        ({"kv_heads": 3}, "kv_heads must divide heads"),
        ({"mask_id": 64}, "mask_id < vocab"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tiny_config(**sizes)
