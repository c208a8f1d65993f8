"""Which schedules are compared: all chosen before a test prompt is drawn.

From calibration prompts alone: the allocation with each proxy, at each budget, on any subset;
`dp` is on K x I, as T2Quant has it, `rollout` on measured changes of single windows.  From tuning
prompts as well, without labels: adaptive bisection, the refined allocation, and the verdict, which
is `tuner.choice`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
from numpy.typing import NDArray

from engines.schedule import SamplerConfig, Schedule
from tests.evidence.bisection import bisect
from tests.evidence.config import BASE, HIGH, LEVELS, SIX_LEVELS
from tests.evidence.study import Study
from tuner.allocate import allocate
from tuner.baselines import back_loaded, backward, front_loaded, permuted
from tuner.choice import Measures, Priced, choose_schedule, mixture
from tuner.costs import Budget
from tuner.gain import PROXIES, TaskSensitivity, gain_from, summarize
from tuner.refine import refine
from tuner.sensitivity import PromptTables

Reals = NDArray[np.float64]

DEFAULT_PROXY = PROXIES[0]
# The allocations that headline rows are made with, by the proxy of each: T2Quant's, and ours.
METHODS = {"dp": DEFAULT_PROXY, "rollout": "rollout"}
# Schedules that the refinement may measure.
REFINEMENTS = 12


@dataclass(frozen=True)
class Chosen:
    """A task's schedules by label, and what they were chosen on.

    Attributes:
        schedules: By label; of each method its allocation, the same at other budgets, permuted,
            refined, and what the product ships with it.
        gains: Predicted by each proxy [W, P] over the headline levels.
        sensitivity: By the default proxy, with intervals, over the headline levels.
        bisected: Schedules that the bisection measured.
    """

    schedules: dict[str, Schedule]
    gains: dict[str, Reals]
    sensitivity: TaskSensitivity
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


def chosen_for(study: Study, task: str) -> Chosen:
    """Return everything that is compared for a task, without a test prompt."""
    config, windows = study.config, study.config.windows
    tables = study.tables(task, SIX_LEVELS, windows, base=BASE)
    rolled = study.rollouts(task, subset(tables, LEVELS), BASE, read=True)
    gains = _gains(study, task, tables, rolled)
    at = partial(allocated, study, task)
    found = {f"uniform {name}": Schedule.uniform(name, windows) for name in SIX_LEVELS}
    for method, proxy in METHODS.items():
        found |= _method(study, task, method, gains[proxy])
    for proxy, gain in gains.items():
        found[f"dp on {proxy}"] = at(gain, LEVELS, config.mean_bits)
    for budget in config.budgets:
        found[f"scored dp at {budget:g}"] = at(gains["kl*influence, scored"], LEVELS, budget)
    six = gain_table(study, tables, SIX_LEVELS, BASE)
    found["dp of six levels"] = at(six, SIX_LEVELS, config.mean_bits)
    bits = {name: study.folder.precisions[name].bits for name in LEVELS}
    found["first"], found["last"] = (
        order(found["dp"], bits) for order in (front_loaded, back_loaded)
    )
    found["backward"] = backward(found["dp"])
    found["bisect"], count = _bisected(study, task)
    for number, schedule in with_high_windows(
        gains[DEFAULT_PROXY], np.array(list(bits.values())), config.mean_bits
    ).items():
        found[f"{number} high windows"] = schedule
    sensitivity = summarize(
        subset(tables, LEVELS), list(bits.values()), base=BASE, seed=config.seed
    )
    return Chosen(found, gains, sensitivity, count)


def _gains(
    study: Study, task: str, tables: PromptTables, rolled: PromptTables
) -> dict[str, Reals]:
    """Return what each proxy predicts over the headline levels [W, P]."""
    windows = study.config.windows
    plain = [proxy for proxy in PROXIES if proxy != "rollout"]
    gains = {proxy: gain_table(study, tables, LEVELS, BASE, proxy) for proxy in plain}
    other = study.tables(task, SIX_LEVELS, windows, base=BASE, influence="counterfactual")
    gains["kl*counterfactual"] = gain_table(study, other, LEVELS, BASE, "kl*influence")
    gains["counterfactual"] = gain_table(study, other, LEVELS, BASE, "influence")
    read = study.tables(task, LEVELS, windows, base=BASE, scored=True)
    gains["kl*influence, scored"] = gain_table(study, read, LEVELS, BASE)
    gains["rollout"] = gain_table(study, rolled, LEVELS, BASE, "rollout")
    every = study.rollouts(task, subset(tables, LEVELS), BASE, read=False)
    gains["rollout, all tokens"] = gain_table(study, every, LEVELS, BASE, "rollout")
    return gains


def _method(study: Study, task: str, method: str, gain: Reals) -> dict[str, Schedule]:
    """Return what a method allocates, at each budget and permuted, refined, and what ships."""
    config = study.config
    own = allocated(study, task, gain, LEVELS, config.mean_bits)
    found = {method: own}
    for budget in config.budgets:
        found[f"{method} at {budget:g}"] = allocated(study, task, gain, LEVELS, budget)
    for number, each in enumerate(permuted(own, config.permutations, config.seed)):
        found[f"{method} permuted {number}"] = each
    priced = priced_for(study, task, gain, LEVELS, config.windows)
    found[f"{method} refined"] = refine(
        own,
        LEVELS,
        priced.fits,
        priced.predicted,
        lambda schedule: study.agreement(task, "tuning", config.tuning, [schedule])[schedule],
        REFINEMENTS,
        config.seed,
    ).schedule
    found[f"{method} shipped"] = verdict(study, task, gain)
    return found


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


def choices_json(chosen: Mapping[str, Chosen]) -> dict[str, object]:
    """Return what is written down before test prompts are drawn: schedules by task and label."""
    return {
        task: {label: list(schedule.precisions) for label, schedule in each.schedules.items()}
        for task, each in chosen.items()
    }
