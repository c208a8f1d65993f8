"""What follows a search, in the child that runs engines: choose, time, judge, ship.

    trials -> the best one's schedules -> timed as whole sequences -> judged on test prompts
           -> plans, where the target has them -> the bundle, sensitivity.json, result.json

Everything measured is in the cache, so where the child is stopped, another one goes on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines.schedule import Schedule
from tuner.best import best_trial
from tuner.closing_table import Measured, Verdict
from tuner.config import TuneConfig
from tuner.contest import Contest
from tuner.folder import write_json
from tuner.judge import judge
from tuner.outcome import shortfall, summary
from tuner.preflight import MIB
from tuner.profile_report import indistinct
from tuner.settle import Settled, settle
from tuner.ship import ship
from tuner.space import size
from tuner.stopwatch import BUILD, EVALUATE, MEASURE
from tuner.trials import TrialResult
from tuner.workbench import Workbench


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a child must know to finish a tune; plain data.

    Attributes:
        identity: Of the command.
        force: Replace a bundle that is there.
        interrupted: Whether there is no time to judge.
        began: When the tune began, seconds of the epoch.
        left_out: Numbers of trials that do not ship: engines of theirs took a child with them.
    """

    identity: str
    force: bool
    interrupted: bool
    began: float
    left_out: tuple[int, ...] = ()


def finish(
    contest: Contest, work: Path, results: Sequence[TrialResult], asked: Asked
) -> dict[str, Any]:
    """Write the bundle and the files beside it; return {"summary", "verdicts", "short"}.

    Args:
        contest: Has the engines.
        work: The tune's folder.
        results: Every finished trial.
        asked: How.

    Raises:
        BackendError: An engine failed, or a plan cannot be built.
        BudgetError: No schedule is within the budgets any more.
    """
    bench = contest.bench
    config, say = bench.config, bench.say
    able = [each for each in results if each.number not in asked.left_out]
    winner, settled = _settled(contest, able)
    verdicts: list[Verdict] = []
    if not asked.interrupted:
        verdicts = judge(contest, winner.candidate, settled.choices)
    facts: dict[str, Any] = {
        "identity": asked.identity,
        "complete": not asked.interrupted,
        "candidate": winner.candidate.values,
        "trial": winner.number,
        "trials": len(results),
        "asked_trials": config.trials or bench.effort.trials,
        "timeout_s": config.timeout_s if _cut_short(contest, results) else None,
        "failed": sum(result.failed is not None for result in results),
        "goal": config.goal,
        "max_loss": {name: config.floor_of(name) for name in bench.jobs},
        "seed": config.seed,
        "mode": config.mode,
        "quality_shown_to": max((v.quality_shown_to for v in verdicts), default=None),
        "short": {
            v.task: [round(end, 2) for end in v.loss]
            for v in verdicts
            if v.quality_shown_to > _floor(config, bench, v.task)
        },
        "unit": bench.unit,
        "tightened": settled.tightened,
        "over_budget": settled.over_budget,
    }
    short = shortfall(facts)
    say("writing the bundle, with golden answers")
    bundle = ship(
        contest,
        winner.candidate,
        settled.choices,
        {verdict.task: verdict for verdict in verdicts},
        facts,
        short is not None,
        force=asked.force,
    )
    counts = {
        "built": contest.shop.built.built
        + sum(round(result.seconds.get("built", 0)) for result in results),
        "reused": contest.shop.built.reused,
    }
    say(f"{counts['built']} engines built, {counts['reused']} reused from the cache")
    seconds = _spent([*(each.seconds for each in results), contest.shop.watch.spent])
    seconds["all"] = time.time() - asked.began
    told = summary(bundle, verdicts, {"made": True, "engines": counts, "seconds": seconds} | facts)
    for name, job in bench.jobs.items():
        found = contest.sensitivity(winner.candidate, job)
        if found.indistinct:
            say(f"{name}: {indistinct(found)}")
    write_json(work / "sensitivity.json", contest.profile(winner.candidate).to_json())
    write_json(work / "result.json", told)
    contest.shop.tidy(winner.candidate)
    if config.cache_limit_mib is not None:
        count, size_ = bench.cache.evict(config.cache_limit_mib * MIB, asked.began)
        say(f"{count} entries of the cache were removed, {size_ / MIB:.1f} MiB, oldest use first")
    return {"summary": told, "verdicts": [asdict(each) for each in verdicts], "short": short}


def verdict_from_plain(given: Mapping[str, Any]) -> Verdict:
    """Return the verdict of plain data that `finish` gave."""
    return Verdict(
        task=given["task"],
        shipped=_measured(given["shipped"]),
        others=tuple(map(_measured, given["others"])),
        reason=given["reason"],
        loss=tuple(given["loss"]),
        budget_ms=given["budget_ms"],
    )


def _measured(given: Mapping[str, Any]) -> Measured:
    ends = {
        name: None if given[name] is None else tuple(given[name])
        for name in ("ms", "accuracy", "agreement")
    }
    schedule = Schedule(tuple(given["schedule"]["precisions"]))
    return Measured(**{**given, **ends, "schedule": schedule})


def _settled(contest: Contest, results: Sequence[TrialResult]) -> tuple[TrialResult, Settled]:
    """Return the best trial whose schedules meet the latency as whole sequences, and these.

    With none, the one that misses it least.
    """
    left, missed = list(results), []
    while any(result.failed is None for result in left):
        winner = best_trial(left, contest.bench.config.goal)
        contest.bench.say(
            f"trial {winner.number + 1} is the best; measuring the neighbours of its schedules"
        )
        choices = contest.choices(winner.candidate, results)
        settled = settle(contest, winner.candidate, choices, results)
        if settled.over_budget is None:
            return winner, settled
        missed.append((settled.over_budget, winner, settled))
        setting = winner.candidate.setting
        left = [result for result in left if result.candidate.setting != setting]
        contest.bench.say(f"trial {winner.number + 1} misses its latency; trying the next best")
    _, winner, settled = min(missed, key=lambda each: each[0])
    return winner, settled


def _cut_short(contest: Contest, results: Sequence[TrialResult]) -> bool:
    """Return whether a search ended by its time: fewer trials than asked for, and some left."""
    config = contest.bench.config
    wanted = min(config.trials or contest.bench.effort.trials, size(contest.shop.space))
    return config.timeout_s is not None and len(results) < wanted


def _spent(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the seconds by kind of work, added up."""
    kinds = (BUILD, MEASURE, EVALUATE)
    return {kind: sum(part.get(kind, 0.0) for part in parts) for kind in kinds}


def _floor(config: TuneConfig, bench: Workbench, task: str) -> float:
    """Return the points that a task may lose; of `default`, the least that any may."""
    if task in bench.jobs:
        return config.floor_of(task)
    return min(config.floor_of(name) for name in bench.jobs)
