"""Which schedule a group of tasks ships: the allocation's answer, measured, and believed or not.

Under budgets the goal is quality: the allocation's schedule is refined by measurement, and the
result competes with every uniform schedule within the budgets.  Without budgets the goal is
latency (or memory): the schedules of the front compete.  `tuner.objective.choose` decides: among
schedules whose quality cannot be told apart on tuning prompts, the cheapest ships, uniform or not.

A mixed schedule competes only where it is *believed*: label-free agreement with full precision, on
prompts that it was not chosen on, must show that it is better than the best uniform schedule
within the budgets; or it is clearly cheaper, and not shown to be worse on any task.

A *group* is one task, or all tasks together for `default`, which may not be shown to be worse than
another option on any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from engines.errors import BudgetError
from engines.schedule import Schedule
from tuner.allocate import FRONT, Allocation, allocate
from tuner.costs import Budget, Costs
from tuner.objective import Option, choose, paired_interval
from tuner.refine import refine

# Schedules of the front that are measured at most, when the goal is latency or memory.
_MOST_MEASURED = 8

# A mixed schedule of at most this share of the reference's cost need not be better than it.
_CHEAPER = 0.95


@dataclass(frozen=True)
class Measures:
    """How the schedules of a group are measured on its tuning prompts.

    Attributes:
        agreement: Schedule to the share of full precision's tokens that each answer has [N], by
            task.
        loss: Schedule to points lost against full precision, by task.
    """

    agreement: Callable[[Schedule], Mapping[str, NDArray[np.float64]]]
    loss: Callable[[Schedule], Mapping[str, float]]


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
        measured: Schedules that were measured.
    """

    schedule: Schedule
    mean_bits: float
    latency_ms: float | None
    memory_mib: float | None
    gain: float
    loss: float
    reference: Schedule | None
    reason: str
    measured: int

    @property
    def cost(self) -> float:
        """Milliseconds a sequence, or mean bits where nothing is timed."""
        return self.mean_bits if self.latency_ms is None else self.latency_ms

    def to_json(self) -> dict[str, object]:
        """Return what the log of trials keeps."""
        return {
            "schedule": list(self.schedule.precisions),
            "mean_bits": self.mean_bits,
            "latency_ms": self.latency_ms,
            "gain": self.gain,
            "loss": self.loss,
            "measured": self.measured,
            "reason": self.reason,
        }


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
        """Return the uniform schedules within the budgets, most bits first."""
        every = [Schedule.uniform(name, len(self.gain)) for name in self.names]
        inside = [each for each in every if self.fits(each)]
        return sorted(inside, key=lambda each: -self.costs.bits_of(self.indices(each)))

    def indices(self, schedule: Schedule) -> NDArray[np.intp]:
        """Return the column of each window's precision [W]."""
        return np.array([self.names.index(name) for name in schedule.precisions], np.intp)

    def predicted(self, schedule: Schedule) -> float:
        """Return the gain of a schedule, nats."""
        return float(self.gain[np.arange(len(self.gain)), self.indices(schedule)].sum())

    def fits(self, schedule: Schedule) -> bool:
        """Return whether a schedule is within every budget."""
        return self.costs.within(self.indices(schedule), self.budget)

    def only(self, names: Sequence[str]) -> Priced:
        """Return the table of some of the candidates, in the same order."""
        kept = [index for index, name in enumerate(self.names) if name in names]
        return Priced(self.gain[:, kept], self.costs.only(kept), self.budget)

    def memory(self, names: Collection[str]) -> float | None:
        """Return the MiB of candidates in use together; None where it is not known."""
        used = [index for index, name in enumerate(self.names) if name in names]
        return self.costs.memory_of(np.array(used, np.intp))

    def cost(self, schedule: Schedule) -> float:
        """Return milliseconds a sequence, or mean bits where nothing is timed."""
        indices = self.indices(schedule)
        ms = self.costs.latency_of(indices)
        return self.costs.bits_of(indices) if ms is None else ms


def choose_schedule(
    table: Priced,
    measures: Measures,
    goal: str,
    max_loss: float | Mapping[str, float],
    refinements: int,
    seed: int,
    baselines: Sequence[Schedule] = (),
) -> Choice:
    """Return the schedule that ships.

    Args:
        table: Gains, costs and budgets.
        measures: Of schedules, on tuning prompts.
        goal: "quality", "latency" or "memory".
        max_loss: Points that may be lost: by every task, or by each its own.
        refinements: Schedules that the refinement may measure; 1 at least.
        seed: Of the bootstrap.
        baselines: Schedules that compete beside the allocation's, as far as they fit.

    Raises:
        BudgetError: No schedule is within the budgets.
    """
    uniform = table.uniform()
    allocation = allocate(table.gain, table.costs, table.budget, 0 if goal == "quality" else FRONT)
    own = Schedule(allocation.schedule)
    if goal == "quality":
        refined = refine(
            own,
            table.names,
            table.fits,
            table.predicted,
            lambda schedule: np.concatenate(list(_part(measures.agreement(schedule), 0).values())),
            max(1, refinements),
            seed,
        )
        competing = list(dict.fromkeys((*uniform, own, refined.schedule)))
        measured = refined.tried + len(uniform)
    else:
        competing = _from_front(table, allocation, uniform)
        measured = len(competing)
    given = [each for each in baselines if table.fits(each) and each not in competing]
    competing, measured = competing + given, measured + len(given)
    reference = uniform[0] if uniform else None
    if reference is not None:
        known = {own, *baselines}  # chosen without a tuning prompt
        competing = [
            each
            for each in competing
            if each.is_uniform
            or _believed(table, each, reference, measures, goal, each in known, seed)
        ]
    options = [_option(table, measures, each) for each in competing]
    chosen = choose(options, goal, max_loss, seed)
    best = competing[chosen.index]
    return Choice(
        schedule=best,
        mean_bits=table.costs.bits_of(table.indices(best)),
        latency_ms=table.costs.latency_of(table.indices(best)),
        memory_mib=table.costs.memory_of(table.indices(best)),
        gain=table.predicted(best),
        loss=options[chosen.index].worst_loss,
        reference=reference,
        reason=_reason(best, reference, measures, f"{chosen.reason} (tuning prompts)", seed),
        measured=measured,
    )


def within_memory(
    table: Priced, chosen: Callable[[tuple[str, ...]], dict[str, Choice]]
) -> dict[str, Choice]:
    """Return choices whose engines are together within the memory budget.

    A bundle holds the engines of all its schedules, so what each task's schedule takes alone is
    not enough: where it is not, each largest set of precisions that fits is tried.

    Args:
        table: Has the budget, and prices sets of precisions.
        chosen: From names of precisions to the choices among them.

    Raises:
        BudgetError: No set of precisions meets the budgets.
    """
    first = chosen(table.names)
    bound = table.budget.memory_mib

    def fits(names: Collection[str]) -> bool:
        memory = table.memory(names)
        return bound is None or (memory is not None and memory <= bound)

    if fits({name for choice in first.values() for name in choice.schedule.precisions}):
        return first
    sets = [
        names
        for size in range(1, len(table.names))
        for names in combinations(table.names, size)
        if fits(names)
    ]
    largest = [names for names in sets if not any(set(names) < set(other) for other in sets)]
    found = []
    for names in largest:
        try:
            found.append(chosen(names))
        except BudgetError:
            continue  # this set alone misses another budget
    if not found:
        raise BudgetError(
            f"no set of precisions is within {bound:g} MiB and meets the other budgets for every "
            f"task; raise --memory-mib, or another budget"
        )
    return min(
        found,
        key=lambda choices: (
            max(choice.loss for choice in choices.values()),
            sum(choice.latency_ms or choice.mean_bits for choice in choices.values()),
        ),
    )


def _from_front(
    table: Priced, allocation: Allocation, uniform: Sequence[Schedule]
) -> list[Schedule]:
    """Return the schedules to be measured: uniform ones, and some of the front, evenly spread.

    The front shows what other budgets would buy, so not all of it is within these.
    """
    front = {Schedule(point.schedule) for point in allocation.front} - set(uniform)
    mixed = sorted(filter(table.fits, front), key=table.cost)
    if len(mixed) > _MOST_MEASURED:
        picks = np.unique(np.linspace(0, len(mixed) - 1, _MOST_MEASURED).round().astype(int))
        mixed = [mixed[pick] for pick in picks]
    return [*uniform, *mixed]


def _part(scores: Mapping[str, NDArray[np.float64]], which: int) -> dict[str, NDArray[np.float64]]:
    """Return every other prompt's scores, of even or odd number; all, where there is only one."""
    if any(len(values) < 2 for values in scores.values()):
        return dict(scores)
    return {task: values[which::2] for task, values in scores.items()}


def _believed(
    table: Priced,
    schedule: Schedule,
    reference: Schedule,
    measures: Measures,
    goal: str,
    fresh: bool,
    seed: int,
) -> bool:
    """Return whether a mixed schedule may compete with the best uniform one.

    Args:
        table: Its costs.
        schedule: Mixed.
        reference: The uniform schedule of most bits within the budgets.
        measures: Of schedules, on tuning prompts.
        goal: For latency or memory it is enough not to be worse.
        fresh: Whether no tuning prompt had a part in finding it; else the prompts of even number,
            which the refinement saw, do not count.
        seed: Of the bootstrap.
    """
    ours, theirs = measures.agreement(schedule), measures.agreement(reference)
    if goal == "quality" and not fresh:
        ours, theirs = _part(ours, 1), _part(theirs, 1)
    gaps = {task: paired_interval(ours[task], theirs[task], seed=seed) for task in ours}
    if any(gap.high < 0.0 for gap in gaps.values()):
        return False
    if goal != "quality" or table.cost(schedule) <= _CHEAPER * table.cost(reference):
        return True
    pooled = paired_interval(
        np.concatenate(list(ours.values())), np.concatenate(list(theirs.values())), seed=seed
    )
    return pooled.low > 0.0


def _option(table: Priced, measures: Measures, schedule: Schedule) -> Option:
    kind = "uniform " + schedule.precisions[0] if schedule.is_uniform else "mixed"
    return Option(
        name=kind,
        cost=table.cost(schedule),
        memory_mib=table.costs.memory_of(table.indices(schedule)) or 0.0,
        uniform=schedule.is_uniform,
        loss=measures.loss(schedule),
        scores=measures.agreement(schedule),
    )


def _reason(
    best: Schedule, reference: Schedule | None, measures: Measures, why: str, seed: int
) -> str:
    """Return why a schedule ships, with its measured distance from the best uniform one."""
    if reference is None:
        return f"{why}; no uniform schedule is within the budgets"
    if best == reference:
        return why
    ours, theirs = (
        np.concatenate(list(measures.agreement(each).values())) for each in (best, reference)
    )
    gap = paired_interval(ours, theirs, seed=seed).scaled(100.0)
    return (
        f"{why}; {gap.mean:+.2f} [{gap.low:.2f}, {gap.high:.2f}] points of full precision's "
        f"tokens against uniform {reference.precisions[0]}"
    )


def mixture(gains: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return the gains of `default` [W, P]: the mean over the tasks, each counted once."""
    return np.asarray(np.mean(list(gains.values()), axis=0))
