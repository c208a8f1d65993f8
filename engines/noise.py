"""What is noise in measured times: medians with intervals, ties, a machine that drifts.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000

# A machine drifts when the last third of its rounds differs from the first by more than this.
DRIFTS = 0.02

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and its 95 % bootstrap interval, in the unit of what was sampled."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Drift:
    """How much slower the last third of some rounds was than the first third.

    Attributes:
        ratio: Of the medians.
        low: Lower end of its 95 % interval.
        high: Upper end.
        found: Whether the interval lies beyond `DRIFTS` of 1.
    """

    ratio: float
    low: float
    high: float
    found: bool


def bootstrap_median(sample: Times, rng: np.random.Generator) -> Interval:
    """Return the median of all values [R, S] with its 95 % interval, resampling the R rounds."""
    rounds = len(sample)
    picked = rng.integers(0, rounds, (RESAMPLES, rounds))
    medians = [float(np.median(sample[chosen])) for chosen in picked]
    low, high = np.quantile(medians, (0.025, 0.975))
    return Interval(float(np.median(sample)), float(low), float(high))


def told_apart(found: Interval) -> bool:
    """Return whether a ratio is told from 1; what is not told apart is a tie."""
    return found.high < 1.0 or found.low > 1.0


def drift(rounds: Sequence[float], seed: int = 0) -> Drift:
    """Return how a machine's speed changed over rounds of the same work.

    Args:
        rounds: Time of each round, in their order [R].
        seed: Of the bootstrap.
    """
    times, third = np.asarray(rounds, np.float64), len(rounds) // 3
    if third < 2:  # too few rounds to tell
        return Drift(1.0, 1.0, 1.0, False)
    rng = np.random.default_rng(seed)
    first, last = times[:third], times[-third:]
    picked = [part[rng.integers(0, third, (RESAMPLES, third))] for part in (last, first)]
    ratios = np.median(picked[0], axis=1) / np.median(picked[1], axis=1)
    low, high = (float(end) for end in np.quantile(ratios, (0.025, 0.975)))
    found = low > 1.0 + DRIFTS or high < 1.0 - DRIFTS
    return Drift(float(np.median(last) / np.median(first)), low, high, found)
