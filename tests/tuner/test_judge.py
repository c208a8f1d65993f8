"""The last judgement: of test prompts, beside what it is fair to compare with."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from engines.precision import EXECUTED
from engines.schedule import Schedule
from exporter.folder import Export
from tests.tuner.tuning import EFFORT, bench_of
from tuner.choice import Choice
from tuner.contest import Contest
from tuner.judge import Entry, entries, judge
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


def labels(found: list[Entry]) -> list[str]:
    return [each.label for each in found]


BOTH = (EXECUTED["fp32"], EXECUTED["int8"])
UNIFORM = ["uniform fp32", "uniform int8, best within budget"]


def test_what_ships_is_first_then_full_precision_and_every_uniform_schedule_once() -> None:
    found = entries(choice_of(Schedule.uniform("int8", 3)), BOTH, 9, 0, {})
    assert labels(found) == ["ships", *UNIFORM]
    without = entries(choice_of(Schedule.uniform("int8", 3), None), BOTH[1:], 0, 0, {})
    assert labels(without) == ["ships", "uniform fp32", "uniform int8"]


@pytest.mark.parametrize("seed", range(5))
def test_a_mixed_schedule_stands_beside_its_bits_in_other_orders_each_once(seed: int) -> None:
    found = entries(choice_of(MIXED), BOTH, 30, seed, {})
    assert found[0].schedule == MIXED
    assert labels(found)[1:3] == UNIFORM
    orders = [each.schedule for each in found if each.label.startswith("same bits")]
    assert 1 <= len(orders) == len(set(orders)) <= 2
    assert MIXED not in orders
    assert all(Counter(each.precisions) == Counter(MIXED.precisions) for each in orders)
    assert entries(choice_of(MIXED), BOTH, 30, seed, {}) == found


def test_what_was_written_by_hand_is_judged_under_the_name_of_its_file() -> None:
    byhand = {"mine": Schedule(("int8", "int8", "fp32", "fp32")), "same": MIXED}
    found = entries(choice_of(MIXED), BOTH, 0, 0, byhand)
    assert {each.label: each.schedule for each in found}["baseline mine"] == byhand["mine"]
    assert "baseline same" in labels(found)


@pytest.fixture
def contest(small_effort: None, exported: Export, tmp_path: Path) -> Contest:
    (tmp_path / "work").mkdir()
    return Contest(Workshop(bench_of(exported, tmp_path), tmp_path / "work"))


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


def test_progress_counts_every_answer(
    contest: Contest, capsys: pytest.CaptureFixture[str]
) -> None:
    choices = {name: choice_of(MIXED) for name in (*contest.bench.jobs, "default")}
    verdicts = judge(contest, contest.shop.default, choices)
    answers = sum(each.n for verdict in verdicts for each in (verdict.shipped, *verdict.others))
    assert f"judging on test prompts, answers: {answers}/{answers} in" in capsys.readouterr().err
