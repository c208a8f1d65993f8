"""From a rule of the space to a schedule: uniform, a share of the budget spent best, or by hand.

Pure.  `spend-K` stands for the exact program's optimum when only K % of what lies between the
cheapest schedule and the budget may be spent; without a budget, of what lies between the cheapest
and the dearest schedule.  So K walks along the front of (cost, gain), and each step of it is the
best that its cost can buy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from engines.errors import BackendError
from engines.schedule import Schedule
from tuner.allocate import allocate
from tuner.choice import Priced
from tuner.costs import Budget
from tuner.space import BASELINE, UNIFORM, rule_parts


def schedule_of(rule: str, table: Priced, baselines: Mapping[str, Schedule]) -> Schedule:
    """Return the schedule of a task that a rule stands for.

    Args:
        rule: A choice of the knob `schedule`.
        table: Gains, costs and budgets of the task.
        baselines: Written by hand for the task, with the table's windows; a task for which none
            was written spends its budget best.

    Raises:
        BackendError: The schedule by hand has other windows.
        BudgetError: No schedule is within the budgets.
        ValueError: The rule is none.
    """
    kind, named = rule_parts(rule)
    if kind == UNIFORM:
        return Schedule.uniform(named, len(table.gain))
    if kind == BASELINE:
        by_hand = baselines.get(named)
        if by_hand is not None and by_hand.windows != len(table.gain):
            raise BackendError(
                f"the schedule {named} has {by_hand.windows} windows, not {len(table.gain)}; "
                f"write one that fits, or leave it out"
            )
        return by_hand or Schedule(allocate(table.gain, table.costs, table.budget, 0).schedule)
    bounded = narrowed(table, float(named) / 100.0)
    return Schedule(allocate(table.gain, table.costs, bounded, 0).schedule)


def narrowed(table: Priced, share: float) -> Budget:
    """Return the budgets with only a share left of what may be spent above the least.

    Args:
        table: Gains, costs and budgets.
        share: 0 to 1.  1 leaves the budgets as they are.
    """
    if share >= 1.0:
        return table.budget
    costs = table.costs
    timed = bool(np.isfinite(costs.window_ms).all())
    price = costs.window_ms if timed else costs.window_bits
    ends = []
    for chosen in (price.argmin(axis=1), price.argmax(axis=1)):
        ms = costs.latency_of(chosen) if timed else None
        ends.append(costs.bits_of(chosen) if ms is None else ms)
    least, most = ends
    given = table.budget.latency_ms if timed else table.budget.mean_bits
    top = most if given is None else given
    # A hair more, so that a schedule which costs just this is not lost to rounding.
    bound = min((least + share * max(0.0, min(most, top) - least)) * (1.0 + 1e-9), top)
    if timed:
        return replace(table.budget, latency_ms=bound)
    return replace(table.budget, mean_bits=bound)


def check_rule(rule: str, precisions: Sequence[str], baselines: Sequence[str]) -> None:
    """Check a choice of the knob `schedule`.

    Raises:
        ValueError: It is no rule, or names what is not there.
    """
    kind, named = rule_parts(rule)
    names = {UNIFORM: precisions, BASELINE: baselines}.get(kind)
    if names is not None and named not in names:
        raise ValueError(f"{rule!r} names none of {', '.join(names) or 'no'} {kind[:-1]}")
