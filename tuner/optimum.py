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
from numpy.typing import NDArray

from engines.errors import CadenzaError
from tuner.bound import Prices, best_prices, most_ahead
from tuner.costs import Indices, Reals
from tuner.labels import TIE, Labels, Table, children, root, undominated

# Looks taken one after the other: the share of the gap between the bound and the best schedule
# known in which a better one is looked for, and the most labels carried.  Beyond, only the most
# promising are kept.
_LOOKS = ((1 / 8, 200), (1 / 3, 200), (1.0, 200))
# Labels of all windows in the last look, which proves.  It takes seconds to reach: where gains
# are all but proportional to costs, and nothing but trying tells one schedule from another.
_MOST_LABELS = 640_000
# Fewer labels than this are carried without comparing them.
_FEW_LABELS = 48
# Pairs of prices by which labels are bounded, as multiples of the best pair.
_SPREAD = tuple((a, b) for a in (1.0, 0.93, 1.07) for b in (1.0, 0.93, 1.07))
# The parent of a label that leaves the schedule to avoid.
_PREFIX = -2


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
    prices, paths = best_prices(small, hints)
    if avoid is not None:
        paths.append(avoid)
    found, least = _start(small, paths, (floor - offset) / scale, avoid)
    most_possible = prices.bound
    for hope, most in (*_LOOKS, (1.0, _MOST_LABELS // len(small.gain))):
        gap = most_possible - least
        if gap <= TIE:
            break
        lowest = most_possible - hope * gap if hope < 1 else least
        choice, lost = _carry(small, prices, lowest + TIE, avoid, most)
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


def _carry(
    table: Table, prices: Prices, lowest: float, avoid: Indices | None, most: int
) -> tuple[Indices | None, float]:
    """Return the best schedule that gains more than `lowest`, and the bound on what was left out.

    Labels beyond the `most` promising ones are left out; minus infinity where none was.
    """
    open_ = prices.through > lowest
    if not open_.any(axis=1).all():
        return None, -np.inf
    order = _order(table, prices, open_)
    bounds = _Bounds(table, prices, open_, order)
    labels, prefix, lost = root(), None, -np.inf
    settled = 0
    if not table.couples:  # windows with one choice left come first, and are summed at once
        settled = int(np.count_nonzero(open_.sum(axis=1) == 1))
        first = order[:settled]
        only = open_[first].argmax(axis=1)
        labels = labels.plus(
            *(float(cost[first, only].sum()) for cost in (table.bits, table.ms, table.gain))
        )
    if avoid is not None and (not settled or np.array_equal(only, avoid[first])):
        labels, prefix = labels.take(np.zeros(0, np.intp)), labels
    trail: list[tuple[Indices, Indices]] = []
    for place, window in enumerate(order[settled:].tolist(), settled):
        allowed = np.flatnonzero(open_[window])
        labels = children(labels, table, window, allowed)
        if prefix is not None and avoid is not None:
            other = allowed[allowed != avoid[window]]
            labels = labels.join(children(prefix, table, window, other, parent=_PREFIX))
            same = allowed[allowed == avoid[window]]
            prefix = children(prefix, table, window, same) if len(same) else None
        labels, promise = bounds.keep(labels, place, lowest)
        if len(promise) > 3 * most:
            labels, promise, lost = _most_promising(labels, promise, 3 * most, lost)
        if len(promise) > _FEW_LABELS:
            kept = undominated(
                labels.bits,
                labels.ms,
                labels.gain,
                labels.last if table.couples else None,
                table.switch_ms,
                table.switch_gain,
            )
            labels, promise = labels.take(kept), promise[kept]
        if len(promise) > most:
            labels, promise, lost = _most_promising(labels, promise, most, lost)
        if not len(promise) and prefix is None:
            return None, lost
        trail.append((labels.parent, labels.choice))
    fits = (labels.bits <= 1.0 + TIE) & (labels.ms <= 1.0 + TIE)
    good = np.flatnonzero(fits & (labels.gain > lowest))
    if not len(good):
        return None, lost
    index = int(good[np.lexsort((labels.bits[good], labels.ms[good], -labels.gain[good]))[0]])
    choice = np.empty(len(order), np.intp)
    if settled:
        choice[first] = only
    for place in range(len(order) - 1, settled - 1, -1):
        parent, chosen = trail[place - settled]
        choice[order[place]] = chosen[index]
        index = int(parent[index])
        if index == _PREFIX and avoid is not None:
            choice[order[:place]] = avoid[order[:place]]
            break
    return choice, lost


def _order(table: Table, prices: Prices, open_: NDArray[np.bool_]) -> Indices:
    """Return the order in which windows are gone through.

    Where neighbours are not coupled any order will do, and clear cases come first.
    """
    windows, choices = table.gain.shape
    if table.couples or choices == 1:
        return np.arange(windows)
    second = np.sort(prices.through, axis=1)[:, -2]
    return np.lexsort((second, open_.sum(axis=1) > 1))


def _most_promising(
    labels: Labels, promise: Reals, most: int, lost: float
) -> tuple[Labels, Reals, float]:
    """Return the `most` labels of greatest promise, and the greatest promise of all left out."""
    rank = np.argsort(-promise, kind="stable")
    lost = max(lost, float(promise[rank[most]]))
    kept = rank[:most]
    return labels.take(kept), promise[kept], lost


class _Bounds:
    """What labels can still become, by several pairs of prices.

    One pair of prices bounds well the labels that have spent as the best schedule would; a little
    off it lie the prices for those that have spent more or less.  The lowest bound counts.
    """

    def __init__(
        self, table: Table, prices: Prices, open_: NDArray[np.bool_], order: Indices
    ) -> None:
        self.table, self.order = table, order
        self.pairs = list({(prices.bit * a, prices.ms * b): None for a, b in _SPREAD})
        self.ahead: list[Reals] = []  # of each pair, made when first needed
        self.rooms: list[Reals] = []  # most that may be spent up to each place [W]: bits, ms
        for cost in (table.bits, table.ms):
            least = np.where(open_, cost, np.inf).min(axis=1)[order]
            self.rooms.append(1.0 + TIE - np.append(np.cumsum(least[::-1])[::-1][1:], 0.0))

    def keep(self, labels: Labels, place: int, lowest: float) -> tuple[Labels, Reals]:
        """Return the labels that can still exceed `lowest`, and the promise of each."""
        fits = (labels.bits <= self.rooms[0][place]) & (labels.ms <= self.rooms[1][place])
        promise = np.where(fits, np.inf, -np.inf)
        for index, (bit, ms) in enumerate(self.pairs):
            if index and len(promise) <= _FEW_LABELS:
                break
            if index == len(self.ahead):
                reduced = self.table.gain - bit * self.table.bits - ms * self.table.ms
                jump = ms * self.table.switch_ms + self.table.switch_gain
                self.ahead.append(most_ahead(reduced[self.order], jump))
            bound = labels.gain + bit * (1.0 - labels.bits) + ms * (1.0 - labels.ms)
            promise = np.minimum(promise, bound + self.ahead[index][place][labels.last])
            good = promise > lowest
            labels, promise = labels.take(good), promise[good]
        return labels, promise
