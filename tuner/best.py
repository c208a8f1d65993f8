"""Which trial is the best: the one whose setting ships, and that others are timed against.  Pure.

Costs within noise of each other are a tie, which the earlier trial wins: its recipe is closer to
the export's own.  Two trials are told apart by the rounds in which they ran in turns, where there
are such, else by whether their intervals, each against the same yardstick, overlap.
"""

from __future__ import annotations

from collections.abc import Sequence

from engines.errors import BackendError, BudgetError
from tuner.trials import TrialResult

# Losses this close, in points, are not told apart when candidates are compared.
SAME_LOSS = 0.5


def best_trial(results: Sequence[TrialResult], goal: str) -> TrialResult:
    """Return the trial that ships.

    Of the feasible ones: for quality the cheapest of those whose loss cannot be told from the
    least, for memory the smallest, else the cheapest.  Ties in cost go to the earliest.  With none
    feasible, the one that loses least.

    Args:
        results: Of one device.
        goal: "latency", "quality" or "memory".

    Raises:
        BudgetError: No trial met the budgets; says what the first could meet.
        BackendError: Every trial failed; shows the first reason.
    """
    worked = [result for result in results if result.failed is None]
    if not worked:
        for result in results:
            if result.nearest is not None:
                raise BudgetError(str(result.failed), result.nearest)
        raise BackendError(
            f"every candidate failed, the first with: {results[0].failed}; export again with "
            f"other precisions"
        )
    feasible = [result for result in worked if result.feasible]
    pool = feasible or worked
    if goal == "quality" or not feasible:
        least = min(result.loss for result in pool)
        pool = [result for result in pool if result.loss <= least + SAME_LOSS]
    if goal == "memory":
        smallest = min(result.memory_mib for result in pool)
        pool = [result for result in pool if result.memory_mib <= smallest * (1.0 + 1e-9)]
    cheapest = min(pool, key=lambda result: (result.cost, result.number))
    return min(
        (each for each in pool if not cheaper(cheapest, each)), key=lambda result: result.number
    )


def best_of(results: Sequence[TrialResult], goal: str) -> TrialResult | None:
    """Return the best trial so far, or None where none is feasible."""
    feasible = [result for result in results if result.feasible]
    return best_trial(feasible, goal) if feasible else None


def cheaper(one: TrialResult, other: TrialResult) -> bool:
    """Return whether a trial is cheaper than another beyond noise."""
    if one.number == other.number:
        return False
    if one.against is not None and one.against["trial"] == other.number:
        return one.against["high"] < 1.0
    if other.against is not None and other.against["trial"] == one.number:
        return other.against["low"] > 1.0
    return one.interval[1] < other.interval[0]
