"""The last judgement: of test prompts, beside what it is fair to compare with."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from engines.measure import Interval
from engines.schedule import Schedule
from exporter.folder import Export
from tests.tuner.tuning import EFFORT, bench_of
from tuner import judge as room
from tuner.choice import Choice
from tuner.contest import Contest
from tuner.judge import entries, judge, time_schedules
from tuner.workshop import Workshop

MIXED = Schedule(("int8", "fp32", "int8"))


def choice_of(schedule: Schedule, reference: str | None = "int8") -> Choice:
    return Choice(
        schedule=schedule,
        mean_bits=16.0,
        latency_ms=None,
        memory_mib=None,
        gain=0.0,
        loss=0.0,
        reference=None if reference is None else Schedule.uniform(reference, schedule.windows),
        reason="for a test",
        measured=1,
    )


def test_what_ships_is_first_then_full_precision_and_every_uniform_schedule_once() -> None:
    found = entries(choice_of(MIXED), ("fp32", "int8"), 0, 0)
    assert [each.label for each in found] == [
        "ships",
        "uniform fp32",
        "uniform int8, best within budget",
    ]
    assert found[0].schedule == MIXED
    without = entries(choice_of(MIXED, None), ("int8",), 0, 0)
    assert [each.label for each in without] == ["ships", "uniform fp32", "uniform int8"]


@pytest.mark.parametrize("seed", range(5))
def test_permutations_have_the_same_bits_and_each_schedule_is_judged_once(seed: int) -> None:
    found = entries(choice_of(MIXED), ("fp32", "int8"), 30, seed)
    shuffled = [each.schedule for each in found if "permuted" in each.label]
    assert 1 <= len(shuffled) == len(set(shuffled)) <= 2
    assert MIXED not in shuffled
    assert all(Counter(each.precisions) == Counter(MIXED.precisions) for each in shuffled)
    assert entries(choice_of(MIXED), ("fp32", "int8"), 30, seed) == found


def test_a_uniform_schedule_has_no_permutations_and_stands_among_the_uniform_ones_too() -> None:
    found = entries(choice_of(Schedule.uniform("int8", 3)), ("int8",), 9, 0)
    assert [each.label for each in found] == [
        "ships",
        "uniform fp32",
        "uniform int8, best within budget",
    ]


@pytest.fixture
def contest(small_effort: None, exported: Export, tmp_path: Path) -> Contest:
    (tmp_path / "work").mkdir()
    return Contest(Workshop(bench_of(exported, tmp_path), tmp_path / "work"))


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
    first = time_schedules(contest, contest.shop.default, wanted)
    assert first == dict.fromkeys("abc", Interval(2.0, 1.0, 9.0))
    assert asked == [{MIXED, Schedule.uniform("fp32", 3)}]
    assert time_schedules(contest, contest.shop.default, wanted) == first
    assert len(asked) == 1


def test_verdicts_are_of_test_prompts_for_each_task_and_for_all_together(
    contest: Contest,
) -> None:
    choices = {name: choice_of(MIXED) for name in (*contest.bench.jobs, "default")}
    verdicts = {each.task: each for each in judge(contest, contest.shop.default, choices)}
    assert list(verdicts) == ["edit", "close", "default"]
    assert verdicts["edit"].shipped.n == EFFORT.test
    assert verdicts["default"].shipped.n == 2 * EFFORT.test
    for verdict in verdicts.values():
        assert verdict.shipped.schedule == MIXED
        assert verdict.shipped.mean_bits == pytest.approx(16.0)
        full = next(each for each in verdict.others if each.label == "uniform fp32")
        assert full.agreement[0] == 1.0
        low, middle, high = (verdict.loss[index] for index in (1, 0, 2))
        assert low <= middle <= high == verdict.quality_shown_to
        assert all(each.ms is not None for each in (verdict.shipped, *verdict.others))
    worst = max(verdicts[name].loss[2] for name in contest.bench.jobs)
    assert verdicts["default"].loss[2] == worst
