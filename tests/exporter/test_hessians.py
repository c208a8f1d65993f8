"""Hessians: sums over the tokens that count, whatever the batch and the memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engines.errors import InputError
from exporter.calibrate import calibrate
from exporter.denoiser import Denoiser
from exporter.framework import LAYER_OF_SITE
from exporter.hessians import DECIDED_WEIGHT, Hessians, bytes_of_block
from exporter.names import sites_of_blocks
from exporter.states import State, StateLog, sample_states
from tests.exporter.test_calibrate import info, requests
from tests.tiny_export import random_denoiser, tiny_config


def some_states(denoiser: Denoiser, count: int = 40) -> list[State]:
    log = StateLog()
    calibrate(denoiser, requests(9), info(denoiser), batch=4, on_pass=log)
    assert len(log.states) == 9 * 4
    return sample_states(log.states, count, 0)


def one_by_one(denoiser: Denoiser, states: list[State]) -> dict[str, np.ndarray]:
    """Return the Hessians from each state run alone, without padding."""
    config, found = denoiser.config, {}
    seen: dict[str, torch.Tensor] = {}
    hooks = []
    for site in sites_of_blocks(config.layers):
        block, _, name = site.rpartition(".")

        def note(layer: torch.nn.Module, inputs: tuple[torch.Tensor], site: str = site) -> None:
            seen[site] = inputs[0][0].double()

        module = denoiser.get_submodule(f"{block}.{LAYER_OF_SITE[name]}")
        hooks.append(module.register_forward_pre_hook(note))
    for state in states:
        ids, asked = torch.from_numpy(state.ids).long(), torch.from_numpy(state.asked).long()
        with torch.no_grad():
            denoiser(ids[None], torch.ones((1, len(ids)), dtype=torch.bool), asked[None])
        weight = torch.where(ids == config.mask_id, 1.0, DECIDED_WEIGHT).double()
        at = (asked - 1).clamp(min=0) if config.shifted else asked
        for site, values in seen.items():
            scaled = values * (weight if len(values) == len(ids) else weight[at])[:, None]
            found[site] = found.get(site, 0) + (scaled.T @ scaled).numpy()
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("shifted", [False, True])
def test_each_token_counts_by_its_weight_and_padding_never(shifted: bool) -> None:
    denoiser = random_denoiser(tiny_config(shifted=shifted))
    states = some_states(denoiser)
    assert len({len(state.ids) for state in states}) > 3
    hessians, wanted = Hessians(denoiser, states), one_by_one(denoiser, states)
    assert set(wanted) == set(sites_of_blocks(2))
    for site, value in wanted.items():
        found = hessians(site)
        np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-4 * np.abs(value).max())
        np.testing.assert_allclose(found, found.T, rtol=1e-9, atol=1e-9 * np.abs(value).max())


def test_little_memory_takes_a_run_a_block_and_gives_the_same(denoiser: Denoiser) -> None:
    states = some_states(denoiser)
    ample, scarce = Hessians(denoiser, states), Hessians(denoiser, states, memory=1)
    for site in sites_of_blocks(2):
        np.testing.assert_array_equal(ample(site), scarce(site))
    assert (ample.runs, scarce.runs) == (1, 2)
    kept = sum(scarce(site).nbytes for site in sites_of_blocks(2)[4:])
    assert kept == bytes_of_block(denoiser.config)


def test_a_run_leaves_no_hook_on_the_module(denoiser: Denoiser) -> None:
    Hessians(denoiser, some_states(denoiser))("blocks.0.ff_in")
    assert all(not module._forward_pre_hooks for module in denoiser.modules())


def test_a_log_keeps_canvases_without_padding_and_their_asked_positions(
    denoiser: Denoiser,
) -> None:
    mask_id = denoiser.config.mask_id
    for state in some_states(denoiser):
        assert (state.ids[state.asked] == mask_id).all()
        assert len(state.asked) == (state.ids == mask_id).sum()
        assert state.masked == pytest.approx(len(state.asked) / 8)


def test_no_state_is_an_error(denoiser: Denoiser) -> None:
    with pytest.raises(InputError, match="no calibration states"):
        Hessians(denoiser, [])
