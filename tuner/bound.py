"""What no schedule within two bounds can exceed: prices of a bit and of a ms.

The Lagrangian bound of a multiple-choice knapsack.  For any prices, the schedule that gains most
after paying for its costs, plus the worth of both bounds, is not beaten by any schedule within the
bounds.  That is convex in the prices, and every schedule gives a plane below it, so the best
prices are found by cutting planes (Kelley, 1960).  Both bounds are 1.  Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np

from tuner.costs import Indices, Reals
from tuner.labels import Table

_CUTS = 40
_HIGHEST_PRICE = 1e4
# Prices are good enough when their bound is within this share of the range of gains of the best.
_CLOSE = 1e-4


@dataclass(frozen=True, slots=True)
class Prices:
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


def best_prices(
    table: Table, hints: Iterable[Indices], floor: float = -np.inf
) -> tuple[Prices, list[Indices]]:
    """Return the prices that bound best, and the schedules met on the way.

    Prices whose bound is not above `floor` are good enough.

    The bound is convex in the prices, and every schedule gives a plane below it (Kelley's
    cutting planes): the next prices to try are where the highest plane is lowest.
    """
    paths = [hint for hint in hints if np.isfinite(table.totals(hint)[2])]
    planes = [_plane(table, path) for path in paths]
    tried = [_bound(table, 0.0, 0.0)]
    paths.append(tried[0][3])
    planes.append(_plane(table, paths[-1]))
    if (planes[-1][1] < 0 or planes[-1][2] < 0) and tried[0][0] > floor:
        spot = (0.0, 0.0, -np.inf)
        for count in range(1, len(planes) + 1):
            spot = _lowest(np.array(planes[:count]), spot)
        while len(tried) < _CUTS:
            tried.append(_bound(table, spot[0], spot[1]))
            least = min(bound for bound, *_ in tried)
            if least <= floor or least - spot[2] <= _CLOSE:
                break
            paths.append(tried[-1][3])
            planes.append(_plane(table, paths[-1]))
            spot = _lowest(np.array(planes), spot)
    bound, bit, ms, _ = min(tried, key=lambda one: one[0])
    reduced = table.gain - bit * table.bits - ms * table.ms
    jump = ms * table.switch_ms + table.switch_gain
    ahead = most_ahead(reduced, jump)
    behind = most_ahead(reduced[::-1], jump)[::-1]
    return Prices(bit, ms, bound, ahead, ahead + reduced + behind + bit + ms), paths


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
    onward = reduced + most_ahead(reduced, jump)
    tops = onward.argmax(axis=1).tolist()
    stays = (onward >= onward.max(axis=1, keepdims=True) - jump).tolist()
    path = [tops[0]]
    for top, stay in zip(tops[1:], stays[1:], strict=True):
        path.append(path[-1] if stay[path[-1]] else top)
    return float(onward[0].max()) + bit + ms, bit, ms, np.array(path)


def most_ahead(reduced: Reals, jump: float) -> Reals:
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
    limit = np.concatenate((height - planes[:-1, 0], [0.0, 0.0, _HIGHEST_PRICE, _HIGHEST_PRICE]))
    i, j = _pairs(len(limit))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        across = normal[i, 0] * normal[j, 1] - normal[i, 1] * normal[j, 0]
        bit = (limit[i] * normal[j, 1] - limit[j] * normal[i, 1]) / across
        ms = (normal[i, 0] * limit[j] - normal[j, 0] * limit[i]) / across
        corner = np.isfinite(bit) & np.isfinite(ms)
        bit, ms = bit[corner], ms[corner]
        slack = 1e-9 * (1.0 + np.abs(limit))
        inside = (np.stack((bit, ms), axis=1) @ normal.T <= limit + slack).all(axis=1)
    if not inside.any():
        return before
    bit, ms = np.maximum(bit[inside], 0.0), np.maximum(ms[inside], 0.0)
    heights = height + a * bit + b * ms
    least = int(heights.argmin())
    return float(bit[least]), float(ms[least]), float(heights[least])


@cache
def _pairs(count: int) -> tuple[Indices, Indices]:
    """Return (i, j) of all pairs i < j of so many."""
    return np.triu_indices(count, 1)
