"""Whether a plan fits a machine: whatever differs is told with both sides and the command."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from engines.plan import Plan, plan_from_bytes
from engines.plan_fit import Here, misfit
from engines.targets import Target, target_from_name

HERE = Here(version="1.7.1.116", sm=89, system="Linux x86_64")
PLAN = Plan(100, (1, 7, 1, 116), (89,), 0, (), "")
BUILT = {"system": "Linux x86_64"}
RTX = target_from_name("rtx-sm89")


def told(
    target: Target = RTX,
    plan: Plan = PLAN,
    here: Here = HERE,
    **built: object,
) -> str | None:
    return misfit("int8.x", target, plan, BUILT | built, here, "DIR/BUNDLE")


def test_a_plan_for_here_fits() -> None:
    assert told() is None
    both = target_from_name("rtx-sm89+sm120")
    assert told(both, replace(PLAN, sms=(89, 120))) is None
    assert told(system=None) is None  # older bundles do not record it


@pytest.mark.parametrize(
    ("here", "plan", "built", "says", "target"),
    [
        (replace(HERE, sm=120), PLAN, {}, "sm89.*here is sm120", "rtx-sm120"),
        (replace(HERE, sm=90), PLAN, {}, "sm89.*here is sm90", "trt"),
        (replace(HERE, version="1.8.0.3"), PLAN, {}, "1.7.1.116.*here is.*1.8.0.3", "rtx-sm89"),
        (HERE, replace(PLAN, version=(1, 7, 1, 115)), {}, "1.7.1.115.*1.7.1.116", "rtx-sm89"),
        (HERE, replace(PLAN, sms=(86,)), {}, "an SM not recorded.*here is sm89", "rtx-sm89"),
        (HERE, PLAN, {"system": "Windows AMD64"}, "Windows AMD64; here is.*Linux", "rtx-sm89"),
        (replace(HERE, system="Linux aarch64"), PLAN, {}, "x86_64; here.*aarch64", "rtx-sm89"),
    ],
)
def test_whatever_differs_is_told_with_both_sides(
    here: Here, plan: Plan, built: dict[str, object], says: str, target: str
) -> None:
    said = told(plan=plan, here=here, **built)
    assert said is not None
    assert said.endswith(f"run: cadenza rebuild DIR/BUNDLE --target {target}")
    assert re.search(says, said), said


def test_of_tensorrt_s_own_plans_the_manifest_knows_the_sm() -> None:
    trt = target_from_name("trt")
    plan = plan_from_bytes(b"ftrt" + bytes(20) + bytes((11, 4, 0, 106)) + bytes(100))
    here = Here(version="11.4.0.106", sm=90, system="Linux x86_64")
    assert told(trt, plan, here) is None
    assert told(trt, plan, here, sm=90) is None
    said = told(trt, plan, here, sm=80)
    assert said is not None
    assert "sm80" in said
    assert said.endswith("--target trt")
    said = told(trt, plan, replace(here, version="11.1.0.106"))
    assert said is not None
    assert "TensorRT 11.4.0.106" in said
    assert "TensorRT 11.1.0.106" in said
