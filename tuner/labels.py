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
class Step:
    """Ways through one window, or through several that follow each other: N of them.

    `first` and `last` are the choices at both ends; switches in between are in `ms` and `gain`.
    """

    bits: Reals
    ms: Reals
    gain: Reals
    first: Indices
    last: Indices

    @classmethod
    def of(cls, table: Table, window: int, allowed: Indices) -> Step:
        """Return the allowed choices of one window."""
        return cls(
            table.bits[window, allowed],
            table.ms[window, allowed],
            table.gain[window, allowed],
            allowed,
            allowed,
        )

    def take(self, index: Indices) -> Step:
        """Return some of the ways."""
        return Step(
            self.bits[index],
            self.ms[index],
            self.gain[index],
            self.first[index],
            self.last[index],
        )


@dataclass(frozen=True, slots=True)
class Labels:
    """N labels; `parent`, and `choice` of its step's ways, say how each came about."""

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
    shift = np.rint(switch_ms * _GRID)
    if len(x) and (x == x[0]).all():  # the bits alone differ: none can pay for a switch in ms
        lost = np.inf if shift else switch_gain
        return order[_rising(bits_key[order], y, group, groups, 0.0, lost)]
    if (bits_key == bits_key[:1]).all():
        return order[_rising(x, y, group, groups, shift, switch_gain)]
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
        if start + _BLOCK >= len(order):
            break
        for index, stair in enumerate(stairs):
            mine = block[group[block] == index] if groups > 1 else block
            stair.add(x[mine], y[mine])
        if groups > 1:
            pooled.add(x[block], y[block])
    return np.concatenate(kept) if kept else np.zeros(0, np.intp)


def _rising(
    x: Reals, y: Reals, group: Indices, groups: int, shift: float, switch_gain: float
) -> Indices:
    """Return the indices of points [N] of one cost, ascending in x, that no other beats or equals.

    One of another group beats after it has paid `shift` and `switch_gain`.
    """
    good = np.zeros(len(x), bool)
    for index in range(groups):
        mine = np.flatnonzero(group == index) if groups > 1 else np.arange(len(x))
        if len(mine):
            rises = np.ones(len(mine), bool)
            rises[1:] = y[mine][1:] > np.maximum.accumulate(y[mine])[:-1] + TIE
            good[mine] = rises
    if groups > 1:
        # Where a switch adds nothing (also to what is infinite), equals would beat each other:
        # there only what is less counts.
        paid = x - shift < x
        step = np.searchsorted(x, x - np.where(paid, shift, 0.0), "right") - 1
        step[~paid] = np.searchsorted(x, x[~paid], "left") - 1
        best = np.maximum.accumulate(y) - switch_gain
        good &= (step < 0) | (best[step] < y - TIE)
    return np.flatnonzero(good)


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
    labels: Labels,
    step: Step,
    table: Table,
    kept: NDArray[np.intp] | None = None,
    parent: int | None = None,
) -> Labels:
    """Return every label followed by every way through the step, or those `kept`.

    With `parent`, that is the parent of all of them.
    """
    if kept is not None:
        step = step.take(kept)
    ways = np.arange(len(step.gain)) if kept is None else kept
    bits = labels.bits[:, None] + step.bits
    ms = labels.ms[:, None] + step.ms
    gain = labels.gain[:, None] + step.gain
    shape = gain.shape
    if table.couples:
        before = labels.last[:, None]
        switched = (before != step.first) & (before >= 0)
        if table.switch_ms:
            ms += table.switch_ms * switched
        if table.switch_gain:
            gain -= table.switch_gain * switched
    if parent is None:
        parents = np.repeat(np.arange(shape[0]), shape[1])
    else:
        parents = np.full(gain.size, parent, np.intp)
    last, ways = (np.tile(values, shape[0]) for values in (step.last, ways))
    return Labels(bits.ravel(), ms.ravel(), gain.ravel(), last, parents, ways)
