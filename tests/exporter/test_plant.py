"""Planted outliers: the same function, and activations that are harder to round."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from engines.errors import InputError
from exporter.checkpoint import load_denoiser, read_checkpoint
from exporter.denoiser import Denoiser
from exporter.framework import TorchBackend
from exporter.plant import SITES, PlantConfig, main, plant, plant_checkpoint
from exporter.weights import Item, read_header, write_family
from tests.exporter.test_graph import states
from tests.tiny_export import random_denoiser, tiny_config

GIVEN = states(6, 24, 12)


def planted(denoiser: Denoiser, wanted: PlantConfig) -> Denoiser:
    changed = copy.deepcopy(denoiser)
    parameters = dict(changed.named_parameters())
    for name, scaling in plant(denoiser.config, wanted).items():
        parameters[name].data = torch.from_numpy(scaling(parameters[name].numpy()))
    return changed


def peaks(denoiser: Denoiser) -> dict[str, float]:
    """Return the largest magnitude over the median one at each site."""
    found: dict[str, float] = {}
    layers = {"k_proj": "attn_in", "attn_out": "attn_out", "ff_up": "ff_in", "ff_down": "ff_down"}
    hooks = []
    for number, block in enumerate(denoiser.blocks):
        for layer, site in layers.items():

            def note(
                layer: torch.nn.Module,
                inputs: tuple[torch.Tensor],
                name: str = f"{number}.{site}",
            ) -> None:
                size = inputs[0].abs()
                found[name] = float(size.max() / size.median())

            hooks.append(block.get_submodule(layer).register_forward_pre_hook(note))
    TorchBackend(denoiser).logits(*GIVEN)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("sites", [SITES, *((site,) for site in SITES)])
@pytest.mark.parametrize("biased", [False, True])
def test_logits_stay_and_the_planted_sites_alone_get_outliers(
    sites: tuple[str, ...], biased: bool
) -> None:
    denoiser = random_denoiser(tiny_config(qkv_bias=biased))
    changed = planted(denoiser, PlantConfig(factor=64, channels=2, sites=sites))
    before = TorchBackend(denoiser).logits(*GIVEN)
    np.testing.assert_allclose(TorchBackend(changed).logits(*GIVEN), before, rtol=1e-5, atol=1e-5)
    rough, smooth = peaks(changed), peaks(denoiser)
    for name, peak in smooth.items():
        if name.partition(".")[2] in sites:
            assert rough[name] > 4 * peak, name
        else:
            assert rough[name] == pytest.approx(peak, rel=1e-4), name


def test_the_choice_of_channels_is_the_seed_s_and_no_other_site_s() -> None:
    config = tiny_config()
    one, again, other = (plant(config, PlantConfig(seed=seed)) for seed in (3, 3, 4))
    alone = plant(config, PlantConfig(seed=3, sites=("ff_down",)))
    name = "blocks.1.ff_up.weight"
    np.testing.assert_array_equal(one[name].rows, again[name].rows)
    np.testing.assert_array_equal(one[name].rows, alone[name].rows)
    assert any((one[name].rows != other[name].rows).any() for name in one)
    assert (one[name].rows == 8).sum() == 4


def test_a_planted_checkpoint_is_whole_and_of_the_same_function(
    checkpoint: Path, denoiser: Denoiser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "PLANTED"
    assert main([str(checkpoint), "-o", str(out), "--channels", "3"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert {path.name for path in out.iterdir()} == {path.name for path in checkpoint.iterdir()}
    before = TorchBackend(denoiser).logits(*GIVEN)
    after = TorchBackend(load_denoiser(out)).logits(*GIVEN)
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)
    assert main([str(checkpoint), "-o", str(out)]) == 2
    assert "choose another place" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["PLANTED"]


@pytest.mark.parametrize("kind", ["BF16", "F16"])
def test_weights_keep_their_type_exactly_or_are_refused(
    kind: str, checkpoint: Path, tmp_path: Path
) -> None:
    source = tmp_path / "SOURCE"
    source.mkdir()
    for file in checkpoint.glob("*.json"):
        (source / file.name).write_bytes(file.read_bytes())
    state = load_denoiser(checkpoint).state_dict()
    kinds = {"BF16": torch.bfloat16, "F16": torch.float16}
    read = read_checkpoint(checkpoint)
    items = [
        Item(
            key,
            kind,
            read.tensors[key].shape,
            state[name].to(kinds[kind]).view(torch.int16).numpy,
        )
        for name, key in read.keys.items()
    ]
    write_family(source / "model.safetensors", items)
    out = plant_checkpoint(source, tmp_path / "OUT", PlantConfig(factor=2, channels=1))
    assert {stored.kind for stored in read_header(out / "model.safetensors").values()} == {kind}
    before = TorchBackend(load_denoiser(source)).logits(*GIVEN)
    after = TorchBackend(load_denoiser(out)).logits(*GIVEN)
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)
    if kind == "F16":
        with pytest.raises(InputError, match="cannot be scaled exactly in F16"):
            plant_checkpoint(source, tmp_path / "FAR", PlantConfig(factor=2**20))
        assert not (tmp_path / "FAR").exists()


def test_what_does_not_fit_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, says in (
        (("--factor", "3"), "power of two"),
        (("--factor", "nan"), "power of two"),
        (("--channels", "0"), "channels >= 1"),
        (("--channels", "33"), "fewer channels"),
        (("--sites", "head"), "sites are attn_in"),
    ):
        assert main([str(checkpoint), "-o", str(tmp_path / "NO"), *options]) == 2
        assert says in capsys.readouterr().err
    assert main([str(checkpoint), "-o", str(checkpoint / "IN")]) == 2
    assert "only read" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
