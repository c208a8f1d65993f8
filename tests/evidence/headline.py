"""The headline rows of one quantizer: every schedule on test prompts, beside uniform and random.

Differences are paired: all schedules answer the same prompts.  Intervals over all tasks draw each
task's prompts again and count each task once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.schedule import Schedule, weighted_mean
from tests.evidence.choices import METHODS, Chosen, raised
from tests.evidence.config import BASE, HIGH, LEVELS, SIX_LEVELS
from tests.evidence.statistics import (
    correlation_interval,
    mean_over_tasks,
    pearson,
    reliability,
    spearman,
)
from tests.evidence.study import Study
from tuner.objective import Interval, paired_interval, wilson_interval

Reals = NDArray[np.float64]
Scores = Mapping[str, Reals]


_HEADLINES = ("bisect", "dp of six levels", f"uniform {BASE}")
_OF_METHOD = re.compile(rf"({'|'.join(METHODS)})( at .*| refined| shipped)?")


def is_headline(label: str) -> bool:
    """Return whether a schedule is answered for all test prompts, not only the first ones."""
    return label in _HEADLINES or bool(_OF_METHOD.fullmatch(label))


def test_scores(study: Study, task: str, schedules: Mapping[str, Schedule]) -> dict[str, Reals]:
    """Return which test answers are right by label, 0 or 1 [N], N as `is_headline` says."""
    config = study.config
    found: dict[str, Reals] = {}
    for count, wanted in ((config.rest, False), (config.test, True)):
        group = {label: each for label, each in schedules.items() if is_headline(label) == wanted}
        right = study.right(task, "test", count, list(group.values()))
        found |= {label: right[schedule] for label, schedule in group.items()}
    full = Schedule.uniform("fp32", 1)
    found["full"] = study.right(task, "test", config.test, [full])[full]
    return found


def rows(study: Study, task: str, chosen: Chosen, scores: Mapping[str, Reals]) -> dict[str, Any]:
    """Return accuracy, bits and the difference from uniform of every schedule of a task."""
    bits = {name: study.folder.precisions[name].bits for name in SIX_LEVELS}
    passes = study.costs(task, LEVELS, study.config.windows).passes.tolist()
    base = scores[f"uniform {BASE}"]
    found: dict[str, Any] = {}
    for label, schedule in chosen.schedules.items():
        right = scores[label]
        n = len(right)
        found[label] = {
            "schedule": list(schedule.precisions),
            "mean_bits": weighted_mean([bits[name] for name in schedule.precisions], passes),
            "accuracy": points(wilson_interval(int(right.sum()), n)),
            "minus_uniform": points(paired_interval(right, base[:n], study.config.seed)),
            "n": n,
        }
    right = scores["full"]
    found["full precision"] = {
        "schedule": ["fp32"],
        "mean_bits": 32.0,
        "accuracy": points(wilson_interval(int(right.sum()), len(right))),
        "minus_uniform": points(paired_interval(right, base, study.config.seed)),
        "n": len(right),
    }
    return found


def points(interval: Interval) -> dict[str, float]:
    """Return an interval of shares in points."""
    return asdict(interval.scaled(100.0))


def permuted_mean(scores: Mapping[str, Reals], method: str) -> Reals | None:
    """Return the mean score of a method's permutations [N]; None where there are none."""
    found = [each for label, each in scores.items() if label.startswith(f"{method} permuted ")]
    return np.mean(found, axis=0) if found else None


def differences(scores: Mapping[str, Mapping[str, Reals]]) -> dict[str, Scores]:
    """Return paired differences by prompt, by what is compared and task.

    A task whose allocation is uniform has no other order of its bits: it counts with difference 0
    to its permutations; `.._minus_random_mixed` leaves it out.
    """
    found: dict[str, dict[str, Reals]] = {}
    for task, own in scores.items():
        base = own[f"uniform {BASE}"]

        def put(name: str, a: Reals, b: Reals, task: str = task) -> None:
            n = min(len(a), len(b))
            found.setdefault(name, {})[task] = a[:n] - b[:n]

        put("uniform_loss", own["full"], base)
        for method in METHODS:
            shuffled = permuted_mean(own, method)
            mine = own[method]
            put(f"{method}_minus_random", mine, mine if shuffled is None else shuffled)
            if shuffled is not None:
                put(f"{method}_minus_random_mixed", mine, shuffled)
            put(f"{method}_minus_uniform", mine, base)
            put(f"{method}_refined_minus_uniform", own[f"{method} refined"], base)
            put(f"{method}_shipped_minus_uniform", own[f"{method} shipped"], base)
            put(f"{method}_minus_bisection", mine, own["bisect"])
            put(f"{method}_default_minus_task", own[f"{method} default"], mine)
            for label in own:
                if label.startswith(f"{method} at "):
                    put(f"{label} minus uniform", own[label], base)
        put("rollout_minus_dp", own["rollout"], own["dp"])
        put("six_minus_uniform", own["dp of six levels"], base)
        for label in ("first", "last", "backward"):
            put(f"dp_minus_{label}", own["dp"], own[label])
        for label in own:
            if label.startswith("dp on "):
                put(f"{label} minus uniform", own[label], base)
    return dict(found)


def summary(found: Mapping[str, Scores], seed: int) -> dict[str, Any]:
    """Return the mean over tasks, and each task's own, of paired differences, in points."""
    return {
        name: {
            "all": points(mean_over_tasks(by_task, seed)),
            "tasks": {task: points(_own(values, seed)) for task, values in by_task.items()},
        }
        for name, by_task in found.items()
    }


def _own(values: Reals, seed: int) -> Interval:
    return paired_interval(values, np.zeros(len(values)), seed)


def bits_at_uniform_quality(
    summary_: Mapping[str, Any],
    budgets: tuple[float, ...],
    mean_bits: float,
    task: str | None,
    method: str = "dp",
) -> float | None:
    """Return the fewest mean bits at which a method is no worse than uniform, by the mean.

    Read at the budgets that were run, from the most bits down, as long as all are no worse; None
    where even the headline budget is worse.
    """

    def mean(name: str) -> float:
        entry = summary_[name]
        found: float = (entry["all"] if task is None else entry["tasks"][task])["mean"]
        return found

    least = mean_bits if mean(f"{method}_minus_uniform") >= 0 else None
    for budget in sorted(budgets, reverse=True):
        if least is None or mean(f"{method} at {budget:g} minus uniform") < 0:
            break
        least = budget
    return least


def singles(study: Study, task: str, high: str = HIGH, base: str = BASE) -> dict[str, Any]:
    """Return what raising each single window buys on all test prompts, and all of them together.

    In points of accuracy and of agreement with full precision, by prompt [N, W].
    """
    config, windows = study.config, study.config.windows
    uniform = Schedule.uniform(base, windows)
    each = [raised(windows, w, high, base) for w in range(windows)]
    joint = Schedule.uniform(high, windows)
    schedules = [uniform, *each, joint]
    right = study.right(task, "test", config.test, schedules)
    same = study.agreement(task, "test", config.test, schedules)
    return {
        "accuracy": np.stack([right[one] - right[uniform] for one in each], axis=1),
        "agreement": np.stack([same[one] - same[uniform] for one in each], axis=1),
        "joint_accuracy": right[joint] - right[uniform],
        "joint_agreement": same[joint] - same[uniform],
    }


def correlations(study: Study, chosen: Chosen, single: Mapping[str, Reals]) -> dict[str, Any]:
    """Return how each proxy's predicted gains go with the measured ones, with intervals."""
    high = LEVELS.index(HIGH)
    found: dict[str, Any] = {}
    for proxy, gain in chosen.gains.items():
        found[proxy] = {
            kind: {
                "pearson": asdict(correlation_interval(gain[:, high], single[kind])),
                "spearman": asdict(correlation_interval(gain[:, high], single[kind], rank=True)),
            }
            for kind in ("accuracy", "agreement")
        }
    return {
        "proxies": found,
        "reliability": {kind: reliability(single[kind]) for kind in ("accuracy", "agreement")},
        "measured": {
            kind: [points(_own(column, study.config.seed)) for column in single[kind].T]
            for kind in ("accuracy", "agreement")
        },
        "predicted": {proxy: gain[:, high].tolist() for proxy, gain in chosen.gains.items()},
        "bands": {
            "low": chosen.sensitivity.gain_low[:, high].tolist(),
            "high": chosen.sensitivity.gain_high[:, high].tolist(),
        },
        "alike": [[bool(pair) for pair in row] for row in chosen.sensitivity.alike],
        "additivity": {
            kind: {
                "sum": 100.0 * float(single[kind].mean(axis=0).sum()),
                "joint": 100.0 * float(single[f"joint_{kind}"].mean()),
            }
            for kind in ("accuracy", "agreement")
        },
    }


def pooled_correlation(
    gains: Mapping[str, Reals], single: Mapping[str, Mapping[str, Reals]], kind: str
) -> dict[str, float]:
    """Return the mean over tasks of Pearson's and Spearman's correlation of a proxy.

    Args:
        gains: Predicted for each window, by task [W].
        single: As `singles`, by task.
        kind: "accuracy" or "agreement".
    """
    pairs = [(gains[task], single[task][kind].mean(axis=0)) for task in gains]
    return {
        "pearson_mean": _mean([pearson(*pair) for pair in pairs]),
        "spearman_mean": _mean([spearman(*pair) for pair in pairs]),
    }


def _mean(values: list[float]) -> float:
    finite = [value for value in values if np.isfinite(value)]
    return float(np.mean(finite)) if finite else float("nan")
