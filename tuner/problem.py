"""The questions that an allocation asks, in terms of precisions and budgets.

`costs` knows what schedules cost and `optimum` finds the best one in a bare table; here stands
what lies between.  Memory depends only on which precisions are used at all, so the largest sets
that fit are listed, and each has a table of its own.  Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from tuner.costs import BUDGETS, SLACK, Budget, Costs, Indices, Point, Reals
from tuner.front import Choices, complete_front, scanned_front, thinned
from tuner.labels import TIE, Table, undominated
from tuner.optimum import best

# Precisions of which all sets are listed under a memory budget.
MOST_PRECISIONS = 16
# Labels in a window beyond which the front is not completed.
_MOST_FRONT_LABELS = 2_000


@dataclass(frozen=True, slots=True)
class Prices:
    """What one more of each budget would gain, nats; None where there is no such budget."""

    bit: float | None = None
    ms: float | None = None
    mib: float | None = None


class Problem:
    """One call's numbers, and the questions that it asks of them."""

    def __init__(self, gain: Reals, costs: Costs, budget: Budget) -> None:
        self.gain, self.costs, self.budget = gain, costs, budget
        # Gains closer than this are equal: the same numbers summed in another order are.
        self.tie = 8 * TIE * float(np.abs(gain).max(axis=1).sum())
        self.bits, self.ms = costs.window_bits, costs.window_ms
        self.passes = float(costs.passes.sum())

    def uniform(self) -> list[Point]:
        """Return the uniform schedules within all budgets, most bits first, then fewest ms."""
        windows, count = self.gain.shape
        points = [self.point(np.full(windows, index)) for index in range(count)]
        return sorted(
            (p for p in points if self.costs.within(np.array(p.indices), self.budget)),
            key=lambda p: (-p.mean_bits, np.inf if p.latency_ms is None else p.latency_ms),
        )

    def point(self, schedule: Indices) -> Point:
        """Return a schedule [W] with its costs and gain."""
        return self.costs.point(schedule, self.gain)

    def tables(
        self, budget: Budget, timed: bool | None = None
    ) -> Iterator[tuple[Table, set[int]]]:
        """Yield, for each largest set of precisions within the memory, its table and the set.

        When `timed`, by default under a latency budget, what has no known latency is left out.
        """
        timed = budget.latency_ms is not None if timed is None else timed
        unknown = np.isnan(self.ms) if timed else np.zeros(self.ms.shape, bool)
        for used in self.sets(budget.memory_mib):
            closed = unknown.copy()
            closed[:, [index for index in range(self.gain.shape[1]) if index not in used]] = True
            yield (
                Table(
                    gain=np.where(closed, -np.inf, self.gain),
                    bits=self.bits,
                    ms=np.where(closed, 0.0, self.ms) if timed else np.zeros(self.ms.shape),
                    switch_ms=self.costs.switch_ms if timed else 0.0,
                ),
                used,
            )

    def sets(self, memory_mib: float | None) -> list[set[int]]:
        """Return the largest sets of precisions within the memory; none holds another."""
        count = self.gain.shape[1]
        if memory_mib is None:
            return [set(range(count))]
        if count > MOST_PRECISIONS:
            raise ValueError(
                f"under a memory budget at most {MOST_PRECISIONS} precisions can compete, "
                f"got {count}"
            )
        codes, sizes = self.set_sizes()
        codes = codes[sizes <= memory_mib * (1.0 + SLACK)]
        largest: list[int] = []
        for code in sorted(codes.tolist(), key=lambda code: (-code.bit_count(), code)):
            if not any(code & other == code for other in largest):
                largest.append(code)
        return [{index for index in range(count) if code >> index & 1} for code in largest]

    def set_sizes(self) -> tuple[Indices, Reals]:
        """Return every non-empty set of precisions, as bits of an integer, and its MiB."""
        count = self.gain.shape[1]
        codes = np.arange(1, 1 << count)
        members = (codes[:, None] >> np.arange(count) & 1).astype(bool)
        alone = np.asarray(self.costs.alone_mib)
        sizes = np.where(members, np.where(np.isnan(alone), np.inf, alone), 0.0).sum(axis=1)
        for family in sorted(set(self.costs.families)):
            mine = [index for index in range(count) if self.costs.families[index] == family]
            sizes += self.costs.family_mib.get(family, 0.0) * members[:, mine].any(axis=1)
        return codes, sizes + self.costs.activation_mib

    def bounds(self, budget: Budget) -> tuple[float, float]:
        """Return the most bits and milliseconds of a sequence."""
        bits = np.inf if budget.mean_bits is None else budget.mean_bits * self.passes
        ms = np.inf if budget.latency_ms is None else budget.latency_ms
        return bits * (1.0 + SLACK), ms * (1.0 + SLACK)

    def best(
        self,
        budget: Budget,
        known: Point | None,
        avoid: Point | None = None,
        hints: Iterable[Point] = (),
    ) -> tuple[Point | None, float]:
        """Return the best schedule, `known` where none gains more; and by how much it may fail."""
        short_of = 0.0
        bits, ms = self.bounds(budget)
        hints = list(hints)
        likely = [*hints, *([] if known is None else [known])][:1]
        # Where the best one known comes from first: then the bounds of the others may fall short.
        tables = sorted(
            self.tables(budget),
            key=lambda one: not all(one[1].issuperset(point.indices) for point in likely),
        )
        for table, used in tables:
            bad = None if avoid is None or not used.issuperset(avoid.indices) else avoid
            near = [p for p in (known, *hints) if p is not None and used.issuperset(p.indices)]
            found = best(
                table,
                bits,
                ms,
                floor=-np.inf if known is None else known.gain,
                avoid=None if bad is None else np.array(bad.indices),
                hints=[np.array(p.indices) for p in near],
            )
            short_of = max(short_of, found.short_of)
            if found.choice is not None:
                point = self.point(found.choice)
                if known is None or point.gain > known.gain:
                    known = point
        return known, short_of

    def steadiest(self) -> Point:
        """Return the schedule of fewest switches within all budgets; of those the best.

        Called only when there is one.
        """
        range_ = float((self.gain.max(axis=1) - self.gain.min(axis=1)).sum())
        bits, ms = self.bounds(self.budget)
        points = []
        for table, _ in self.tables(self.budget):
            found = best(replace(table, switch_gain=2.0 * range_ or 1.0), bits, ms)
            if found.choice is not None:
                points.append(self.point(found.choice))
        return min(points, key=lambda p: (_switches(p.indices), -p.gain))

    def prices(self, top: Point) -> tuple[Prices, float]:
        """Return what one more of each budget would gain; and by how much that may fail."""
        values: dict[str, float | None] = {}
        most_short = 0.0
        for budget, name in zip(BUDGETS, ("bit", "ms", "mib"), strict=True):
            bound = getattr(self.budget, budget)
            values[name] = None
            if bound is not None:
                raised = replace(self.budget, **{budget: bound + 1.0})
                values[name] = 0.0
                if budget != "memory_mib" or self.sets(bound) != self.sets(bound + 1.0):
                    better, short_of = self.best(raised, top)
                    most_short = max(most_short, short_of)
                    if better is not None and better.gain > top.gain + self.tie:
                        values[name] = better.gain - top.gain
        return Prices(**values), most_short

    def nearest(self) -> dict[str, float | None]:
        """Return, for each budget given, the smallest that fits with the others as given."""
        given = [name for name in BUDGETS if getattr(self.budget, name) is not None]
        return {name: self.least(name, self.budget) for name in given}

    def least(self, name: str, budget: Budget) -> float | None:
        """Return the least that schedules spend of one budget, within the others."""
        others = replace(budget, **{name: None})
        if name == "memory_mib":
            return self._least_memory(others)
        bits, ms = self.bounds(others)
        spent = []
        for table, _ in self.tables(others, timed=name == "latency_ms" or None):
            cost = table.bits if name == "mean_bits" else table.ms
            switch = 0.0 if name == "mean_bits" else table.switch_ms
            goal = np.where(table.gain > -np.inf, -cost, -np.inf)
            found = best(replace(table, gain=goal, switch_gain=switch), bits, ms)
            if found.choice is not None:
                value = getattr(self.point(found.choice), name)
                spent.append(float(value))
        return min(spent, default=None)

    def _least_memory(self, others: Budget) -> float | None:
        """Return the memory of the smallest set of precisions that meets the other budgets."""
        sizes = np.unique(self.set_sizes()[1])
        sizes = sizes[np.isfinite(sizes)]
        low, high = 0, len(sizes)
        while low < high:  # what fits in less memory fits in more
            middle = (low + high) // 2
            raised = replace(others, memory_mib=float(sizes[middle]) or np.finfo(float).tiny)
            if self.best(raised, None)[0] is None:
                low = middle + 1
            else:
                high = middle
        return float(sizes[low]) if low < len(sizes) else None

    def front(self, limit: int, known: Sequence[Point]) -> tuple[tuple[Point, ...], bool]:
        """Return the front within the memory budget, and whether it is all there.

        Args:
            limit: Points beyond which it is thinned, to so many on each axis; 0 for none.
            known: Schedules that stand for others of the same bits, ms and gain.
        """
        if not limit:
            return (), False
        memory = Budget(memory_mib=self.budget.memory_mib)
        timed = self.budget.latency_ms is not None
        untimed = bool(np.isnan(self.ms).all())
        axes = [
            axis
            for axis, bound in (("bits", self.budget.mean_bits), ("ms", self.budget.latency_ms))
            if bound is not None
        ] or (["bits"] if untimed else ["bits", "ms"])
        complete = True
        found: list[Choices] = [np.array([point.indices for point in known], np.intp)]
        for table, _ in self.tables(memory, timed):
            closed = table.gain == -np.inf
            ms = np.where(closed | untimed, 0.0, np.where(np.isnan(self.ms), np.inf, self.ms))
            table = replace(table, ms=ms, switch_ms=0.0 if untimed else self.costs.switch_ms)
            if closed.all(axis=1).any():
                continue
            every = complete_front(table, max(_MOST_FRONT_LABELS, limit))
            if every is not None:
                found.append(every)
                continue
            complete = False
            for axis in axes:
                one = table
                if axis == "ms":
                    gain = np.where(np.isinf(table.ms), -np.inf, table.gain)
                    one = replace(table, gain=gain, ms=np.where(gain == -np.inf, 0.0, table.ms))
                found.append(scanned_front(one, axis, limit))
        choices = np.concatenate(found)
        bits, ms, gain = self._measure(choices)
        kept = undominated(
            bits / bits.max(),
            ms / (ms[np.isfinite(ms)].max(initial=0.0) or 1.0),
            gain / (np.abs(gain).max() or 1.0),
        )
        if len(kept) > limit:
            complete = False
            costs = [{"bits": bits, "ms": ms}[axis][kept] for axis in axes]
            kept = kept[thinned(costs, gain[kept], limit)]
        return tuple(self.point(choices[index]) for index in kept), complete

    def _measure(self, choices: Choices) -> tuple[Reals, Reals, Reals]:
        """Return (bits, ms, gain), each [F], of schedules [F, W]; ms infinite if not known."""
        if np.isnan(self.ms).all():
            table = Table(self.gain, self.bits, np.zeros(self.ms.shape))
        else:
            ms = np.where(np.isnan(self.ms), np.inf, self.ms)
            table = Table(self.gain, self.bits, ms, self.costs.switch_ms)
        return table.sums(choices)


def _switches(indices: Sequence[int]) -> int:
    """Return how often neighbours differ."""
    return sum(a != b for a, b in pairwise(indices))
