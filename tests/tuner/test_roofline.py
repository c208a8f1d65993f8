"""The roofline: never below either roof, and plain words where fewer bits cannot pay."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from engines.errors import InputError
from engines.gpus import GPUS, Gpu, format_from_precision, gpu_from_name
from engines.precision import EXECUTED, FULL_PRECISION, Precision
from exporter.gemms import Pass, Product
from exporter.groups import Group
from tuner.roofline import (
    ACTIVATIONS,
    COMPUTE,
    HALF,
    INT8,
    LAUNCH,
    LAUNCH_US,
    WEIGHT_ONLY,
    WEIGHTS,
    pays,
    predict,
    side,
)

NVFP4 = Precision("nvfp4", "nvfp4", 4.5, 4.5)
FP8 = Precision("fp8", "fp8", 8, 8)
PRECISIONS = (FULL_PRECISION, HALF, WEIGHT_ONLY, INT8, FP8, NVFP4)


def linear(name: str, m: int, k: int, n: int, source: str, quantized: bool = True) -> Product:
    return Product(name, "linear", m, k, n, 1, k * n, m * k, m * n, source, quantized)


def made_pass(batch: int, length: int, hidden: int = 4096, layers: int = 4) -> Pass:
    """Return the linear layers and norms of a transformer without attention."""
    m, products, groups = batch * length, [], []
    for i in range(layers):
        for each in "qkv":
            products.append(linear(f"{each}{i}", m, hidden, hidden, f"n{i}"))
        products.append(linear(f"o{i}", m, hidden, hidden, f"a{i}"))
        for made in (f"n{i}", f"a{i}"):
            groups.append(Group(("Add", "RMSNormalization"), 4 * m * hidden, 0, (made,)))
    products.append(linear("head", batch, hidden, 32_000, "h", quantized=False))
    return Pass(batch, length, length, tuple(products), tuple(groups))


SHAPES = [(1, 1), (1, 16), (1, 512), (8, 128), (32, 512)]
WORKS = {shape: made_pass(*shape) for shape in SHAPES}


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda precision: precision.name)
def test_a_prediction_is_never_below_the_roofs_nor_above_all_costs_one_after_another(
    gpu: Gpu, precision: Precision
) -> None:
    if gpu.peak(format_from_precision(precision)) is None:
        with pytest.raises(InputError, match=f"{gpu.name} does not multiply"):
            predict(WORKS[1, 1], gpu, precision)
        return
    for work in WORKS.values():
        found = predict(work, gpu, precision)
        peaks = [gpu.peak(name) or 0 for name in ("fp32", "fp16", "bf16", "int8", "fp8", "fp4")]
        weights = sum(product.weight_bytes(precision) for product in work.products)
        assert found.latency_ms >= work.operations / max(peaks) / 1e9
        assert found.latency_ms >= weights / gpu.bandwidth / 1e6
        assert found.latency_ms >= max(found.compute_ms, found.memory_ms) + found.launch_ms
        together = found.compute_ms + found.memory_ms + found.launch_ms
        assert found.latency_ms <= together * (1 + 1e-12)
        assert found.launch_ms == pytest.approx(found.kernels * LAUNCH_US / 1e3)
        assert sum(found.shares.values()) == pytest.approx(1)
        assert len(found.bounds) == len(work.calls(precision))


@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda precision: precision.name)
def test_larger_batches_take_longer_in_all_and_less_time_a_row(precision: Precision) -> None:
    gpu = gpu_from_name("RTX 5090")
    batches = (1, 2, 8, 64)
    found = [predict(made_pass(batch, 64), gpu, precision).latency_ms for batch in batches]
    for (few, less), (many, more) in itertools.pairwise(zip(batches, found, strict=True)):
        assert less < more
        assert more / many < less / few


def test_a_gpu_twice_as_fast_takes_half_the_time_beside_its_launches() -> None:
    gpu = gpu_from_name("RTX 4090")
    twice = replace(gpu, peaks=tuple(p and 2 * p for p in gpu.peaks), bandwidth=2 * gpu.bandwidth)
    for work, precision in itertools.product(WORKS.values(), (HALF, INT8)):
        slow, fast = (predict(work, each, precision) for each in (gpu, twice))
        assert fast.launch_ms == slow.launch_ms
        assert 2 * (fast.latency_ms - fast.launch_ms) == pytest.approx(
            slow.latency_ms - slow.launch_ms
        )


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_fewer_bits_of_weights_never_cost_more_than_launches(gpu: Gpu) -> None:
    for work in WORKS.values():
        half, weight_only, int8 = (predict(work, gpu, p) for p in (HALF, WEIGHT_ONLY, INT8))
        assert half.latency_ms <= predict(work, gpu, FULL_PRECISION).latency_ms
        assert int8.latency_ms <= half.latency_ms
        assert int8.kernels == half.kernels < weight_only.kernels


def test_one_product_is_by_hand_the_longer_of_its_two_roofs() -> None:
    gpu = gpu_from_name("A10")
    work = Pass(1, 64, 64, (linear("w", 64, 1000, 2000, "x"),), ())
    found = predict(work, gpu, HALF)
    arithmetic = 2 * 64 * 1000 * 2000 / (125e12 * 0.7) * 1e3
    moving = 2 * (1000 * 2000 + 64 * 1000 + 64 * 2000) / (600e9 * 0.8) * 1e3
    assert found.compute_ms == pytest.approx(arithmetic)
    assert found.memory_ms == pytest.approx(moving)
    assert found.latency_ms == pytest.approx(max(arithmetic, moving) + 0.002)
    assert found.bounds == (WEIGHTS,)


def test_the_rest_is_computed_in_16_bits_and_at_fp32_in_32() -> None:
    gpu = gpu_from_name("RTX 4090")
    head = linear("head", 4096, 4096, 4096, "h", quantized=False)
    work = Pass(1, 1, 1, (head,), ())
    assert predict(work, gpu, INT8).latency_ms == predict(work, gpu, HALF).latency_ms
    assert predict(work, gpu, FULL_PRECISION).latency_ms > predict(work, gpu, HALF).latency_ms


def test_a_prediction_says_that_it_is_one() -> None:
    found = predict(WORKS[1, 16], gpu_from_name("T4"), INT8)
    assert found.source == "predicted"
    assert found.to_json()["source"] == "predicted"


def test_a_simulated_precision_has_no_latency() -> None:
    simulated = Precision("w4a4", "w4", 4, 4, simulated=True)
    with pytest.raises(ValueError, match="w4a4 is simulated"):
        predict(WORKS[1, 1], gpu_from_name("T4"), simulated)


def test_a_format_that_the_gpu_lacks_is_refused_with_those_it_has() -> None:
    with pytest.raises(InputError, match="needs; it multiplies fp32, fp16, bf16, int8, so take"):
        predict(WORKS[1, 1], gpu_from_name("A10"), FP8)


def test_where_weights_are_the_bound_weight_only_is_said_to_be_as_fast() -> None:
    work, gpu = made_pass(1, 1, hidden=8192), gpu_from_name("RTX 4090")
    assert predict(work, gpu, WEIGHT_ONLY).bound == WEIGHTS
    said = pays(work, gpu)
    assert said.startswith("Activation precision cannot pay at batch 1 and 1 tokens on RTX 4090")
    assert "reading weights, so int8 weights alone are as fast" in said


def test_where_arithmetic_is_the_bound_activation_precision_is_said_to_pay() -> None:
    work, gpu = made_pass(32, 512), gpu_from_name("RTX 4090")
    assert predict(work, gpu, WEIGHT_ONLY).bound == COMPUTE
    assert pays(work, gpu).startswith("Activation precision pays at batch 32 and 512 tokens")


def test_where_launches_are_the_bound_no_precision_is_said_to_help() -> None:
    work, gpu = made_pass(1, 16, hidden=64), gpu_from_name("H100 SXM")
    assert predict(work, gpu, INT8).bound == LAUNCH
    assert "launching kernels, which no precision shortens" in pays(work, gpu)


def test_a_gpu_that_multiplies_int8_no_faster_is_named() -> None:
    said = pays(made_pass(32, 512), gpu_from_name("MI210"))
    assert "cannot pay" in said
    assert "MI210 multiplies int8 no faster than fp16" in said


def test_where_moving_activations_is_the_bound_that_is_said() -> None:
    wide = Group(("Add",), 10**9, 0, ("other",))
    work = replace(made_pass(8, 128), groups=(wide,) * 9)
    assert predict(work, gpu_from_name("L4"), HALF).bound == ACTIVATIONS
    assert "moving activations" in pays(work, gpu_from_name("L4"))


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_whether_it_pays_is_whether_int8_is_faster_than_both_others(gpu: Gpu) -> None:
    for work in WORKS.values():
        half, weight_only, int8 = (predict(work, gpu, p) for p in (HALF, WEIGHT_ONLY, INT8))
        gain = min(half.latency_ms, weight_only.latency_ms) / int8.latency_ms
        assert ("cannot pay" in pays(work, gpu)) == (gain <= 1.05)


def test_the_side_is_the_longer_roof_of_the_published_rates() -> None:
    gpu = gpu_from_name("RTX 4090")
    for m, precision in itertools.product((1, 64, 1024, 16384), (HALF, INT8, FP8, FULL_PRECISION)):
        product = linear("w", m, 4096, 4096, "x")
        peak = gpu.peak(format_from_precision(precision))
        assert peak is not None
        arithmetic = product.operations / (peak * 1e12)
        moving = product.bytes(precision) / (gpu.bandwidth * 1e9)
        assert side(product, gpu, precision) == ("compute" if arithmetic >= moving else "memory")
    assert side(linear("w", 1, 8, 8, "x"), gpu, NVFP4) is None
    assert side(linear("w", 1, 8, 8, "x"), gpu, EXECUTED["int8"]) == "memory"
