"""Trials for a report: which compete, which nothing beats, and which are drawn.  Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from tuner.report_data import Record
from tuner.trials import TrialResult

# Marks of a figure, and rows of a table; more are thinned, and it is said.
MOST_DRAWN, MOST_ROWS = 600, 1_000

# Larger numbers than this are told in tables, and not drawn: no axis holds them and others.
LARGEST_DRAWN = 1e12

FEASIBLE, INFEASIBLE, FAILED = "feasible", "misses a limit", "failed"
OBJECTIVES: dict[str, Callable[[TrialResult], float]] = {
    "latency": lambda trial: trial.cost,
    "quality": lambda trial: trial.loss,
    "memory": lambda trial: trial.memory_mib,
}


def status(trial: TrialResult) -> str:
    """Return what became of a trial, in a word or three."""
    if trial.failed is not None:
        return FAILED
    return FEASIBLE if trial.feasible else INFEASIBLE


def competing(record: Record) -> list[TrialResult]:
    """Return the trials that have a cost and were measured on the chosen one's device."""
    worked = [trial for trial in record.trials if trial.failed is None]
    device = record.search.device if record.chosen is None else record.chosen.device
    return [trial for trial in worked if trial.device == device] or worked


def drawable(*values: float) -> bool:
    """Return whether an axis can show all values: finite, and not beyond reason."""
    return all(abs(value) <= LARGEST_DRAWN for value in values)


def drawn(record: Record) -> list[TrialResult]:
    """Return the competing trials that figures can show."""
    return [
        trial
        for trial in competing(record)
        if drawable(trial.cost, trial.loss, trial.memory_mib, *trial.interval)
    ]


def non_dominated(
    trials: Iterable[TrialResult], across: Callable[[TrialResult], float]
) -> list[TrialResult]:
    """Return the feasible trials that no other beats in `across` and in loss, by `across`."""
    found: list[TrialResult] = []
    least = math.inf
    feasible = (trial for trial in trials if trial.feasible)
    for trial in sorted(feasible, key=lambda each: (across(each), each.loss, each.number)):
        if trial.loss < least:
            least = trial.loss
            found.append(trial)
    return found


def best_by_trial(
    trials: Sequence[TrialResult], objective: Callable[[TrialResult], float]
) -> list[tuple[int, float]]:
    """Return (trial, best objective of a feasible one up to it), where it improves."""
    found: list[tuple[int, float]] = []
    for trial in trials:
        if trial.feasible and (not found or objective(trial) < found[-1][1]):
            found.append((trial.number, objective(trial)))
    return found


def thinned(
    trials: Sequence[TrialResult], keep: Iterable[TrialResult], most: int
) -> list[TrialResult]:
    """Return at most about `most` trials in their order: those to keep, and others evenly.

    Args:
        trials: In order.
        keep: Are there whatever their number.
        most: If there are more.
    """
    if len(trials) <= most:
        return list(trials)
    kept = {trial.number for trial in keep}
    others = [trial for trial in trials if trial.number not in kept]
    room = min(max(most - len(kept), 1), len(others))
    chosen = {others[index * len(others) // room].number for index in range(room)} | kept
    return [trial for trial in trials if trial.number in chosen]
