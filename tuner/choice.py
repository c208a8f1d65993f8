"""Which schedule a group of tasks ships: the allocation's answer, measured, and believed or not.

Under budgets the goal is quality: the allocation's schedule and its refinement must reproduce more
of full precision's tokens than the best uniform schedule within the budgets, beyond the noise of
the tuning prompts; else the answer is "uniform".  Without budgets the goal is latency: the
cheapest schedule of the front whose loss is within `--max-loss`.  Among schedules whose quality
cannot be told apart, the cheapest ships, uniform or not.

A *group* is one task, or all tasks together for `default`, which must not be worse than uniform on
any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.errors import BudgetError
from engines.schedule import Schedule
from tuner.allocate import Allocation, Budget, Costs, allocate
from tuner.objective import paired_interval
from tuner.refine import refine

# Schedules of the front that are measured at most, when the goal is latency or memory.
_MOST_MEASURED = 8


@dataclass(frozen=True)
class Measures:
    """How the schedules of a group are measured on its tuning prompts.

    Attributes:
        agreement: Schedule to the share of full precision's tokens that each answer has, one
            array [N] for each task.
        loss: Schedule to points lost against full precision, the worst task's.
    """

    agreement: Callable[[Schedule], tuple[NDArray[np.float64], ...]]
    loss: Callable[[Schedule], float]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The schedule that ships, with what was predicted and why it was taken.

    Attributes:
        schedule: The precision of each window.
        mean_bits: Mean activation bits over the expected passes.
        latency_ms: Predicted milliseconds a sequence; None where nothing is timed.
        memory_mib: Weights and activations.
        gain: Predicted, nats.
        loss: Points lost on tuning prompts, the worst task's.
        reference: The uniform schedule of most bits within the budgets, or None.
        reason: In a sentence.
        allocated: What the allocation alone would have shipped.
        measured: Schedules that were measured.
    """

    schedule: Schedule
    mean_bits: float
    latency_ms: float | None
    memory_mib: float
    gain: float
    loss: float
    reference: Schedule | None
    reason: str
    allocated: Schedule
    measured: int


@dataclass(frozen=True)
class Priced:
    """A table of gains with its costs and budgets; prices any schedule."""

    gain: NDArray[np.float64]
    costs: Costs
    budget: Budget

    @property
    def names(self) -> tuple[str, ...]:
        """The candidates."""
        return self.costs.names

    def uniform(self) -> list[Schedule]:
        """Return the uniform schedules within the budgets, cheapest first."""
        every = [Schedule.uniform(name, len(self.gain)) for name in self.names]
        return sorted((each for each in every if self.fits(each)), key=self.cost)

    def indices(self, schedule: Schedule) -> NDArray[np.intp]:
        """Return the column of each window's precision [W]."""
        return np.array([self.names.index(name) for name in schedule.precisions], np.intp)

    def predicted(self, schedule: Schedule) -> float:
        """Return the gain of a schedule, nats."""
        return float(self.gain[np.arange(len(self.gain)), self.indices(schedule)].sum())

    def fits(self, schedule: Schedule) -> bool:
        """Return whether a schedule is within every budget."""
        return self.costs.within(self.indices(schedule), self.budget)

    def cost(self, schedule: Schedule) -> float:
        """Return milliseconds a sequence, or mean bits where nothing is timed."""
        indices = self.indices(schedule)
        ms = self.costs.latency_of(indices)
        return self.costs.bits_of(indices) if ms is None else ms


def choose_schedule(
    table: Priced,
    measures: Measures,
    goal: str,
    max_loss: float,
    refinements: int,
    seed: int,
) -> Choice:
    """Return the schedule that ships.

    Args:
        table: Gains, costs and budgets.
        measures: Of schedules, on tuning prompts.
        goal: "quality", "latency" or "memory".
        max_loss: Points that may be lost, where the goal is not quality.
        refinements: Schedules that the refinement may measure.
        seed: Of the bootstrap.

    Raises:
        BudgetError: No schedule is within the budgets.
    """
    allocation = allocate(table.gain, table.costs, table.budget)
    if goal == "quality":
        return _best_quality(table, measures, allocation, refinements, seed)
    return _cheapest(table, measures, allocation, goal, max_loss)


def _best_quality(
    table: Priced, measures: Measures, allocation: Allocation, refinements: int, seed: int
) -> Choice:
    own = Schedule(allocation.schedule)
    uniform = table.uniform()
    refined = refine(
        own,
        table.names,
        table.fits,
        table.predicted,
        lambda schedule: np.concatenate(measures.agreement(schedule)),
        max(1, refinements),
        seed,
    )
    best, measured = refined.schedule, refined.tried
    how = "allocated" if best == own else "allocated, then refined by measurement"
    if not uniform:
        reason = f"no uniform schedule is within the budgets; {how}"
        return _choice(table, measures, best, None, reason, own, measured)
    reference = max(uniform, key=lambda each: (table.costs.bits_of(table.indices(each))))
    reason = f"{how}: uniform {reference.precisions[0]} is best within the budgets"
    if not best.is_uniform:
        ours, theirs = measures.agreement(best), measures.agreement(reference)
        gap = paired_interval(np.concatenate(ours), np.concatenate(theirs), seed=seed)
        said = f"{100 * gap.mean:+.2f} points of full precision's tokens [{100 * gap.low:.2f}, {100 * gap.high:.2f}]"
        worse = any(
            paired_interval(one, other, seed=seed).high < 0.0
            for one, other in zip(ours, theirs, strict=True)
        )
        if gap.low <= 0.0:
            best, reason = reference, (
                f"uniform: on tuning prompts the mixed schedule cannot be told from uniform "
                f"{reference.precisions[0]} ({said})"
            )
        elif worse:
            best, reason = reference, (
                f"uniform: the mixed schedule is worse than uniform {reference.precisions[0]} on "
                f"one of the tasks"
            )
        else:
            reason = f"{how}: {said} over uniform {reference.precisions[0]}"
    for cheaper in uniform:
        if table.cost(cheaper) >= table.cost(best):
            break
        gap = paired_interval(
            np.concatenate(measures.agreement(best)),
            np.concatenate(measures.agreement(cheaper)),
            seed=seed,
        )
        if gap.low <= 0.0:
            reason = (
                f"uniform: {cheaper.precisions[0]} is cheaper and cannot be told from "
                f"{'the mixed schedule' if not best.is_uniform else best.precisions[0]} on tuning "
                f"prompts"
            )
            best = cheaper
            break
    return _choice(table, measures, best, reference, reason, own, measured)


def _cheapest(
    table: Priced, measures: Measures, allocation: Allocation, goal: str, max_loss: float
) -> Choice:
    own = Schedule(allocation.schedule)
    uniform = table.uniform()
    key = table.cost
    if goal == "memory":
        key = lambda each: (table.costs.memory_of(table.indices(each)), table.cost(each))  # type: ignore[assignment, return-value]  # noqa: E731
    options = {Schedule(point.schedule) for point in allocation.front} | set(uniform) | {own}
    ordered = _thinned(sorted(options, key=key), set(uniform))
    losses: dict[Schedule, float] = {}
    for schedule in ordered:
        losses[schedule] = measures.loss(schedule)
        if losses[schedule] <= max_loss:
            kind = "uniform" if schedule.is_uniform else "mixed"
            reason = (
                f"{kind}: the cheapest measured schedule that loses {max_loss:g} points or fewer "
                f"({losses[schedule]:.2f} on tuning prompts)"
            )
            break
    else:
        schedule = min(losses, key=lambda each: (losses[each], key(each)))
        reason = (
            f"nothing measured stays within {max_loss:g} points of full precision; this one loses "
            f"least ({losses[schedule]:.2f} on tuning prompts)"
        )
    reference = max(uniform, key=lambda each: table.costs.bits_of(table.indices(each)), default=None)
    return _choice(table, measures, schedule, reference, reason, own, len(losses))


def _thinned(ordered: Sequence[Schedule], always: set[Schedule]) -> list[Schedule]:
    """Return at most `_MOST_MEASURED` of the mixed schedules, evenly spread, and all of `always`."""
    mixed = [each for each in ordered if each not in always]
    if len(mixed) > _MOST_MEASURED:
        picks = np.unique(np.linspace(0, len(mixed) - 1, _MOST_MEASURED).round().astype(int))
        mixed = [mixed[pick] for pick in picks]
    kept = always | set(mixed)
    return [each for each in ordered if each in kept]


def _choice(
    table: Priced,
    measures: Measures,
    schedule: Schedule,
    reference: Schedule | None,
    reason: str,
    allocated: Schedule,
    measured: int,
) -> Choice:
    indices = table.indices(schedule)
    return Choice(
        schedule=schedule,
        mean_bits=table.costs.bits_of(indices),
        latency_ms=table.costs.latency_of(indices),
        memory_mib=table.costs.memory_of(indices),
        gain=table.predicted(schedule),
        loss=measures.loss(schedule),
        reference=reference,
        reason=reason,
        allocated=allocated,
        measured=measured,
    )


def mixture(gains: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return the gains of `default` [W, P]: the mean over the tasks, each counted once."""
    return np.asarray(np.mean(list(gains.values()), axis=0))


__all__ = ["BudgetError", "Choice", "Measures", "Priced", "choose_schedule", "mixture"]
