"""Where the front may still grow: what is known of the knobs, put to use.  Pure.

Three facts of this space, which no general sampler knows:

* an option of the backend changes what a candidate costs, by a factor that is much alike for all
  recipes, and nothing else: so the best ones are found once, and everything is tried with them;
* loss and memory depend on recipe and schedule alone;
* good candidates lie near good ones: one knob away from a point of the present front.

Effects of single values are fitted to all results (log cost, loss, memory; ridge regression).  A
neighbour of the front is predicted from the point that it differs from, a little optimistically
where a value was seldom tried, and the one that would add most volume to the front comes next.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.space import Candidate, Knob, Value
from tuner.trials import TrialResult

Reals = NDArray[np.float64]

# Points that stand for the volume under the front.
_SAMPLES = 2048
_RIDGE = 0.1
# What an untried value may turn out to be better, in standard deviations of what is not explained.
_HOPE = 1.0
# A neighbour that adds less than this share of the volume is not worth a trial of its own.
_WORTH = 2e-4


@dataclass(frozen=True)
class _Fit:
    """Effects of single values.

    Attributes:
        at: Column of (knob, value).
        effects: On log cost, loss and memory [D, 3].
        counts: Trials with the value [D].
        rest: Standard deviation of what is not explained [3].
    """

    at: dict[tuple[str, Value], int]
    effects: Reals
    counts: Reals
    rest: Reals


def guided(
    space: Sequence[Knob],
    results: Sequence[TrialResult],
    taken: Collection[Candidate],
    seed: int,
) -> Candidate | None:
    """Return the candidate that promises to add most to the front, or None.

    Args:
        space: The knobs.
        results: Finished trials.
        taken: Candidates that are finished, or run elsewhere.
        seed: Of the points that stand for volume.
    """
    feasible = [result for result in results if result.feasible]
    if not feasible:
        return None
    worked = [result for result in results if result.failed is None]
    fit = _fitted(space, worked)
    options = _best_options(space, fit)
    values = np.array([_point(result) for result in feasible])
    front = [feasible[index] for index in nondominated(values)]
    pool, predicted = [], []
    for result in front:
        for near in _neighbours(space, result.candidate, options):
            if near not in taken:
                pool.append(near)
                predicted.append(_predicted(result, near, fit))
    if not pool:
        return None
    gains = _volume_gained(values, np.array(predicted), seed)
    best = int(gains.argmax())
    return pool[best] if gains[best] >= _WORTH else None


def nondominated(points: Reals) -> list[int]:
    """Return which points [N, 3] no other one dominates, smaller being better; ties once."""
    kept: list[int] = []
    for index in np.lexsort(points.T[::-1]).tolist():
        if not any((points[other] <= points[index]).all() for other in kept):
            kept.append(index)
    return kept


def _point(result: TrialResult) -> list[float]:
    return [float(np.log(max(result.cost, 1e-12))), result.loss, result.memory_mib]


def _fitted(space: Sequence[Knob], results: Sequence[TrialResult]) -> _Fit:
    """Return the effects of single values; of an option, on the cost alone."""
    at: dict[tuple[str, Value], int] = {}
    for knob in space:
        for choice in knob.choices:
            at[knob.name, choice] = len(at)
    rows = np.zeros((len(results), len(at)))
    for row, result in zip(rows, results, strict=True):
        for item in result.candidate.items:
            if item in at:
                row[at[item]] = 1.0
    targets = np.array([_point(result) for result in results])
    centred = targets - targets.mean(axis=0)
    options = np.array([knob.kind == "backend" for knob in space for _ in knob.choices], np.bool_)
    effects = np.zeros((len(at), 3))
    for column in range(3):
        used = np.ones(len(at), np.bool_) if column == 0 else ~options
        design = rows[:, used]
        gram = design.T @ design + _RIDGE * np.eye(int(used.sum()))
        effects[used, column] = np.linalg.solve(gram, design.T @ centred[:, column])
    left = centred - rows @ effects
    return _Fit(at, effects, rows.sum(axis=0), left.std(axis=0))


def _best_options(space: Sequence[Knob], fit: _Fit) -> dict[str, Value]:
    """Return the value of each backend option that makes everything cheapest, of those tried."""
    found: dict[str, Value] = {}
    for knob in space:
        if knob.kind == "backend":
            tried = [each for each in knob.choices if fit.counts[fit.at[knob.name, each]] > 0]
            found[knob.name] = min(
                tried or knob.choices[:1], key=lambda each: fit.effects[fit.at[knob.name, each], 0]
            )
    return found


def _neighbours(
    space: Sequence[Knob], candidate: Candidate, options: dict[str, Value]
) -> list[Candidate]:
    """Return a candidate with the best options, then those one knob away from it.

    Of the options too: how two of them go together is seen only where both are tried.
    """
    home = candidate.changed(**options)
    return [home] + [
        home.changed(**{knob.name: choice})
        for knob in space
        for choice in knob.choices
        if choice != home[knob.name]
    ]


def _predicted(result: TrialResult, near: Candidate, fit: _Fit) -> list[float]:
    """Return log cost, loss and memory of a candidate that differs little from a result."""
    point = np.array(_point(result))
    theirs = result.candidate.values
    for name, value in near.items:
        old = theirs.get(name)
        if old is None or value == old or (name, old) not in fit.at:
            continue
        new, before = fit.at[name, value], fit.at[name, old]
        hope = _HOPE * fit.rest / np.sqrt(1.0 + fit.counts[new])
        point += fit.effects[new] - fit.effects[before]
        # An option changes the cost alone, so nothing else is hoped of it.
        point -= hope * (fit.effects[new] != 0.0) if fit.counts[new] else hope
    point[1] = max(point[1], 0.0)
    return [float(value) for value in point]


def _volume_gained(known: Reals, predicted: Reals, seed: int) -> Reals:
    """Return the share of the box that each predicted point would add to what is dominated.

    The box reaches from the best of every objective to a little beyond the worst.

    Args:
        known: Points found [N, 3].
        predicted: Points hoped for [C, 3].
        seed: Of the sample.
    """
    low = np.minimum(known.min(axis=0), predicted.min(axis=0))
    high = known.max(axis=0)
    high = high + 0.05 * np.maximum(high - low, 1e-9)
    sample = np.random.default_rng(seed).uniform(low, high, (_SAMPLES, 3))
    free = sample[~(known[:, None, :] <= sample[None, :, :]).all(axis=2).any(axis=0)]
    if not len(free):
        return np.zeros(len(predicted))
    gained = (predicted[:, None, :] <= free[None, :, :]).all(axis=2).sum(axis=1)
    return np.asarray(gained / _SAMPLES)
