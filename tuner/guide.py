"""Where the front may still grow: what is known of the knobs, put to use.  Pure.

Three facts of this space, which no general sampler knows:

* an option of the backend changes what a candidate costs, by a factor that is much alike for all
  recipes, and nothing else: so the best ones are found once, and recipes are tried with them;
* loss and memory depend on recipe and schedule alone;
* candidates that differ in few knobs come to much the same.

Log cost, loss and memory are each modelled as effects of single values (ridge regression) and a
Gaussian process over what these leave, whose covariance falls with the number of knobs in which
two candidates differ.  One draw from that model says what each candidate left may come to; the one
that would add most volume to the front is tried next.  So what is uncertain is tried as often as
it may be the best (Thompson, 1933), and nothing is tuned to a table.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from tuner.space import Candidate, Knob, Value
from tuner.strategies import candidate_at
from tuner.trials import TrialResult

Reals = NDArray[np.float64]
Rows = NDArray[np.intp]

# Points that stand for the volume under the front.
_SAMPLES = 2048
# Candidates with the best options that are looked at: all of them, or so many drawn.
_POOL = 2000
_RIDGE = 0.1
# By what factor covariance falls for each knob in which two candidates differ.
_FALLS = 0.6
# Variance of a measurement beside that of what single values leave unexplained.
_NOISE = 0.05


def guided(
    space: Sequence[Knob],
    results: Sequence[TrialResult],
    taken: Collection[Candidate],
    seed: int,
) -> Candidate | None:
    """Return the candidate that promises to add most to the front, or None.

    Args:
        space: The knobs.
        results: Finished trials, all of candidates that the space offers.
        taken: Candidates that are finished, or run elsewhere.
        seed: Of the draw, and of the points that stand for volume.
    """
    worked = [result for result in results if result.failed is None]
    feasible = [result for result in worked if result.feasible]
    if not feasible:
        return None
    values = np.array([_point(result) for result in worked])
    known = np.array([_point(result) for result in feasible])
    options = _best_options(space, worked)
    front = [feasible[index].candidate for index in nondominated(known)]
    pool = [each for each in _pool(space, front, options, seed) if each not in taken]
    if not pool:
        return None
    rng = np.random.default_rng(seed)
    drawn = np.column_stack(
        [
            _draw(space, worked, values[:, column], pool, column == 0, rng)
            for column in range(values.shape[1])
        ]
    )
    drawn[:, 1:] = np.maximum(drawn[:, 1:], 0.0)
    gains = _volume_gained(known, drawn, seed)
    best = int(gains.argmax())
    return pool[best] if gains[best] > 0.0 else None


def nondominated(points: Reals) -> list[int]:
    """Return which points [N, 3] no other one dominates, smaller being better; ties once."""
    kept: list[int] = []
    for index in np.lexsort(points.T[::-1]).tolist():
        if not any((points[other] <= points[index]).all() for other in kept):
            kept.append(index)
    return kept


def _point(result: TrialResult) -> list[float]:
    return [float(np.log(max(result.cost, 1e-12))), result.loss, result.memory_mib]


def _best_options(space: Sequence[Knob], results: Sequence[TrialResult]) -> dict[str, Value]:
    """Return the value of each backend option that makes everything cheapest, of those tried."""
    costs = np.array([_point(result)[0] for result in results])
    effects = _effects(_rows(space, [each.candidate for each in results]), costs, space)
    found: dict[str, Value] = {}
    start = 0
    tried = {item for result in results for item in result.candidate.items}
    for knob in space:
        own = effects[start : start + len(knob.choices)]
        start += len(knob.choices)
        if knob.kind == "backend":
            order = [
                (effect, place)
                for place, effect in enumerate(own.tolist())
                if (knob.name, knob.choices[place]) in tried
            ]
            found[knob.name] = knob.choices[min(order)[1]]
    return found


def _pool(
    space: Sequence[Knob],
    front: Sequence[Candidate],
    options: dict[str, Value],
    seed: int,
) -> list[Candidate]:
    """Return candidates to choose from: recipes and schedules with the best options, and the
    neighbours of the front, one knob away.
    """
    others = [
        knob if knob.kind != "backend" else Knob(knob.name, (options[knob.name],), knob.kind, "")
        for knob in space
    ]
    count = math.prod(len(knob.choices) for knob in others)
    numbers: Sequence[int] = range(count)
    if count > _POOL:
        numbers = [random.Random(seed).randrange(count) for _ in range(_POOL)]
        numbers = list(dict.fromkeys(numbers))
    pool = [candidate_at(others, number) for number in numbers]
    for candidate in front:
        home = candidate.changed(**options)
        pool += [
            near.changed(**{knob.name: choice})
            for near in (candidate, home)
            for knob in space
            for choice in knob.choices
        ]
    return list(dict.fromkeys(pool))


def _draw(
    space: Sequence[Knob],
    results: Sequence[TrialResult],
    values: Reals,
    pool: Sequence[Candidate],
    cost: bool,
    rng: np.random.Generator,
) -> Reals:
    """Return what each candidate of a pool may come to, one draw each, in one objective [C].

    Args:
        space: The knobs.
        results: Finished trials [N].
        values: What they came to [N].
        pool: Candidates.
        cost: Whether options of the backend matter.
        rng: Of the draw.
    """
    used = [knob for knob in space if cost or knob.kind != "backend"]
    here = _rows(used, [result.candidate for result in results])
    there = _rows(used, pool)
    middle = values.mean()
    effects = _effects(here, values - middle, used)
    left = values - middle - effects[here].sum(axis=1)
    spread = float(left.std()) or 1e-9 * max(1.0, abs(float(middle)))
    same = _FALLS ** (here[:, None, :] != here[None, :, :]).sum(axis=2)
    across = _FALLS ** (there[:, None, :] != here[None, :, :]).sum(axis=2)
    inverse = np.linalg.inv(same + _NOISE * np.eye(len(here)))
    weights = across @ inverse
    mean = middle + effects[there].sum(axis=1) + weights @ left
    variance = np.maximum(1.0 - (weights * across).sum(axis=1), 0.0)
    return np.asarray(mean + spread * np.sqrt(variance) * rng.standard_normal(len(pool)))


def _rows(space: Sequence[Knob], candidates: Sequence[Candidate]) -> Rows:
    """Return, for each candidate and knob, the number of its value among all values [N, K]."""
    at: dict[tuple[str, Value], int] = {}
    for knob in space:
        for choice in knob.choices:
            at[knob.name, choice] = len(at)
    names = [knob.name for knob in space]
    rows = [
        [at[name, values[name]] for name in names] for values in (c.values for c in candidates)
    ]
    return np.array(rows, np.intp).reshape(len(candidates), len(names))


def _effects(rows: Rows, values: Reals, space: Sequence[Knob]) -> Reals:
    """Return the effect of each single value on centred values, by ridge regression [D]."""
    count = sum(len(knob.choices) for knob in space)
    design = np.zeros((len(rows), count))
    np.put_along_axis(design, rows, 1.0, axis=1)
    gram = design.T @ design + _RIDGE * np.eye(count)
    return np.asarray(np.linalg.solve(gram, design.T @ (values - values.mean())))


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
