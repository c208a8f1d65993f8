"""Intervals of what the evidence states: correlations, and means over tasks of paired differences.

Pure; random numbers come from seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tuner.objective import Interval

Reals = NDArray[np.float64]

RESAMPLES = 2_000


def mean_over_tasks(values: Mapping[str, Reals], seed: int = 0) -> Interval:
    """Return the mean over tasks of the mean of each one's values [N], each task counted once.

    The 95 % interval is from drawing the prompts of each task again.
    """
    rng = np.random.default_rng(seed)
    drawn = np.zeros(RESAMPLES)
    for task in sorted(values):
        drawn += _resampled_means(np.asarray(values[task], np.float64), rng)
    low, high = np.quantile(drawn / len(values), (0.025, 0.975))
    mean = float(np.mean([np.mean(each) for each in values.values()]))
    return Interval(mean, min(float(low), mean), max(float(high), mean))


def _resampled_means(values: Reals, rng: np.random.Generator) -> Reals:
    count = len(values)
    weights = rng.multinomial(count, np.full(count, 1.0 / count), RESAMPLES) / count
    out: Reals = weights @ values
    return out


def pearson(x: Sequence[float] | Reals, y: Sequence[float] | Reals) -> float:
    """Return Pearson's r of two rows [n]; NaN where one of them does not vary."""
    a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum() / size) if size > 0 else float("nan")


def ranks(values: Sequence[float] | Reals) -> Reals:
    """Return the ranks of values [n], from 0, equal ones sharing their mean rank."""
    row = np.asarray(values, np.float64)
    below = (row[None, :] < row[:, None]).sum(axis=1)
    same = (row[None, :] == row[:, None]).sum(axis=1)
    return np.asarray(below + (same - 1) / 2.0)


def spearman(x: Sequence[float] | Reals, y: Sequence[float] | Reals) -> float:
    """Return Spearman's rank correlation of two rows [n]."""
    return pearson(ranks(x), ranks(y))


def correlation_interval(
    proxy: Reals, gains: Reals, seed: int = 0, rank: bool = False
) -> Interval:
    """Return the correlation of a proxy [W] with mean measured gains, with its interval.

    Args:
        proxy: A number for each window [W].
        gains: Measured, by prompt and window [N, W].
        seed: Of the bootstrap over prompts.
        rank: Spearman instead of Pearson.

    The interval is of the noise in the measured gains alone; with W windows the correlation says
    little about other windows, whatever the prompts.
    """
    of = spearman if rank else pearson
    rng = np.random.default_rng(seed)
    count = len(gains)
    weights = rng.multinomial(count, np.full(count, 1.0 / count), RESAMPLES // 4) / count
    drawn = np.array([of(proxy, row) for row in weights @ gains])
    value = of(proxy, gains.mean(axis=0))
    kept = drawn[np.isfinite(drawn)]
    if not np.isfinite(value) or not len(kept):
        return Interval(float("nan"), float("nan"), float("nan"))
    low, high = np.quantile(kept, (0.025, 0.975))
    return Interval(value, min(float(low), value), max(float(high), value))


def reliability(gains: Reals, seed: int = 0, splits: int = 50) -> float:
    """Return how well mean gains by window [N, W] of half the prompts predict the other half's.

    Mean Pearson r of random halves, stepped up to the whole by Spearman and Brown's formula: the
    square root is the ceiling that noise in the measured gains puts on any proxy's correlation.
    """
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(splits):
        order = rng.permutation(len(gains))
        half = len(order) // 2
        r = pearson(gains[order[:half]].mean(axis=0), gains[order[half:]].mean(axis=0))
        if np.isfinite(r):
            found.append(r)
    if not found:
        return float("nan")
    mean = float(np.mean(found))
    return 2 * mean / (1 + mean) if mean > 0 else 0.0
