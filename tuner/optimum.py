"""The schedule of greatest gain within two bounds, proven: a multiple-choice knapsack.

    1. Strike out choices that cannot fit, and scale what is left so that each bound is 1.
    2. Find prices of a bit and of a ms (Lagrange multipliers, by cutting planes) that bound from
       above what any schedule within the bounds gains.
    3. Strike out choices through which that bound does not reach the best schedule known.
    4. Carry non-dominated labels over what is left, without those whose bound is too low.

With many windows the bound is tight, so few labels are carried.  Step 4 first hopes for a gain
close to the bound, which leaves fewest, and lowers its hopes when it finds nothing.  A general
solver of integer programs was refused: it is a dependency, and not faster here.  Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from engines.errors import CadenzaError
from tuner.bound import best_prices
from tuner.carry import carry
from tuner.costs import Indices, Reals
from tuner.labels import TIE, Table

# Looks taken one after the other: the share of the gap between the bound and the best schedule
# known in which a better one is looked for, and the most labels carried.  Beyond, only the most
# promising are kept.
_LOOKS = ((1 / 4, 500), (1.0, 2000))
# Labels of all windows in the last look, which proves.  It takes seconds to reach: where gains
# are all but proportional to costs, and nothing but trying tells one schedule from another.
_MOST_LABELS = 640_000


@dataclass(frozen=True, slots=True)
class Found:
    """A schedule [W], or None where none is wanted and fits; and by how much that may be wrong.

    `short_of` is how much more another could gain than the schedule, or than what was asked for;
    0 when it is proven, as it is unless the search was cut off.
    """

    choice: Indices | None
    short_of: float = 0.0


def best(
    table: Table,
    bits: float = np.inf,
    ms: float = np.inf,
    floor: float = -np.inf,
    avoid: Indices | None = None,
    hints: Iterable[Indices] = (),
) -> Found:
    """Return the schedule of greatest gain within the bounds.

    Args:
        table: What each choice adds.
        bits: Upper bound on the sum of bits.
        ms: Upper bound on the sum of milliseconds.
        floor: Only schedules that gain more than this are wanted.
        avoid: A schedule that is not wanted, whatever it gains.
        hints: Schedules that may be good; the closer they are to the best, the less is searched.

    Raises:
        CadenzaError: Without a floor, the search was cut off before it found any schedule.
    """
    unit = _to_unit(table, bits, ms)
    if unit is None:
        return Found(None)
    small, offset, scale = unit
    least = (floor - offset) / scale
    prices, paths = best_prices(small, hints, least)
    if prices.bound <= least:
        return Found(None)
    if avoid is not None:
        paths.append(avoid)
    found, least = _start(small, paths, least, avoid)
    most_possible = prices.bound
    for hope, most in (*_LOOKS, (1.0, _MOST_LABELS // len(small.gain))):
        gap = most_possible - least
        if gap <= TIE:
            break
        lowest = most_possible - hope * gap if hope < 1 else least
        choice, lost = carry(small, prices, lowest + TIE, avoid, most)
        if choice is not None:
            found, least = choice, small.totals(choice)[2]
        most_possible = min(most_possible, max(lost, lowest + TIE if choice is None else least))
    short_of = scale * (most_possible - least) if most_possible > least + 2 * TIE else 0.0
    if found is None and short_of and floor == -np.inf:
        raise CadenzaError(
            "no schedule was found among the most promising ones, and none is proven impossible; "
            "raise a budget, or name fewer precisions"
        )
    return Found(found, short_of)


def _start(
    table: Table, paths: list[Indices], least: float, avoid: Indices | None
) -> tuple[Indices | None, float]:
    """Return the best schedule found by changing single windows of the given ones, and its gain.

    None, and `least` or a gain below any, when none within the bounds gains more than `least`.
    """
    best_yet: Indices | None = None
    for path in paths[:2] + paths[2:][-4:]:
        while np.isfinite(table.totals(path)[2]):
            bits, ms, gain = _neighbours(table, path)
            gain = np.where((bits <= 1.0 + TIE) & (ms <= 1.0 + TIE), gain, -np.inf)
            if avoid is not None and np.count_nonzero(path != avoid) <= 1:
                differs = np.flatnonzero(path != avoid)
                rows = differs if len(differs) else np.arange(len(path))
                gain[rows, avoid[rows]] = -np.inf
            window, choice = np.unravel_index(int(gain.argmax()), gain.shape)
            if not gain[window, choice] > least + TIE:
                break
            path = path.copy()
            path[window] = choice
            best_yet, least = path, table.totals(path)[2]
    if not np.isfinite(least):
        least = -1.0 - table.switch_gain * len(table.gain)  # gains of all windows sum to [0, 1]
    return best_yet, least


def _neighbours(table: Table, path: Indices) -> tuple[Reals, Reals, Reals]:
    """Return (bits, ms, gain), each [W, P], of a schedule with one window changed."""
    bits, ms, gain = table.totals(path)
    rows = np.arange(len(path))
    more_bits = bits + table.bits - table.bits[rows, path][:, None]
    more_ms = ms + table.ms - table.ms[rows, path][:, None]
    more_gain = gain + table.gain - table.gain[rows, path][:, None]
    if table.couples:
        differs = np.arange(table.gain.shape[1]) != path[:, None]
        switches = np.zeros(table.gain.shape)
        switches[1:] += differs[:-1]
        switches[:-1] += differs[1:]
        switches -= switches[rows, path][:, None]
        more_ms = more_ms + table.switch_ms * switches
        more_gain = more_gain - table.switch_gain * switches
    return more_bits, more_ms, more_gain


def _to_unit(table: Table, bits: float, ms: float) -> tuple[Table, float, float] | None:
    """Return the table with both bounds 1 and the gains of windows summing to at most 1.

    Costs are counted from the cheapest choice of each window, gains from the least, and a cost
    that cannot exceed its bound is dropped.  Also returned: offset and scale, by which a gain is
    offset + scale * (gain in the new table).  None when nothing fits.
    """
    open_ = table.gain > -np.inf
    while True:
        if not open_.any(axis=1).all():
            return None
        before = np.count_nonzero(open_)
        costs, slacks = [], []
        for cost, bound in ((table.bits, bits), (table.ms, ms)):
            cost = np.where(open_, cost, np.inf)
            lowest = cost.min(axis=1, keepdims=True)
            if not np.isfinite(bound) or not np.isfinite(lowest).all():
                if np.isfinite(bound):
                    return None
                costs.append(np.zeros_like(cost))
                slacks.append(np.inf)
                continue
            slack = bound - float(lowest.sum())
            if slack < 0:
                return None
            open_ = open_ & (cost - lowest <= slack)
            costs.append(np.where(open_, cost - lowest, 0.0))
            slacks.append(max(slack, 1e-15 * abs(bound), np.finfo(float).tiny))
        if np.count_nonzero(open_) == before:
            break
    switch_ms = table.switch_ms
    if costs[0].max(axis=1).sum() <= slacks[0]:
        costs[0] = np.zeros_like(costs[0])
    if costs[1].max(axis=1).sum() + switch_ms * (len(open_) - 1) <= slacks[1]:
        costs[1], switch_ms = np.zeros_like(costs[1]), 0.0
    slacks = [slack if slack < np.inf else 1.0 for slack in slacks]
    lowest = np.where(open_, table.gain, np.inf).min(axis=1, keepdims=True)
    gain = np.where(open_, table.gain - lowest, -np.inf)
    scale = float(gain.max(axis=1).sum()) or 1.0
    small = Table(
        gain / scale,
        costs[0] / slacks[0],
        costs[1] / slacks[1],
        switch_ms / slacks[1],
        table.switch_gain / scale,
    )
    return small, float(lowest.sum()), scale
