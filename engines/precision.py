"""Precisions: a weight format and an activation format, with the declared bits of each.

A precision is *executed* when an engine computes with that format, and *simulated* when its graph
rounds activations to fewer levels but computes in floating point.  Simulated precisions have bits
but never a latency claim.

Precisions of one *family* share one stored set of weights.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Group of weights along the input axis that share a scale, in simulated weight formats.
WEIGHT_GROUP = 32

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
        """Whether its graphs hold activation scales calibrated beforehand."""
        return self.name == "int8"


EXECUTED: dict[str, Precision] = {
    "fp32": Precision("fp32", "fp32", 32, 32),
    "int8": Precision("int8", "int8", 8, 8),
}
FULL_PRECISION = EXECUTED["fp32"]


def precision_from_name(name: str) -> Precision:
    """Return the precision of a name: `fp32`, `int8`, or simulated `wXaY`.

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
