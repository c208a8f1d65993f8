"""What a schedule's answers are worth, and which one of several ships.

Quality is paired: every schedule answers the same prompts, and a score of each answer, 0 to 1,
says how good it is (accepted by the grader; equal to full precision's; share of its tokens).  The
*loss* is in points: what full precision's accuracy is ahead where answers are graded, else
100 minus the percentage of agreement.

Pure: random numbers come from seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64] | NDArray[np.bool_]

OBJECTIVES = ("latency", "quality", "memory")
CONFIDENCE = 0.95
RESAMPLES = 2_000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with the ends of its interval."""

    mean: float
    low: float
    high: float

    def scaled(self, factor: float) -> Interval:
        """Return the interval of a positive multiple."""
        return Interval(factor * self.mean, factor * self.low, factor * self.high)


def bootstrap_interval(
    values: Scores, seed: int, confidence: float = CONFIDENCE, resamples: int = RESAMPLES
) -> Interval:
    """Return the mean of values [N] with its percentile bootstrap interval.

    Raises:
        ValueError: There are no values, or one is not finite.
    """
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or not sample.size or not np.isfinite(sample).all():
        raise ValueError(f"need finite values [N], N >= 1, got shape {sample.shape}")
    rng = np.random.default_rng(seed)
    count = len(sample)
    rows = max(1, 1_000_000 // count)  # of the resamples made at once, which bounds memory
    means = np.concatenate(
        [
            sample[rng.integers(0, count, (min(rows, resamples - start), count))].mean(axis=1)
            for start in range(0, resamples, rows)
        ]
    )
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(means, (tail, 1.0 - tail))
    mean = float(sample.mean())
    return Interval(mean, min(float(low), mean), max(float(high), mean))


def paired_interval(
    scores: Scores,
    others: Scores,
    seed: int,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return the mean of scores - others, both [N] on the same prompts, with its interval.

    Raises:
        ValueError: The shapes differ, or as `bootstrap_interval`.
    """
    if np.shape(scores) != np.shape(others):
        raise ValueError(
            f"scores must be of the same prompts, got shapes {np.shape(scores)} and "
            f"{np.shape(others)}"
        )
    gaps = np.asarray(scores, np.float64) - np.asarray(others, np.float64)
    return bootstrap_interval(gaps, seed, confidence, resamples)


def wilson_interval(accepted: int, count: int, confidence: float = CONFIDENCE) -> Interval:
    """Return a share with Wilson's score interval, which is honest at 0 and at 1 too.

    Raises:
        ValueError: Not 0 <= accepted <= count, or count is 0.
    """
    if not 0 <= accepted <= count or not count:
        raise ValueError(f"need 0 <= accepted <= count and count >= 1, got {accepted}, {count}")
    z = NormalDist().inv_cdf(0.5 + confidence / 2.0)
    share = accepted / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = (
        z
        * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
        / (1 + z * z / count)
    )
    return Interval(
        share, min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))
    )


def loss_in_points(
    scores: NDArray[np.bool_], full: NDArray[np.bool_] | None, confidence: float = CONFIDENCE
) -> Interval:
    """Return the points lost against full precision, with an interval that is never a point.

    Args:
        scores: Which answers are accepted by the grader, or, without one, equal full precision's
            [N].
        full: Which of full precision's answers the grader accepts [N]; None without a grader.
        confidence: Of the interval.

    Where graded, the interval is Agresti and Min's for a paired difference of shares (2005):
    half a prompt is added to each way in which two answers can differ in worth, so that a few
    equal answers do not pass for proof.  Otherwise it is Wilson's of the agreement.

    Raises:
        ValueError: There are no prompts, or the shapes differ.
    """
    count = len(scores)
    if full is None:
        agreed = wilson_interval(int(np.count_nonzero(scores)), count, confidence)
        return Interval(
            100.0 * (1 - agreed.mean), 100.0 * (1 - agreed.high), 100.0 * (1 - agreed.low)
        )
    if np.shape(scores) != np.shape(full) or not count:
        raise ValueError(
            f"scores must be of the same prompts, got shapes {np.shape(scores)} and "
            f"{np.shape(full)}"
        )
    lost = int(np.count_nonzero(full & ~scores))
    won = int(np.count_nonzero(scores & ~full))
    z = NormalDist().inv_cdf(0.5 + confidence / 2.0)
    padded = count + 2
    middle = (lost - won) / padded
    half = z * math.sqrt(max(0.0, lost + won + 1 - (lost - won) ** 2 / padded)) / padded
    mean = (lost - won) / count
    return Interval(
        100.0 * mean, 100.0 * max(-1.0, middle - half), 100.0 * min(1.0, middle + half)
    )


def dominates(a: Sequence[float], b: Sequence[float]) -> bool:
    """Return whether costs `a` are nowhere above costs `b` and somewhere below.

    >>> dominates((1, 2), (1, 3)), dominates((1, 2), (1, 2)), dominates((0, 3), (1, 2))
    (True, False, False)
    """
    pairs = list(zip(a, b, strict=True))
    return all(x <= y for x, y in pairs) and any(x < y for x, y in pairs)


@dataclass(frozen=True, kw_only=True)
class Option:
    """A measured candidate.

    Attributes:
        name: For the reason that is given.
        cost: Milliseconds a sequence, or mean bits where nothing is timed.
        memory_mib: Weights and activations.
        uniform: Whether every window runs the same precision.
        loss: Points lost by each task.
        scores: Of each answer, by task, on the same prompts for all options [N], 0 to 1.
    """

    name: str
    cost: float
    memory_mib: float
    uniform: bool
    loss: Mapping[str, float]
    scores: Mapping[str, Scores]

    @property
    def worst_loss(self) -> float:
        """Points lost by the task that loses most."""
        return max(self.loss.values())


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which option ships.

    Attributes:
        index: Of the option.
        within: Whether it is within the loss that is allowed, for every task.
        reason: Why, in a sentence.
    """

    index: int
    within: bool
    reason: str


def choose(
    options: Sequence[Option],
    objective: str,
    max_loss: float | Mapping[str, float],
    seed: int,
    same_cost: float = 1e-9,
    resamples: int = RESAMPLES,
) -> Chosen:
    """Return the option that ships.

    Of the options within `max_loss` for every task, `latency` takes the fastest and `memory` the
    smallest.  `quality` takes the one that loses least, or the fastest of those whose quality
    cannot be told from it: whose paired interval of scores, over the prompts of all tasks,
    holds 0, and of which no single task is shown to be worse.  Options that cost the same are
    told apart by the other cost, then uniform goes before mixed, then the smaller loss.
    With none within `max_loss`, the one whose worst task loses least.

    Args:
        options: Measured on the same prompts.
        objective: One of OBJECTIVES.
        max_loss: Points that a task may lose: every task, or each its own.
        seed: Of the bootstrap.
        same_cost: Costs within this share of each other are the same.
        resamples: Of the bootstrap.

    Raises:
        ValueError: No options, an unknown objective, or options of different tasks.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective is one of {', '.join(OBJECTIVES)}, got {objective!r}")
    if not options:
        raise ValueError("need at least one option")
    tasks = sorted(options[0].loss)
    for option in options:
        if sorted(option.loss) != tasks or sorted(option.scores) != tasks or not tasks:
            raise ValueError(
                f"options must be measured on the same tasks, got {tasks} and "
                f"{sorted(option.loss)} with scores of {sorted(option.scores)}"
            )
    floors = max_loss if isinstance(max_loss, Mapping) else dict.fromkeys(tasks, max_loss)
    within = [
        index
        for index, option in enumerate(options)
        if all(option.loss[task] <= floors[task] for task in tasks)
    ]
    allowed = "/".join(f"{floor:g}" for floor in dict.fromkeys(floors[task] for task in tasks))
    if not within:
        index = min(
            range(len(options)), key=lambda i: (options[i].worst_loss, _rank(options, i, False))
        )
        return Chosen(
            index,
            False,
            f"{options[index].name}: none is within {allowed} points of full precision; this "
            f"one loses least, {options[index].worst_loss:.2f} points",
        )
    pool, top, why = within, -1, f"of those within {allowed} points of full precision"
    if objective == "quality":
        top = min(within, key=lambda i: (_mean_loss(options[i]), _rank(options, i, False)))
        pool = [i for i in within if i == top or _alike(options[i], options[top], seed, resamples)]
        why = f"of those whose quality cannot be told from {options[top].name}"
    index = _cheapest(options, pool, objective == "memory", same_cost)
    if objective == "quality" and index == top:
        why = f"that loses least, within {allowed} points of full precision"
        return Chosen(index, True, f"{options[index].name}: the one {why}")
    kind = "smallest" if objective == "memory" else "fastest"
    return Chosen(index, True, f"{options[index].name}: the {kind} {why}")


def _costs(option: Option, memory: bool) -> tuple[float, float]:
    """Return the cost that counts, and the other one."""
    costs = (option.cost, option.memory_mib)
    return costs[::-1] if memory else costs


def _rank(options: Sequence[Option], index: int, memory: bool) -> tuple[float, float, bool, float]:
    option = options[index]
    return (*_costs(option, memory), not option.uniform, _mean_loss(option))


def _mean_loss(option: Option) -> float:
    return math.fsum(option.loss.values()) / len(option.loss)


def _alike(option: Option, top: Option, seed: int, resamples: int) -> bool:
    """Return whether an option's quality cannot be told from the best one's."""
    gaps = {
        task: np.asarray(top.scores[task], np.float64) - np.asarray(option.scores[task])
        for task in sorted(top.scores)
    }
    pooled = bootstrap_interval(np.concatenate(list(gaps.values())), seed, resamples=resamples)
    if pooled.low > 0.0:
        return False
    return all(
        bootstrap_interval(gap, seed, resamples=resamples).low <= 0.0 for gap in gaps.values()
    )


def _cheapest(
    options: Sequence[Option], pool: Sequence[int], memory: bool, same_cost: float
) -> int:
    """Return the cheapest of the pool; among the same costs the other cost, then uniform."""
    left = list(pool)
    for which in (0, 1):
        costs = {index: _costs(options[index], memory)[which] for index in left}
        least = min(costs.values())
        left = [index for index in left if costs[index] <= least * (1.0 + same_cost)]
    return min(left, key=lambda i: (not options[i].uniform, _mean_loss(options[i]), i))
