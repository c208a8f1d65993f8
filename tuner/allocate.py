"""Which precision each window runs: the schedule of greatest gain within the budgets.

    maximise    sum of gain[w, p_w]
    subject to  mean of bits over the expected passes          <= mean_bits
                ms of all passes, and of switches              <= latency_ms
                families in use + each precision's own + act.  <= memory_mib

Exact.  Memory depends only on which precisions are used at all, so the largest sets that fit are
listed, and within each the search (`optimum`) is over bits and ms alone.  What it returns is
compared with the *reference*, the uniform schedule of most bits within all budgets: with no
evidence for anything else, that is the answer.

Pure: no clock, no randomness, no files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from engines.errors import BudgetError
from tuner.costs import Budget, Costs, Point, Reals
from tuner.problem import Prices, Problem

__all__ = ["FRONT", "Allocation", "Budget", "Costs", "Point", "Prices", "allocate", "in_words"]

# Steps of each budgeted cost to which a front is thinned.
FRONT = 200


@dataclass(frozen=True, slots=True)
class Allocation:
    """The answer.

    Attributes:
        point: The schedule of greatest gain, or the reference where that is as good.
        reason: Why this one, a sentence.
        runner_up: The schedule of greatest gain besides it; None where it is the only one.
        prices: Of one more mean bit, ms and MiB.
        front: Within the memory budget, by ascending bits.
        front_complete: Whether the front is all there.
    """

    point: Point
    reason: str
    runner_up: Point | None
    prices: Prices
    front: tuple[Point, ...]
    front_complete: bool

    @property
    def schedule(self) -> tuple[str, ...]:
        """Name of the precision of each window [W]."""
        return self.point.schedule

    @property
    def indices(self) -> tuple[int, ...]:
        """Index of the precision of each window [W]."""
        return self.point.indices

    @property
    def mean_bits(self) -> float:
        """Of an activation, over the expected passes."""
        return self.point.mean_bits

    @property
    def latency_ms(self) -> float | None:
        """Of a sequence."""
        return self.point.latency_ms

    @property
    def memory_mib(self) -> float | None:
        """Of weights and activations."""
        return self.point.memory_mib

    @property
    def gain(self) -> float:
        """Over the base, in the unit of the gains."""
        return self.point.gain

    @property
    def uniform(self) -> bool:
        """Whether every window runs the same precision."""
        return self.point.uniform

    def to_json(self) -> dict[str, object]:
        """Return the allocation as `cadenza allocate --json` prints it."""
        return {
            "schedule": list(self.schedule),
            **{key: value for key, value in self.point.to_json().items() if key != "schedule"},
            "uniform": self.uniform,
            "reason": self.reason,
            "runner_up": None if self.runner_up is None else self.runner_up.to_json(),
            "front": [point.to_json() for point in self.front],
            "front_complete": self.front_complete,
            "prices": {"bit": self.prices.bit, "ms": self.prices.ms, "mib": self.prices.mib},
        }


def allocate(gain: Reals, costs: Costs, budget: Budget, front_limit: int = FRONT) -> Allocation:
    """Return the schedule of greatest total gain within every budget.

    Args:
        gain: What each precision buys in each window over the base [W, P], finite;
            in nats for K x I, else in the proxy's unit.
        costs: Of the windows at each precision; all its precisions are candidates, but one of
            unknown latency (or memory) is none under a budget for it.
        budget: Upper bounds.
        front_limit: Points of the front on each budgeted axis beyond which it is thinned; 0 for
            no front, which saves most of the time.

    Raises:
        BudgetError: No schedule fits; `nearest` and the message say the smallest budgets that do.
        ValueError: gain has the wrong shape or is not finite, or front_limit is negative.
    """
    gain = np.array(gain, dtype=np.float64)
    shape = (len(costs.passes), len(costs.names))
    if gain.shape != shape:
        raise ValueError(f"gain must have the shape [W, P] = {shape}, got {gain.shape}")
    if not np.abs(gain).max() < 1e300:
        where = np.argwhere(~(np.abs(gain) < 1e300))[0].tolist()
        raise ValueError(f"gain must be finite, got {gain[tuple(where)]} at {where}")
    if front_limit < 0:
        raise ValueError(f"front_limit >= 0 must hold, got {front_limit}")
    problem = Problem(gain, costs, budget)
    uniform = problem.uniform()
    top = max(uniform, key=lambda point: point.gain, default=None)
    top, short_of = problem.best(budget, top)
    if top is None:
        raise _infeasible(problem)
    reference = uniform[0] if uniform else problem.steadiest()
    chosen, reason = _choose(top, reference, uniform, problem)
    if short_of > problem.tie:
        reason += f"; the search was cut off, and another may gain up to {short_of:.3g} more"
    others = [point for point in (top, *uniform) if point.indices != chosen.indices]
    second = max(others, key=lambda point: point.gain, default=None)
    second, second_short = problem.best(budget, second, avoid=chosen, hints=[top])
    prices, prices_short = problem.prices(top)
    for what, short in (("runner-up", second_short), ("prices", prices_short)):
        if short > problem.tie:
            reason += f"; the search for the {what} was cut off, up to {short:.3g} short"
    front, complete = problem.front(front_limit, [chosen, *uniform])
    return Allocation(chosen, reason, second, prices, front, complete)


def _choose(
    top: Point, reference: Point, uniform: list[Point], problem: Problem
) -> tuple[Point, str]:
    """Return what is answered, and why: ties go to the reference, then to another uniform one."""
    name = reference.schedule[0] if reference.uniform else "schedule of fewest switches"
    bounded = problem.budget != Budget()
    within = " within the budgets" if bounded else ", whatever it costs,"
    good = [p for p in (reference, *uniform) if p.gain >= top.gain - problem.tie]
    if not good:
        if not uniform:
            return top, "mixed: no uniform schedule is within the budgets"
        of = "within the budgets" if bounded else "of all"
        return top, (
            f"mixed: gains {top.gain - reference.gain:.4g} over uniform {name}, the uniform "
            f"schedule of most bits {of}"
        )
    chosen = good[0]
    if not chosen.uniform:
        return chosen, (
            "mixed: no uniform schedule is within the budgets; none that is gains more than this "
            "one, which has the fewest switches"
        )
    own = chosen.schedule[0]
    if len(problem.costs.names) == 1:
        return chosen, f"uniform {own}: it is the only candidate"
    if chosen is not reference:
        return chosen, (
            f"uniform {own}: no schedule{within} gains more, and uniform {name}, which "
            f"has as many bits or more, gains {top.gain - reference.gain:.4g} less"
        )
    if not problem.gain.any():
        return chosen, f"uniform {own}: all gains are zero, so nothing speaks for another schedule"
    return chosen, f"uniform {own}: no schedule{within} gains more"


def _infeasible(problem: Problem) -> BudgetError:
    """Return the error of a problem without a schedule, with the budgets that would do."""
    nearest = problem.nearest()
    asked = in_words({name: getattr(problem.budget, name) for name in nearest}, "and")
    names = {name: value for name, value in nearest.items() if value is not None}
    if problem.budget.latency_ms is not None and np.isnan(problem.ms).all():
        message = (
            f"no schedule is within {asked}, for the latency of no candidate is known (simulated "
            f"precisions have none); leave out the latency, or measure it"
        )
    elif len(names) == len(nearest) == 1:
        message = (
            f"no schedule is within {asked}; the smallest that fits is {in_words(names)}; "
            f"raise it, or allow a cheaper precision"
        )
    elif names:
        message = (
            f"no schedule is within {asked}; with the other budgets as given, the smallest that "
            f"fits is {in_words(names)}; raise it, or allow a cheaper precision"
        )
    else:
        alone = {name: problem.least(name, Budget()) for name in nearest}
        known = {name: value for name, value in alone.items() if value is not None}
        message = (
            f"no schedule is within {asked}, nor within them when only one is raised; alone, the "
            f"smallest that fit are {in_words(known, 'and')}; raise several, or allow a cheaper "
            f"precision"
        )
    return BudgetError(message, nearest)


_UNITS = {"mean_bits": "mean bits", "latency_ms": "ms a sequence", "memory_mib": "MiB"}


def in_words(budgets: Mapping[str, float], word: str = "or") -> str:
    """Return budgets in words, rounded up to six digits, so that what is written fits too."""
    parts = []
    for name, value in budgets.items():
        step = 10.0 ** max(math.floor(math.log10(value)) - 5, -300) if value > 0 else 1.0
        up = max(math.ceil(value / step - 1e-6) * step, value * (1 - 1e-6))
        parts.append(f"{up:.6g} {_UNITS[name]}")
    return f" {word} ".join(parts)
