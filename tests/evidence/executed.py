"""Schedules on real engines: what a window-wise schedule saves within a point of full precision.

fp32 and int8 engines of ONNX Runtime, timed as whole sequences in one run, interleaved.  These
rows change the weights with the activations, so they stand apart from the headline rows.  The
schedule is chosen on tuning prompts as `cadenza tune` does without a budget: the fastest within
one point.  A saving is *claimed* only where the cheapest uniform engine loses three points or more
on test prompts and what ships loses at most one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from engines.build import digest_json
from engines.measure import measure, measure_schedules
from engines.precision import FULL_PRECISION
from engines.schedule import SamplerConfig, Schedule
from tests.evidence.headline import points
from tests.evidence.study import Study
from tuner.choice import Measures, Priced, choose_schedule
from tuner.costs import Budget, Costs, Reals
from tuner.gain import gain_from
from tuner.objective import Interval, loss_in_points, paired_interval

NAMES = ("int8", "fp32")
MAX_LOSS, WORTHWHILE_LOSS = 1.0, 3.0


def executed(study: Study) -> dict[str, Any]:
    """Return for each task what ships, its latency and its loss, beside the uniform engines."""
    config, windows = study.config, study.config.windows
    uniform = {name: Schedule.uniform(name, windows) for name in NAMES}
    shipped: dict[str, Schedule] = {}
    reasons: dict[str, str] = {}
    for task in study.prompts:
        latency = _pass_latency(study, study.prompts[task].sampler)
        shipped[task], reasons[task] = _shipped(study, task, latency)
    found: dict[str, Any] = {}
    for task, schedule in shipped.items():
        sampler = study.prompts[task].sampler
        # What shares a sampler is timed together, once.
        alike = [each for name, each in shipped.items() if study.prompts[name].sampler == sampler]
        timed = _sequences(study, sampler, {*uniform.values(), *alike})
        right = study.right(task, "test", config.test, [*uniform.values(), schedule])
        full = right[uniform["fp32"]]
        losses = {
            label: loss_in_points(right[each] > 0, full > 0)
            for label, each in (("shipped", schedule), ("int8", uniform["int8"]))
        }
        saved = 1.0 - timed[schedule].mean / timed[uniform["fp32"]].mean
        claimed = losses["int8"].mean >= WORTHWHILE_LOSS and losses["shipped"].mean <= MAX_LOSS
        found[task] = {
            "schedule": list(schedule.precisions),
            "reason": reasons[task],
            "accuracy_full": 100.0 * float(full.mean()),
            "loss_shipped": asdict(losses["shipped"]),
            "loss_int8": asdict(losses["int8"]),
            "shipped_minus_int8": points(
                paired_interval(right[schedule], right[uniform["int8"]], config.seed)
            ),
            "ms": {
                "shipped": asdict(timed[schedule]),
                "fp32": asdict(timed[uniform["fp32"]]),
                "int8": asdict(timed[uniform["int8"]]),
            },
            "latency_saved": saved,
            "claimed": claimed,
        }
    claims = [each["latency_saved"] for each in found.values() if each["claimed"]]
    return {
        "tasks": found,
        "latency_saved": float(np.mean(claims)) if claims else None,
        "claimed_tasks": [task for task, each in found.items() if each["claimed"]],
        "n_test": config.test,
    }


def _shipped(study: Study, task: str, latency: Mapping[str, list[float]]) -> tuple[Schedule, str]:
    """Return the fastest schedule within a point on tuning prompts, and why."""
    config, windows = study.config, study.config.windows
    tables = study.tables(task, NAMES, windows, base=NAMES[0])
    bits = [study.folder.precisions[name].bits for name in NAMES]
    plain = study.costs(task, NAMES, windows)
    costs = Costs(
        names=NAMES,
        bits=plain.bits,
        passes=plain.passes,
        latency_ms=np.array([latency[name] for name in NAMES]).T,
        families=plain.families,
    )

    def agreement(schedule: Schedule) -> dict[str, Reals]:
        return {task: study.agreement(task, "tuning", config.tuning, [schedule])[schedule]}

    def loss(schedule: Schedule) -> dict[str, float]:
        full = Schedule.uniform(FULL_PRECISION.name, windows)
        right = study.right(task, "tuning", config.tuning, [schedule, full])
        return {task: 100.0 * float((right[full] - right[schedule]).mean())}

    choice = choose_schedule(
        Priced(gain_from(tables, bits, NAMES[0]), costs, Budget()),
        Measures(agreement, loss),
        "latency",
        MAX_LOSS,
        1,
        config.seed,
    )
    return choice.schedule, choice.reason


def _pass_latency(study: Study, sampler: SamplerConfig) -> dict[str, list[float]]:
    """Return ms of a pass in each window [W] by precision, at the export's shape, from the cache.

    Timed once: what was chosen by them stays what it was when the study goes on.
    """
    config, shape = study.config, study.folder.shape
    key = digest_json(
        ["evidence", [study.fleet.keys[name] for name in NAMES], asdict(sampler), config.repeats]
    )
    kept = study.cache.get("latency", key)
    if kept is None:
        found = measure(
            {name: study.fleet.engines[name] for name in NAMES},
            sampler,
            config.windows,
            shape.batch[1],
            shape.prompt[1],
            study.folder.model,
            repeats=config.repeats,
            seed=config.seed,
        )
        kept = {row.precision: list(row.by_window) for row in found.rows}
        study.cache.put("latency", key, kept)
    return {name: list(kept[name]) for name in NAMES}


def _sequences(
    study: Study, sampler: SamplerConfig, schedules: set[Schedule]
) -> dict[Schedule, Interval]:
    """Return ms of a whole sequence of each schedule, all in one run, from the cache."""
    config, shape = study.config, study.folder.shape
    ordered = sorted(schedules, key=lambda each: each.precisions)
    key = digest_json(
        [
            "evidence",
            [study.fleet.keys[name] for name in NAMES],
            [each.precisions for each in ordered],
            asdict(sampler),
            config.repeats,
        ]
    )
    kept = study.cache.get("schedules", key)
    if kept is None:
        found = measure_schedules(
            {str(number): (each, sampler) for number, each in enumerate(ordered)},
            {name: study.fleet.engines[name] for name in NAMES},
            shape.batch[1],
            shape.prompt[1],
            study.folder.model,
            repeats=config.repeats,
            seed=config.seed,
        )
        kept = [[each.median, each.low, each.high] for each in found.values()]
        study.cache.put("schedules", key, kept)
    return {each: Interval(*row) for each, row in zip(ordered, kept, strict=True)}
