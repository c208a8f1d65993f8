"""What is noise: ties stay ties on a clock that drifts, and a drift is told when there is one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from engines.backend import FakeBackend, Floats, Ids, Mask
from engines.measure import Lane, balanced_orders, compare_schedules, measure, ratio
from engines.model import ModelInfo
from engines.noise import Interval, bootstrap_median, drift, told_apart
from engines.precision import precision_from_name
from engines.schedule import SamplerConfig, Schedule

MODEL = ModelInfo(
    name="fake", architecture="llada", vocab=9, mask_id=4, eos_id=8, max_length=99, digest="0" * 64
)
SAMPLER = SamplerConfig(steps=4, gen_length=8, block_length=8)
ROUNDS = 24


class Clock:
    """Seconds that pass in engines alone, slower by a factor of the time that went by."""

    def __init__(
        self, slower: Callable[[float], float], noise: float = 0.0, seed: int = 0
    ) -> None:
        self.now, self.slower, self.noise = 0.0, slower, noise
        self.rng = np.random.default_rng(seed)
        self.last = ""

    def __call__(self) -> float:
        return self.now

    def engine(self, name: str, latency_ms: float) -> FakeBackend:
        def sleep(seconds: float) -> None:
            shaken = 1.0 + self.noise * float(self.rng.standard_normal())
            self.now += seconds * self.slower(self.now) * max(0.1, shaken)

        def logits(ids: Ids, mask: Mask, positions: Ids) -> Floats:
            return np.zeros((*positions.shape, MODEL.vocab), np.float32)

        return FakeBackend(precision_from_name(name), logits, latency_ms, sleep)


def drifting(share: float, total_s: float) -> Callable[[float], float]:
    """Return a clock's factor that grows from 1 by a share over a time."""
    return lambda now: 1.0 + share * min(1.0, now / total_s)


def compared(clock: Clock, one_ms: float, other_ms: float, rounds: int = ROUNDS) -> Interval:
    schedule = ((Schedule.uniform("int8", 2), SAMPLER),)
    lanes = [
        Lane(label, {"int8": clock.engine("int8", ms)}, schedule)
        for label, ms in (("one", one_ms), ("other", other_ms))
    ]
    found = compare_schedules(lanes, 2, 3, MODEL, repeats=rounds, clock=clock)
    assert found.of("one").median > 0.0
    return found.ratio("one", "other")


@pytest.mark.parametrize("seed", range(6))
def test_on_a_clock_that_drifts_by_15_percent_two_equal_candidates_end_as_a_tie(seed: int) -> None:
    clock = Clock(drifting(0.15, ROUNDS * 2 * 4 * 0.005), 0.01, seed)
    found = compared(clock, 5.0, 5.0)
    assert not told_apart(found)
    assert found.low <= 1.0 <= found.high


@pytest.mark.parametrize("seed", range(6))
def test_on_the_same_clock_one_that_is_5_percent_faster_is_told_apart(seed: int) -> None:
    clock = Clock(drifting(0.15, ROUNDS * 2 * 4 * 0.005), 0.01, seed)
    found = compared(clock, 4.75, 5.0)
    assert told_apart(found)
    assert found.median == pytest.approx(0.95, abs=0.01)


def test_the_drift_is_found_and_reported() -> None:
    clock = Clock(drifting(0.15, ROUNDS * 4 * 0.005), 0.005)
    lanes = {"int8": clock.engine("int8", 5.0)}
    row = measure(lanes, SAMPLER, 2, 2, 3, MODEL, repeats=ROUNDS, clock=clock).of("int8")
    found = drift(row.rounds)
    assert found.found
    assert 1.05 < found.ratio < 1.15
    assert found.low > 1.02
    assert drift(row.rounds[::-1]).high < 0.98


def test_a_steady_noisy_clock_does_not_drift() -> None:
    false = 0
    for seed in range(20):
        clock = Clock(lambda now: 1.0, 0.02, seed)
        lanes = {"int8": clock.engine("int8", 5.0)}
        row = measure(lanes, SAMPLER, 2, 2, 3, MODEL, repeats=ROUNDS, clock=clock).of("int8")
        false += drift(row.rounds, seed).found
    assert false <= 1


@pytest.mark.parametrize("rounds", [[], [1.0], [1.0] * 5])
def test_too_few_rounds_tell_of_no_drift_in_numbers_that_json_holds(rounds: list[float]) -> None:
    found = drift(rounds)
    assert not found.found
    assert all(map(math.isfinite, (found.ratio, found.low, found.high)))


@pytest.mark.parametrize("count", range(1, 9))
def test_over_all_orders_each_has_each_place_and_each_predecessor_equally_often(
    count: int,
) -> None:
    orders = balanced_orders(count)
    assert all(sorted(order) == list(range(count)) for order in orders)
    for place in range(count):
        held = np.bincount([order[place] for order in orders], minlength=count)
        assert len(set(held.tolist())) == 1
    follows = np.zeros((count, count), int)
    for order in orders:
        for before, after in itertools.pairwise(order):
            follows[before, after] += 1
    assert len(set(follows[~np.eye(count, dtype=bool)].tolist())) <= 1


def test_a_lane_that_slows_its_successor_harms_every_other_one_alike() -> None:
    clock = Clock(lambda now: 1.0)
    after = {"guilty": False}

    def engine(name: str, guilty: bool) -> FakeBackend:
        made = clock.engine(name, 5.0)
        plain = made.sleep

        def sleep(seconds: float) -> None:
            plain(seconds * (1.3 if after["guilty"] and not guilty else 1.0))
            after["guilty"] = guilty

        made.sleep = sleep
        return made

    lanes = {name: engine(name, name == "w4a4") for name in ("fp32", "int8", "w4a4", "w8a8")}
    found = measure(lanes, SAMPLER, 2, 2, 3, MODEL, repeats=ROUNDS, clock=clock)
    means = [np.mean(found.of(name).rounds) for name in ("fp32", "int8", "w8a8")]
    assert means[0] == pytest.approx(means[1], rel=1e-6)
    assert means[0] == pytest.approx(means[2], rel=1e-6)
    assert not told_apart(ratio(found.of("fp32"), found.of("int8")))


def test_a_median_lies_within_its_interval() -> None:
    sample = np.random.default_rng(3).normal(5.0, 1.0, (30, 1))
    found = bootstrap_median(sample, np.random.default_rng(0))
    assert found.low <= found.median <= found.high
