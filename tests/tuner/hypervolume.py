"""The volume that points dominate below a reference: what a search of several objectives found."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tuner.guide import nondominated
from tuner.trials import TrialResult


def hypervolume(points: NDArray[np.float64], reference: Sequence[float]) -> float:
    """Return the volume between points [N, 3], to be made small, and a reference [3].

    By slices along the third objective, each a sum of rectangles.
    """
    below = points[(points < np.asarray(reference)).all(axis=1)]
    if not len(below):
        return 0.0
    front = below[nondominated(below)]
    front = front[np.argsort(front[:, 2], kind="stable")]
    volume = 0.0
    tops = [*front[1:, 2], reference[2]]
    for count, top in enumerate(tops, start=1):
        depth = top - front[count - 1, 2]
        if depth > 0:
            volume += depth * _area(front[:count, :2], reference[:2])
    return float(volume)


def _area(points: NDArray[np.float64], reference: Sequence[float]) -> float:
    area, roof = 0.0, reference[1]
    for x, y in sorted(map(tuple, points.tolist())):
        if y < roof:
            area += (reference[0] - x) * (roof - y)
            roof = y
    return area


def volume_of(results: Sequence[TrialResult], reference: Sequence[float]) -> float:
    """Return the hypervolume of the feasible results' cost, loss and memory."""
    points = [[each.cost, each.loss, each.memory_mib] for each in results if each.feasible]
    return hypervolume(np.array(points).reshape(-1, 3), reference)


class Progress:
    """The hypervolume after each result of a walk, without counting dominated ones again."""

    def __init__(self, reference: Sequence[float]) -> None:
        self.reference = reference
        self.front: list[list[float]] = []
        self.volume = 0.0

    def add(self, result: TrialResult) -> float:
        """Count a result and return the volume."""
        point = [result.cost, result.loss, result.memory_mib]
        if result.feasible and not any(
            all(a <= b for a, b in zip(other, point, strict=True)) for other in self.front
        ):
            self.front = [
                other
                for other in self.front
                if not all(a <= b for a, b in zip(point, other, strict=True))
            ]
            self.front.append(point)
            self.volume = hypervolume(np.array(self.front), self.reference)
        return self.volume
