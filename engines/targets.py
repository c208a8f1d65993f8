"""Targets: where engines are built for and run, and which precisions each takes.

    cpu             ONNX Runtime on this machine's processor
    cuda            ONNX Runtime on this machine's NVIDIA GPU
    trt             TensorRT, built for this machine's GPU
    rtx-sm89        TensorRT-RTX, built ahead of time for GPUs of compute capability 8.9, with or
                    without one here; several at once in one engine: rtx-sm89+sm120

TensorRT-RTX takes a precision on an SM where it has the data types of that precision's graph, and
one engine for several SMs where each has them.  A type that is there on one SM is there on every
later one, so the table is one SM a type; tests hold it against what the builder says.  Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from engines.document import shorten
from engines.errors import InputError
from engines.precision import precision_from_name

Module = Literal["onnxruntime", "tensorrt", "tensorrt-rtx"]

SMS = (75, 80, 86, 89, 120, 121)
_RTX = "rtx-"

# Targets without an SM in their names, and who builds for them.
_MODULES: dict[str, Module] = {"cpu": "onnxruntime", "cuda": "onnxruntime", "trt": "tensorrt"}

# What `--target` takes, less the combinations of several SMs.
TARGETS = (*_MODULES, *(f"{_RTX}sm{sm}" for sm in SMS))

# Of each precision the data type that the fewest SMs have, with 16-bit floats around the products
# of a quantized graph.  nvfp4 needs fp8 too, for the scales of its blocks.
_NEEDS = {
    "fp32": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
    "int8": "int8",
    "fp8": "fp8",
    "int8-w": "int8",
    "fp8-w": "fp8",
    "int4-w": "int4",
    "int4-int8": "int4",
    "nvfp4": "fp4",
}
PRECISIONS = tuple(_NEEDS)

# The first SM for which TensorRT-RTX builds products of each type.  Not what the silicon can do:
# SM75 multiplies in fp32 and int4 too, and is refused.
_SINCE = {"fp16": 75, "int8": 75, "fp32": 80, "bf16": 80, "int4": 80, "fp8": 89, "fp4": 120}

# What graphs are made for.  On cpu ONNX Runtime widens fp16 and fp8 first and has no bf16 and no
# fp4; weights alone in fewer bits run there, but no graph of ours asks for it.
_ONNXRUNTIME = {"cpu": ("fp32", "int8"), "cuda": ("fp32", "int8")}


@dataclass(frozen=True, slots=True)
class Target:
    """Where engines are built for and run.

    Attributes:
        name: What `--target` calls it, its SMs in ascending order.
        module: Who builds.
        sms: Compute capabilities that its engines are for, times ten, ascending; empty where it is
            whatever this machine has.
    """

    name: str
    module: Module
    sms: tuple[int, ...] = ()

    @property
    def ahead(self) -> bool:
        """Whether engines are plans, built ahead of time by TensorRT."""
        return self.module != "onnxruntime"

    def __post_init__(self) -> None:
        ordered = tuple(sorted(set(self.sms)))
        if ordered != self.sms or not set(self.sms) <= set(SMS):
            raise ValueError(f"sms must ascend and be of {SMS}, got {self.sms}")
        name = _RTX + "+".join(f"sm{sm}" for sm in self.sms)
        module = "tensorrt-rtx" if self.sms else _MODULES.get(self.name)
        if self.module != module or (self.sms and self.name != name):
            raise ValueError(
                f"name, module and sms must agree, got {self.name=}, {self.module=}, {self.sms=}"
            )


def target_from_name(name: str) -> Target:
    """Return the target of a name; SMs of one engine in any order.

    Raises:
        InputError: There is none; names the nearest.
    """
    if name in _MODULES:
        return Target(name, _MODULES[name])
    if not name.startswith(_RTX):
        raise InputError(f"unknown target {shorten(name)}; {_nearest(name, TARGETS)}")
    known = {f"sm{sm}": sm for sm in SMS}
    parts = name.removeprefix(_RTX).split("+")
    for place, part in enumerate(parts):
        if part not in known:
            near = _nearest(part, tuple(known))
            raise InputError(f"target {shorten(name)} has no {shorten(part)}; {near}")
        if part in parts[:place]:
            raise InputError(f"target {shorten(name)} names {part} twice; leave one out")
    sms = tuple(sorted(known[part] for part in parts))
    return Target(_RTX + "+".join(f"sm{sm}" for sm in sms), "tensorrt-rtx", sms)


def refusal(target: Target, precision: str) -> str | None:
    """Return why a target does not take a precision, a sentence that ends with what it takes.

    None where it does.  TensorRT on this machine's GPU is asked by building: nobody here knows yet
    which GPU that is.

    Args:
        target: Where the engine is to run; for several SMs, each must take it.
        precision: Its name; simulated ones (wXaY) are for ONNX Runtime alone.

    Raises:
        InputError: There is no such precision; names the nearest.
    """
    simulated = _is_simulated(precision)
    if not simulated and precision not in _NEEDS:
        raise InputError(
            f"unknown precision {shorten(precision)}; {_nearest(precision, PRECISIONS)}"
        )
    if precision in taken(target) or (simulated and target.module == "onnxruntime"):
        return None
    takes = f"{target.name} takes {', '.join(taken(target))}"
    if simulated:
        return f"{precision} is simulated, which is for cpu and cuda; {takes}"
    if target.module == "onnxruntime":
        return f"{precision} is not built for {target.name}; {takes} and simulated wXaY"
    lacks, since = _NEEDS[precision], _SINCE[_NEEDS[precision]]
    without = " and ".join(f"sm{sm}" for sm in target.sms if sm < since)
    verb = "lack" if " " in without else "lacks"
    return f"{without} {verb} {lacks} (TensorRT-RTX has it from sm{since} on); {takes}"


def taken(target: Target) -> tuple[str, ...]:
    """Return the executed precisions that a target takes, in the order of `PRECISIONS`.

    For `trt` all of them, as long as nobody knows its GPU.
    """
    if target.module == "onnxruntime":
        return _ONNXRUNTIME[target.name]
    return tuple(
        name for name in PRECISIONS if all(sm >= _SINCE[_NEEDS[name]] for sm in target.sms)
    )


def _is_simulated(precision: str) -> bool:
    try:
        return precision_from_name(precision).simulated
    except ValueError:
        return False


def _nearest(name: str, known: tuple[str, ...]) -> str:
    near = get_close_matches(name.lower()[:40], known, 1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
