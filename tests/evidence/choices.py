"""Which schedules are compared: all chosen before a test prompt is drawn.

From calibration prompts alone: the allocation (DP) with each proxy, at each budget, on any subset.
From tuning prompts as well, without labels: measured single-window gains and the allocation on
them, adaptive bisection, the refined allocation, and the verdict, which is `tuner.choice`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
from numpy.typing import NDArray

from engines.schedule import SamplerConfig, Schedule
from tests.evidence.config import BASE, HIGH, LEVELS, SIX_LEVELS
from tests.evidence.study import Study
from tuner.allocate import allocate
from tuner.baselines import back_loaded, backward, bisect, front_loaded, permuted
from tuner.choice import Measures, Priced, choose_schedule, mixture
from tuner.costs import Budget
from tuner.gain import PROXIES, TaskSensitivity, gain_from, summarize
from tuner.refine import refine
from tuner.sensitivity import PromptTables

Reals = NDArray[np.float64]

DEFAULT_PROXY = PROXIES[0]
# Schedules that the refinement may measure.
REFINEMENTS = 12


@dataclass(frozen=True)
class Chosen:
    """A task's schedules by label, and what they were chosen on.

    Attributes:
        schedules: By label.
        verdict: Label of what the product would ship at the headline budget: "dp", "refined" or
            "uniform NAME".
        gains: Predicted by each proxy [W, P] over the headline levels.
        sensitivity: By the default proxy, with intervals, over the headline levels.
        measured: Measured on tuning prompts, raising one window to each level [W, P].
        bisected: Schedules that the bisection measured.
    """

    schedules: dict[str, Schedule]
    verdict: str
    gains: dict[str, Reals]
    sensitivity: TaskSensitivity
    measured: Reals
    bisected: int


def subset(tables: PromptTables, names: Sequence[str]) -> PromptTables:
    """Return the tables of some of the precisions."""
    columns = [tables.precisions.index(name) for name in names]
    return replace(
        tables,
        precisions=tuple(names),
        kl=tables.kl[..., columns],
        flips=tables.flips[..., columns],
        moves=None if tables.moves is None else tables.moves[..., columns],
    )


def gain_table(
    study: Study,
    tables: PromptTables,
    names: Sequence[str],
    base: str,
    proxy: str = DEFAULT_PROXY,
    weights: Reals | None = None,
) -> Reals:
    """Return the gains [..., W, len(names)] that a proxy predicts over the base.

    `weights` of the prompts [..., N] stand for draws of them; None: all alike.
    """
    bits = [study.folder.precisions[name].bits for name in names]
    return gain_from(subset(tables, names), bits, base, proxy, weights)


def allocated(
    study: Study,
    task: str,
    gain: Reals,
    names: Sequence[str],
    mean_bits: float,
    sampler: SamplerConfig | None = None,
) -> Schedule:
    """Return the schedule of greatest gain within a budget of mean activation bits."""
    costs = study.costs(task, names, len(gain), sampler)
    return Schedule(allocate(gain, costs, Budget(mean_bits=mean_bits), 0).schedule)


def raised(windows: int, window: int, name: str, base: str = BASE) -> Schedule:
    """Return the base everywhere, but for one window."""
    return Schedule(tuple(name if w == window else base for w in range(windows)))


def measured_gains(
    study: Study, task: str, names: Sequence[str], base: str, windows: int
) -> Reals:
    """Return the agreement that each single change of the base buys on tuning prompts [W, P].

    In points of full precision's tokens; no labels are read.
    """
    count = study.config.tuning
    singles = {
        (w, name): raised(windows, w, name, base)
        for w in range(windows)
        for name in names
        if name != base
    }
    uniform = Schedule.uniform(base, windows)
    found = study.agreement(task, "tuning", count, [uniform, *singles.values()])
    gain = np.zeros((windows, len(names)))
    for (w, name), schedule in singles.items():
        gap = found[schedule] - found[uniform]
        gain[w, names.index(name)] = 100.0 * gap.mean()
    return gain


def chosen_for(study: Study, task: str) -> Chosen:
    """Return everything that is compared for a task, without a test prompt."""
    config, windows = study.config, study.config.windows
    tables = study.tables(task, SIX_LEVELS, windows, base=BASE)
    other = study.tables(task, SIX_LEVELS, windows, base=BASE, influence="counterfactual")
    costs = study.costs(task, SIX_LEVELS, windows)
    bits = dict(zip(costs.names, costs.bits.tolist(), strict=True))
    gains = {proxy: gain_table(study, tables, LEVELS, BASE, proxy) for proxy in PROXIES}
    gains["kl*counterfactual"] = gain_table(study, other, LEVELS, BASE, "kl*influence")
    gains["counterfactual"] = gain_table(study, other, LEVELS, BASE, "influence")
    at = partial(allocated, study, task)
    dp = at(gains[DEFAULT_PROXY], LEVELS, config.mean_bits)
    found = {f"uniform {name}": Schedule.uniform(name, windows) for name in SIX_LEVELS}
    found["dp"] = dp
    for proxy, gain in gains.items():
        found[f"dp on {proxy}"] = at(gain, LEVELS, config.mean_bits)
    for budget in config.budgets:
        found[f"dp at {budget:g}"] = at(gains[DEFAULT_PROXY], LEVELS, budget)
    read = study.tables(task, LEVELS, windows, base=BASE, scored=True)
    gains["kl*influence, scored"] = gain_table(study, read, LEVELS, BASE)
    for budget in (*config.budgets, config.mean_bits):
        found[f"scored dp at {budget:g}"] = at(gains["kl*influence, scored"], LEVELS, budget)
    six = gain_table(study, tables, SIX_LEVELS, BASE)
    found["dp of six levels"] = at(six, SIX_LEVELS, config.mean_bits)
    measured = measured_gains(study, task, LEVELS, BASE, windows)
    found["dp on measured gains"] = at(measured, LEVELS, config.mean_bits)
    found["first"], found["last"] = front_loaded(dp, bits), back_loaded(dp, bits)
    found["backward"] = backward(dp)
    for number, each in enumerate(permuted(dp, config.permutations, config.seed)):
        found[f"permuted {number}"] = each
    bisection, count = _bisected(study, task)
    found["bisect"] = bisection
    priced = priced_for(study, task, gains[DEFAULT_PROXY], LEVELS, windows)
    found["refined"] = refine(
        dp,
        LEVELS,
        priced.fits,
        priced.predicted,
        lambda schedule: study.agreement(task, "tuning", config.tuning, [schedule])[schedule],
        REFINEMENTS,
        config.seed,
    ).schedule
    for number, schedule in with_high_windows(
        gains[DEFAULT_PROXY],
        costs.only([SIX_LEVELS.index(name) for name in LEVELS]).bits,
        config.mean_bits,
    ).items():
        found[f"{number} high windows"] = schedule
    shipped = found["shipped"] = verdict(study, task, gains[DEFAULT_PROXY])
    sensitivity = summarize(
        subset(tables, LEVELS),
        [study.folder.precisions[name].bits for name in LEVELS],
        base=BASE,
        seed=config.seed,
    )
    return Chosen(found, _label(shipped, found), gains, sensitivity, measured, count)


def _label(shipped: Schedule, found: Mapping[str, Schedule]) -> str:
    order = sorted(found, key=lambda label: (not label.startswith("uniform"), label != "dp"))
    return next((label for label in order if found[label] == shipped), "refined")


def priced_for(study: Study, task: str, gain: Reals, names: Sequence[str], windows: int) -> Priced:
    """Return gains with their costs and the headline budget."""
    return Priced(
        gain, study.costs(task, names, windows), Budget(mean_bits=study.config.mean_bits)
    )


def verdict(
    study: Study,
    task: str,
    gain: Reals,
    rows: NDArray[np.intp] | None = None,
    refinements: int = REFINEMENTS,
) -> Schedule:
    """Return what the product ships for a task at the headline budget, judged without labels.

    Args:
        study: Has the engines.
        task: Its name.
        gain: Predicted [W, P] over the headline levels.
        rows: Tuning prompts that count, drawn again where the verdict is resampled; None for all.
        refinements: Schedules that may be measured beside the allocation's.
    """
    config = study.config

    def agreement(schedule: Schedule) -> dict[str, Reals]:
        found = study.agreement(task, "tuning", config.tuning, [schedule])[schedule]
        return {task: found if rows is None else found[rows]}

    def loss(schedule: Schedule) -> dict[str, float]:
        return {task: 100.0 * (1.0 - float(agreement(schedule)[task].mean()))}

    return choose_schedule(
        priced_for(study, task, gain, LEVELS, len(gain)),
        Measures(agreement, loss),
        "quality",
        0.0,
        refinements,
        config.seed,
    ).schedule


def default_schedule(study: Study, gains: Mapping[str, Reals]) -> Schedule:
    """Return the allocation on the mixture of the tasks."""
    task = next(iter(gains))
    return allocated(study, task, mixture(gains), LEVELS, study.config.mean_bits)


def _bisected(study: Study, task: str) -> tuple[Schedule, int]:
    """Return the better of two adaptive bisections on tuning prompts, and what both measured.

    From all low, the target of the raise is the headline's highest level, or the one below it.
    """
    config = study.config
    costs = study.costs(task, LEVELS, config.windows)
    priced = Priced(
        np.zeros((config.windows, len(LEVELS))), costs, Budget(mean_bits=config.mean_bits)
    )

    def error(schedule: Schedule) -> float:
        found = study.agreement(task, "tuning", config.tuning, [schedule])[schedule]
        return 100.0 * (1.0 - float(found.mean()))

    ends = [
        bisect(config.windows, LEVELS[0], high, error, priced.fits) for high in (LEVELS[-2], HIGH)
    ]
    best = min(ends, key=lambda each: error(each.schedule))
    return best.schedule, sum(each.measured for each in ends)


def with_high_windows(gain: Reals, bits: Reals, mean_bits: float) -> dict[int, Schedule]:
    """Return the best schedule within a budget for each number of windows at the highest level.

    By listing all, which six windows of four levels allow; passes are equal in all windows.
    """
    windows, levels = gain.shape
    if levels**windows > 100_000:
        return {}
    every = np.array(list(product(range(levels), repeat=windows)))
    inside = every[bits[every].mean(axis=1) <= mean_bits * (1 + 1e-9)]
    total = gain[np.arange(windows), inside].sum(axis=1)
    high = (inside == levels - 1).sum(axis=1)
    found = {}
    for number in sorted(set(high.tolist())):
        rows = np.flatnonzero(high == number)
        best = inside[rows[int(np.argmax(total[rows]))]]
        found[number] = Schedule(tuple(LEVELS[index] for index in best.tolist()))
    return found


def choices_json(chosen: Mapping[str, Chosen], default: Schedule) -> dict[str, object]:
    """Return what is written down before test prompts are drawn."""
    return {
        "default": list(default.precisions),
        "tasks": {
            task: {
                "verdict": each.verdict,
                "schedules": {
                    label: list(schedule.precisions) for label, schedule in each.schedules.items()
                },
            }
            for task, each in chosen.items()
        },
    }
