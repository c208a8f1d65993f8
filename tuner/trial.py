"""One trial: a candidate's schedules, made by its rule, measured on tuning prompts, and gated.

    engines -> first look (distances of logits) -> schedules by rule -> costs, answers, losses
            -> timed in turns against the best trial before, where the two are close

A gate comes before what costs more: engines whose logits are far off answer no prompt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from engines.build import digest_json
from engines.errors import BackendError, BudgetError
from engines.machine import state
from engines.measure import Lane, compare_schedules
from engines.precision import FULL_PRECISION
from engines.schedule import Schedule, fixed_steps_like
from tuner.choice import Priced
from tuner.contest import Contest
from tuner.gate import first_look, refused
from tuner.rule import schedule_of
from tuner.space import UNIFORM, Candidate, rule_parts
from tuner.stopwatch import EVALUATE, MEASURE
from tuner.timing import Timing
from tuner.trials import TrialResult

# A candidate is timed against the best one before it where their costs are this close.
_CLOSE = 1.25

# Calibration prompts whose denoising states are looked at first, of each task.
_LOOKED_AT = 2


@dataclass(frozen=True)
class _Run:
    """What a task's schedule came to."""

    schedule: Schedule
    cost: float
    low: float
    high: float
    loss: float
    plain: dict[str, object]
    violations: dict[str, float]


def run_trial(
    contest: Contest, candidate: Candidate, number: int, best: TrialResult | None
) -> TrialResult:
    """Return what a candidate comes to; one that fails or meets no budget is out, and why.

    Args:
        contest: Makes and measures what is needed.
        candidate: What is tried.
        number: Of the trial.
        best: The best trial before, which this one is timed against.
    """
    before, watch = state(), contest.shop.watch
    began, spent = time.monotonic(), dict(watch.spent)

    def out(
        error: BackendError | BudgetError, distances: dict[str, dict[str, float | None]]
    ) -> TrialResult:
        return TrialResult(
            number=number,
            candidate=candidate,
            cost=0.0,
            loss=100.0,
            distances=distances,
            device=contest.bench.device,
            machine=before,
            seconds={**watch.since(spent), "all": time.monotonic() - began},
            failed=str(error),
            nearest=error.nearest if isinstance(error, BudgetError) else None,
        )

    distances: dict[str, dict[str, float | None]] = {}
    try:
        distances = look(contest, candidate)
        gates = dict(contest.bench.config.gates)
        reasons = {
            name: why
            for name, found in distances.items()
            if (why := refused({name: found}, gates)) is not None
        }
        if not _spared(candidate, contest, reasons):
            raise BackendError(
                f"{next(iter(reasons.values()))}; use a higher precision, or another --gate"
            )
        tables = {name: contest.priced(candidate, name) for name in contest.bench.jobs}
        runs = {name: _run(contest, candidate, name, table) for name, table in tables.items()}
        used = {each for run in runs.values() for each in run.schedule.precisions}
        memory = next(iter(tables.values())).memory(used) or 0.0
        violations = {
            label: value for run in runs.values() for label, value in run.violations.items()
        }
        if contest.bench.config.memory_mib is not None:
            violations["memory_mib"] = memory - contest.bench.config.memory_mib
        cost = float(np.mean([run.cost for run in runs.values()]))
        result = TrialResult(
            number=number,
            candidate=candidate,
            cost=cost,
            low=float(np.mean([run.low for run in runs.values()])),
            high=float(np.mean([run.high for run in runs.values()])),
            loss=max(run.loss for run in runs.values()),
            memory_mib=memory,
            violations=violations,
            tasks={name: dict(run.plain) for name, run in runs.items()},
            distances=distances,
            device=contest.bench.device,
            machine={**before, **_drifts(contest, candidate)},
            against=_against(contest, candidate, runs, cost, best),
            seconds={**watch.since(spent), "all": time.monotonic() - began},
        )
    except (BackendError, BudgetError) as error:
        return out(error, distances)
    return result


def _spared(candidate: Candidate, contest: Contest, refused: Mapping[str, str]) -> bool:
    """Return whether a candidate's schedules can run none of the precisions that are refused."""
    kind, named = rule_parts(candidate.schedule)
    if kind == UNIFORM:
        return named not in refused
    names = candidate.precisions or tuple(each.name for each in contest.bench.precisions)
    return not set(names) & set(refused)


def look(contest: Contest, candidate: Candidate) -> dict[str, dict[str, float | None]]:
    """Return the distances of each quantized precision's logits from full precision's.

    Kept in the cache: candidates with the same engines are looked at once.
    """
    bench, engines = contest.bench, contest.shop.engines(candidate)
    full = contest.shop.engines(contest.shop.default).fleet
    names = [each.name for each in bench.precisions if each.name != FULL_PRECISION.name]
    asked = {
        "full": full.keys[FULL_PRECISION.name],
        "engines": [[name, engines.fleet.keys[name]] for name in names],
        "prompts": [
            [job.sampler.to_json(), [item.ids for item in job.calibration[:_LOOKED_AT]]]
            for job in bench.jobs.values()
        ],
    }
    key = digest_json(asked)
    kept: dict[str, dict[str, float | None]] | None = bench.cache.get("look", key)
    if kept is None:
        with contest.shop.watch(EVALUATE):
            found = first_look(
                contest.shop.few_states(_LOOKED_AT),
                full.engines[FULL_PRECISION.name],
                {name: engines.fleet.engines[name] for name in names},
                bench.export.model.mask_id,
            )
        kept = {name: each.to_json() for name, each in found.items()}
        bench.cache.put("look", key, kept)
    contest.step("first look")
    return kept


def _run(contest: Contest, candidate: Candidate, name: str, table: Priced) -> _Run:
    """Return what the schedule of a task comes to on its tuning prompts."""
    config = contest.bench.config
    names = candidate.precisions
    if names is not None:
        table = table.only(names)
    schedule = schedule_of(candidate.schedule, table, contest.baselines(name, candidate.windows))
    indices = table.indices(schedule)
    ms, bits = table.costs.latency_of(indices), table.costs.bits_of(indices)
    measures = contest.measures(candidate, name)
    loss = measures.loss(schedule)[name]
    agreement = float(measures.agreement(schedule)[name].mean())
    contest.step(f"{name}: answers")
    cost = bits if ms is None else ms
    low, high = _ends(table, schedule, contest.timing(candidate, contest.bench.sampler(name)))
    violations = {f"{name}: loss": loss - config.floor_of(name)}
    for label, value, bound in (
        ("mean_bits", bits, table.budget.mean_bits),
        ("latency_ms", ms, table.budget.latency_ms),
    ):
        if bound is not None and value is not None:
            violations[f"{name}: {label}"] = _exceeds(value, bound)
    return _Run(
        schedule=schedule,
        cost=cost,
        low=cost if ms is None else cost * low,
        high=cost if ms is None else cost * high,
        loss=loss,
        plain={
            "schedule": list(schedule.precisions),
            "mean_bits": bits,
            "latency_ms": ms,
            "gain": table.predicted(schedule),
            "loss": loss,
            "agreement": agreement,
        },
        violations=violations,
    )


def _drifts(contest: Contest, candidate: Candidate) -> dict[str, float]:
    """Return the machine's drift while a candidate was timed: since the default, and within."""
    found: dict[str, float] = {}
    for job in contest.bench.jobs.values():
        timing = contest.timing(candidate, job.sampler)
        if timing is not None:
            found["drift"] = max(found.get("drift", 1.0), timing.drift, key=_distance)
            if timing.within is not None:
                within = found.get("drift_within", 1.0)
                found["drift_within"] = max(within, timing.within, key=_distance)
    return found


def _distance(factor: float) -> float:
    """Return how far a factor is from 1."""
    return abs(math.log(factor)) if factor > 0.0 else 0.0


def _exceeds(value: float, bound: float) -> float:
    """Return by how much a budget is exceeded; 0 where rounding alone does."""
    return 0.0 if 0.0 < value - bound <= 1e-9 * bound else value - bound


def _ends(table: Priced, schedule: Schedule, timing: Timing | None) -> tuple[float, float]:
    """Return the ends of a schedule's latency, as shares of it.

    Conservative: all its engines at their low end, or all at their high end.
    """
    if timing is None:
        return 1.0, 1.0
    indices, windows = table.indices(schedule), np.arange(len(table.gain))
    share = table.costs.window_ms[windows, indices]
    ends = np.array([timing.spread[name] for name in schedule.precisions])
    low, high = (share[:, None] * ends).sum(axis=0) / share.sum()
    return float(low), float(high)


def _against(
    contest: Contest,
    candidate: Candidate,
    runs: Mapping[str, _Run],
    cost: float,
    best: TrialResult | None,
) -> dict[str, float] | None:
    """Return the ratio to the best trial before, of whole sequences in the same rounds.

    None where there is none, where the two are far apart, or where they run the same.
    """
    bench = contest.bench
    measured = bench.timed and bench.latencies is None
    if best is None or not measured or not set(runs) <= set(best.tasks):
        return None
    if not best.cost > 0.0 or not 1.0 / _CLOSE <= cost / best.cost <= _CLOSE:
        return None
    theirs = {name: Schedule(tuple(best.tasks[name]["schedule"])) for name in runs}
    known = {each.name for each in bench.shown_precisions}
    if not {each for schedule in theirs.values() for each in schedule.precisions} <= known:
        return None
    fleets = [contest.shop.engines(each).fleet for each in (candidate, best.candidate)]
    lanes = []
    for label, fleet, schedules in zip(
        ("candidate", "best"),
        fleets,
        ({name: run.schedule for name, run in runs.items()}, theirs),
        strict=True,
    ):
        sequences = [
            (schedule, fixed_steps_like(bench.sampler(name), schedule.windows))
            for name, schedule in schedules.items()
        ]
        lanes.append(Lane(label, fleet.engines, tuple(sequences)))
    keys = [
        [
            [[fleet.keys[each] for each in schedule.precisions], sampler.to_json()]
            for schedule, sampler in lane.sequences
        ]
        for lane, fleet in zip(lanes, fleets, strict=True)
    ]
    if keys[0] == keys[1]:
        return None
    shape, repeats = bench.export.shape, bench.effort.repeats
    key = digest_json([keys, [shape.batch[1], shape.prompt[1]], repeats, bench.config.seed])
    kept: list[float] | None = bench.cache.get("against", key)
    if kept is None:
        with contest.shop.watch(MEASURE):
            found = compare_schedules(
                lanes,
                shape.batch[1],
                shape.prompt[1],
                bench.export.model,
                repeats=repeats,
                seed=bench.config.seed,
            ).ratio("candidate", "best")
        kept = [found.median, found.low, found.high]
        bench.cache.put("against", key, kept)
    contest.step("timed against the best")
    ratio, low, high = kept
    return {"trial": float(best.number), "ratio": ratio, "low": low, "high": high}
