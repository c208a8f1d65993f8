"""`cadenza tune`, from an export to a bundle.

    prepare -> search over candidates -> the best one's schedules, timed and held to the budget
            -> judged once on test prompts -> bundle

Killed at any point, the same command goes on: trials are in a log, everything measured is in the
cache.  Interrupted, it writes the best bundle so far, not judged, and says so.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engines.build import Cache
from engines.bundle import Bundle, check_output, is_bundle, read_bundle
from engines.errors import BackendError, BudgetError, BundleError
from engines.files import digest_file
from engines.precision import Precision
from engines.terminal import Progress
from exporter.folder import EXPORT
from tuner.config import TuneConfig
from tuner.contest import Contest
from tuner.folder import TRIALS, tune_folder, write_json
from tuner.judge import judge
from tuner.profile_report import indistinct
from tuner.report import Verdict, verdict_json
from tuner.search import open_study, search
from tuner.settle import Settled, settle
from tuner.ship import ship
from tuner.space import Candidate, knobs, size
from tuner.trials import TrialLog, TrialResult
from tuner.workbench import Workbench, prepare
from tuner.workshop import Workshop

# Losses this close, in points, are not told apart when candidates are compared.
_SAME_LOSS = 0.5

_INTERRUPTED = "interrupted: writing the best bundle so far, not judged on test prompts"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a tune ended with.

    Attributes:
        bundle: As written, or as found.
        verdicts: On each task and `default`; empty where nothing was judged now.
        precisions: That a schedule of the verdicts may run.
        shortfall: What was asked for and not shown, or None; the bundle says it is degraded.
        interrupted: Whether it was stopped and the bundle is the best so far.
        summary: For `--json`.
    """

    bundle: Bundle
    verdicts: tuple[Verdict, ...]
    precisions: tuple[Precision, ...]
    shortfall: str | None
    interrupted: bool
    summary: Mapping[str, Any]


def tune(
    config: TuneConfig, cache: Cache, say: Callable[[str], None], force: bool = False
) -> Outcome:
    """Tune an export and write the bundle.

    Args:
        config: What is asked for.
        cache: Engines, measurements and answers.
        say: Where progress goes, a line at a time.
        force: Replace what another command left at the output.

    Raises:
        InputError: An argument or a file given is at fault.
        BudgetError: No schedule is within the budgets.
    """
    bench = prepare(config, cache, say)
    identity = config.identity(digest_file(config.export / EXPORT).sha256, bench.prompts_digest)
    finished = _finished(config.output, identity, force)
    if finished is not None:
        say(f"{config.output} is complete already; nothing was changed")
        return Outcome(
            bundle=finished,
            verdicts=(),
            precisions=bench.shown_precisions,
            shortfall=_shortfall(_tune_of(config.output)),
            interrupted=False,
            summary=_summary(finished, (), {"made": False}),
        )
    unfinished = _tune_of(config.output).get("identity") == identity
    check_output(config.output, force=force or unfinished)
    with tune_folder(config.output, identity, force) as work:
        return _tune(bench, work, identity, force or unfinished)


def _tune(bench: Workbench, work: Path, identity: str, force: bool) -> Outcome:
    config, say = bench.config, bench.say
    contest = Contest(Workshop(bench, work))
    began = time.monotonic()
    interrupted = False
    log = TrialLog(work / TRIALS)
    try:
        results = _search(bench, contest, log, f"cadenza-{identity[:16]}", began)
    except KeyboardInterrupt:
        results = log.read()
        if not any(result.failed is None for result in results):
            raise
        say(_INTERRUPTED)
        interrupted = True
    winner = best_trial(results, config.goal)
    settled = Settled(contest.choices(winner.candidate))
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
        "candidate": winner.candidate.values(),
        "quantizer": bench.export.recipe.quantizer,
        "trial": winner.number,
        "trials": len(results),
        "goal": config.goal,
        "max_loss": config.max_loss,
        "seed": config.seed,
        "mode": config.mode,
        "quality_shown_to": max((v.quality_shown_to for v in verdicts), default=None),
        "short": {
            v.task: [round(end, 2) for end in v.loss]
            for v in verdicts
            if v.quality_shown_to > config.max_loss
        },
        "tightened": settled.tightened,
        "over_budget": settled.over_budget,
    }
    shortfall = _shortfall(facts)
    bundle = ship(
        contest,
        winner.candidate,
        settled.choices,
        {verdict.task: verdict for verdict in verdicts},
        facts,
        shortfall is not None,
        force=force,
    )
    counts = {"built": contest.shop.built.built, "reused": contest.shop.built.reused}
    say(f"{counts['built']} engines built, {counts['reused']} reused from the cache")
    summary = _summary(bundle, verdicts, {"made": True, "engines": counts, **facts})
    for name, job in bench.jobs.items():
        found = contest.sensitivity(winner.candidate, job)
        if found.indistinct:
            say(f"{name}: {indistinct(found)}")
    write_json(work / "sensitivity.json", contest.profile(winner.candidate).to_json())
    write_json(work / "result.json", summary)
    return Outcome(
        bundle=bundle,
        verdicts=tuple(verdicts),
        precisions=bench.shown_precisions,
        shortfall=shortfall,
        interrupted=interrupted,
        summary=summary,
    )


def _search(
    bench: Workbench, contest: Contest, log: TrialLog, study: str, began: float
) -> list[TrialResult]:
    config = bench.config
    steps = min(job.sampler.steps for job in bench.jobs.values())
    space = knobs(contest.shop.default, steps, contest.shop.blocks, bench.precisions)
    trials = config.trials or bench.effort.trials
    bench.say(f"searching {size(space)} candidates in {trials} trials for {config.goal}")

    def evaluate(candidate: Candidate, number: int) -> TrialResult:
        started = time.monotonic()
        with Progress(2 * len(bench.jobs) + 1, f"trial {number + 1}/{trials}") as progress:
            watched = replace(contest, step=lambda note: progress.advance(1, note))
            result = watched.evaluate(candidate, number)
        if number == 0 and result.nearest is not None and not config.has_latency:
            raise BudgetError(str(result.failed), result.nearest)  # no candidate can help
        took = time.monotonic() - started
        said = result.failed or (
            f"{result.cost:.4g} {'bits' if bench.simulated else 'ms a sequence'}, "
            f"loss {result.loss:.2f} points"
        )
        values = ", ".join(f"{key} {value}" for key, value in candidate.values().items())
        bench.say(f"trial {number + 1}/{trials}: {values}: {said} ({took:.1f} s)")
        return result

    deadline = None if config.timeout_s is None else began + config.timeout_s
    return search(
        space,
        evaluate,
        log,
        open_study(log.path.parent, config.storage, study),
        trials,
        config.seed,
        config.strategy,
        deadline,
    )


def _settled(contest: Contest, results: Sequence[TrialResult]) -> tuple[TrialResult, Settled]:
    """Return the best trial whose schedules meet the latency as whole sequences, and these.

    With none, the one that misses it least.
    """
    left, missed = list(results), []
    while any(result.failed is None for result in left):
        winner = best_trial(left, contest.bench.config.goal)
        settled = settle(contest, winner.candidate, contest.choices(winner.candidate))
        if settled.over_budget is None:
            return winner, settled
        missed.append((settled.over_budget, winner, settled))
        left.remove(winner)
        contest.bench.say(f"trial {winner.number + 1} misses its latency; trying the next best")
    _, winner, settled = min(missed, key=lambda each: each[0])
    return winner, settled


def best_trial(results: list[TrialResult], goal: str) -> TrialResult:
    """Return the trial that ships.

    Of the feasible ones: for quality the cheapest of those whose loss cannot be told from the
    least, else the cheapest; ties to the earliest, whose recipe is closest to the export's own.
    With none feasible, the one that loses least.

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
    feasible = [result for result in worked if result.feasible] or worked
    if goal == "quality" or not any(result.feasible for result in worked):
        least = min(result.loss for result in feasible)
        feasible = [result for result in feasible if result.loss <= least + _SAME_LOSS]
    return min(feasible, key=lambda result: (result.cost, result.number))


def _tune_of(output: Path) -> Mapping[str, Any]:
    """Return what the bundle at the output says of the tune that made it; {} without one."""
    if not is_bundle(output):
        return {}
    try:
        made = json.loads((output / "manifest.json").read_text(encoding="utf-8")).get("tune")
    except (OSError, ValueError, AttributeError):
        return {}
    return made if isinstance(made, dict) else {}


def _finished(output: Path, identity: str, force: bool) -> Bundle | None:
    """Return the bundle that this very command wrote before, whole, or None.

    Raises:
        BundleError: It is damaged, and may not be replaced.
    """
    made = _tune_of(output)
    if made.get("identity") != identity or not made.get("complete"):
        return None
    try:
        return read_bundle(output)
    except BundleError as error:
        if force:
            return None
        raise BundleError(f"{error}, with --force") from error


def _shortfall(made: Mapping[str, Any]) -> str | None:
    """Return what a tune asked for and has not shown, with the mend, or None.

    Args:
        made: What the manifest says of the tune.
    """
    if not made.get("complete"):
        return "interrupted, so not judged on test prompts; the same command finishes it"
    if made.get("over_budget") is not None:
        return (
            f"timed as a whole, a schedule takes {made['over_budget']:.3f} times its latency; "
            f"allow more --latency-ms"
        )
    if made["quality_shown_to"] > made["max_loss"]:
        short = made.get("short", {})
        tasks = ", ".join(
            f"{name} {m:.2f} [{low}, {high}]" for name, (m, low, high) in short.items()
        )
        more = any(low <= made["max_loss"] for _, low, _ in short.values())
        return (
            f"a loss of {made['max_loss']:g} points or fewer was not shown on test prompts for "
            f"{tasks}; {'tune with more prompts (--mode), or ' if more else ''}"
            f"allow more --max-loss"
        )
    return None


def _summary(
    bundle: Bundle, verdicts: Sequence[Verdict], facts: Mapping[str, Any]
) -> dict[str, Any]:
    manifest = bundle.manifest
    return {
        "bundle": str(bundle.folder),
        "digest": bundle.digest,
        "degraded": manifest.degraded,
        "schedules": {
            name: {
                target: list(tuned.schedule.precisions) for target, tuned in task.targets.items()
            }
            for name, task in manifest.tasks.items()
        },
        "tasks": {verdict.task: verdict_json(verdict) for verdict in verdicts},
        **facts,
    }
