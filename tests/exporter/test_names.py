"""Names: every parameter has one key, every linear layer of a block one site."""

from __future__ import annotations

import pytest
import torch

from exporter.denoiser import Denoiser
from exporter.names import keys_from_parameters, linear_from_key, sites_of_blocks
from tests.tiny_export import tiny_config


@pytest.mark.parametrize("architecture", ["llada", "dream"])
def test_every_parameter_has_its_own_key_and_the_linears_of_blocks_a_site(
    architecture: str,
) -> None:
    with torch.device("meta"):
        denoiser = Denoiser(tiny_config(layers=12, qkv_bias=architecture == "dream"))
    names = {name: True for name, _ in denoiser.named_parameters()}
    keys = keys_from_parameters(architecture, names)
    assert len(set(keys.values())) == len(names)
    places = {name: linear_from_key(architecture, key) for name, key in keys.items()}
    quantized = {name for name, place in places.items() if place is not None}
    assert len(quantized) == 12 * 7
    assert all(name.startswith("blocks.") and name.endswith(".weight") for name in quantized)
    assert {place[1] for place in places.values() if place} == set(sites_of_blocks(12))
    assert places["blocks.11.q_proj.weight"] == places["blocks.11.v_proj.weight"]
    assert places["blocks.11.ff_down.weight"] == (11, "blocks.11.ff_down")


def test_llada_s_head_is_not_taken_for_a_down_projection() -> None:
    assert linear_from_key("llada", "model.transformer.ff_out.weight") is None
    place = linear_from_key("llada", "model.transformer.blocks.3.ff_out.weight")
    assert place == (3, "blocks.3.ff_down")
