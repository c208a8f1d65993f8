"""What ships is held to its latency, timed as whole sequences, and says where that fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engines.noise import Interval
from engines.schedule import SamplerConfig, Schedule
from exporter.folder import Export
from tests.tuner.tuning import bench_of
from tuner import settle as room
from tuner.choice import Choice
from tuner.contest import Contest
from tuner.settle import Settled, settle, time_schedules
from tuner.workshop import Workshop

MIXED = Schedule(("int8", "fp32", "int8"))
Timed = Callable[..., dict[str, Interval]]


@pytest.fixture
def contest(small_effort: None, exported: Export, tmp_path: Path) -> Contest:
    (tmp_path / "work").mkdir()
    return Contest(Workshop(bench_of(exported, tmp_path), tmp_path / "work"))


def asked_for(contest: Contest, latency_ms: float) -> Contest:
    """Return the contest under a latency."""
    bench = contest.bench
    config = replace(bench.config, latency_ms=latency_ms)
    return replace(contest, shop=replace(contest.shop, bench=replace(bench, config=config)))


def takes(monkeypatch: pytest.MonkeyPatch, ms_of: Callable[[Schedule], float]) -> None:
    """Let whole sequences take what a function says."""

    def timed(
        contest: Contest,
        candidate: object,
        schedules: dict[str, tuple[Schedule, SamplerConfig]],
        *_: object,
    ) -> dict[str, Interval]:
        return {
            label: Interval(ms_of(schedule), ms_of(schedule), ms_of(schedule))
            for label, (schedule, _) in schedules.items()
        }

    monkeypatch.setattr(room, "time_schedules", timed)


def test_schedules_are_timed_in_one_run_each_once_and_never_again(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = contest.bench.jobs["edit"].sampler
    asked: list[set[Schedule]] = []

    def measured(lanes: dict[str, tuple[Schedule, object]], *_: object, **__: object) -> object:
        asked.append({schedule for schedule, _ in lanes.values()})
        return {name: Interval(float(len(lanes)), 1.0, 9.0) for name in lanes}

    monkeypatch.setattr(room, "measure_schedules", measured)
    wanted = dict.fromkeys(("a", "b"), (MIXED, sampler))
    wanted["c"] = (Schedule.uniform("fp32", 3), sampler)
    first = time_schedules(contest, contest.shop.default, wanted, {})
    assert first == dict.fromkeys("abc", Interval(2.0, 1.0, 9.0))
    assert asked == [{MIXED, Schedule.uniform("fp32", 3)}]
    assert time_schedules(contest, contest.shop.default, wanted, {}) == first
    assert len(asked) == 1


def test_without_a_latency_nothing_is_timed(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "time_schedules", None)
    choices = contest.choices(contest.shop.default)
    assert settle(contest, contest.shop.default, choices) == Settled(choices)


def test_choices_that_meet_the_latency_are_kept(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    loose = asked_for(contest, 1e6)
    choices = loose.choices(loose.shop.default)
    takes(monkeypatch, lambda schedule: 1.0)
    found = settle(loose, loose.shop.default, choices)
    assert found == Settled(choices, tightened=1.0, over_budget=None)


def test_one_that_is_slower_as_a_whole_is_chosen_anew_under_less(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    tight = asked_for(contest, 100.0)
    default = contest.shop.default
    any_choice = contest.choices(default)["edit"]

    def choices(self: Contest, candidate: object, tried: object = ()) -> dict[str, Choice]:
        name = "fp32" if self.tighten > 0.7 else "int8"
        return {"edit": replace(any_choice, schedule=Schedule.uniform(name, 3))}

    monkeypatch.setattr(Contest, "choices", choices)
    takes(monkeypatch, lambda schedule: 150.0 if "fp32" in schedule.precisions else 100.0)
    found = settle(tight, default, tight.choices(default))
    assert found.choices["edit"].schedule == Schedule.uniform("int8", 3)
    assert found.over_budget is None
    assert found.tightened == pytest.approx(1 / 1.5)


def test_what_never_meets_the_latency_says_by_how_much(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    loose = asked_for(contest, 1e6)
    takes(monkeypatch, lambda schedule: 2e6)
    found = settle(loose, loose.shop.default, loose.choices(loose.shop.default))
    assert found.over_budget == pytest.approx(2.0)
    assert found.tightened < 1.0
