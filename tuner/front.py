"""The front: schedules of which none beats another in (bits, ms, gain); all of them, or a choice.

`complete_front` carries every non-dominated label.  With many windows there are too many; then
`scanned_front` looks at one cost at a time and returns the best schedules of N equal steps of it:
exact too, but not all there is.  Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tuner.costs import Indices, Reals
from tuner.labels import Step, Table, children, root, undominated
from tuner.optimum import best

Choices = NDArray[np.intp]

# Labels in a window beyond which a front of one cost is not completed.
_MOST_LABELS = 12_000


def complete_front(table: Table, most: int) -> Choices | None:
    """Return all schedules [F, W] of which none beats or equals another in (bits, ms, gain).

    A schedule whose ms is infinite counts as the slowest.  None when more than `most` labels
    would have to be carried from a window to the next.
    """
    table = _to_unit(table)
    windows = len(table.gain)
    labels = root()
    trail: list[tuple[Indices, Indices]] = []
    for window in range(windows):
        allowed = np.flatnonzero(table.gain[window] > -np.inf)
        if len(labels.gain) > most:
            return None
        labels = children(labels, Step.of(table, window, allowed), table)
        ends = window == windows - 1 or not table.couples
        kept = undominated(
            labels.bits,
            labels.ms,
            labels.gain,
            None if ends else labels.last,
            table.switch_ms,
            table.switch_gain,
        )
        labels = labels.take(kept)
        trail.append((labels.parent, allowed[labels.choice]))
    schedules = np.empty((len(labels.gain), windows), np.intp)
    index = np.arange(len(schedules))
    for window in range(windows - 1, -1, -1):
        parent, choice = trail[window]
        schedules[:, window], index = choice[index], parent[index]
    return schedules


def _to_unit(table: Table) -> Table:
    """Return the table with each column of costs, and the gains, of the order of 1 in sum."""

    def scale(values: Reals) -> float:
        peaks = np.where(np.isfinite(values), np.abs(values), 0).max(axis=1, initial=0)
        return float(peaks.sum()) or 1.0

    ms = scale(table.ms) + table.switch_ms * (len(table.ms) - 1)
    gain, bits = scale(table.gain), scale(table.bits)
    return Table(
        table.gain / gain,
        table.bits / bits,
        table.ms / ms,
        table.switch_ms / ms,
        table.switch_gain / gain,
    )


def scanned_front(table: Table, axis: str, steps: int) -> Choices:
    """Return the schedules [F, W] of greatest gain for N equal steps of one cost, 1 a step.

    Args:
        table: What each choice adds; finite ms where the axis is "ms".
        axis: "bits" or "ms": the cost that counts; the other is free.
        steps: N.
    """
    side = 0 if axis == "bits" else 1
    cost = (table.bits, table.ms)[side]
    if axis == "bits":
        table = replace(table, ms=np.zeros_like(cost), switch_ms=0.0)
    else:
        table = replace(table, bits=np.zeros_like(cost))
    every = complete_front(table, _MOST_LABELS)  # of one cost there are far fewer
    if every is not None:
        sums = table.sums(every)
        return every[thinned([sums[side]], sums[2], steps)]
    allowed = table.gain > -np.inf
    frugal = replace(table, gain=np.where(allowed, -cost, -np.inf), switch_gain=table.switch_ms)
    cheapest, found = best(frugal).choice, best(table).choice
    if cheapest is None or found is None:
        return np.zeros((0, len(table.gain)), np.intp)
    rows = [found]
    low = table.totals(cheapest)[side]
    spent = high = table.totals(found)[side]
    while found is not None and spent > low:
        # What is best under a bound is best under all lower ones, down to what it spends.
        step = int(np.ceil((spent - low) / (high - low) * steps * (1 - 1e-12))) - 1
        bound = low + (high - low) * step / steps
        caps = (bound * (1 + 1e-12), np.inf) if axis == "bits" else (np.inf, bound * (1 + 1e-12))
        found = best(table, *caps, hints=rows[-1:]).choice
        if found is not None:
            rows.append(found)
            spent = min(bound, table.totals(found)[side])
    return np.array(rows, np.intp)


def thinned(costs: Sequence[Reals], gain: Reals, steps: int) -> Indices:
    """Return the indices of points that gain most in one of N equal steps of some axis, ascending.

    Args:
        costs: Values on each axis [F]; infinite where not known.
        gain: [F].
        steps: N.
    """
    kept: set[int] = set()
    for cost in costs:
        timed = np.flatnonzero(np.isfinite(cost))
        cost, own = cost[timed], gain[timed]
        low = cost.min(initial=np.inf)
        width = (cost.max(initial=low) - low) / steps or 1.0
        cell = np.minimum((cost - low) // width, steps - 1)
        order = np.lexsort((-own, cell))
        first = np.ones(len(order), bool)
        first[1:] = np.diff(cell[order]) > 0
        kept.update(timed[order[first]].tolist())
    return np.array(sorted(kept), np.intp)
