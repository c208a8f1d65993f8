"""Hold what is to ship to the latency that was asked for, timed as whole sequences.

The allocation adds up windows; what ships runs them in a row.  Where that takes longer than the
budget, the budget is tightened by as much and the choice made anew.

By threshold a whole sequence takes passes that depend on the data.  Timed are fixed steps of the
same lengths, whole sequences too, and each of their passes counts as often as the schedule itself
took passes in that window on the prompts at hand; so a schedule that is less sure of its tokens
and takes more passes is charged for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from engines.build import digest_json
from engines.errors import BudgetError
from engines.manifest import DEFAULT_TASK
from engines.measure import measure_schedules
from engines.noise import Interval
from engines.precision import FULL_PRECISION
from engines.schedule import (
    THRESHOLD,
    SamplerConfig,
    Schedule,
    fixed_steps_like,
    passes_by_window,
)
from tuner.choice import Choice
from tuner.contest import Contest
from tuner.costs import Reals
from tuner.space import Candidate
from tuner.stopwatch import MEASURE
from tuner.timing import Timing, given_timing
from tuner.trials import TrialResult

# How often a schedule that misses its latency is chosen anew.
_ROUNDS = 3

# A schedule within this factor of its latency meets it: a clock's noise over whole sequences.
_SAME_LATENCY = 1.01

# Fewest measured generations of each schedule.
_FEWEST_REPEATS = 9


@dataclass(frozen=True)
class Settled:
    """Choices held to the latency.

    Attributes:
        choices: By task.
        tightened: Factor on the latency budget that they were found under, at most 1.
        over_budget: By what factor the worst of them still misses its latency, or None.
    """

    choices: dict[str, Choice]
    tightened: float = 1.0
    over_budget: float | None = None


def settle(
    contest: Contest,
    candidate: Candidate,
    choices: dict[str, Choice],
    tried: Sequence[TrialResult] = (),
) -> Settled:
    """Return the choices, or others in their place, that meet the latency where any do.

    Args:
        contest: Chooses and has the engines.
        candidate: Whose setting the choices are of.
        choices: Of each task and `default`.
        tried: Trials of the search, whose schedules compete in a new choice too.
    """
    if not contest.bench.config.has_latency:
        return Settled(choices)
    for turn in range(_ROUNDS):
        over = overshoot(contest, candidate, choices)
        if over <= _SAME_LATENCY:
            return Settled(choices, contest.tighten)
        said = f"timed as a whole, a schedule takes {over:.3f} times its budget"
        if turn + 1 == _ROUNDS:
            contest.bench.say(said)
        else:
            contest.bench.say(f"{said}; choosing again")
            contest, choices = _tightened(contest, candidate, over, tried)
    return Settled(choices, contest.tighten, over)


def _tightened(
    contest: Contest, candidate: Candidate, over: float, tried: Sequence[TrialResult]
) -> tuple[Contest, dict[str, Choice]]:
    """Return choices under a latency smaller by a factor, or by as much as any schedule meets."""
    tighter = replace(contest, tighten=contest.tighten / over)
    try:
        return tighter, tighter.choices(candidate, tried)
    except BudgetError as error:
        least = error.nearest.get("latency_ms")
        budget = contest.budget(DEFAULT_TASK).latency_ms
        if least is None or budget is None:
            raise
        # A little more than the least, which is the cheapest schedule's own latency.
        fits = replace(contest, tighten=contest.tighten * max(1.0001 * least / budget, 1.0 / over))
        return fits, fits.choices(candidate, tried)


def overshoot(contest: Contest, candidate: Candidate, choices: Mapping[str, Choice]) -> float:
    """Return by what factor the worst schedule misses its latency, or 1.

    A share of full precision is taken of full precision in the same rounds, and passes are those
    that tuning prompts took.
    """
    bench, engines = contest.bench, contest.shop.engines(candidate)
    wanted: dict[str, tuple[Schedule, SamplerConfig]] = {}
    passes: dict[str, Reals] = {}
    for name, choice in choices.items():
        full = Schedule.uniform(FULL_PRECISION.name, choice.schedule.windows)
        for label, schedule in ((name, choice.schedule), (f"full {name}", full)):
            wanted[label] = (schedule, bench.sampler(name))
            passes[label] = contest.passes_as_run(engines, name, "tuning", schedule)
    timed = time_schedules(contest, candidate, wanted, passes)
    assert timed is not None, "simulated precisions have no latency budget"
    worst = 1.0
    for name in choices:
        bound = bench.config.latency_bound(timed[f"full {name}"].median)
        assert bound is not None, "called where there is no latency budget"
        worst = max(worst, timed[name].median / bound)
    return worst


def time_schedules(
    contest: Contest,
    candidate: Candidate,
    schedules: Mapping[str, tuple[Schedule, SamplerConfig]],
    passes: Mapping[str, Reals],
) -> dict[str, Interval] | None:
    """Return milliseconds a sequence at the declared shape, by label; None if there are none.

    Measured in one run, in turns, and kept in the cache; or summed of those that were given.

    Args:
        contest: Has the engines.
        candidate: Whose.
        schedules: A schedule and its sampler, by label.
        passes: Of each in each window [W], by label; read where they depend on the data.
    """
    bench = contest.bench
    if not bench.timed:
        return None
    if bench.latencies is not None:
        return {
            label: _given(
                given_timing(bench.latencies, candidate, schedule.windows),
                schedule,
                sampler,
                passes[label],
            )
            for label, (schedule, sampler) in schedules.items()
        }
    engines, shape = contest.shop.engines(candidate), bench.export.shape
    keys = {
        label: digest_json(
            [schedule.precisions, sampler.to_json()]
            + ([passes[label].tolist()] if sampler.rule == THRESHOLD else [])
        )
        for label, (schedule, sampler) in schedules.items()
    }
    distinct = {
        keys[label]: (schedule, fixed_steps_like(sampler, schedule.windows))
        for label, (schedule, sampler) in schedules.items()
    }
    counts = {
        keys[label]: passes[label]
        for label, (_, sampler) in schedules.items()
        if sampler.rule == THRESHOLD
    }
    rounds = max(bench.effort.repeats, _FEWEST_REPEATS)
    batch, length = shape.batch[1], shape.prompt[1]
    key = digest_json(
        {
            "engines": dict(engines.fleet.keys),
            "of": sorted(distinct),
            "shape": [batch, length],
            "repeats": rounds,
        }
    )
    kept = bench.cache.get("schedules", key)
    if kept is None:
        with contest.shop.watch(MEASURE):
            found = measure_schedules(
                dict(sorted(distinct.items())),
                engines.fleet.engines,
                batch,
                length,
                engines.folder.model,
                repeats=rounds,
                seed=bench.config.seed,
                passes=counts,
            )
        kept = {name: [each.median, each.low, each.high] for name, each in found.items()}
        bench.cache.put("schedules", key, kept)
    return {label: Interval(*kept[key]) for label, key in keys.items()}


def _given(timing: Timing, schedule: Schedule, sampler: SamplerConfig, passes: Reals) -> Interval:
    """Return the sum of given latencies over the passes of a schedule."""
    counts = passes if sampler.rule == THRESHOLD else passes_by_window(sampler, schedule.windows)
    names = schedule.precisions
    ms = np.array([timing.by_window[name][w] for w, name in enumerate(names)])
    ends = np.array([timing.spread[name] for name in names])
    changes = sum(one != other for one, other in pairwise(names))
    low, middle, high = (
        float(np.dot(counts, ms * share)) + changes * timing.switch_ms
        for share in (ends[:, 0], 1.0, ends[:, 1])
    )
    return Interval(middle, low, high)
