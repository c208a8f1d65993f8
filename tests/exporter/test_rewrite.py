"""Quantized graphs against the same rounding in the framework; and what the engine executes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from engines.backend import Floats
from engines.options import OrtOptions
from engines.ort import OrtBackend
from exporter.calibrate import read_calibration, window_scales
from exporter.denoiser import Denoiser
from exporter.folder import Export
from exporter.framework import TorchBackend, rotated_tensor
from exporter.hadamard import hadamard, rotated
from exporter.names import linear_from_key, sites_of_blocks
from exporter.parity import engine_of
from exporter.quantize import quantize_channels, quantize_groups, quantized_name, scale_name
from exporter.weights import Stored, floats, mapped, read_header
from tests.exporter.test_graph import states

LINEARS = ("q_proj", "k_proj", "v_proj", "attn_out", "ff_gate", "ff_up", "ff_down")
GIVEN = states(6, 24, 12)


def scales_of(exported: Export) -> Floats:
    return np.array(exported.graphs["int8.serve"].scales, np.float32)


def rounded(
    denoiser: Denoiser,
    weight: Callable[[np.ndarray], np.ndarray],
    source: Callable[[str, Tensor], Tensor],
) -> TorchBackend:
    """Return a denoiser whose blocks round weights and inputs before every product."""
    changed = copy.deepcopy(denoiser)
    for number, block in enumerate(changed.blocks):
        for name in LINEARS:
            layer = getattr(block, name)
            assert isinstance(layer, nn.Linear)
            layer.weight = nn.Parameter(torch.from_numpy(weight(layer.weight.numpy())))
            layer.weight.requires_grad_(False)
            place = linear_from_key(
                "llada", f"model.transformer.blocks.{number}.{LLADA.get(name, name)}.weight"
            )
            assert place is not None
            layer.register_forward_pre_hook(
                lambda layer, inputs, site=place[1]: (source(site, inputs[0]),)
            )
    return TorchBackend(changed)


LLADA = {"ff_gate": "ff_proj", "ff_up": "up_proj", "ff_down": "ff_out"}


def int8_reference(denoiser: Denoiser, scales: Floats) -> TorchBackend:
    by_site = dict(zip(sites_of_blocks(2), scales.tolist(), strict=True))

    def weight(values: np.ndarray) -> np.ndarray:
        integers, scale = quantize_channels(values)
        return np.ascontiguousarray(integers.T * scale[:, None])

    def source(site: str, x: Tensor) -> Tensor:
        return (x / by_site[site]).round().clamp(-128, 127) * by_site[site]

    return rounded(denoiser, weight, source)


def test_an_int8_graph_rounds_as_the_framework_would(exported: Export, denoiser: Denoiser) -> None:
    scales = scales_of(exported).max(0)
    wanted = int8_reference(denoiser, scales).logits(*GIVEN)
    got = engine_of(exported, "int8.all.trace").logits(*GIVEN)
    full = TorchBackend(denoiser).logits(*GIVEN)
    cost = np.abs(wanted - full).mean()
    assert cost > 1e-2
    # Only inputs that lie within a last digit of the middle between two integers may differ.
    assert np.abs(got - wanted).mean() < 0.02 * cost


@pytest.mark.parametrize(("name", "bits", "steps"), [("w4a4", 4, 7), ("w8a8", 8, 127)])
def test_a_simulated_graph_rounds_as_the_framework_would(
    name: str, bits: int, steps: int, exported: Export, denoiser: Denoiser
) -> None:
    def weight(values: np.ndarray) -> np.ndarray:
        integers, scale = quantize_groups(values, bits)
        spread = np.repeat(scale, 32, axis=0)[: len(integers)]
        return np.ascontiguousarray((integers * spread).T.astype(np.float32))

    def source(site: str, x: Tensor) -> Tensor:
        step = x.abs().amax(-1, keepdim=True) / steps
        return (x / step).round() * step

    wanted = rounded(denoiser, weight, source).logits(*GIVEN)
    got = engine_of(exported, f"{name}.trace").logits(*GIVEN)
    cost = np.abs(wanted - TorchBackend(denoiser).logits(*GIVEN)).mean()
    assert np.abs(got - wanted).mean() < 0.02 * cost


def test_scales_as_an_input_give_what_constants_give(exported: Export) -> None:
    shared = engine_of(exported, "int8.serve")
    for window in range(exported.windows):
        progress = np.full(6, window / exported.windows, np.float32)
        own = engine_of(exported, f"int8.w{window}.serve").serve(*GIVEN[:3], progress)
        same = shared.serve(*GIVEN[:3], progress)
        assert (own.tokens == same.tokens).mean() > 0.97
        np.testing.assert_allclose(own.probability, same.probability, atol=0.05)


def test_rows_of_one_batch_get_the_scales_of_their_own_windows(exported: Export) -> None:
    engine = engine_of(exported, "int8.trace")
    progress = np.array([0, 0.4, 0.9, 0, 0.4, 0.9], np.float32)
    mixed = engine.logits(*GIVEN[:3], progress)
    for window, at in enumerate((0.0, 0.4, 0.9)):
        alone = engine.logits(*GIVEN[:3], np.full(6, at, np.float32))
        np.testing.assert_allclose(mixed[window::3], alone[window::3], atol=1e-4)
    assert len({alone.tobytes() for alone in mixed}) == 6


def test_answers_differ_when_the_scales_of_two_windows_are_swapped(exported: Export) -> None:
    scales = scales_of(exported)
    scales[1] *= 40
    path, precision = exported.path("int8.serve"), exported.precisions["int8"]
    straight, swapped = (
        OrtBackend.load(path, None, precision, rows) for rows in (scales, scales[[1, 0, 2]])
    )
    first = np.zeros(6, np.float32)
    a, b = straight.serve(*GIVEN[:3], first), swapped.serve(*GIVEN[:3], first)
    assert (a.tokens != b.tokens).mean() > 0.2


@pytest.mark.parametrize("graph", ["int8.serve", "int8.w1.serve", "int8.all.trace"])
def test_every_product_of_the_blocks_is_executed_in_integers(graph: str, exported: Export) -> None:
    built = engine_of(exported, graph, read_back=True).built
    integer = sum(count for kernel, count in built.items() if "int8)" in kernel)
    assert integer == 2 * len(LINEARS)
    assert sum(built.values()) - integer == 1  # the LM head


def test_integer_products_equal_the_rounding_in_floating_point(exported: Export) -> None:
    entry, precision = exported.graphs["int8.all.trace"], exported.precisions["int8"]
    path = exported.folder / entry.file
    exact, plain = (
        OrtBackend.load(None, path, precision, None, OrtOptions(graph_optimization=level))
        for level in ("all", "basic")
    )
    difference = np.abs(exact.logits(*GIVEN) - plain.logits(*GIVEN))
    assert np.median(difference) < 1e-4


def test_a_simulated_graph_is_never_computed_in_integers(exported: Export) -> None:
    built = engine_of(exported, "w4a4.trace", read_back=True).built
    assert set(built) == {"MatMul(float)"}


def test_what_is_never_quantized_stays(exported: Export) -> None:
    for name in ("int8.trace", "w4a4.trace"):
        graph = onnx.load(str(exported.path(name)), load_external_data=False).graph
        kinds = {i.name: i.data_type for i in graph.initializer}
        for kept in ("wte", "ln_f", "ff_out"):
            assert kinds[f"model.transformer.{kept}.weight"] == onnx.TensorProto.FLOAT
        quantized = [n for n in kinds if n.endswith(".quantized")]
        assert len(quantized) == 2 * len(LINEARS)


def test_scales_are_the_largest_magnitudes_of_the_windows(exported: Export) -> None:
    calibration = read_calibration(exported.folder / "calibration.json")
    np.testing.assert_allclose(scales_of(exported), window_scales(calibration, 3, 1.0), rtol=1e-6)


def test_a_rotated_graph_computes_the_same_function(rotated_export: Export) -> None:
    full = engine_of(rotated_export, "fp32.trace").logits(*GIVEN)
    fine = engine_of(rotated_export, "w16a16.trace").logits(*GIVEN)
    coarse = engine_of(rotated_export, "w4a4.trace").logits(*GIVEN)
    assert np.abs(fine - full).mean() < 1e-3 * np.abs(coarse - full).mean()
    np.testing.assert_allclose(fine, full, atol=5e-3)


def of_layer(stored: dict[str, Stored], block: int, layer: str) -> np.ndarray:
    """Return the weight [out, in] that an int8 file's integers stand for, turned back."""
    name = f"model.transformer.blocks.{block}.{LLADA.get(layer, layer)}.weight"
    integers = stored[quantized_name(name)]
    values = mapped(integers).view(np.int8).reshape(integers.shape)
    return rotated(np.ascontiguousarray((values * floats(stored[scale_name(name)])).T))


def test_a_rotated_int8_graph_rounds_rotated_activations(
    rotated_export: Export, denoiser: Denoiser
) -> None:
    calibration = read_calibration(rotated_export.folder / "calibration.json")
    assert calibration.rotated
    scales = window_scales(calibration, 3, 1.0)
    np.testing.assert_allclose(scales_of(rotated_export), scales, rtol=1e-6)
    by_site = dict(zip(sites_of_blocks(2), scales.max(0).tolist(), strict=True))
    stored = read_header(rotated_export.folder / "weights/int8.safetensors")

    def source(site: str, x: Tensor) -> Tensor:
        steps = (rotated_tensor(x) / by_site[site]).round().clamp(-128, 127)
        return rotated_tensor(steps * by_site[site])

    wanted = rounded(denoiser, lambda values: values, source)
    for number, block in enumerate(wanted._denoiser.blocks):
        for layer in LINEARS:
            weight = torch.from_numpy(of_layer(stored, number, layer))
            getattr(block, layer).weight = nn.Parameter(weight, requires_grad=False)
    full = TorchBackend(denoiser).logits(*GIVEN)
    answer = wanted.logits(*GIVEN)
    cost = np.abs(answer - full).mean()
    assert cost > 1e-2
    got = engine_of(rotated_export, "int8.all.trace").logits(*GIVEN)
    assert np.abs(got - answer).mean() < 0.03 * cost


@pytest.mark.parametrize("graph", ["int8.serve", "int8.w1.serve", "int8.all.trace"])
def test_every_product_of_a_rotated_graph_is_executed_in_integers(
    graph: str, rotated_export: Export
) -> None:
    built = engine_of(rotated_export, graph, read_back=True).built
    assert sum(count for kernel, count in built.items() if "int8)" in kernel) == 2 * len(LINEARS)


def test_a_rotation_stands_once_a_size_with_the_weights(rotated_export: Export) -> None:
    for family in ("int8", "w4", "w16"):
        stored = read_header(rotated_export.folder / f"weights/{family}.safetensors")
        matrices = {name: floats(s) for name, s in stored.items() if name.startswith("rotation")}
        assert set(matrices) == {"rotation.8", "rotation.32"}  # of widths 40 and 32
        for matrix in matrices.values():
            np.testing.assert_array_equal(matrix, hadamard(len(matrix)))
    for name in ("int8.serve", "w4a4.trace"):
        graph = onnx.load(str(rotated_export.path(name)), load_external_data=False).graph
        found = [i for i in graph.initializer if i.name.startswith("rotation")]
        assert [i.data_location for i in found] == [onnx.TensorProto.EXTERNAL] * 2
