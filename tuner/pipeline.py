"""`cadenza tune`, from an export to a bundle.

    prepare -> search: each trial in a child process -> the best one's setting: a schedule for each
            task, timed and held to the budget -> judged once on test prompts -> bundle

Killed at any point, the same command goes on: trials are in a log, everything measured is in the
cache.  Interrupted, it writes the best bundle so far, not judged, and says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from engines.build import Cache
from engines.bundle import check_output, read_bundle
from engines.child import Child, ChildError
from engines.errors import BudgetError
from engines.files import digest_file
from engines.terminal import Progress
from exporter.folder import EXPORT
from tuner.best import best_of, best_trial
from tuner.config import TuneConfig
from tuner.finish import Asked, verdict_from_plain
from tuner.folder import CONFIG, TRIALS, tune_folder, worker_of, write_json
from tuner.gate import baseline_said
from tuner.outcome import Outcome, finished, shortfall, summary, tune_of
from tuner.preflight import check, foreseen
from tuner.search import search
from tuner.search_file import SEARCH, contrast, described
from tuner.space import Candidate, size
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
            latency_from=bench.latency_from,
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
    shop, began = Workshop(bench, work), time.time()
    plan = foreseen(shop, None)
    check(plan, config.output)
    for note in plan.notes:
        say(note)
    interrupted = False
    log = TrialLog(work / TRIALS)
    limits = config.child_limit_s, config.child_memory_mib
    with Child(SERVE, given_to(bench, work), *limits) as worker:
        try:
            results = _search(shop, worker, log, identity)
        except KeyboardInterrupt:
            results = [each for each in log.read() if each.device in ("", bench.device)]
            if not any(result.failed is None for result in results):
                raise
            say(_INTERRUPTED)
            interrupted = True
        asked = Asked(identity=identity, force=force, interrupted=interrupted, began=began)
        try:
            made = _finish(bench, worker, work, results, asked)
        except KeyboardInterrupt:
            if interrupted:
                raise
            say(_INTERRUPTED)
            interrupted = True
            made = _finish(bench, worker, work, results, replace(asked, interrupted=True))
    return Outcome(
        bundle=read_bundle(config.output, verify=False),
        verdicts=tuple(map(verdict_from_plain, made["verdicts"])),
        precisions=bench.shown_precisions,
        latency_from=bench.latency_from,
        shortfall=made["short"],
        interrupted=interrupted,
        summary=made["summary"],
    )


def _finish(
    bench: Workbench,
    worker: Child,
    work: Path,
    results: Sequence[TrialResult],
    asked: Asked,
) -> dict[str, Any]:
    """Return what `tuner.finish` comes to in the worker; a setting that kills it does not ship."""
    while True:
        request = {
            "do": "finish",
            "asked": asdict(asked),
            "results": [each.to_json() for each in results],
        }
        try:
            made: dict[str, Any] = worker.ask(request, work / "logs" / "finish.log", bench.say)
            return made
        except ChildError as error:
            able = [each for each in results if each.number not in asked.left_out]
            setting = best_trial(able, bench.config.goal).candidate.setting
            out = {each.number for each in able if each.candidate.setting == setting}
            rest = [each for each in able if each.number not in out]
            if not any(each.failed is None for each in rest):
                raise
            bench.say(f"{error}; trying the next best")
            asked = replace(asked, left_out=tuple(sorted({*asked.left_out, *out})))


def _search(shop: Workshop, worker: Child, log: TrialLog, identity: str) -> list[TrialResult]:
    bench, work, began = shop.bench, shop.work, time.monotonic()
    config, space = bench.config, shop.space
    trials = config.trials or bench.effort.trials
    bench.say(f"searching {size(space)} candidates in {trials} trials for {config.goal}")
    # First of all: a storage that cannot be had is told before anything is built.
    study = open_study(
        work, config.storage, f"cadenza-{identity[:16]}", worker_of(work), bench.device
    )
    found = worker.ask({"do": "baseline"}, work / "logs" / "baseline.log")
    bench.say(baseline_said(found["baseline"]))
    write_json(work / SEARCH, described(bench, space, found["baseline"], found["full"]))

    def evaluate(candidate: Candidate, number: int, before: Sequence[TrialResult]) -> TrialResult:
        result = _ask(worker, bench, work, candidate, number, before)
        first = not any(each.failed is None for each in before)
        if first and result.nearest is not None and not config.has_latency:
            raise BudgetError(str(result.failed), result.nearest)  # no candidate can help
        return result

    return search(
        space,
        evaluate,
        log,
        study,
        trials,
        config.seed,
        config.strategy,
        None if config.timeout_s is None else began + config.timeout_s,
    )


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
            f"trial {number + 1}/{trials}: the machine took {drift:.2f} times as long as when the "
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
