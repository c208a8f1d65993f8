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
from tuner.labels import TIE, Indices, Labels, Reals, Table, children, root, undominated

_CUTS = 40
_HIGHEST_PRICE = 1e4
_HOPES = (1 / 16, 1 / 4, 1.0)
# Labels beyond which only the most promising are kept, and `Found.short_of` says what that costs.
_MOST_LABELS = 100_000
# Fewer labels than this are carried without comparing them.
_FEW_LABELS = 48
# Prices are good enough when their bound is within this share of the range of gains of the best.
_CLOSE = 1e-4
# The parent of a label that leaves the schedule to avoid.
_PREFIX = -2


@dataclass(frozen=True, slots=True)
class Found:
    """A schedule [W], and how much more another could gain at most: 0 when it is proven best."""

    choice: Indices
    short_of: float = 0.0


def best(
    table: Table,
    bits: float = np.inf,
    ms: float = np.inf,
    floor: float = -np.inf,
    avoid: Indices | None = None,
    hints: Iterable[Indices] = (),
) -> Found | None:
    """Return the schedule of greatest gain within the bounds, or None.

    Args:
        table: What each choice adds.
        bits: Upper bound on the sum of bits.
        ms: Upper bound on the sum of milliseconds.
        floor: Only schedules that gain more than this are wanted.
        avoid: A schedule that is not wanted, whatever it gains.
        hints: Schedules that may be good; the closer they are to the best, the less is searched.

    Returns:
        None when no wanted schedule is within the bounds.
    """
    unit = _to_unit(table, bits, ms)
    if unit is None:
        return None
    small, offset, scale = unit
    known: Indices | None = None
    least = (floor - offset) / scale
    prices, paths = _prices(small, hints)
    for path in paths:
        used_bits, used_ms, gain = small.totals(path)
        fits = used_bits <= 1 + TIE and used_ms <= 1 + TIE
        if fits and gain > least + TIE and not (avoid is not None and np.array_equal(path, avoid)):
            known, least = path, gain
    if not np.isfinite(least):
        least = -1.0 - small.switch_gain * len(small.gain)  # below any: gains are scaled to [0, 1]
    gap = prices.bound - least
    for hope in _HOPES:
        if gap <= TIE:
            break
        lowest = prices.bound - hope * gap if hope < 1 else least
        choice, missed = _carry(small, prices, lowest + TIE, avoid)
        if choice is not None:
            short = max(0.0, missed - small.totals(choice)[2])
            return Found(choice, short * scale)
        if missed > least + TIE:
            if known is None:
                raise CadenzaError(
                    f"no schedule was found among the {_MOST_LABELS} most promising ones, and "
                    f"none is proven impossible; raise a budget, or name fewer precisions"
                )
            return Found(known, (missed - least) * scale)
    return None if known is None else Found(known)


@dataclass(frozen=True, slots=True)
class _Prices:
    """Lagrange multipliers and what they prove.

    Attributes:
        bit: Gain that a unit of bits must bring, at least 0.
        ms: Likewise of milliseconds.
        bound: No schedule within the bounds gains more.
        ahead: Most that the windows after each can add, less their price, by the choice in that
            window [W, P].
        through: The bound for schedules with a given choice in a window [W, P].
    """

    bit: float
    ms: float
    bound: float
    ahead: Reals
    through: Reals


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
        gain / scale, costs[0] / slacks[0], costs[1] / slacks[1],
        switch_ms / slacks[1], table.switch_gain / scale,
    )
    return small, float(lowest.sum()), scale


def _prices(table: Table, hints: Iterable[Indices]) -> tuple[_Prices, list[Indices]]:
    """Return the prices that bound best, and the schedules met on the way.

    The bound is convex in the prices, and every schedule gives a plane below it (Kelley's
    cutting planes): the next prices to try are where the highest plane is lowest.
    """
    paths = [hint for hint in hints if np.isfinite(table.totals(hint)[2])]
    planes = [_plane(table, path) for path in paths]
    tried = [_bound(table, 0.0, 0.0)]
    paths.append(tried[0][3])
    planes.append(_plane(table, paths[-1]))
    if planes[-1][1] < 0 or planes[-1][2] < 0:
        spot = (0.0, 0.0, -np.inf)
        for count in range(1, len(planes) + 1):
            spot = _lowest(np.array(planes[:count]), spot)
        while len(tried) < _CUTS:
            tried.append(_bound(table, spot[0], spot[1]))
            if min(bound for bound, *_ in tried) - spot[2] <= _CLOSE:
                break
            paths.append(tried[-1][3])
            planes.append(_plane(table, paths[-1]))
            spot = _lowest(np.array(planes), spot)
    bound, bit, ms, _ = min(tried, key=lambda one: one[0])
    reduced = table.gain - bit * table.bits - ms * table.ms
    jump = ms * table.switch_ms + table.switch_gain
    ahead = _ahead(reduced, jump)
    behind = _ahead(reduced[::-1], jump)[::-1]
    return _Prices(bit, ms, bound, ahead, ahead + reduced + behind + bit + ms), paths


def _plane(table: Table, path: Indices) -> tuple[float, float, float]:
    """Return (height, slope in the price of a bit, slope in that of a ms) of a schedule."""
    bits, ms, gain = table.totals(path)
    return gain, 1.0 - bits, 1.0 - ms


def _bound(table: Table, bit: float, ms: float) -> tuple[float, float, float, Indices]:
    """Return (bound, bit, ms, schedule that attains it): most gain less the price of its costs."""
    reduced = table.gain - bit * table.bits - ms * table.ms
    if not table.couples:
        path = reduced.argmax(axis=1)
        return float(reduced.max(axis=1).sum()) + bit + ms, bit, ms, path
    jump = ms * table.switch_ms + table.switch_gain
    onward = reduced + _ahead(reduced, jump)
    tops = onward.argmax(axis=1).tolist()
    stays = (onward >= onward.max(axis=1, keepdims=True) - jump).tolist()
    path = [tops[0]]
    for top, stay in zip(tops[1:], stays[1:], strict=True):
        path.append(path[-1] if stay[path[-1]] else top)
    return float(onward[0].max()) + bit + ms, bit, ms, np.array(path)


def _ahead(reduced: Reals, jump: float) -> Reals:
    """Return the most that the windows after each can add, by the choice in that window [W, P]."""
    if jump == 0:
        tops = reduced.max(axis=1)
        rest = np.append(np.cumsum(tops[::-1])[::-1][1:], 0.0)
        return np.broadcast_to(rest[:, None], reduced.shape)
    row = [0.0] * reduced.shape[1]
    rows = [row]
    for gains in reduced[:0:-1].tolist():  # plain lists: P is small, and numpy's calls are not
        onward = [a + b for a, b in zip(gains, row, strict=True)]
        least = max(onward) - jump
        row = [value if value > least else least for value in onward]
        rows.append(row)
    return np.array(rows[::-1])


def _lowest(planes: Reals, before: tuple[float, float, float]) -> tuple[float, float, float]:
    """Return (bit, ms, height) where the highest of the planes [N, 3] is lowest.

    `before` is that place without the last plane.  Where the last one is higher there, the new
    place is on it, in a corner of where it is the highest: all corners are looked at.
    """
    height, a, b = planes[-1]
    if height + a * before[0] + b * before[1] <= before[2]:
        return before
    normal = np.concatenate((planes[:-1, 1:] - (a, b), [(-1, 0), (0, -1), (1, 0), (0, 1)]))
    limit = np.concatenate(
        (height - planes[:-1, 0], [0.0, 0.0, _HIGHEST_PRICE, _HIGHEST_PRICE])
    )
    i, j = np.triu_indices(len(limit), 1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        across = normal[i, 0] * normal[j, 1] - normal[i, 1] * normal[j, 0]
        bit = (limit[i] * normal[j, 1] - limit[j] * normal[i, 1]) / across
        ms = (normal[i, 0] * limit[j] - normal[j, 0] * limit[i]) / across
        corner = np.isfinite(bit) & np.isfinite(ms)
        bit, ms = bit[corner], ms[corner]
        slack = 1e-9 * (1.0 + np.abs(limit))
        inside = (np.outer(bit, normal[:, 0]) + np.outer(ms, normal[:, 1]) <= limit + slack).all(1)
    if not inside.any():
        return before
    bit, ms = np.maximum(bit[inside], 0.0), np.maximum(ms[inside], 0.0)
    heights = height + a * bit + b * ms
    least = int(heights.argmin())
    return float(bit[least]), float(ms[least]), float(heights[least])


def _carry(
    table: Table, prices: _Prices, lowest: float, avoid: Indices | None
) -> tuple[Indices | None, float]:
    """Return the best schedule that gains more than `lowest`, and the bound on what was left out.

    Labels beyond `_MOST_LABELS` are left out; minus infinity where none was.
    """
    open_ = prices.through > lowest
    if not open_.any(axis=1).all():
        return None, -np.inf
    order, ahead = _order(table, prices, open_)
    least_bits = np.where(open_, table.bits, np.inf).min(axis=1)[order]
    least_ms = np.where(open_, table.ms, np.inf).min(axis=1)[order]
    room_bits = 1.0 + TIE - np.append(np.cumsum(least_bits[::-1])[::-1][1:], 0.0)
    room_ms = 1.0 + TIE - np.append(np.cumsum(least_ms[::-1])[::-1][1:], 0.0)
    labels = root()
    prefix = None
    if avoid is not None:
        labels, prefix = labels.take(np.zeros(0, np.intp)), labels
    trail: list[tuple[Indices, Indices]] = []
    missed = -np.inf
    for place, window in enumerate(order.tolist()):
        allowed = np.flatnonzero(open_[window])
        labels = children(labels, table, window, allowed)
        if prefix is not None and avoid is not None:
            other = allowed[allowed != avoid[window]]
            labels = labels.join(children(prefix, table, window, other, parent=_PREFIX))
            same = allowed[allowed == avoid[window]]
            prefix = children(prefix, table, window, same) if len(same) else None
        bound = (
            labels.gain
            + prices.bit * (1.0 - labels.bits)
            + prices.ms * (1.0 - labels.ms)
            + ahead[place][labels.last]
        )
        good = (bound > lowest) & (labels.bits <= room_bits[place]) & (labels.ms <= room_ms[place])
        labels = labels.take(good)
        if len(labels.gain) > _FEW_LABELS:
            kept = undominated(
                labels.bits,
                labels.ms,
                labels.gain,
                labels.last if table.couples else None,
                table.switch_ms,
                table.switch_gain,
            )
            labels = labels.take(kept)
            if len(kept) > _MOST_LABELS:
                bound = bound[good][kept]
                rank = np.argsort(-bound, kind="stable")
                missed = max(missed, float(bound[rank[_MOST_LABELS]]))
                labels = labels.take(rank[:_MOST_LABELS])
        if not len(labels.gain) and prefix is None:
            return None, missed
        trail.append((labels.parent, labels.choice))
    good = labels.gain > lowest
    if not good.any():
        return None, missed
    index = int(np.lexsort((labels.bits, labels.ms, -labels.gain, ~good))[0])
    choice = np.empty(len(order), np.intp)
    for place in range(len(order) - 1, -1, -1):
        parent, chosen = trail[place]
        choice[order[place]] = chosen[index]
        index = int(parent[index])
        if index == _PREFIX and avoid is not None:
            choice[order[:place]] = avoid[order[:place]]
            break
    return choice, missed


def _order(table: Table, prices: _Prices, open_: NDArray[np.bool_]) -> tuple[Indices, Reals]:
    """Return the order in which windows are gone through, and what is ahead of each, [W, P].

    Where neighbours are not coupled any order will do, and clear cases come first.
    """
    windows, choices = table.gain.shape
    if table.couples or choices == 1:
        return np.arange(windows), prices.ahead
    second = np.sort(prices.through, axis=1)[:, -2]
    order = np.argsort(second, kind="stable")
    reduced = table.gain - prices.bit * table.bits - prices.ms * table.ms
    return order, _ahead(reduced[order], 0.0)
