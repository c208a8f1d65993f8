"""Laws of throughput and latency, on fake engines and a fake clock; nothing here waits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from engines.backend import Backend, FakeBackend, Ids, Mask, Served
from engines.measure import balanced_orders
from engines.schedule import SamplerConfig, Schedule
from engines.throughput import (
    FEWEST_ROUNDS,
    SHARES,
    canned_prompts,
    measure_throughput,
    quantile,
    rounds_in,
    samples_needed,
)
from tests.engines.test_measure import MODEL, SAMPLER, Clock

LOW, HIGH = Schedule.uniform("int8", 6), Schedule.uniform("fp32", 6)
MIXED = Schedule(("fp32", "int8", "int8", "int8", "int8", "fp32"))
EVERY = {"shipped": MIXED, "fp32": HIGH, "int8": LOW}


def engines(clock: Clock, fp32: float = 5.0, int8: float = 2.0) -> dict[str, Backend]:
    return {"fp32": clock.engine("fp32", fp32), "int8": clock.engine("int8", int8)}


def prompts(batch: int = 3, length: int = 7) -> list[list[tuple[int, ...]]]:
    return [list(canned_prompts(batch, length, MODEL))]


def test_steady_engines_are_measured_exactly() -> None:
    clock = Clock()
    found = measure_throughput(
        EVERY, engines(clock), SAMPLER, prompts(), MODEL, rounds=400, clock=clock
    )
    for label, ms in (("shipped", 4 * 5.0 + 8 * 2.0), ("fp32", 60.0), ("int8", 24.0)):
        lane, speed = found.lanes[label], 3 * 24 / ms * 1000.0
        per_s = lane.tokens_per_s
        assert (per_s.median, per_s.low, per_s.high) == pytest.approx((speed,) * 3)
        for each in lane.latency_ms.values():
            assert (each.value, each.low, each.high) == pytest.approx((ms,) * 3)
            assert each.n == 400
        assert lane.passes == 12.0
    assert found.lanes["shipped"].bits == pytest.approx((4 * 32 + 8 * 8) / 12)
    assert found.ratio("shipped", "int8").median == pytest.approx(24.0 / 36.0)
    assert found.fastest(["shipped", "fp32"]) == "shipped"
    assert (found.batch, found.tokens, found.drift.found) == (3, 72, False)


@pytest.mark.parametrize(
    "speed",
    [
        lambda now: 1.0 + now * 2.0,  # throttling: ever slower
        lambda now: 3.0 / (1.0 + now),  # warming up: ever faster
    ],
)
def test_equal_schedules_end_as_a_tie_while_the_clock_drifts(
    speed: Callable[[float], float],
) -> None:
    clock = Clock(speed)
    equal = {"shipped": MIXED, "fp32": HIGH, "int8": LOW}
    found = measure_throughput(
        equal, engines(clock, 1.0, 1.0), SAMPLER, prompts(), MODEL, rounds=12, clock=clock
    )
    for other in ("fp32", "int8"):
        against = found.ratio("shipped", other)
        assert against.low <= 1.0 <= against.high
    assert found.drift.found


def test_a_faster_schedule_is_told_apart_while_the_clock_drifts() -> None:
    clock = Clock(lambda now: 1.0 + now * 2.0)
    found = measure_throughput(
        EVERY, engines(clock, 1.0, 0.8), SAMPLER, prompts(), MODEL, rounds=12, clock=clock
    )
    assert found.ratio("int8", "fp32").low > 1.0


def test_rounds_walk_through_the_prompts_and_every_schedule_answers_the_same_ones() -> None:
    clock = Clock()
    batches = [list(canned_prompts(2, 5, MODEL, seed)) for seed in range(3)]
    two = {"fp32": HIGH, "int8": LOW}
    measure_throughput(
        two, engines(clock), SAMPLER, batches, MODEL, rounds=6, warmup=1, clock=clock
    )
    asked = [tuple(map(tuple, ids[:, :5].tolist())) for ids in clock.prompts[::12]]
    wanted = [tuple(batch) for batch in batches]
    assert asked[:2] == [wanted[0]] * 2  # the warm-up
    assert asked[2:] == [wanted[turn % 3] for turn in range(6) for _ in two]


def test_every_schedule_takes_every_place_in_the_order() -> None:
    order: list[str] = []

    class Named(FakeBackend):
        def serve(self, ids: Ids, mask: Mask, positions: Ids, progress: np.ndarray) -> Served:
            if progress[0] == 0:
                order.append(self.precision.name)
            return super().serve(ids, mask, positions, progress)

    clock = Clock()
    named: dict[str, Backend] = {}
    for name in ("fp32", "int8", "w4a4"):
        plain = clock.engine(name, 1.0)
        named[name] = Named(plain.precision, plain.logits_of, 1.0, clock.sleep)
    uniform = {name: Schedule.uniform(name, 6) for name in named}
    found = measure_throughput(
        uniform, named, SAMPLER, prompts(), MODEL, seconds=0.0, warmup=1, clock=clock
    )
    rounds = [order[at : at + 3] for at in range(3, len(order), 3)]
    assert len(rounds) == len(found.lanes["fp32"].rounds) == 12  # whole designs of six
    for place in range(3):
        assert [sum(each[place] == name for each in rounds) for name in named] == [4, 4, 4]


def test_by_threshold_the_passes_are_those_of_the_prompts() -> None:
    clock = Clock()
    sampler = SamplerConfig(gen_length=24, rule="threshold", threshold=0.2)
    found = measure_throughput(
        {"int8": LOW}, engines(clock), sampler, prompts(), MODEL, rounds=2, clock=clock
    )
    lane = found.lanes["int8"]  # four equal logits: each token has a probability of a quarter
    assert lane.passes == 1.0
    assert lane.rounds == pytest.approx((2.0, 2.0))
    never = replace(sampler, threshold=0.9)
    found = measure_throughput(
        {"int8": LOW}, engines(clock), never, prompts(), MODEL, rounds=2, clock=clock
    )
    assert found.lanes["int8"].passes == 24.0


def test_a_quantile_has_a_value_from_the_fewest_samples_that_hold_it() -> None:
    for share in (*SHARES.values(), 0.01, 0.25, 0.9):
        needed, wide = samples_needed(share), max(share, 1 - share)
        assert wide**needed <= 0.025 < wide ** (needed - 1)
        sample = np.random.default_rng(1).normal(size=needed)
        less = quantile(sample[1:], share)
        assert (less.value, less.low, less.high) == (None, None, None)
        assert (less.n, less.needed) == (needed - 1, needed)
        found = quantile(sample, share)
        assert found.low is not None and found.value is not None and found.high is not None
        assert found.low <= found.value <= found.high
        assert sample.min() <= found.low and found.high <= sample.max()
    assert [samples_needed(share) for share in SHARES.values()] == [6, 72, 368]


@pytest.mark.parametrize(("share", "n"), [(0.5, 9), (0.5, 100), (0.95, 72), (0.95, 400)])
def test_the_interval_of_a_quantile_holds_it_in_at_least_95_of_100_samples(
    share: float, n: int
) -> None:
    rng, wanted = np.random.default_rng(2), -math.log(1.0 - share)  # of the exponential
    held = 0
    for _ in range(1000):
        found = quantile(rng.exponential(size=n), share)
        assert found.low is not None and found.high is not None
        held += found.low <= wanted <= found.high
    assert held >= 935  # 950 less two standard errors


def test_rounds_fit_the_seconds_within_bounds_and_in_whole_designs() -> None:
    for schedules in (1, 2, 3, 4, 5):
        design = len(balanced_orders(schedules))
        least, most = (rounds_in(s, 1.0, schedules) for s in (0.0, 1e9))
        assert FEWEST_ROUNDS <= least < FEWEST_ROUNDS + design
        assert 368 <= most < 368 + design
        for seconds in (20.0, 100.0, 300.0):
            found = rounds_in(seconds, 1.0, schedules)
            assert seconds <= found < seconds + design
            assert found % design == 0
    assert rounds_in(5.0, 0.0, 2) == 368


def test_canned_prompts_are_of_the_shape_seeded_and_hold_no_mask_token() -> None:
    made = np.array(canned_prompts(50, 7, MODEL, 3))
    assert made.shape == (50, 7)
    assert (made != MODEL.mask_id).all() and made.min() >= 0 and made.max() == MODEL.vocab - 1
    assert (made == np.array(canned_prompts(50, 7, MODEL, 3))).all()


def test_what_cannot_be_measured_is_the_caller_s_mistake() -> None:
    clock = Clock()
    ready = engines(clock)
    for schedules, batches in (({}, prompts()), (EVERY, []), (EVERY, prompts(2) + prompts(3))):
        with pytest.raises(ValueError, match="need schedules and batches of one size"):
            measure_throughput(schedules, ready, SAMPLER, batches, MODEL, clock=clock)
    for wrong in ({"warmup": 0}, {"rounds": 0}, {"seconds": -1.0}, {"seconds": math.nan}):
        with pytest.raises(ValueError, match="warmup >= 1"):
            measure_throughput(EVERY, ready, SAMPLER, prompts(), MODEL, clock=clock, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 < share < 1"):
        quantile([1.0], 1.0)
