"""What ONNX Runtime built, from a profiled pass, held against what was asked for.  Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping

from engines.errors import BackendError
from engines.options import PROVIDERS, OrtOptions
from engines.precision import Precision

_GEMM_WORDS = ("MatMul", "Gemm")


def gemms_of_profile(
    text: str, name: str, precision: Precision, options: OrtOptions
) -> dict[str, int]:
    """Return the GEMMs of a pass by kernel and type of the first operand.

    Args:
        text: The profile, JSON.
        name: Of the graph, for messages.
        precision: What was asked for.
        options: How the session was made.

    Raises:
        BackendError: A GEMM ran elsewhere than asked, an int8 engine has none in integers, or a
            simulated one has.
    """
    gemms: Counter[str] = Counter()
    elsewhere: Counter[str] = Counter()
    wanted = PROVIDERS[options.provider]
    for event in json.loads(text):
        args = event.get("args", {})
        kernel, operands = args.get("op_name", ""), args.get("input_type_shape") or [{}]
        if not event.get("name", "").endswith("_kernel_time") or not any(
            word in kernel for word in _GEMM_WORDS
        ):
            continue
        gemms[f"{kernel}({next(iter(operands[0]), 'unknown')})"] += 1
        if args.get("provider", wanted) != wanted:
            elsewhere[f"{kernel} on {args['provider']}"] += 1
    if elsewhere:
        raise BackendError(
            f"{name}: asked for {wanted}, but these ran elsewhere: {_said(elsewhere)}; "
            f"use another precision on this target, or target cpu"
        )
    integer = sum(count for kernel, count in gemms.items() if "int8)" in kernel)
    exact = precision.simulated or options.exact
    if precision.name == "int8" and not exact and not integer:
        raise BackendError(
            f"{name}: asked for int8, but no GEMM was built in integers, only "
            f"{_said(gemms) or 'none at all'}; use another precision on this target, or raise "
            f"graph_optimization"
        )
    if exact and integer:
        raise BackendError(
            f"{name}: {precision.name} is simulated in floating point, but "
            f"{integer} GEMMs were built in integers: {_said(gemms)}; report this"
        )
    return dict(sorted(gemms.items()))


def _said(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
