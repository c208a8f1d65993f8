"""Rounded weights: within half a step, symmetric, and packed as ONNX reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from engines.precision import WEIGHT_GROUP
from exporter import quantize
from exporter.gptq import gptq
from exporter.quantize import (
    pack_int4,
    quantize_channels,
    quantize_groups,
    quantized_items,
    quantized_name,
    scale_name,
)
from exporter.weights import Item, Stored, floats, mapped, read_header, write_family


def weight(outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(outputs, inputs)).astype(np.float32)


def test_channels_are_within_half_a_step_and_use_the_whole_range() -> None:
    values = weight(6, 40)
    integers, scale = quantize_channels(values)
    assert integers.dtype == np.int8
    assert integers.shape == (40, 6)
    assert np.abs(integers).max(0).tolist() == [127] * 6
    error = np.abs(integers.T * scale[:, None] - values)
    assert (error <= scale[:, None] / 2 * (1 + 1e-5)).all()


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("inputs", [32, 40, 31, 96])
def test_groups_are_within_half_a_step(bits: int, inputs: int) -> None:
    values = weight(6, inputs)
    integers, scale = quantize_groups(values, bits)
    assert scale.shape == (-(-inputs // WEIGHT_GROUP), 6)
    assert np.abs(integers).max() == 2 ** (bits - 1) - 1
    steps = np.repeat(scale, WEIGHT_GROUP, axis=0)[:inputs]
    error = np.abs(integers * steps - values.T)
    assert (error <= steps / 2 * (1 + 1e-2)).all()


def test_zeros_stay_zeros() -> None:
    for zeros in (np.zeros((3, 64), np.float32), np.full((3, 64), 1e-44, np.float32)):
        for integers, scale in (
            quantize_channels(zeros),
            quantize_groups(zeros, 4),
            gptq(zeros, np.eye(64), 4, by_channel=False),
        ):
            assert not integers.any()
            assert (scale == 1).all()


@pytest.mark.parametrize("shape", [(5, 3), (4, 4), (1, 1)])
def test_packed_integers_are_read_by_onnx(shape: tuple[int, int]) -> None:
    values = np.random.default_rng(0).integers(-7, 8, shape).astype(np.int8)
    tensor = onnx.TensorProto(
        data_type=onnx.TensorProto.INT4, dims=shape, raw_data=pack_int4(values).tobytes()
    )
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor).astype(np.int8), values)


@pytest.mark.parametrize(("family", "bits"), [("int8", 8), ("w4", 4), ("w8", 8), ("w16", 16)])
def test_a_family_holds_all_that_its_graphs_need(family: str, bits: int, tmp_path: Path) -> None:
    values = {"norm": weight(1, 8)[0], "a": weight(6, 40), "b": weight(3, 5)}
    stored = write_family(
        tmp_path / "model.safetensors",
        [Item(name, "F32", v.shape, lambda v=v: v) for name, v in values.items()],
    )
    write_family(tmp_path / "f.safetensors", quantized_items(stored, {"a": "site"}, bits, family))
    written = read_header(tmp_path / "f.safetensors")
    assert {"norm", "b", quantized_name("a"), scale_name("a")} <= set(written)
    assert "a" not in written
    assert written["b"].shape == (3, 5)


@pytest.mark.parametrize(("bits", "family"), [(8, "int8"), (4, "w4"), (8, "w8")])
def test_a_weight_is_read_and_rounded_once(
    bits: int, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = weight(6, 70)
    item = Item("w", "F32", values.shape, lambda: values)
    stored = write_family(tmp_path / "a.safetensors", [item])
    reads: list[str] = []

    def counted(of: Stored) -> NDArray[np.float32]:
        reads.append("w")
        return floats(of)

    monkeypatch.setattr(quantize, "floats", counted)
    items = quantized_items(stored, {"w": "site"}, bits, family)
    made = write_family(tmp_path / "b.safetensors", items)
    assert reads == ["w"]
    scales_alone = quantized_items(stored, {"w": "site"}, bits, family)[1].make()
    assert mapped(made[scale_name("w")]).tobytes() == scales_alone.tobytes()
