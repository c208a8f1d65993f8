"""Measured, label-free refinement of an allocated schedule.

The allocation trusts that gains add up.  Where damage is large they do not, so the neighbours of
its answer are tried on engines: one window moved to another precision, or the precisions of two
windows swapped, within the budgets.  A neighbour is judged by how many of full precision's tokens
it reproduces on tuning prompts; no labels.  It must be better beyond the noise of those prompts,
or the schedule stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.schedule import Schedule
from tuner.objective import paired_interval


@dataclass(frozen=True, slots=True)
class Refinement:
    """Where the refinement ended.

    Attributes:
        schedule: The best schedule that was measured.
        tried: Schedules measured, the first included.
    """

    schedule: Schedule
    tried: int


def neighbours(schedule: Schedule, precisions: Sequence[str]) -> Iterator[Schedule]:
    """Yield each schedule that differs in one window, then each with two windows swapped."""
    now = schedule.precisions
    for window, own in enumerate(now):
        for other in precisions:
            if other != own:
                yield Schedule((*now[:window], other, *now[window + 1 :]))
    for first in range(len(now)):
        for second in range(first + 1, len(now)):
            if now[first] != now[second]:
                swapped = list(now)
                swapped[first], swapped[second] = swapped[second], swapped[first]
                yield Schedule(tuple(swapped))


def refine(
    start: Schedule,
    precisions: Sequence[str],
    fits: Callable[[Schedule], bool],
    promise: Callable[[Schedule], float],
    measure: Callable[[Schedule], NDArray[np.float64]],
    evaluations: int,
    seed: int = 0,
) -> Refinement:
    """Return the best schedule found from `start` within a number of measured schedules.

    Args:
        start: The allocation's answer.
        precisions: Names that a window may have.
        fits: Whether a schedule is within every budget.
        promise: Predicted gain of a schedule, nats; the most promising neighbours are tried first.
        measure: Token agreement of a schedule on the same prompts every time [N].
        evaluations: Most schedules measured, `start` included; at least 1.
        seed: Of the bootstrap.

    Raises:
        ValueError: evaluations < 1.
    """
    if evaluations < 1:
        raise ValueError(f"evaluations >= 1 must hold, got {evaluations}")
    best, agreement, tried = start, measure(start), {start}
    improved = True
    while improved and len(tried) < evaluations:
        improved = False
        near = [each for each in neighbours(best, precisions) if each not in tried and fits(each)]
        for candidate in sorted(near, key=lambda each: -promise(each)):
            if len(tried) >= evaluations:
                break
            tried.add(candidate)
            measured = measure(candidate)
            low = paired_interval(measured, agreement, seed=seed).low
            if low > 0.0:
                best, agreement, improved = candidate, measured, True
                break
    return Refinement(best, len(tried))
