"""`cadenza tune`, from an export to a bundle.

    prepare -> search: each trial in a child process -> the best one's setting: a schedule for each
            task, timed and held to the budget -> judged once on test prompts -> bundle

Killed at any point, the same command goes on: trials are in a log, everything measured is in the
cache.  Interrupted, it writes the best bundle so far, not judged, and says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.build import Cache
from engines.bundle import check_output
from engines.child import Child, ChildError
from engines.errors import BudgetError
from engines.files import digest_file
from engines.terminal import Progress
from exporter.folder import EXPORT
from tuner.best import best_of, best_trial
from tuner.closing_table import Verdict
from tuner.config import TuneConfig
from tuner.contest import Contest
from tuner.folder import CONFIG, TRIALS, tune_folder, worker_of, write_json
from tuner.gate import baseline_said
from tuner.judge import judge
from tuner.outcome import Outcome, finished, shortfall, summary, tune_of
from tuner.preflight import MIB, check, foreseen
from tuner.profile_report import indistinct
from tuner.search import search
from tuner.search_file import SEARCH, contrast, described
from tuner.settle import Settled, settle
from tuner.ship import ship
from tuner.space import Candidate, size
from tuner.stopwatch import BUILD, EVALUATE, MEASURE
from tuner.study import open_study
from tuner.trials import TrialLog, TrialResult
from tuner.workbench import Workbench, prepare
from tuner.worker import SERVE, given_to
from tuner.workshop import Workshop

# Pieces of work on a task in a trial, and those on all of them (a first look, and being timed
# against the best), for the progress that is shown.
STEPS, STEPS_TOGETHER = 2, 2

# A machine that is by this factor slower than before is told of.
_MUCH = 1.1

_INTERRUPTED = "interrupted: writing the best bundle so far, not judged on test prompts"


def tune(
    config: TuneConfig,
    cache: Cache,
    say: Callable[[str], None],
    force: bool = False,
    asked: Mapping[str, Any] | None = None,
) -> Outcome:
    """Tune an export and write the bundle.

    Args:
        config: What is asked for.
        cache: Engines, measurements and answers.
        say: Where progress goes, a line at a time.
        force: Replace what another command left at the output.
        asked: Every value of the config with its source, for the record.

    Raises:
        InputError: An argument or a file given is at fault.
        BudgetError: No schedule is within the budgets.
    """
    bench = prepare(config, cache, say)
    digests = [digest_file(each / EXPORT).sha256 for each in (config.export, *config.others)]
    identity = config.identity("/".join(digests), bench.prompts_digest)
    asked_trials = config.trials or bench.effort.trials
    before = finished(config.output, identity, asked_trials, force, config.timeout_s)
    if before is not None:
        say(f"{config.output} is complete already; nothing was changed")
        return Outcome(
            bundle=before,
            verdicts=(),
            precisions=bench.shown_precisions,
            unit=bench.unit,
            shortfall=shortfall(tune_of(config.output)),
            interrupted=False,
            summary=summary(before, (), {"made": False}),
        )
    unfinished = tune_of(config.output).get("identity") == identity
    check_output(config.output, force=force or unfinished)
    with tune_folder(config.output, identity, force) as work:
        write_json(work / CONFIG, dict(asked or {}))
        return _tune(bench, work, identity, force or unfinished)


def _tune(bench: Workbench, work: Path, identity: str, force: bool) -> Outcome:
    config, say = bench.config, bench.say
    contest, began = Contest(Workshop(bench, work)), time.time()
    plan = foreseen(contest.shop, None)
    check(plan, config.output)
    for note in plan.notes:
        say(note)
    interrupted = False
    log = TrialLog(work / TRIALS)
    try:
        results = _search(bench, contest, log, work, identity)
    except KeyboardInterrupt:
        results = [each for each in log.read() if each.device in ("", bench.device)]
        if not any(result.failed is None for result in results):
            raise
        say(_INTERRUPTED)
        interrupted = True
    winner = best_trial(results, config.goal)
    settled = Settled(contest.choices(winner.candidate, results))
    verdicts: list[Verdict] = []
    try:
        winner, settled = _settled(contest, results)
        if not interrupted:
            verdicts = judge(contest, winner.candidate, settled.choices)
    except KeyboardInterrupt:
        say(_INTERRUPTED)
        interrupted = True
    facts: dict[str, Any] = {
        "identity": identity,
        "complete": not interrupted,
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
    bundle = ship(
        contest,
        winner.candidate,
        settled.choices,
        {verdict.task: verdict for verdict in verdicts},
        facts,
        short is not None,
        force=force,
    )
    counts = {
        "built": contest.shop.built.built
        + sum(round(result.seconds.get("built", 0)) for result in results),
        "reused": contest.shop.built.reused,
    }
    say(f"{counts['built']} engines built, {counts['reused']} reused from the cache")
    seconds = _spent([*(each.seconds for each in results), contest.shop.watch.spent])
    seconds["all"] = time.time() - began
    made = {"made": True, "engines": counts, "seconds": seconds}
    told = summary(bundle, verdicts, made | facts)
    for name, job in bench.jobs.items():
        found = contest.sensitivity(winner.candidate, job)
        if found.indistinct:
            say(f"{name}: {indistinct(found)}")
    write_json(work / "sensitivity.json", contest.profile(winner.candidate).to_json())
    write_json(work / "result.json", told)
    contest.shop.tidy(winner.candidate)
    if config.cache_limit_mib is not None:
        count, size_ = bench.cache.evict(config.cache_limit_mib * MIB, began)
        say(f"{count} entries of the cache were removed, {size_ / MIB:.1f} MiB, oldest use first")
    return Outcome(
        bundle=bundle,
        verdicts=tuple(verdicts),
        precisions=bench.shown_precisions,
        unit=bench.unit,
        shortfall=short,
        interrupted=interrupted,
        summary=told,
    )


def _search(
    bench: Workbench, contest: Contest, log: TrialLog, work: Path, identity: str
) -> list[TrialResult]:
    config, began = bench.config, time.monotonic()
    space = contest.shop.space
    trials = config.trials or bench.effort.trials
    bench.say(f"searching {size(space)} candidates in {trials} trials for {config.goal}")
    limits = config.child_limit_s, config.child_memory_mib
    with Child(SERVE, given_to(bench, work), *limits) as worker:
        found = worker.ask({"do": "baseline"}, work / "logs" / "baseline.log")
        bench.say(baseline_said(found["baseline"]))
        write_json(work / SEARCH, described(bench, space, found["baseline"], found["full"]))

        def evaluate(
            candidate: Candidate, number: int, before: Sequence[TrialResult]
        ) -> TrialResult:
            result = _ask(worker, bench, work, candidate, number, before)
            first = not any(each.failed is None for each in before)
            if first and result.nearest is not None and not config.has_latency:
                raise BudgetError(str(result.failed), result.nearest)  # no candidate can help
            return result

        return search(
            space,
            evaluate,
            log,
            open_study(
                work, config.storage, f"cadenza-{identity[:16]}", worker_of(work), bench.device
            ),
            trials,
            config.seed,
            config.strategy,
            None if config.timeout_s is None else began + config.timeout_s,
        )


def _cut_short(contest: Contest, results: Sequence[TrialResult]) -> bool:
    """Return whether a search ended by its time: fewer trials than asked for, and some left."""
    config = contest.bench.config
    wanted = min(config.trials or contest.bench.effort.trials, size(contest.shop.space))
    return config.timeout_s is not None and len(results) < wanted


def _ask(
    worker: Child,
    bench: Workbench,
    work: Path,
    candidate: Candidate,
    number: int,
    before: Sequence[TrialResult],
) -> TrialResult:
    """Return what a candidate comes to in the worker; one that kills it is out, and why."""
    began, trials = time.monotonic(), bench.config.trials or bench.effort.trials
    best = best_of(before, bench.config.goal)
    request = {
        "do": "trial",
        "candidate": candidate.values,
        "number": number,
        "best": None if best is None else best.to_json(),
    }
    steps = STEPS * len(bench.jobs) + STEPS_TOGETHER
    with Progress(steps, f"trial {number + 1}/{trials}") as progress:
        try:
            log = work / "logs" / f"trial-{number:04d}.log"
            try:
                answer = worker.ask(request, log, lambda note: progress.advance(1, note))
            except ChildError as error:
                if "killed by the system" not in str(error):
                    raise
                # Whoever killed it may have meant somebody else's memory: once more.
                bench.say(f"trial {number + 1}/{trials}: {error}; trying once more")
                answer = worker.ask(request, log, lambda note: progress.advance(0, note))
            result = TrialResult.from_json(answer)
            progress.advance(steps - progress.done)  # not every trial has them all
        except ChildError as error:
            result = TrialResult(
                number=number,
                candidate=candidate,
                cost=0.0,
                loss=100.0,
                device=bench.device,
                seconds={"all": time.monotonic() - began},
                failed=str(error),
                log=error.tail,
            )
    said = result.failed or (f"{result.cost:.4g} {bench.unit}, loss {result.loss:.2f} points")
    changed = contrast(candidate, before[0].candidate) if before else "the defaults"
    took = time.monotonic() - began
    bench.say(f"trial {number + 1}/{trials}: {changed}: {said} ({took:.1f} s)")
    drift = result.machine.get("drift", 1.0)
    if not 1.0 / _MUCH <= drift <= _MUCH:
        bench.say(
            f"trial {number + 1}/{trials}: the machine was {drift:.2f} times slower than when the "
            f"defaults were timed; latencies are held against full precision in the same rounds"
        )
    within = result.machine.get("drift_within")
    if within is not None:
        bench.say(
            f"trial {number + 1}/{trials}: the machine's speed changed by "
            f"{abs(within - 1.0):.0%} while it was timed; its latencies are held against full "
            f"precision's in the same rounds"
        )
    return result


def _settled(contest: Contest, results: Sequence[TrialResult]) -> tuple[TrialResult, Settled]:
    """Return the best trial whose schedules meet the latency as whole sequences, and these.

    With none, the one that misses it least.
    """
    left, missed = list(results), []
    while any(result.failed is None for result in left):
        winner = best_trial(left, contest.bench.config.goal)
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


def _spent(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the seconds by kind of work, added up."""
    kinds = (BUILD, MEASURE, EVALUATE)
    return {kind: sum(part.get(kind, 0.0) for part in parts) for kind in kinds}


def _floor(config: TuneConfig, bench: Workbench, task: str) -> float:
    """Return the points that a task may lose; of `default`, the least that any may."""
    if task in bench.jobs:
        return config.floor_of(task)
    return min(config.floor_of(name) for name in bench.jobs)
