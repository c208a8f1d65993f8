"""Laws of the measurements, on fake engines and a fake clock; nothing here waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from engines.backend import Backend, FakeBackend, Floats, Ids, Mask, Served
from engines.measure import (
    measure,
    measure_schedules,
    measure_switch,
    ratio,
)
from engines.model import ModelInfo
from engines.noise import bootstrap_median
from engines.precision import precision_from_name
from engines.schedule import SamplerConfig, Schedule

MODEL = ModelInfo(
    name="fake",
    architecture="llada",
    vocab=9,
    mask_id=4,
    eos_id=8,
    max_length=99,
    digest="0" * 64,
)
SAMPLER = SamplerConfig(steps=12, gen_length=24, block_length=24)


@dataclass
class Clock:
    """Seconds that pass only in engines; `speed` says how long a second takes at a time."""

    speed: Callable[[float], float] = lambda now: 1.0
    now: float = 0.0
    prompts: list[Ids] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds * self.speed(self.now)

    def engine(self, name: str, latency_ms: float) -> FakeBackend:
        def logits(ids: Ids, mask: Mask, positions: Ids) -> Floats:
            self.prompts.append(ids)
            return np.zeros((*positions.shape, 4), np.float32)

        return FakeBackend(precision_from_name(name), logits, latency_ms, self.sleep)


def shape(repeats: int = 12) -> dict[str, int]:
    return {"windows": 6, "batch": 3, "prompt_length": 7, "repeats": repeats}


def test_a_steady_engine_is_measured_exactly() -> None:
    clock = Clock()
    backends = {"fp32": clock.engine("fp32", 5.0), "int8": clock.engine("int8", 2.0)}
    found = measure(backends, SAMPLER, model=MODEL, clock=clock, **shape())
    assert [row.precision for row in found.rows] == ["fp32", "int8"]
    for name, expected in (("fp32", 5.0), ("int8", 2.0)):
        row = found.of(name)
        assert (row.latency_ms, row.low, row.high) == pytest.approx((expected,) * 3)
        assert row.by_window == pytest.approx((expected,) * 6)
        assert row.n == 12 * 12
    assert (found.batch, found.prompt_length) == (3, 7)
    assert ratio(found.of("int8"), found.of("fp32")).high == pytest.approx(0.4)


def test_prompts_are_of_the_shape_asked_and_hold_no_mask_token() -> None:
    clock = Clock()
    measure({"fp32": clock.engine("fp32", 1.0)}, SAMPLER, model=MODEL, clock=clock, **shape(2))
    for ids in clock.prompts:
        assert ids.shape == (3, 7 + 24)
        assert (ids[:, :7] != MODEL.mask_id).all() and (ids < MODEL.vocab).all()


def test_all_candidates_answer_the_same_prompts() -> None:
    clock = Clock()
    backends = {"fp32": clock.engine("fp32", 5.0), "int8": clock.engine("int8", 2.0)}
    measure(backends, SAMPLER, model=MODEL, clock=clock, **shape(2))
    first = clock.prompts[0][:, :7]
    assert all(np.array_equal(ids[:, :7], first) for ids in clock.prompts)


@pytest.mark.parametrize(
    "speed",
    [
        lambda now: 1.0 + now * 2.0,  # throttling: ever slower
        lambda now: 3.0 / (1.0 + now),  # warming up: ever faster
        lambda now: 4.0 if 0.3 < now < 0.6 else 1.0,  # somebody else for a while
    ],
)
@pytest.mark.parametrize("candidates", [2, 3])
def test_equal_engines_end_as_a_tie_while_the_clock_drifts(
    speed: Callable[[float], float], candidates: int
) -> None:
    clock = Clock(speed)
    names = ("fp32", "int8", "w4a4")[:candidates]
    backends = {name: clock.engine(name, 1.0) for name in names}
    found = measure(backends, SAMPLER, model=MODEL, clock=clock, **shape())
    for name in names[1:]:
        against = ratio(found.of("fp32"), found.of(name))
        assert against.low <= 1.0 <= against.high
        one, other = found.of("fp32"), found.of(name)
        assert one.low <= other.high and other.low <= one.high


def test_a_faster_engine_is_told_apart_while_the_clock_drifts() -> None:
    clock = Clock(lambda now: 1.0 + now * 2.0)
    backends = {"fp32": clock.engine("fp32", 1.0), "int8": clock.engine("int8", 0.8)}
    found = measure(backends, SAMPLER, model=MODEL, clock=clock, **shape())
    assert ratio(found.of("int8"), found.of("fp32")).high < 1.0


def test_every_candidate_takes_every_place_in_the_order() -> None:
    order: list[str] = []

    @dataclass
    class Named:
        inner: FakeBackend
        name: str

        @property
        def precision(self):  # type: ignore[no-untyped-def]
            return self.inner.precision

        def logits(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Floats:
            raise AssertionError

        def serve(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Served:
            if progress[0] == 0:
                order.append(self.name)
            return self.inner.serve(ids, mask, positions, progress)

    clock = Clock()
    backends: dict[str, Backend] = {
        name: Named(clock.engine(name, 1.0), name) for name in ("fp32", "int8", "w4a4")
    }
    measure(backends, SAMPLER, model=MODEL, clock=clock, warmup=0, **shape(3))
    rounds = [order[i : i + 3] for i in range(0, 9, 3)]
    assert all(sorted(names) == sorted(backends) for names in rounds)
    assert all(len({names[place] for names in rounds}) == 3 for place in range(3))


def test_windows_have_their_own_latency() -> None:
    clock = Clock()

    class Falling(FakeBackend):
        def serve(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Served:
            self.latency_ms = float(positions.shape[1])
            return super().serve(ids, mask, positions, progress)

    plain = clock.engine("fp32", 0.0)
    engine = Falling(plain.precision, plain.logits_of, 0.0, clock.sleep)
    row = measure({"fp32": engine}, SAMPLER, model=MODEL, clock=clock, **shape()).of("fp32")
    assert row.by_window == pytest.approx((23, 19, 15, 11, 7, 3))
    assert row.latency_ms == pytest.approx(13)


def test_the_same_seed_gives_the_same_intervals() -> None:
    sample = np.random.default_rng(0).normal(5, 1, (20, 12))
    one, two = (bootstrap_median(sample, np.random.default_rng(3)) for _ in range(2))
    assert one == two and one.low < one.median < one.high


@dataclass
class Switching:
    """Engines of one machine: the first pass after another engine's costs extra."""

    clock: Clock
    cost_ms: float
    last: str = ""

    def engine(self, name: str, latency_ms: float) -> Backend:
        return _SwitchingBackend(self, self.clock.engine(name, latency_ms))


@dataclass
class _SwitchingBackend:
    machine: Switching
    inner: FakeBackend

    @property
    def precision(self):  # type: ignore[no-untyped-def]
        return self.inner.precision

    def logits(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Floats:
        raise AssertionError

    def serve(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Served:
        name = self.precision.name
        if progress[0] > 0 and self.machine.last != name:
            self.machine.clock.sleep(self.machine.cost_ms / 1000)
        self.machine.last = name
        return self.inner.serve(ids, mask, positions, progress)


@pytest.mark.parametrize("cost_ms", [0.0, 0.5])
def test_the_cost_of_a_switch_is_found_and_none_is_none(cost_ms: float) -> None:
    machine = Switching(Clock(), cost_ms)
    backends = {"fp32": machine.engine("fp32", 5.0), "int8": machine.engine("int8", 2.0)}
    found = measure_switch(backends, SAMPLER, model=MODEL, clock=machine.clock, **shape())
    assert found == pytest.approx(cost_ms, abs=1e-9)


def test_one_engine_or_one_window_has_no_switch() -> None:
    clock = Clock()
    backends = {"fp32": clock.engine("fp32", 1.0)}
    assert measure_switch(backends, SAMPLER, model=MODEL, clock=clock, **shape()) == 0.0
    backends["int8"] = clock.engine("int8", 1.0)
    one = {**shape(), "windows": 1}
    assert measure_switch(backends, SAMPLER, model=MODEL, clock=clock, **one) == 0.0


@pytest.mark.parametrize("wrong", ["batch", "repeats", "windows"])
def test_sizes_below_one_are_the_callers_mistake(wrong: str) -> None:
    with pytest.raises(ValueError, match=f"{wrong} >= 1"):
        measure({}, SAMPLER, model=MODEL, **{**shape(), wrong: 0})


def test_a_mixed_schedule_takes_what_its_windows_take() -> None:
    clock = Clock()
    backends: dict[str, Backend] = {
        "fp32": clock.engine("fp32", 5.0),
        "int8": clock.engine("int8", 2.0),
    }
    schedules = {
        "low": (Schedule.uniform("int8", 6), SAMPLER),
        "mixed": (Schedule(("fp32", "int8", "int8", "int8", "int8", "fp32")), SAMPLER),
    }
    found = measure_schedules(
        schedules, backends, batch=2, prompt_length=5, model=MODEL, repeats=4, clock=clock
    )
    assert found["low"].median == pytest.approx(12 * 2.0)
    assert found["mixed"].median == pytest.approx(4 * 5.0 + 8 * 2.0)


def test_passes_that_depend_on_the_data_are_charged_for_as_often_as_they_are_expected() -> None:
    clock = Clock()
    backends: dict[str, Backend] = {
        "fp32": clock.engine("fp32", 5.0),
        "int8": clock.engine("int8", 2.0),
    }
    schedules = {
        "low": (Schedule.uniform("int8", 3), SAMPLER),
        "mixed": (Schedule(("fp32", "int8", "int8")), SAMPLER),
    }
    found = measure_schedules(
        schedules, backends, batch=2, prompt_length=5, model=MODEL, repeats=4, clock=clock,
        passes={"mixed": np.array([1.5, 0.0, 2.25])},
    )  # fmt: skip
    assert found["low"].median == pytest.approx(12 * 2.0)
    assert found["mixed"].median == pytest.approx(1.5 * 5.0 + 2.25 * 2.0)


def test_only_fixed_steps_can_be_timed() -> None:
    clock, sampler = Clock(), SamplerConfig(rule="threshold", threshold=0.5)
    backends: dict[str, Backend] = {"fp32": clock.engine("fp32", 1.0)}
    with pytest.raises(ValueError, match="time fixed_steps_like it"):
        measure(backends, sampler, model=MODEL, clock=clock, **shape())
    schedules = {"a": (Schedule.uniform("fp32", 3), sampler)}
    with pytest.raises(ValueError, match="time fixed_steps_like it"):
        measure_schedules(schedules, backends, batch=1, prompt_length=5, model=MODEL, clock=clock)
    few = {"a": (Schedule.uniform("fp32", 20), SAMPLER)}
    with pytest.raises(ValueError, match="are expected in windows with"):
        measure_schedules(
            few, backends, batch=1, prompt_length=5, model=MODEL, passes={"a": np.ones(20)}
        )
