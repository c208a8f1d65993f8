"""Precisions: a weight format and an activation format, with the declared bits of each.

A precision is *executed* when an engine computes with that format, and *simulated* when its graph
rounds activations to fewer levels but computes in floating point.  Simulated precisions have bits
but never a latency claim.

Precisions of one *family* share one stored set of weights.  Which target takes which precision is
`engines.targets`'s to say.  What is not quantized is float32 on the CPU and float16 on the targets
of TensorRT, so weights alone in few bits leave activations at 16.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Group of weights along the input axis that share a scale: w4, w8, w16, and int4.
WEIGHT_GROUP = 32

# Group of weights or activations along the input axis that share a scale in nvfp4.
FP4_GROUP = 16

_SIMULATED = re.compile(r"w(4|8|16)a(\d{1,2})")


@dataclass(frozen=True, slots=True)
class Precision:
    """One choice for a window.

    Attributes:
        name: What `--precision` calls it.
        family: Whose stored weights it uses.
        weight_bits: Declared bits of a weight.
        bits: Declared bits of an activation; what `--mean-bits` budgets.
        simulated: Whether activations are only rounded, not computed, at those bits.
    """

    name: str
    family: str
    weight_bits: float
    bits: float
    simulated: bool = False

    @property
    def has_static_scales(self) -> bool:
        """Whether its graphs may hold activation scales calibrated beforehand, a set a window."""
        return self.name in ("int8", "fp8")


# Declared bits of int4-w and nvfp4 hold the scales of their groups: 16 bits for 32 weights, 8 for
# 16.  int4-int8 has weights of its own: an integer product leaves room for one scale a channel.
EXECUTED: dict[str, Precision] = {
    each.name: each
    for each in (
        Precision("fp32", "fp32", 32, 32),
        Precision("fp16", "fp16", 16, 16),
        Precision("bf16", "bf16", 16, 16),
        Precision("int8", "int8", 8, 8),
        Precision("int8-w", "int8", 8, 16),
        Precision("fp8", "fp8", 8, 8),
        Precision("fp8-w", "fp8", 8, 16),
        Precision("int4-w", "int4", 4.5, 16),
        Precision("int4-int8", "int4-int8", 4, 8),
        Precision("nvfp4", "nvfp4", 4.5, 4.5),
    )
}
FULL_PRECISION = EXECUTED["fp32"]


def precision_from_name(name: str) -> Precision:
    """Return the precision of a name: an executed one's, or simulated `wXaY`.

    Raises:
        ValueError: The name is unknown; lists the known ones.
    """
    if name in EXECUTED:
        return EXECUTED[name]
    match = _SIMULATED.fullmatch(name)
    if match and 2 <= int(match[2]) <= 16:
        return Precision(name, f"w{match[1]}", float(match[1]), float(match[2]), simulated=True)
    raise ValueError(
        f"unknown precision {name!r}; known are {', '.join(EXECUTED)} and simulated wXaY "
        f"with X one of 4, 8, 16 and Y from 2 to 16, for instance w4a6"
    )
