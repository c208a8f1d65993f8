"""Latency of engines at a named shape: whole generations, interleaved, medians with intervals.

In each round every candidate answers the same canned prompts once; the order rotates from round to
round, so that a machine that warms up or throttles slows all of them alike.  What is timed is a
pass as a user waits for it: engine and sampler, for the whole batch.  Intervals resample rounds,
not passes, because passes of one generation are not independent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.backend import Backend
from engines.model import ModelInfo
from engines.noise import Interval, bootstrap_median
from engines.sampler import Pass, Request, generate
from engines.schedule import THRESHOLD, SamplerConfig, Schedule, window_of

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Latency:
    """Of one candidate at the shape of its `Latencies`.

    Attributes:
        precision: Name of the candidate.
        latency_ms: Median wall time of a pass over all windows, milliseconds for the whole batch.
        low: Lower end of its 95 % interval, milliseconds.
        high: Upper end.
        by_window: Median wall time of a pass in each window [W]; the median over all where a
            window has no pass.
        n: Passes timed.
        rounds: Median wall time of a pass in each round [R], for paired comparison.
    """

    precision: str
    latency_ms: float
    low: float
    high: float
    by_window: tuple[float, ...]
    n: int
    rounds: tuple[float, ...]


@dataclass(frozen=True)
class Lane:
    """Sequences that one set of engines runs in turns with others.

    Attributes:
        label: Its name.
        engines: By the name of their precision.
        sequences: Schedules, each with its sampler of fixed steps.
    """

    label: str
    engines: Mapping[str, Backend]
    sequences: tuple[tuple[Schedule, SamplerConfig], ...]


@dataclass(frozen=True)
class Compared:
    """Milliseconds of all sequences of each lane, by round.

    Attributes:
        rounds: By label [R].
        seed: Of the bootstrap.
    """

    rounds: Mapping[str, Times]
    seed: int

    def of(self, label: str) -> Interval:
        """Return the milliseconds of a lane's sequences together."""
        return bootstrap_median(self.rounds[label][:, None], np.random.default_rng(self.seed))

    def ratio(self, one: str, other: str) -> Interval:
        """Return a lane's time over another's, paired by round."""
        paired = self.rounds[one] / self.rounds[other]
        return bootstrap_median(paired[:, None], np.random.default_rng(self.seed))


@dataclass(frozen=True, slots=True)
class Latencies:
    """What `measure` found, and at which shape.

    Attributes:
        batch: Rows of a pass.
        prompt_length: Tokens of each prompt.
        rows: One of each candidate, in the order given.
    """

    batch: int
    prompt_length: int
    rows: tuple[Latency, ...]

    def of(self, precision: str) -> Latency:
        """Return the row of a candidate; KeyError where it was not measured."""
        return {row.precision: row for row in self.rows}[precision]


def measure(
    backends: Mapping[str, Backend],
    sampler: SamplerConfig,
    windows: int,
    batch: int,
    prompt_length: int,
    model: ModelInfo,
    repeats: int = 20,
    clock: Callable[[], float] = time.perf_counter,
    seed: int = 0,
    warmup: int = 1,
) -> Latencies:
    """Return the latency of each backend, measured in turns.

    Args:
        backends: The candidates by name.
        sampler: How the answers are denoised, in fixed steps: the passes of a generation.
        windows: W, for `by_window`.
        batch: Rows of a pass.
        prompt_length: Tokens of each canned prompt.
        model: Special ids and vocabulary.
        repeats: Rounds; a multiple of the candidates gives each every place in the order.
        clock: Seconds.
        seed: Of the canned prompts and of the bootstrap.
        warmup: Generations of each candidate before the first round.

    Raises:
        BackendError: An engine failed.
        ValueError: batch, repeats or windows is below 1, or the steps depend on the data.
    """
    _check(batch=batch, repeats=repeats, windows=windows)
    where = _windows_of_passes(sampler, windows)
    rng = np.random.default_rng(seed)
    names = list(backends)
    runs = [
        _requests(sampler, Schedule.uniform(name, windows), batch, prompt_length, model, seed)
        for name in names
    ]
    times = _in_turns([(run, backends) for run in runs], model, repeats, warmup, clock)
    rows = []
    for name, sample in zip(names, times, strict=True):
        found = bootstrap_median(sample, rng)
        parts = [sample[:, where == window] for window in range(windows)]
        rows.append(
            Latency(
                precision=name,
                latency_ms=found.median,
                low=found.low,
                high=found.high,
                by_window=tuple(float(np.median(p)) if p.size else found.median for p in parts),
                n=sample.size,
                rounds=tuple(np.median(sample, axis=1).tolist()),
            )
        )
    return Latencies(batch, prompt_length, tuple(rows))


def measure_schedules(
    schedules: Mapping[str, tuple[Schedule, SamplerConfig]],
    backends: Mapping[str, Backend],
    batch: int,
    prompt_length: int,
    model: ModelInfo,
    repeats: int = 20,
    clock: Callable[[], float] = time.perf_counter,
    seed: int = 0,
    warmup: int = 1,
    passes: Mapping[str, NDArray[np.float64]] | None = None,
) -> dict[str, Interval]:
    """Return the wall time of a whole sequence of each schedule, in ms, measured in turns.

    Args:
        schedules: A schedule and the sampler of fixed steps that follows it, by a label.
        backends: The engine of each precision that a schedule uses.
        batch: Rows of a pass.
        prompt_length: Tokens of each canned prompt.
        model: Special ids and vocabulary.
        repeats: Rounds.
        clock: Seconds.
        seed: Of the canned prompts and of the bootstrap.
        warmup: Generations of each schedule before the first round.
        passes: Expected in each window [W], by label, where they are not those of the fixed steps
            that run: each pass then counts as often as there are expected ones for one run in its
            window.  A change of engine counts with the pass that it precedes.

    Raises:
        BackendError: An engine failed.
        ValueError: batch or repeats is below 1, the steps depend on the data, or passes are
            expected in a window in which none runs.
    """
    _check(batch=batch, repeats=repeats)
    counts = [
        _weights(schedule, sampler, (passes or {}).get(label))
        for label, (schedule, sampler) in schedules.items()
    ]
    rng = np.random.default_rng(seed)
    runs = [
        _requests(sampler, schedule, batch, prompt_length, model, seed)
        for schedule, sampler in schedules.values()
    ]
    times = _in_turns([(run, backends) for run in runs], model, repeats, warmup, clock)
    return {
        label: bootstrap_median((sample * count).sum(axis=1, keepdims=True), rng)
        for label, sample, count in zip(schedules, times, counts, strict=True)
    }


def measure_switch(
    backends: Mapping[str, Backend],
    sampler: SamplerConfig,
    windows: int,
    batch: int,
    prompt_length: int,
    model: ModelInfo,
    repeats: int = 20,
    clock: Callable[[], float] = time.perf_counter,
    seed: int = 0,
    warmup: int = 1,
) -> float:
    """Return what changing the engine at a window's edge costs, in ms a switch.

    Generations that alternate between two engines are compared, within each round, with the same
    windows taken from generations that do not.  0.0 when the 95 % interval reaches zero, when
    there is one engine only, or one window.  Of more than two, the first and the last are used.

    Args and errors as `measure`.
    """
    _check(batch=batch, repeats=repeats, windows=windows)
    if len(backends) < 2 or windows < 2:
        return 0.0
    rng = np.random.default_rng(seed)
    one, *_, other = backends
    taking_turns = tuple(one if window % 2 == 0 else other for window in range(windows))
    schedules = (
        Schedule.uniform(one, windows),
        Schedule.uniform(other, windows),
        Schedule(taking_turns),
    )
    prompts = [_requests(sampler, s, batch, prompt_length, model, seed) for s in schedules]
    first, second, mixed = _in_turns(
        [(run, backends) for run in prompts], model, repeats, warmup, clock
    )
    where = _windows_of_passes(sampler, windows)
    switches = int((np.diff(where % 2) != 0).sum())
    if switches == 0:
        return 0.0
    expected = np.where(where % 2 == 0, first, second).sum(axis=1)
    cost = bootstrap_median((mixed.sum(axis=1) - expected)[:, None] / switches, rng)
    return cost.median if cost.low > 0.0 else 0.0


def compare_schedules(
    lanes: Sequence[Lane],
    batch: int,
    prompt_length: int,
    model: ModelInfo,
    repeats: int = 20,
    clock: Callable[[], float] = time.perf_counter,
    seed: int = 0,
    warmup: int = 1,
) -> Compared:
    """Return the wall time of whole sequences of several sets of engines, measured in turns.

    Unlike in `measure_schedules` each lane has engines of its own, under the same names.

    Args and errors as `measure_schedules`.
    """
    _check(batch=batch, repeats=repeats)
    runs = [
        (_requests(sampler, schedule, batch, prompt_length, model, seed), lane.engines)
        for lane in lanes
        for schedule, sampler in lane.sequences
    ]
    times = iter(_in_turns(runs, model, repeats, warmup, clock))
    return Compared(
        {
            lane.label: np.sum([next(times).sum(axis=1) for _ in lane.sequences], axis=0)
            for lane in lanes
        },
        seed,
    )


def ratio(one: Latency, other: Latency, seed: int = 0) -> Interval:
    """Return the latency of `one` over `other`, paired by round; a tie where 1 is inside.

    Raises:
        ValueError: They are of different measurements.
    """
    if len(one.rounds) != len(other.rounds):
        raise ValueError(
            f"only latencies of one measurement can be paired, got {len(one.rounds)} and "
            f"{len(other.rounds)} rounds"
        )
    paired = np.array(one.rounds) / np.array(other.rounds)
    return bootstrap_median(paired[:, None], np.random.default_rng(seed))


def _in_turns(
    runs: Sequence[tuple[Sequence[Request], Mapping[str, Backend]]],
    model: ModelInfo,
    repeats: int,
    warmup: int,
    clock: Callable[[], float],
) -> list[Times]:
    """Return the milliseconds of each pass of each run [R, T], its engines beside it."""
    for run, backends in runs:
        for _ in range(warmup):
            generate(run, backends, model)
    times = [np.zeros((repeats, run[0].sampler.steps)) for run, _ in runs]
    orders = balanced_orders(len(runs))
    for turn in range(repeats):
        for index in orders[turn % len(orders)]:
            run, backends = runs[index]
            times[index][turn] = _pass_times(run, backends, model, clock)
    return times


def balanced_orders(count: int) -> list[list[int]]:
    """Return the rounds of a Williams design: no place and no predecessor favours anyone.

    Over all of them each of `count` has each place equally often, and follows each other one
    equally often.  Source: E. J. Williams, 1949.
    """
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    orders = [[(each + shift) % count for each in zigzag] for shift in range(count)]
    if count % 2:
        orders += [order[::-1] for order in orders]
    return orders


def _pass_times(
    run: Sequence[Request],
    backends: Mapping[str, Backend],
    model: ModelInfo,
    clock: Callable[[], float],
) -> Times:
    """Return the milliseconds of each pass [T], which add up to the whole generation.

    A pass lasts until the next one is ready to start; the first holds the setting up too.
    """
    starts: list[float] = []

    def started(state: Pass) -> None:
        starts.append(clock())

    began = clock()
    generate(run, backends, model, clock=clock, on_pass=started)
    return np.diff([began, *starts[1:], clock()]) * 1000.0


def _weights(
    schedule: Schedule, sampler: SamplerConfig, passes: NDArray[np.float64] | None
) -> NDArray[np.float64]:
    """Return how often each pass that runs counts [T]."""
    where = _windows_of_passes(sampler, schedule.windows)
    if passes is None:
        return np.ones(len(where))
    there = np.bincount(where, minlength=schedule.windows)
    if passes.shape != there.shape or ((passes > 0) & (there == 0)).any():
        raise ValueError(f"passes {passes} are expected in windows with {there} passes")
    weights: NDArray[np.float64] = passes[where] / there[where]
    return weights


def _windows_of_passes(sampler: SamplerConfig, windows: int) -> NDArray[np.int64]:
    """Return the window of each pass [T]."""
    if sampler.rule == THRESHOLD:
        raise ValueError("passes by threshold depend on the data; time fixed_steps_like it")
    before = np.cumsum((0, *sampler.commits[:-1]))
    return window_of(before, sampler.gen_length, windows)


def _requests(
    sampler: SamplerConfig,
    schedule: Schedule,
    batch: int,
    prompt_length: int,
    model: ModelInfo,
    seed: int,
) -> list[Request]:
    """Return a batch of canned prompts: random ids of the vocabulary, never the mask token."""
    ids = np.random.default_rng(seed).integers(0, model.vocab - 1, (batch, prompt_length))
    ids += ids >= model.mask_id
    return [
        Request(prompt=tuple(row), sampler=sampler, schedule=schedule, task="measure")
        for row in ids.tolist()
    ]


def _check(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} >= 1 must hold, got {value}")
