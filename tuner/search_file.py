"""`search.json`: what a search was asked, the space that it walked, and on what.

Written when a search begins, for people and for `cadenza report`; nothing is decided by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from engines import __version__
from engines.machine import machine
from engines.precision import FULL_PRECISION
from tuner.contest import Contest
from tuner.space import Candidate, Knob
from tuner.workbench import Workbench

SEARCH, FORMAT = "search.json", "cadenza-search/1"


def described(
    bench: Workbench,
    space: Sequence[Knob],
    baseline: Mapping[str, Any] | None,
    full: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what `search.json` holds.

    Args:
        bench: What the search works on.
        space: The knobs.
        baseline: How full precision compares with the framework, or None.
        full: What full precision costs, and the budgets by task, as `full_precision` says.
    """
    config = bench.config
    gpu = config.target == "cuda" or bench.plans_here
    return {
        "format": FORMAT,
        "cadenza": __version__,
        "goal": config.goal,
        "strategy": config.strategy,
        "seed": config.seed,
        "unit": bench.unit,
        "latencies": None if bench.latencies is None else bench.latencies.to_json(),
        "space": [asdict(knob) for knob in space],
        "budgets": full["budgets"],
        "floors": {name: config.floor_of(name) for name in bench.jobs},
        "full": {"cost": full["cost"], "memory_mib": full["memory_mib"]},
        "baseline": baseline,
        "precisions": [
            {"name": each.name, "bits": each.bits, "simulated": each.simulated}
            for each in bench.shown_precisions
        ],
        "environment": {
            **bench.export.environment,
            **machine(gpu=gpu),
        },
        "device": bench.device,
    }


def full_precision(contest: Contest) -> dict[str, Any]:
    """Return what full precision costs with the default engines, and the budgets by task."""
    default, bench = contest.shop.default, contest.bench
    costs = []
    for name, job in bench.jobs.items():
        timing = contest.timing(default, job.sampler)
        ms = None
        if timing is not None:
            passes = contest.passes(name, default.windows)
            ms = float(passes @ timing.by_window[FULL_PRECISION.name])
        costs.append(FULL_PRECISION.bits if ms is None else ms)
    weights = bench.export.families[FULL_PRECISION.family]
    return {
        "cost": sum(costs) / len(costs),
        "memory_mib": weights / (1 << 20),
        "budgets": {name: asdict(contest.budget(name)) for name in bench.jobs},
    }


def contrast(candidate: Candidate, other: Candidate) -> str:
    """Return the knobs in which a candidate differs from another, in a line."""
    theirs = other.values
    changed = [f"{name} {value}" for name, value in candidate.items if theirs.get(name) != value]
    return ", ".join(changed) or "the defaults"
