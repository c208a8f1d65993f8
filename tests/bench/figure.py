"""A figure, its line, and how two things are timed against each other."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number beside what it is held against.

    Attributes:
        name: What `python -m tests.bench NAME` calls it.
        value: The measured number.
        unit: Its unit.
        against: What the reference is, in words.
        reference: The reference in the same unit, or None.
        spread: 95 % interval of the value.
        n: Measurements behind it.
    """

    name: str
    value: float
    unit: str
    against: str
    reference: float | None
    spread: tuple[float, float]
    n: int

    def line(self) -> str:
        """Return the figure as one line of JSON.

        >>> print(Figure(name="built", value=0.0, unit="engines", against="0", reference=0.0,
        ...              spread=(0.0, 0.0), n=1).line())
        {"figure": "built", "value": 0.0, "unit": "engines", "against": "0", "reference": 0.0, \
"ratio": null, "spread": [0.0, 0.0], "n": 1}
        """
        ratio = self.value / self.reference if self.reference else None
        return json.dumps(
            {
                "figure": self.name,
                "value": self.value,
                "unit": self.unit,
                "against": self.against,
                "reference": self.reference,
                "ratio": ratio,
                "spread": list(self.spread),
                "n": self.n,
            },
            allow_nan=False,
        )


def seconds_of(
    runs: Mapping[str, Callable[[int], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, NDArray[np.float64]]:
    """Return the wall time of each run in each round [rounds], seconds.

    A round calls every run once with the round's number, so that all of them answer the same
    prompts; who goes first rotates.  A first round, not counted, warms up.
    """
    names = list(runs)
    seconds = {name: np.zeros(rounds) for name in names}
    for number in range(-1, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            start = clock()
            runs[name](max(number, 0))
            if number >= 0:
                seconds[name][number] = clock() - start
    return seconds


def median_interval(values: Sequence[float] | NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median of values [n]."""
    sample = np.asarray(values, np.float64)
    draws = np.random.default_rng(0).integers(len(sample), size=(2000, len(sample)))
    low, high = np.quantile(np.median(sample[draws], axis=1), (0.025, 0.975))
    return float(low), float(high)


def speed_figure(
    name: str,
    against: str,
    unit: str,
    work: float,
    ours: NDArray[np.float64],
    theirs: NDArray[np.float64],
) -> Figure:
    """Return a figure of speed: `work` a second, from the median of seconds [n] of each side."""
    low, high = median_interval(work / ours)
    return Figure(
        name=name,
        value=work / float(np.median(ours)),
        unit=unit,
        against=against,
        reference=work / float(np.median(theirs)),
        spread=(low, high),
        n=len(ours),
    )
