"""Adaptive bisection, after TMPDiff's abstract: an allocation from measurements alone.

From all low, raise the interval of windows whose raise mends most a window, halving intervals; the
second half's share follows from additivity, so a split costs one measurement.  Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engines.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Bisection:
    """Where an adaptive bisection ended: its schedule, and the schedules that it measured."""

    schedule: Schedule
    measured: int


def bisect(
    windows: int,
    low: str,
    high: str,
    error: Callable[[Schedule], float],
    fits: Callable[[Schedule], bool],
) -> Bisection:
    """Return the schedule that raises from `low` to `high` where it mends most a window.

    Args:
        windows: W.
        low: Precision of all windows at the start.
        high: That windows are raised to.
        error: Measured error of a schedule, in any unit; called at most 2 W times.
        fits: Whether a schedule is within the budgets; a raise that is not is passed over.

    Raises:
        ValueError: windows < 1, or not even all low fits.
    """
    if windows < 1 or not fits(Schedule.uniform(low, windows)):
        raise ValueError(f"need windows >= 1 and a budget for uniform {low}, got {windows=}")
    measured: dict[Schedule, float] = {}

    def mended(start: int, stop: int) -> float:
        return known(()) - known(range(start, stop))

    def known(raised: Sequence[int]) -> float:
        schedule = Schedule(tuple(high if w in raised else low for w in range(windows)))
        if schedule not in measured:
            measured[schedule] = error(schedule)
        return measured[schedule]

    heap: list[tuple[float, int, int, float]] = []

    def push(start: int, stop: int, gain: float) -> None:
        heapq.heappush(heap, (-gain / (stop - start), start, stop, gain))

    raised: set[int] = set()

    def with_raised(more: int) -> Schedule:
        return Schedule(tuple(high if w in raised or w == more else low for w in range(windows)))

    push(0, windows, mended(0, windows))
    while heap and any(fits(with_raised(w)) for w in range(windows) if w not in raised):
        _, start, stop, gain = heapq.heappop(heap)
        if stop - start == 1:
            if fits(with_raised(start)):
                raised.add(start)
            continue
        middle = (start + stop) // 2
        first = mended(start, middle)
        push(start, middle, first)
        push(middle, stop, gain - first)
    schedule = Schedule(tuple(high if w in raised else low for w in range(windows)))
    return Bisection(schedule, len(measured))
