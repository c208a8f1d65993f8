"""Schedules to hold an allocation against, at the same bits or from the same measurements.

    permuted     the same precisions, shuffled over the windows: does *where* matter?
    front_loaded, back_loaded, backward      the same precisions, first, last, the other way round
    bisect       TMPDiff's adaptive bisection, as its abstract describes it: from all low, raise
                 the interval of windows whose raise mends most a window, halving intervals while
                 their halves differ; the second half's share follows from additivity, so a split
                 costs one measurement
    from_file    written by hand

Pure but for `from_file`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engines.document import Document, document_from_text
from engines.errors import InputError
from engines.schedule import Schedule

# Shuffles drawn for each permutation wanted, before there are taken to be no others.
_DRAWS = 50
# Bytes of a file of schedules that are read at most.
_LARGEST_FILE = 1 << 20


def permuted(schedule: Schedule, count: int, seed: int) -> list[Schedule]:
    """Return up to `count` different shuffles of a schedule, itself never among them."""
    rng = np.random.default_rng(seed)
    found: dict[Schedule, None] = {}
    for _ in range(_DRAWS * count):
        if len(found) == count:
            break
        shuffled = Schedule(tuple(rng.permutation(schedule.precisions).tolist()))
        if shuffled != schedule:
            found[shuffled] = None
    return list(found)


def front_loaded(schedule: Schedule, bits: Mapping[str, float]) -> Schedule:
    """Return the same precisions with the most bits in the first windows."""
    return Schedule(tuple(sorted(schedule.precisions, key=lambda name: -bits[name])))


def back_loaded(schedule: Schedule, bits: Mapping[str, float]) -> Schedule:
    """Return the same precisions with the most bits in the last windows."""
    return Schedule(tuple(sorted(schedule.precisions, key=lambda name: bits[name])))


def backward(schedule: Schedule) -> Schedule:
    """Return the schedule read from its end."""
    return Schedule(schedule.precisions[::-1])


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


def from_file(file: Path, precisions: Sequence[str]) -> dict[str | None, Schedule]:
    """Return the schedules of a file by task; the key None stands for every other task.

    The file is a JSON list with the precision of each window, or an object with such a list for
    each task.

    Args:
        file: Written by hand.
        precisions: Names that a window may have.

    Raises:
        InputError: It cannot be read, or is at fault; says where and how to mend it.
    """
    try:
        if file.stat().st_size > _LARGEST_FILE:
            raise InputError(f"{str(file)!r} is larger than 1 MiB; give a file of schedules")
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read the schedules {str(file)!r}: {error}; give a JSON file"
        ) from error
    top = document_from_text(text, str(file))
    if isinstance(top.value, list):
        return {None: _schedule(top, precisions)}
    found: dict[str | None, Schedule] = {
        task: _schedule(each, precisions) for task, each in top.items()
    }
    if not found:
        top.fail("there is no schedule in it; write a list of precisions, or one for each task")
    return found


def _schedule(document: Document, precisions: Sequence[str]) -> Schedule:
    names = []
    for entry in document.entries():
        name = entry.text()
        if name not in precisions:
            entry.fail(f"{name!r} is none of {', '.join(precisions)}; name one of these")
        names.append(name)
    if not names:
        document.fail("a schedule has at least one window; name its precision")
    return Schedule(tuple(names))


def widened(schedule: Schedule, windows: int) -> Schedule | None:
    """Return a schedule written with more windows that answers alike, or None if there is none.

    Windows are equal parts of progress, so each of a schedule's is a whole number of the wider
    one's, or there is no such schedule.
    """
    times, rest = divmod(windows, schedule.windows)
    if rest or not times:
        return None
    return Schedule(tuple(name for name in schedule.precisions for _ in range(times)))
