"""Experiments beside the headline: verdicts drawn again, 8 bits, fewer prompts, other samplers.

Each returns plain data for `results.json`.  What is chosen is chosen on calibration and tuning
prompts; accuracies are of the first test prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.schedule import SamplerConfig, Schedule
from tests.evidence.choices import (
    DEFAULT_PROXY,
    METHODS,
    allocated,
    gain_table,
    subset,
    verdict,
)
from tests.evidence.config import BASE, EIGHT_BASE, EIGHT_LEVELS, LEVELS, SIX_LEVELS
from tests.evidence.headline import points
from tests.evidence.statistics import mean_over_tasks, pearson
from tests.evidence.study import Study
from tuner.baselines import permuted
from tuner.objective import paired_interval

Reals = NDArray[np.float64]


def cross_tasks(study: Study, schedules: Mapping[str, Schedule]) -> dict[str, Any]:
    """Return the accuracy of each schedule on each task, and how often a task's own is best.

    Args:
        study: Has the engines.
        schedules: By the task that each was allocated for; `default` may be among them.
    """
    count = study.config.rest
    matrix: dict[str, dict[str, float]] = {}
    for task in study.prompts:
        right = study.right(task, "test", count, list(schedules.values()))
        matrix[task] = {
            name: 100.0 * float(right[each].mean()) for name, each in schedules.items()
        }
    others = [name for name in schedules if name in matrix]
    wins = {
        task: matrix[task][task] >= max(matrix[task][other] for other in others) for task in matrix
    }
    return {
        "accuracy": matrix,
        "schedules": {name: list(each.precisions) for name, each in schedules.items()},
        "wins": wins,
        "transfer_diagonal_wins": float(np.mean(list(wins.values()))),
        "n": count,
    }


def resampled_verdicts(study: Study, method: str) -> dict[str, Any]:
    """Return what a method's choice loses, and how often "mixed" is wrong, over calibrations.

    Calibration and tuning prompts are drawn again, the allocation and its verdict made from each
    draw; what ships is compared with uniform and with the allocation on test prompts.
    """
    config = study.config
    regret: dict[str, Reals] = {}
    tasks: dict[str, dict[str, Any]] = {}
    for task in study.prompts:
        regret[task], tasks[task] = _verdicts_of(study, task, method)
    verdicts = config.resamples * len(tasks)
    return {
        "verdict_regret": points(mean_over_tasks(regret, config.seed)),
        "largest_regret": max(each["largest_regret"] for each in tasks.values()),
        "verdicts": verdicts,
        "mixed": sum(each["mixed"] for each in tasks.values()),
        "false_mixed": sum(each["wrong"] for each in tasks.values()) / verdicts,
        "false_mixed_shown": sum(each["shown_wrong"] for each in tasks.values()) / verdicts,
        "tasks": tasks,
    }


def _verdicts_of(study: Study, task: str, method: str) -> tuple[Reals, dict[str, Any]]:
    """Return a task's mean regret by prompt [N], and what its verdicts were."""
    config = study.config
    rng = np.random.default_rng([config.seed, list(study.prompts).index(task)])
    tables = subset(study.tables(task, SIX_LEVELS, config.windows, base=BASE), LEVELS)
    if METHODS[method] == "rollout":
        tables = study.rollouts(task, tables, BASE, read=True)
    uniform = Schedule.uniform(BASE, config.windows)
    count = len(tables.kl)
    lost: list[Reals] = []
    mixed, wrong, shown = 0, 0, 0
    seen: dict[str, int] = {}
    prompts = len(study.prompts[task].items("tuning", config.tuning))
    for _ in range(config.resamples):
        weights = rng.multinomial(count, np.full(count, 1.0 / count)) / count
        rows = rng.integers(0, prompts, prompts)
        gain = gain_table(study, tables, LEVELS, BASE, METHODS[method], weights[None])[0]
        own = allocated(study, task, gain, LEVELS, config.mean_bits)
        shipped = verdict(study, task, gain, rows, refinements=1)
        right = study.right(task, "test", config.rest, [uniform, own, shipped])
        lost.append(max(right[uniform], right[own], key=np.mean) - right[shipped])
        if not shipped.is_uniform:
            gap = paired_interval(right[shipped], right[uniform], config.seed)
            mixed, wrong, shown = mixed + 1, wrong + (gap.mean < 0), shown + (gap.high < 0)
        key = " ".join(shipped.precisions)
        seen[key] = seen.get(key, 0) + 1
    return np.mean(lost, axis=0), {
        "verdict_regret": 100.0 * float(np.mean(lost)),
        "largest_regret": 100.0 * max(float(each.mean()) for each in lost),
        "mixed": mixed,
        "wrong": int(wrong),
        "shown_wrong": int(shown),
        "false_mixed": float(wrong) / config.resamples,
        "shipped": seen,
    }


def eight_bits(study: Study) -> dict[str, Any]:
    """Return the paper's Table 4 here: 8-bit weights, levels 4, 8 and 16, 8 bits on average."""
    config = study.config
    found: dict[str, Any] = {}
    gaps: dict[str, dict[str, Reals]] = {"dp_minus_uniform": {}, "dp_minus_random": {}}
    for task in study.prompts:
        tables = study.tables(task, EIGHT_LEVELS, config.windows, base=EIGHT_BASE)
        gain = gain_table(study, tables, EIGHT_LEVELS, EIGHT_BASE)
        own = allocated(study, task, gain, EIGHT_LEVELS, 8.0)
        uniform = Schedule.uniform(EIGHT_BASE, config.windows)
        others = permuted(own, config.permutations, config.seed)
        right = study.right(task, "test", config.rest, [uniform, own, *others])
        random = np.mean([right[each] for each in others] or [right[own]], axis=0)
        gaps["dp_minus_uniform"][task] = right[own] - right[uniform]
        gaps["dp_minus_random"][task] = right[own] - random
        full = Schedule.uniform("fp32", 1)
        found[task] = {
            "schedule": list(own.precisions),
            "full": 100.0 * float(study.right(task, "test", config.rest, [full])[full].mean()),
            "uniform": 100.0 * float(right[uniform].mean()),
            "dp": 100.0 * float(right[own].mean()),
            "random": 100.0 * float(random.mean()),
            "dp_minus_uniform": points(paired_interval(right[own], right[uniform], config.seed)),
        }
    return {
        "tasks": found,
        "n": config.rest,
        **{name: points(mean_over_tasks(each, config.seed)) for name, each in gaps.items()},
    }


def calibration_sizes(study: Study) -> dict[str, Any]:
    """Return how the allocation changes with the number of calibration prompts.

    For random subsets of each size: the correlation of the predicted gains with those of all
    prompts, and the accuracy of the allocation against that on all prompts.
    """
    config = study.config
    rng = np.random.default_rng(config.seed + 1)
    found: dict[str, Any] = {}
    for size in config.sizes:
        r, gaps = [], {}
        for task in study.prompts:
            tables = study.tables(task, SIX_LEVELS, config.windows, base=BASE)
            whole = gain_table(study, tables, LEVELS, BASE)
            all_of_them = allocated(study, task, whole, LEVELS, config.mean_bits)
            by_subset = []
            for _ in range(config.subsets):
                few = min(size, len(tables.kl))
                weights = np.zeros((1, len(tables.kl)))
                weights[0, rng.choice(len(tables.kl), few, replace=False)] = 1.0 / few
                gain = gain_table(study, tables, LEVELS, BASE, weights=weights)[0]
                r.append(pearson(gain[:, -1], whole[:, -1]))
                own = allocated(study, task, gain, LEVELS, config.mean_bits)
                right = study.right(task, "test", config.rest, [own, all_of_them])
                by_subset.append(right[own] - right[all_of_them])
            gaps[task] = np.mean(by_subset, axis=0)
        found[str(size)] = {
            "pearson": float(np.nanmean(r)),
            "pearson_least": float(np.nanmin(r)),
            "minus_all_prompts": points(mean_over_tasks(gaps, config.seed)),
        }
    return found


def confirmation(study: Study, chosen: Mapping[str, Mapping[str, Schedule]]) -> dict[str, Any]:
    """Return the methods against uniform on test prompts that nothing else was answered for.

    Rollouts were added after the first look at test answers; these prompts were drawn after that.
    """
    config = study.config
    full, base = Schedule.uniform("fp32", 1), Schedule.uniform(BASE, config.windows)
    gaps: dict[str, dict[str, Reals]] = {}
    accuracy: dict[str, dict[str, float]] = {}
    counts = []
    for task, schedules in chosen.items():
        count = len(study.prompts[task].items("fresh", config.test))
        if not count:
            continue
        counts.append(count)
        labels = [each for m in METHODS for each in (m, f"{m} shipped")]
        wanted = {label: schedules[label] for label in labels} | {"full": full, "uniform": base}
        right = study.right(task, "fresh", config.test, list(wanted.values()))
        accuracy[task] = {
            label: 100.0 * float(right[each].mean()) for label, each in wanted.items()
        }
        for label in labels:
            gap = right[wanted[label]] - right[base]
            gaps.setdefault(f"{label.replace(' ', '_')}_minus_uniform", {})[task] = gap
        gap = right[wanted["rollout"]] - right[wanted["dp"]]
        gaps.setdefault("rollout_minus_dp", {})[task] = gap
    return {
        "n": min(counts, default=0),
        "accuracy": accuracy,
        **{name: points(mean_over_tasks(each, config.seed)) for name, each in gaps.items()},
    }


# From a task's own sampler to another one, or None where its numbers allow none.
Variant = Callable[[SamplerConfig], SamplerConfig | None]


def other_samplers(
    study: Study, schedules: Mapping[str, Schedule], variants: Mapping[str, Variant]
) -> dict[str, Any]:
    """Return how schedules found with the tasks' own sampler do with others.

    Beside each stands the schedule that is calibrated with that sampler itself: what not
    calibrating again costs.  All at the headline's mean bits a window; where the number of passes
    depends on the answer, bits as run are given.
    """
    config = study.config
    found: dict[str, Any] = {}
    for name, variant in variants.items():
        gaps: dict[str, dict[str, Reals]] = {}
        bits: dict[str, list[float]] = {}
        for task, fixed in schedules.items():
            sampler = variant(study.prompts[task].sampler)
            if sampler is None:
                continue
            tables = study.tables(task, SIX_LEVELS, config.windows, base=BASE, sampler=sampler)
            gain = gain_table(study, tables, LEVELS, BASE)
            own = allocated(study, task, gain, LEVELS, config.mean_bits, sampler)
            uniform = Schedule.uniform(BASE, config.windows)
            shuffled = permuted(fixed, min(4, config.permutations), config.seed)
            wanted = [uniform, fixed, own, *shuffled]
            right = study.right(task, "test", config.rest, wanted, sampler)
            answers = study.answers(task, "test", config.rest, wanted, sampler)
            for label, a, b in (
                ("fixed_minus_uniform", fixed, uniform),
                ("own_minus_uniform", own, uniform),
                ("fixed_minus_own", fixed, own),
            ):
                gaps.setdefault(label, {})[task] = right[a] - right[b]
            random = np.mean([right[each] for each in shuffled] or [right[fixed]], axis=0)
            gaps.setdefault("fixed_minus_random", {})[task] = right[fixed] - random
            for label, each in (("fixed", fixed), ("own", own)):
                bits.setdefault(label, []).append(float(answers[each].bits.mean()))
            passes = answers[uniform].commit_step.max(axis=1)
            bits.setdefault("passes", []).append(float(passes.mean()))
        found[name] = {
            **{label: points(mean_over_tasks(each, config.seed)) for label, each in gaps.items()},
            "bits_as_run": {label: float(np.mean(each)) for label, each in bits.items()},
            "n": config.rest,
        }
    return found


def reverse_transfer(study: Study, variants: Mapping[str, Variant]) -> dict[str, Any]:
    """Return how schedules calibrated with other samplers do with the tasks' own sampler."""
    config = study.config
    found: dict[str, Any] = {}
    for name, variant in variants.items():
        gaps: dict[str, Reals] = {}
        for task, prompts in study.prompts.items():
            sampler = variant(prompts.sampler)
            if sampler is None:
                continue
            uniform = Schedule.uniform(BASE, config.windows)
            tables = study.tables(task, SIX_LEVELS, config.windows, base=BASE, sampler=sampler)
            gain = gain_table(study, tables, LEVELS, BASE)
            other = allocated(study, task, gain, LEVELS, config.mean_bits, sampler)
            right = study.right(task, "test", config.rest, [uniform, other])
            gaps[task] = right[other] - right[uniform]
        found[name] = points(mean_over_tasks(gaps, config.seed))
    return found


def numbers_of_windows(study: Study) -> dict[str, Any]:
    """Return the allocation against uniform and its permutations, for each number of windows."""
    config = study.config
    found: dict[str, Any] = {}
    for windows in (*config.other_windows, config.windows):
        gaps: dict[str, dict[str, Reals]] = {"dp_minus_uniform": {}, "dp_minus_random": {}}
        for task in study.prompts:
            tables = study.tables(task, SIX_LEVELS, windows, base=BASE)
            gain = gain_table(study, tables, LEVELS, BASE, DEFAULT_PROXY)
            own = allocated(study, task, gain, LEVELS, config.mean_bits)
            uniform = Schedule.uniform(BASE, windows)
            others = permuted(own, min(4, config.permutations), config.seed)
            right = study.right(task, "test", config.rest, [uniform, own, *others])
            random = np.mean([right[each] for each in others] or [right[own]], axis=0)
            gaps["dp_minus_uniform"][task] = right[own] - right[uniform]
            gaps["dp_minus_random"][task] = right[own] - random
        found[str(windows)] = {
            name: points(mean_over_tasks(each, config.seed)) for name, each in gaps.items()
        }
    return found


def static_scales(study: Study) -> dict[str, Any]:
    """Return uniform int8 with one set of static scales beside one a window, on test prompts."""
    config = study.config
    found: dict[str, Any] = {}
    gaps: dict[str, Reals] = {}
    shared = Schedule.uniform("int8", config.windows)
    own = Schedule.uniform("int8.window", config.windows)
    for task in study.prompts:
        right = study.right(task, "test", config.test, [shared, own])
        gaps[task] = right[own] - right[shared]
        found[task] = {
            "shared": 100.0 * float(right[shared].mean()),
            "window": 100.0 * float(right[own].mean()),
        }
    return {"tasks": found, "window_minus_shared": points(mean_over_tasks(gaps, config.seed))}


def by_threshold(threshold: float) -> Variant:
    """Return the confidence rule with a task's own lengths."""

    def variant(own: SamplerConfig) -> SamplerConfig:
        return SamplerConfig(
            steps=own.gen_length,
            gen_length=own.gen_length,
            block_length=own.block_length,
            rule="threshold",
            threshold=threshold,
        )

    return variant


def with_steps(factor: float, windows: int) -> Variant:
    """Return a multiple of a task's steps, where they fit its length and fill the windows."""

    def variant(own: SamplerConfig) -> SamplerConfig | None:
        steps = round(own.steps * factor)
        if not max(windows, own.blocks) <= steps <= own.gen_length or steps % own.blocks:
            return None
        return replace(own, steps=steps)

    return variant
