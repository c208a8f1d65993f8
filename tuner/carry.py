"""The best schedule above a gain, by labels that are carried over what can still reach it.

Prices leave most windows with few choices that matter, many with one.  Windows are joined into
*steps* while the ways through them stay few: one step for a run of settled windows, and for a few
open ones all ways whose bound is high enough.  So labels are compared a dozen times, not once a
window.  A label is dropped when another beats it, or when what it can still become, by several
pairs of prices, is too little.  Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tuner.bound import Prices, most_ahead
from tuner.costs import Indices, Reals
from tuner.labels import TIE, Labels, Step, Table, children, root, undominated

# Fewer labels than this are carried without comparing them.
_FEW_LABELS = 150
# Ways through windows that are joined into a step.
_MOST_WAYS = 32
# Pairs of prices by which labels are bounded, as multiples of the best pair.
_SPREAD = tuple((a, b) for a in (1.0, 0.93, 1.07) for b in (1.0, 0.93, 1.07))
# The parent of a label that leaves the schedule to avoid.
_PREFIX = -2


def carry(
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
    if avoid is not None:
        labels, prefix = labels.take(np.zeros(0, np.intp)), labels
    trail: list[tuple[Labels, Indices, int]] = []
    for start, ways in _joined(table, prices, lowest, open_, order):
        stop = start + ways.shape[1]
        step = _step(table, order[start:stop], ways)
        after = children(labels, step, table)
        if prefix is not None and avoid is not None:
            own = (ways == avoid[order[start:stop]]).all(axis=1)
            other, same = np.flatnonzero(~own), np.flatnonzero(own)
            after = after.join(children(prefix, step, table, other, parent=_PREFIX))
            prefix = children(prefix, step, table, same) if len(same) else None
        labels, promise = bounds.keep(after, stop - 1, lowest)
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
        trail.append((labels, ways, start))
    fits = (labels.bits <= 1.0 + TIE) & (labels.ms <= 1.0 + TIE)
    good = np.flatnonzero(fits & (labels.gain > lowest))
    if not len(good):
        return None, lost
    index = int(good[np.lexsort((labels.bits[good], labels.ms[good], -labels.gain[good]))[0]])
    choice = np.empty(len(order), np.intp)
    for labels, ways, start in reversed(trail):
        choice[order[start : start + ways.shape[1]]] = ways[labels.choice[index]]
        index = int(labels.parent[index])
        if index == _PREFIX and avoid is not None:
            choice[order[:start]] = avoid[order[:start]]
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


def _joined(
    table: Table, prices: Prices, lowest: float, open_: NDArray[np.bool_], order: Indices
) -> Iterator[tuple[int, Indices]]:
    """Yield steps: where each starts in the order, and the ways through it [N, windows].

    A way whose bound does not exceed `lowest` is left out.  In turn, its bound is that through
    its first choice, less what every further choice loses against the best one there.
    """
    reduced = table.gain - prices.bit * table.bits - prices.ms * table.ms
    jump = prices.ms * table.switch_ms + table.switch_gain
    slack = lowest - TIE  # what sums of other roundings may differ by
    start = 0
    ways: Indices = np.zeros((1, 0), np.intp)
    bound: Reals = np.zeros(1)
    settled = open_.sum(axis=1) == 1
    only = open_.argmax(axis=1)
    place = 0
    while place < len(order):
        window = order[place]
        if settled[window]:  # a run of these at once
            end = place + 1
            while end < len(order) and settled[order[end]]:
                end += 1
        else:
            end = place + 1
        if not ways.shape[1]:
            start = place
            if settled[window]:
                ways = only[order[place:end]][None, :]
                bound = prices.through[order[end - 1], ways[:, -1]]
            else:
                ways = np.flatnonzero(open_[window])[:, None]
                bound = prices.through[window, ways[:, 0]]
            place = end
            continue
        allowed = np.flatnonzero(open_[window])
        if table.couples:
            onward = reduced[window, allowed] + prices.ahead[window, allowed]
            last = ways[:, -1]
            loss = prices.ahead[order[place - 1], last][:, None] - (
                onward - jump * (last[:, None] != allowed)
            )
        else:
            loss = np.broadcast_to(
                prices.bound - prices.through[window, allowed], (1, len(allowed))
            )
        further = bound[:, None] - loss
        row, column = np.nonzero(further > slack)
        if len(row) > _MOST_WAYS and len(ways) > 1:
            yield start, ways
            ways, bound = np.zeros((1, 0), np.intp), np.zeros(1)
            continue
        bound = further[row, column]
        ways = np.concatenate((ways[row], allowed[column][:, None]), axis=1)
        if end > place + 1:
            rest = np.broadcast_to(only[order[place + 1 : end]], (len(ways), end - place - 1))
            ways = np.concatenate((ways, rest), axis=1)
        place = end
    yield start, ways


def _step(table: Table, windows: Indices, ways: Indices) -> Step:
    """Return the ways [N, K] through K windows with their costs and gains."""
    bits = table.bits[windows, ways].sum(axis=1)
    ms = table.ms[windows, ways].sum(axis=1)
    gain = table.gain[windows, ways].sum(axis=1)
    if table.couples:
        switches = np.count_nonzero(ways[:, 1:] != ways[:, :-1], axis=1)
        ms = ms + table.switch_ms * switches
        gain = gain - table.switch_gain * switches
    return Step(bits, ms, gain, ways[:, 0], ways[:, -1])


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
