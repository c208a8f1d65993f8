"""The table of GPUs: orders that physics and data sheets keep, and names as people write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from engines.errors import InputError
from engines.gpus import (
    FORMATS,
    GPUS,
    Gpu,
    format_from_precision,
    gpu_from_name,
    gpus_of_sm,
    typical,
)
from engines.precision import Precision

BY_NAME = {gpu.name: gpu for gpu in GPUS}


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_fewer_bits_are_never_slower_and_every_gpu_has_fp32_fp16_and_int8(gpu: Gpu) -> None:
    fp32, fp16, int8 = (gpu.peak(name) for name in ("fp32", "fp16", "int8"))
    assert fp32 is not None
    assert fp16 is not None
    assert int8 is not None
    assert fp32 <= fp16 <= int8
    for pair in (("bf16", "int8"), ("fp16", "fp8"), ("fp8", "fp4"), ("int8", "fp4")):
        wide, narrow = (gpu.peak(name) for name in pair)
        assert wide is None or narrow is None or wide <= narrow


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_rates_are_dense_half_of_the_bits_is_at_most_four_times_the_rate(gpu: Gpu) -> None:
    # A rate that sparsity doubled would stand out: int8 is at most 4 times fp16 (GeForce, whose
    # sums in 32 bits are halved) and fp4 at most 2 times int8, on every card.
    fp16, int8, fp4 = (gpu.peak(name) for name in ("fp16", "int8", "fp4"))
    assert fp16 is not None
    assert int8 is not None
    assert int8 / fp16 <= 4.05
    assert fp4 is None or fp4 / int8 == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_formats_come_with_the_generation_that_brought_them(gpu: Gpu) -> None:
    if gpu.sm is not None:
        assert (gpu.peak("bf16") is not None) == (gpu.sm >= 80)
        assert (gpu.peak("fp8") is not None) == (gpu.sm >= 89)
        assert (gpu.peak("fp4") is not None) == (gpu.sm >= 100)
    assert set(gpu.derived) <= {name for name in FORMATS if gpu.peak(name) is not None}
    assert gpu.vendor in ("NVIDIA", "AMD")
    assert (gpu.sm is None) == (gpu.vendor == "AMD")
    assert gpu.source


def test_on_geforce_sums_in_32_bits_halve_fp16_and_on_other_cards_they_do_not() -> None:
    def ratio(name: str) -> float:
        gpu = BY_NAME[name]
        return (gpu.peak("int8") or 0) / (gpu.peak("fp16") or 1)

    def over_cuda_cores(name: str) -> float:
        gpu = BY_NAME[name]
        return (gpu.peak("fp16") or 0) / (gpu.peak("fp32") or 1)

    for geforce in ("RTX 3090", "RTX 4090", "RTX 4070", "RTX 5090", "RTX 5080", "RTX 5070"):
        assert ratio(geforce) == pytest.approx(4, rel=0.01)
        assert over_cuda_cores(geforce) == pytest.approx(2, rel=0.01)
    for other in ("T4", "A100 80 GB", "A10", "L4", "L40S", "H100 SXM", "RTX PRO 6000 Blackwell"):
        assert ratio(other) == pytest.approx(2, rel=0.02)
    for other in ("A10", "L4", "L40S", "RTX PRO 6000 Blackwell", "DGX Spark"):
        assert over_cuda_cores(other) == pytest.approx(4, rel=0.02)


def test_a_whole_mi250x_is_two_of_its_dies() -> None:
    whole, half = gpu_from_name("MI250X"), gpu_from_name("mi250x gcd")
    assert [2 * (rate or 0) for rate in half.peaks] == [rate or 0 for rate in whole.peaks]
    assert (2 * half.bandwidth, 2 * half.memory) == (whole.bandwidth, whole.memory)


@pytest.mark.parametrize("sm", [75, 80, 86, 89, 90, 100, 120, 121])
def test_every_compute_capability_has_a_typical_gpu(sm: int) -> None:
    assert typical(sm).sm == sm
    assert typical(sm) == gpus_of_sm(sm)[0]


def test_every_gpu_with_a_compute_capability_is_among_those_of_it() -> None:
    capabilities = {gpu.sm for gpu in GPUS if gpu.sm is not None}
    listed = [gpu for sm in capabilities for gpu in gpus_of_sm(sm)]
    assert {gpu.name for gpu in listed} == {gpu.name for gpu in GPUS if gpu.sm is not None}


def test_an_unknown_compute_capability_is_refused_and_the_known_are_listed() -> None:
    with pytest.raises(InputError, match=r"sm70 is known; .* sm75, sm80, .*sm121"):
        typical(70)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("spell", [str, str.lower, lambda t: t.upper().replace(" ", "-")])
def test_a_name_is_found_however_it_is_written(gpu: Gpu, spell: Callable[[str], str]) -> None:
    assert gpu_from_name(spell(gpu.name)) is gpu
    assert gpu_from_name(f"{gpu.vendor} {spell(gpu.name)}") is gpu


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-80GB", "A100 80 GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA GB10", "DGX Spark"),
        ("AMD Instinct MI300X OAM", "MI300X"),
    ],
)
def test_names_that_people_and_drivers_use_are_known(written: str, meant: str) -> None:
    assert gpu_from_name(written).name == meant


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("H100", "H100 SXM, H100 PCIe"),  # two cards of different speed: never guessed
        ("A100", "A100 80 GB, A100 PCIe 80 GB, A100 40 GB"),
        ("RTX 5070 Ti", "RTX 5070"),
        ("MI250", "MI250X"),
        ("L40", "L40S"),
        ("Voodoo", "known are T4"),
        ("", "known are T4"),
        ("x" * 100_000, "known are T4"),
    ],
)
def test_another_card_is_refused_and_the_nearest_are_named(written: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as refused:
        gpu_from_name(written)
    assert len(str(refused.value)) < 700


def test_no_two_gpus_share_a_name() -> None:
    assert len({gpu_from_name(gpu.name).name for gpu in GPUS}) == len(GPUS)


def test_the_ridge_is_where_both_bounds_take_the_same_time() -> None:
    gpu = BY_NAME["RTX 4090"]
    ridge = gpu.ridge("int8")
    assert ridge is not None
    moved = 1e9
    assert ridge * moved / (660.6e12) == pytest.approx(moved / (gpu.bandwidth * 1e9))
    assert gpu.ridge("fp4") is None


@pytest.mark.parametrize(
    ("name", "weight_bits", "bits", "format_"),
    [
        ("fp32", 32, 32, "fp32"),
        ("fp16", 16, 16, "fp16"),
        ("bf16", 16, 16, "bf16"),
        ("int8", 8, 8, "int8"),
        ("fp8", 8, 8, "fp8"),
        ("int8-w", 8, 16, "fp16"),
        ("fp8-w", 8, 16, "fp16"),
        ("int4-w", 4.25, 16, "fp16"),
        ("int4-int8", 4.25, 8, "int8"),
        ("nvfp4", 4.5, 4.5, "fp4"),
    ],
)
def test_the_format_is_that_of_the_activations(
    name: str, weight_bits: float, bits: float, format_: str
) -> None:
    assert format_from_precision(Precision(name, name, weight_bits, bits)) == format_


def test_a_simulated_precision_has_no_format() -> None:
    with pytest.raises(ValueError, match="w4a4 is simulated"):
        format_from_precision(Precision("w4a4", "w4", 4, 4, simulated=True))


def test_a_gpu_without_all_its_rates_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="peaks must be"):
        replace(BY_NAME["T4"], peaks=(1.0,))
    with pytest.raises(ValueError, match="above 0"):
        replace(BY_NAME["T4"], bandwidth=0.0)
