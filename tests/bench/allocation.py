"""Figures of the exact allocation: its time, beside an integer program of the same instance.

The instances are `tests.tuner.enumeration.realistic`: equal passes, one latency a precision, gains
that fall off in bits and windows that are orders of magnitude apart, under budgets of bits,
latency and memory; those named `_switch` have a cost of switching too, which couples windows.
The program is solved by HiGHS as scipy brings it; building its matrices is not counted.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from tests.bench.figure import Figure, median_interval, seconds_of
from tests.tuner.enumeration import realistic
from tests.tuner.program import Program
from tuner.allocate import FRONT, allocate
from tuner.costs import Budget, Costs

SMALL_PROBLEMS = 15
ALL = 1_000_000
# Seeds of the large instances, and how often each is timed.
SEEDS = 12
REPEATS = 3
FRONT_SEEDS = 4
FRONT_REPEATS = 1
POINTS = 20
# Of the mean pass: what a switch costs in the instances that have one.
SWITCH_SHARE = 0.05


def allocate_16x4() -> Figure:
    """Return the ms of one allocation with the complete front: 16 windows, 4 precisions."""
    costs = Costs(
        names=("int4", "int8", "fp16", "fp32"),
        bits=np.array([4.0, 8.0, 16.0, 32.0]),
        passes=np.full(16, 2.0),
        latency_ms=np.array([1.0, 1.4, 2.1, 3.9]),
    )
    budget = Budget(mean_bits=12.0, latency_ms=60.0)
    took = []
    for seed in range(-1, SMALL_PROBLEMS):
        rng = np.random.default_rng(seed + 1)
        steps = rng.exponential(size=(16, 3)) * rng.exponential(size=(16, 1))
        gain = np.concatenate((np.zeros((16, 1)), steps.cumsum(axis=1)), axis=1)
        start = time.perf_counter()
        answer = allocate(gain, costs, budget, front_limit=ALL)
        took.append(1000.0 * (time.perf_counter() - start))
        if not answer.front_complete:
            raise RuntimeError(f"the front of problem {seed} is not complete")
    took = took[1:]  # the first warmed up
    return Figure(
        name="allocate_16x4",
        value=float(np.median(took)),
        unit="ms",
        against="at most 50 for the complete front, equal passes, one latency a precision",
        reference=50.0,
        spread=median_interval(took),
        n=len(took),
    )


def optimum_64x6(name: str, switch_share: float) -> Figure:
    """Return the ms of an optimum with runner-up and prices, against one integer program."""
    instances = [realistic(64, 6, seed, switch_share) for seed in range(SEEDS)]
    programs = [Program.of(*instance) for instance in instances]
    runs = {
        "ours": lambda n: allocate(*instances[n % SEEDS], front_limit=0),
        "program": lambda n: programs[n % SEEDS].solve(),
    }
    with _stdout_to_stderr():
        seconds = seconds_of(runs, SEEDS * REPEATS)
    return _figure(name, "one solve of the integer program", seconds, SEEDS)


def front_64x6(name: str, switch_share: float) -> Figure:
    """Return the ms of the thinned front, against the integer program for some of its points."""
    instances = [realistic(64, 6, seed, switch_share) for seed in range(FRONT_SEEDS)]
    programs = [list(_points(*instance)) for instance in instances]

    def solve_all(number: int) -> None:
        for program in programs[number % FRONT_SEEDS]:
            program.solve()

    runs = {
        "ours": lambda n: allocate(*instances[n % FRONT_SEEDS], front_limit=FRONT),
        "program": solve_all,
    }
    with _stdout_to_stderr():
        seconds = seconds_of(runs, FRONT_SEEDS * FRONT_REPEATS)
    against = f"the integer program for {POINTS} points of it"
    return _figure(name, against, seconds, FRONT_SEEDS)


def _points(gain: np.ndarray, costs: Costs, budget: Budget) -> Iterator[Program]:
    """Yield programs for points of the front: equal steps of bits, then of latency."""
    memory = Budget(memory_mib=budget.memory_mib)
    shares = (np.arange(POINTS // 2) + 0.5) / (POINTS // 2)
    low, high = costs.bits.min(), costs.bits.max()
    for share in shares.tolist():
        bound = float(low + share * (high - low))
        yield Program.of(gain, costs, replace(memory, mean_bits=bound))
    spent = costs.window_ms.sum(axis=0)
    for share in shares.tolist():
        bound = float(spent.min() + share * (spent.max() - spent.min()))
        yield Program.of(gain, costs, replace(memory, latency_ms=bound))


def _figure(name: str, against: str, seconds: dict[str, np.ndarray], seeds: int) -> Figure:
    """Return the figure of rounds that went through the instances in turn."""
    ours, program = 1000.0 * seconds["ours"], 1000.0 * seconds["program"]
    each = np.median(ours.reshape(-1, seeds), axis=0) / np.median(
        program.reshape(-1, seeds), axis=0
    )
    return Figure(
        name=name,
        value=float(np.median(ours)),
        unit="ms",
        against=(
            f"{against}, 64 windows, 6 precisions, equal passes, one latency a precision, "
            f"{seeds} instances (ratio of the worst instance {each.max():.2f}, of the best "
            f"{each.min():.2f})"
        ),
        reference=float(np.median(program)),
        spread=median_interval(ours),
        n=len(ours),
    )


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send what a solver prints to stdout elsewhere, for there a figure is a line."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
