"""The five distances between two tensors that TensorRT's own tuner knows: l0, l1, l2, lInf, cos.

    l0    share of elements with |a - r| > atol + rtol |r|
    l1    mean of |a - r|          l2    mean of (a - r)^2          lInf   largest |a - r|
    cos   1 - a.r / (|a| |r|); 1 where the denominator is below 1e-12

A value that is not finite, in either tensor, makes every distance infinite: no comparison with a
limit passes then, where NaN would pass every one.  Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

DISTANCES = ("l0", "l1", "l2", "lInf", "cos")
ATOL = RTOL = 1e-5
_SMALLEST = 1e-12


@dataclass(frozen=True, slots=True)
class Distances:
    """Of a tensor from a reference, over all its elements; infinite where one is not finite."""

    l0: float
    l1: float
    l2: float
    lInf: float
    cos: float

    @property
    def finite(self) -> bool:
        """Whether every value compared was finite."""
        return math.isfinite(self.l0)

    def to_json(self) -> dict[str, float | None]:
        """Return the distances by name; JSON has no infinity, so None stands for it."""
        values = {name: getattr(self, name) for name in DISTANCES}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}


def distances(
    pairs: Iterable[tuple[NDArray[Any], NDArray[Any]]], atol: float = ATOL, rtol: float = RTOL
) -> Distances:
    """Return the distances over all elements of all pairs, as if each side were one long tensor.

    Args:
        pairs: (candidate, reference), each two of one shape.
        atol: Absolute tolerance of l0.
        rtol: Relative tolerance of l0.

    Raises:
        ValueError: Two shapes differ, or there is no element.
    """
    count = outside = 0
    total = squares = largest = dot = own = other = 0.0
    finite = True
    for candidate, reference in pairs:
        if candidate.shape != reference.shape:
            raise ValueError(
                f"tensors must have one shape, got {candidate.shape} and {reference.shape}"
            )
        a, r = np.asarray(candidate, np.float64), np.asarray(reference, np.float64)
        count += a.size
        if not (np.isfinite(a).all() and np.isfinite(r).all()):
            finite = False  # what was added up does not matter any more
        if not finite or not a.size:
            continue
        gap = np.abs(a - r)
        outside += int(np.count_nonzero(gap > atol + rtol * np.abs(r)))
        total += float(gap.sum())
        squares += float((gap * gap).sum())
        largest = max(largest, float(gap.max()))
        dot += float((a * r).sum())
        own += float((a * a).sum())
        other += float((r * r).sum())
    if not count:
        raise ValueError("need at least one element to compare")
    if not finite:
        return Distances(*[math.inf] * len(DISTANCES))
    below = math.sqrt(own) * math.sqrt(other)
    cos = 1.0 if below < _SMALLEST else max(0.0, 1.0 - dot / below)
    return Distances(outside / count, total / count, squares / count, largest, cos)
