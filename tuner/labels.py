"""Non-dominated labels: (bits, ms, gain) of the choices so far, carried from window to window.

A label that is beaten in bits, ms and gain by another of the same last choice can be dropped, for
whatever follows costs both the same.  What is left at the end is the whole front.  Where a switch
costs, labels of different last choices are compared after the one that would beat has paid for it.

Knows nothing about precisions, names, budgets or memory: a table in, choices out.  Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.costs import Indices, Reals

# Costs of labels are compared on a grid this fine (the budget is 1), and gains closer than this
# share of the table's range are equal: sums of the same numbers in another order are the same.
_GRID = 2.0**40
TIE = 2.0**-40
_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Table:
    """What each choice adds, W windows and P choices.

    Attributes:
        gain: [W, P], minus infinity where a choice is not allowed; to be made large.
        bits: Activation bits, all passes of the window [W, P], at least 0.
        ms: Milliseconds, all passes of the window [W, P], at least 0.
        switch_ms: Added whenever neighbours differ, at least 0.
        switch_gain: Gain lost whenever neighbours differ, at least 0.
    """

    gain: Reals
    bits: Reals
    ms: Reals
    switch_ms: float = 0.0
    switch_gain: float = 0.0

    @property
    def couples(self) -> bool:
        """Whether a window's cost depends on its neighbour's choice."""
        return self.switch_ms > 0 or self.switch_gain > 0

    def sums(self, choices: Indices) -> tuple[Reals, Reals, Reals]:
        """Return (bits, ms, gain), each [F], of schedules [F, W]."""
        rows = np.arange(choices.shape[1])
        switches = np.count_nonzero(choices[:, 1:] != choices[:, :-1], axis=1)
        return (
            self.bits[rows, choices].sum(axis=1),
            self.ms[rows, choices].sum(axis=1) + self.switch_ms * switches,
            self.gain[rows, choices].sum(axis=1) - self.switch_gain * switches,
        )

    def totals(self, choice: Indices) -> tuple[float, float, float]:
        """Return (bits, ms, gain) of a schedule [W]."""
        rows = np.arange(len(choice))
        switches = int(np.count_nonzero(choice[1:] != choice[:-1]))
        return (
            float(self.bits[rows, choice].sum()),
            float(self.ms[rows, choice].sum()) + self.switch_ms * switches,
            float(self.gain[rows, choice].sum()) - self.switch_gain * switches,
        )


@dataclass(frozen=True, slots=True)
class Labels:
    """N labels; `parent` and `choice` say how each came about."""

    bits: Reals
    ms: Reals
    gain: Reals
    last: Indices
    parent: Indices
    choice: Indices

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_]) -> Labels:
        return Labels(
            self.bits[index],
            self.ms[index],
            self.gain[index],
            self.last[index],
            self.parent[index],
            self.choice[index],
        )

    def plus(self, bits: float, ms: float, gain: float) -> Labels:
        return Labels(
            self.bits + bits, self.ms + ms, self.gain + gain, self.last, self.parent, self.choice
        )

    def join(self, other: Labels) -> Labels:
        return Labels(
            np.concatenate((self.bits, other.bits)),
            np.concatenate((self.ms, other.ms)),
            np.concatenate((self.gain, other.gain)),
            np.concatenate((self.last, other.last)),
            np.concatenate((self.parent, other.parent)),
            np.concatenate((self.choice, other.choice)),
        )


def undominated(
    bits: Reals,
    ms: Reals,
    gain: Reals,
    last: Indices | None = None,
    switch_ms: float = 0.0,
    switch_gain: float = 0.0,
) -> Indices:
    """Return the indices of labels that no other beats or equals, by ascending bits, then ms.

    Of equal labels one stays.  With `last` [N], labels of different last choices are compared
    after the one that would beat has paid for a switch.  Costs and gains are of the order of 1.
    """
    bits_key, ms_key = np.rint(bits * _GRID), np.rint(ms * _GRID)
    order = np.lexsort((-gain, ms_key, bits_key))
    if last is None:
        group, groups = np.zeros(len(order), np.intp), 1
    else:
        group, groups = last[order], int(last.max(initial=0)) + 1
    x, y = ms_key[order], gain[order]
    if last is None:
        first = np.ones(len(order), bool)
        first[1:] = (x[1:] != x[:-1]) | (np.diff(bits_key[order]) != 0)
        order, x, y, group = order[first], x[first], y[first], group[first]
        if (x == x[:1]).all() or (bits_key == bits_key[:1]).all():  # one cost alone: no blocks
            rises = np.ones(len(y), bool)
            rises[1:] = y[1:] > np.maximum.accumulate(y)[:-1] + TIE
            return order[rises]
    shift = np.rint(switch_ms * _GRID)
    stairs = [_Stairs() for _ in range(groups)]
    pooled = _Stairs()
    kept: list[Indices] = []
    for start in range(0, len(order), _BLOCK):
        block = np.arange(start, min(start + _BLOCK, len(order)))
        if start:
            beaten = np.zeros(len(block), bool)
            for index, stair in enumerate(stairs):
                mine = group[block] == index if groups > 1 else slice(None)
                beaten[mine] = stair.beats(x[block][mine], y[block][mine])
            if groups > 1:
                beaten |= pooled.beats(x[block] - shift, y[block] + switch_gain)
            block = block[~beaten]
        bx, by = x[block], y[block]
        if groups > 1:
            differ = group[block][:, None] != group[block]
            beats = (bx + shift * differ <= bx[:, None]) & (
                by - switch_gain * differ >= by[:, None] - TIE
            )
        else:
            beats = (bx <= bx[:, None]) & (by >= by[:, None] - TIE)
        block = block[~np.tril(beats, -1).any(axis=1)]
        kept.append(order[block])
        for index, stair in enumerate(stairs):
            mine = block[group[block] == index] if groups > 1 else block
            stair.add(x[mine], y[mine])
        if groups > 1:
            pooled.add(x[block], y[block])
    return np.concatenate(kept) if kept else np.zeros(0, np.intp)


class _Stairs:
    """The greatest gain seen at or below each ms, as steps that rise to the right."""

    def __init__(self) -> None:
        self.x: Reals = np.zeros(0)
        self.y: Reals = np.zeros(0)

    def beats(self, x: Reals, y: Reals) -> NDArray[np.bool_]:
        """Return which points [N] lie under the steps."""
        if not len(self.x):
            return np.zeros(len(x), bool)
        step = np.searchsorted(self.x, x, "right") - 1
        beaten: NDArray[np.bool_] = (step >= 0) & (self.y[step] >= y - TIE)
        return beaten

    def add(self, x: Reals, y: Reals) -> None:
        """Raise the steps to cover further points."""
        x, y = np.concatenate((self.x, x)), np.concatenate((self.y, y))
        order = np.lexsort((-y, x))
        x, y = x[order], y[order]
        rises = np.ones(len(y), bool)
        rises[1:] = y[1:] > np.maximum.accumulate(y)[:-1]
        self.x, self.y = x[rises], y[rises]


def root() -> Labels:
    """Return the label of no choice at all."""
    zero, none = np.zeros(1), np.full(1, -1, np.intp)
    return Labels(zero, zero, zero, none, none, none)


def children(
    labels: Labels, table: Table, window: int, allowed: Indices, parent: int | None = None
) -> Labels:
    """Return every label followed by every allowed choice of the window.

    With `parent`, that is the parent of all of them.
    """
    bits = labels.bits[:, None] + table.bits[window, allowed]
    ms = labels.ms[:, None] + table.ms[window, allowed]
    gain = labels.gain[:, None] + table.gain[window, allowed]
    if table.couples:
        switched = (labels.last[:, None] != allowed) & (labels.last[:, None] >= 0)
        ms = ms + table.switch_ms * switched
        gain = gain - table.switch_gain * switched
    last = np.broadcast_to(allowed, gain.shape).ravel()
    if parent is None:
        parents = np.repeat(np.arange(len(labels.gain)), len(allowed))
    else:
        parents = np.full(gain.size, parent, np.intp)
    return Labels(bits.ravel(), ms.ravel(), gain.ravel(), last, parents, last)
