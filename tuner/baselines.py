"""Schedules to hold an allocation against: the same bits in other orders, and written by hand.

    permuted     the same precisions, shuffled over the windows: does *where* matter?
    front_loaded, back_loaded, backward      the same precisions, first, last, the other way round
    from_file    written by hand

Pure but for `from_file`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from engines.document import Document, document_from_text, text_from_file
from engines.schedule import Schedule

# Shuffles drawn for each permutation wanted, before there are taken to be no others.
_DRAWS = 50
# Bytes of a file of schedules that are read at most.
_LARGEST_FILE = 1 << 20


def permuted(
    schedule: Schedule, count: int, seed: int, passes: Sequence[float] | None = None
) -> list[Schedule]:
    """Return up to `count` different shuffles of a schedule at its bits, itself never among them.

    Args:
        schedule: What is shuffled.
        count: How many are wanted.
        seed: Of the shuffles.
        passes: In each window [W]; windows are shuffled among those of as many passes, for
            others would change the mean bits.  None: all alike.
    """
    rng = np.random.default_rng(seed)
    groups = _alike(schedule, passes)
    found: dict[Schedule, None] = {}
    for _ in range(_DRAWS * count):
        if len(found) == count:
            break
        shuffled = _within(schedule, groups, lambda names: rng.permutation(names).tolist())
        if shuffled != schedule:
            found[shuffled] = None
    return list(found)


def front_loaded(
    schedule: Schedule, bits: Mapping[str, float], passes: Sequence[float] | None = None
) -> Schedule:
    """Return the same precisions with the most bits in the first windows; `passes` as above."""
    groups = _alike(schedule, passes)
    return _within(schedule, groups, lambda names: sorted(names, key=lambda name: -bits[name]))


def back_loaded(
    schedule: Schedule, bits: Mapping[str, float], passes: Sequence[float] | None = None
) -> Schedule:
    """Return the same precisions with the most bits in the last windows; `passes` as above."""
    groups = _alike(schedule, passes)
    return _within(schedule, groups, lambda names: sorted(names, key=lambda name: bits[name]))


def backward(schedule: Schedule, passes: Sequence[float] | None = None) -> Schedule:
    """Return the schedule read from its end, among windows of as many passes."""
    return _within(schedule, _alike(schedule, passes), lambda names: names[::-1])


def _alike(schedule: Schedule, passes: Sequence[float] | None) -> list[list[int]]:
    """Return the windows in groups of equal passes."""
    groups: dict[float, list[int]] = {}
    for window in range(schedule.windows):
        key = 0.0 if passes is None else round(float(passes[window]), 9)
        groups.setdefault(key, []).append(window)
    return list(groups.values())


def _within(
    schedule: Schedule, groups: Sequence[Sequence[int]], order: Callable[[list[str]], list[str]]
) -> Schedule:
    """Return the schedule with the precisions of each group of windows in another order."""
    names = list(schedule.precisions)
    for group in groups:
        ordered = order([names[window] for window in group])
        for window, name in zip(group, ordered, strict=True):
            names[window] = name
    return Schedule(tuple(names))


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
    text = text_from_file(file, str(file), "a JSON file of schedules", _LARGEST_FILE)
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
