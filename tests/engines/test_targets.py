"""Laws of targets: names round trip, and the table of precisions is what the builder says.

The builder of TensorRT-RTX needs no GPU, so every cell is built for real, in one process.
"""

from __future__ import annotations

from itertools import combinations, permutations

import pytest

from engines.errors import InputError
from engines.precision import EXECUTED
from engines.targets import (
    PRECISIONS,
    SMS,
    TARGETS,
    Target,
    refusal,
    taken,
    target_from_name,
)
from tests.engines.precision_graphs import FUSED, SMALL, Verdict, build, precision_graph

# How the builder names a type that an SM lacks, by how a refusal names it.
BUILDER_SAYS = {"bf16": "b16", "int4": "int4", "fp8": "fp8_e4m3", "fp4": "fp4_e2m1"}


def rtx(*sms: int) -> Target:
    return target_from_name("rtx-" + "+".join(f"sm{sm}" for sm in sms))


def agree(target: Target, precision: str, verdict: Verdict) -> None:
    """Assert that the table and the builder say the same, for the same reason."""
    why = refusal(target, precision)
    assert verdict.built == (why is None), (target.name, precision, why, verdict.errors)
    if why is not None:
        lacks = why.partition("lack")[2].removeprefix("s").split()[0]
        said = verdict.errors[0].partition("HW-specific datatypes: ")[2].partition(". In")[0]
        if lacks == "fp32":
            assert "FP32 GEMM is not supported" in verdict.errors[0]
        else:
            assert BUILDER_SAYS[lacks] in said.split(", ")


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_comes_back_by_its_name(name: str) -> None:
    target = target_from_name(name)
    assert target.name == name
    assert target_from_name(target.name) == target


def test_the_module_and_the_sms_follow_from_the_name() -> None:
    assert target_from_name("cpu") == Target("cpu", "onnxruntime")
    assert target_from_name("cuda") == Target("cuda", "onnxruntime")
    assert target_from_name("trt") == Target("trt", "tensorrt")
    assert target_from_name("rtx-sm120") == Target("rtx-sm120", "tensorrt-rtx", (120,))


def test_the_order_of_sms_does_not_matter() -> None:
    for chosen in permutations((75, 89, 120)):
        assert rtx(*chosen) == Target("rtx-sm75+sm89+sm120", "tensorrt-rtx", (75, 89, 120))


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("cpuu", "did you mean 'cpu'"),
        ("CUDA", "did you mean 'cuda'"),
        ("tensorrt", "there are cpu, cuda, trt"),
        ("rtxsm89", "did you mean 'rtx-sm89'"),
        ("sm89", "did you mean 'rtx-sm89'"),
        ("", "there are cpu, cuda, trt, rtx-sm75"),
        ("rtx-", "there are sm75"),
        ("rtx-sm90", "has no 'sm90'; did you mean 'sm"),
        ("rtx-sm89+sm12", "has no 'sm12'; did you mean 'sm12"),
        ("rtx-sm89+", "has no ''"),
        ("rtx-sm89+rtx-sm120", "did you mean 'sm120'"),
        ("rtx-sm89+sm89", "twice; leave one out"),
        ("rtx-SM89", "did you mean 'sm89'"),
        ("rtx-sm089", "did you mean 'sm89'"),
        ("rtx-sm\u0668\u0669", "has no"),
        ("rtx-sm89\n", "has no"),
        ("x" * 100_000, "unknown target"),
        ("rtx-" + "sm89+" * 100_000, "twice"),
    ],
    ids=lambda text: repr(text[:20]),
)
def test_another_name_is_refused_with_the_nearest_in_one_line(name: str, mend: str) -> None:
    with pytest.raises(InputError) as caught:
        target_from_name(name)
    assert mend in str(caught.value)
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("name", "module", "sms"),
    [
        ("cpu", "tensorrt", ()),
        ("rtx-sm89", "tensorrt-rtx", ()),
        ("rtx-sm89", "tensorrt-rtx", (86,)),
        ("rtx-sm89", "tensorrt", (89,)),
        ("rtx-sm120+sm89", "tensorrt-rtx", (120, 89)),
        ("rtx-sm89+sm89", "tensorrt-rtx", (89, 89)),
        ("rtx-sm90", "tensorrt-rtx", (90,)),
        ("cpu", "onnxruntime", (89,)),
        ("tpu", "onnxruntime", ()),
    ],
)
def test_a_target_whose_parts_disagree_cannot_be_made(
    name: str, module: str, sms: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="got"):
        Target(name, module, sms)  # type: ignore[arg-type]


def test_a_refusal_says_what_lacks_since_when_and_what_is_taken() -> None:
    assert refusal(rtx(86), "fp8") == (
        "sm86 lacks fp8 (TensorRT-RTX has it from sm89 on); "
        "rtx-sm86 takes fp32, fp16, bf16, int8, int8-w, int4-w, int4-int8"
    )
    assert refusal(rtx(120, 80, 86), "nvfp4") == (
        "sm80 and sm86 lack fp4 (TensorRT-RTX has it from sm120 on); "
        "rtx-sm80+sm86+sm120 takes fp32, fp16, bf16, int8, int8-w, int4-w, int4-int8"
    )
    assert refusal(rtx(75), "fp32") == (
        "sm75 lacks fp32 (TensorRT-RTX has it from sm80 on); rtx-sm75 takes fp16, int8, int8-w"
    )
    assert refusal(target_from_name("cpu"), "fp16") == (
        "fp16 is not built for cpu; cpu takes fp32, int8 and simulated wXaY"
    )


@pytest.mark.parametrize("size", range(1, len(SMS) + 1))
def test_several_sms_take_what_each_takes(size: int) -> None:
    for chosen in combinations(SMS, size):
        for precision in PRECISIONS:
            alone = [refusal(rtx(sm), precision) is None for sm in chosen]
            assert (refusal(rtx(*chosen), precision) is None) == all(alone)


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_takes_what_it_says_and_refuses_the_rest_naming_what_it_takes(name: str) -> None:
    target = target_from_name(name)
    assert taken(target)
    for precision in PRECISIONS:
        why = refusal(target, precision)
        assert (why is None) == (precision in taken(target))
        if why is not None:
            assert f"{name} takes {', '.join(taken(target))}" in why
            assert "\n" not in why


def test_simulated_precisions_are_for_onnx_runtime_alone() -> None:
    for name in TARGETS:
        why = refusal(target_from_name(name), "w4a6")
        assert (why is None) == (name in ("cpu", "cuda"))


@pytest.mark.parametrize(
    ("precision", "mend"),
    [
        ("fp81", "'fp8'"),
        ("NVFP4", "'nvfp4'"),
        ("int4_w", "'int4-w'"),
        ("", "fp32, "),
        ("w4a1", ""),
    ],
)
@pytest.mark.parametrize("name", TARGETS)
def test_an_unknown_precision_is_an_error_on_every_target(
    name: str, precision: str, mend: str
) -> None:
    with pytest.raises(InputError, match="unknown precision") as caught:
        refusal(target_from_name(name), precision)
    assert mend in str(caught.value)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_on_each_sm_the_builder_takes_what_the_table_takes_and_refuses_the_rest(
    precision: str, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    model = precision_graph(precision, SMALL)
    for sm in SMS:
        agree(rtx(sm), precision, build(model, (sm,)))
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_so_it_does_where_products_are_large_enough_to_fuse_and_for_any_two_sms_and_all(
    precision: str,
) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    for shape, sets in (
        (FUSED, [(sm,) for sm in SMS]),
        (SMALL, [*combinations(SMS, 2), SMS]),
        (FUSED, [(86, 89, 120), SMS[1:], SMS]),
    ):
        model = precision_graph(precision, shape)
        for sms in sets:
            agree(rtx(*sms), precision, build(model, sms))


@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_the_order_in_which_sms_are_given_to_the_builder_does_not_matter(order: str) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    sms = (86, 89) if order == "ascending" else (89, 86)
    assert not build(precision_graph("fp8"), sms).built
    assert build(precision_graph("int8"), sms).built


def test_the_table_has_every_executed_precision() -> None:
    assert set(PRECISIONS) == set(EXECUTED)
