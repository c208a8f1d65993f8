"""One trial: gated, held to budgets and floors, timed against the best, and out where it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.backend import FakeBackend, Floats, Ids, Mask
from engines.errors import BackendError, BudgetError, InputError
from engines.measure import Compared, Latencies, Latency
from engines.precision import precision_from_name
from exporter.folder import Export
from tests.tuner.test_contest import asking, slowed
from tests.tuner.tuning import bench_of
from tuner import contest as rooms
from tuner import timing as clocks
from tuner import trial as trials
from tuner import workshop
from tuner.contest import Contest
from tuner.trial import look, run_trial
from tuner.trials import TrialResult
from tuner.workshop import Workshop

pytestmark = pytest.mark.usefixtures("small_effort")


@pytest.fixture
def contest(
    exported: Export, tmp_path: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Contest:
    """Return a contest on a machine whose clock is ours: fp32 takes 4 ms a pass, int8 3."""
    (tmp_path / "work").mkdir()
    monkeypatch.setattr(clocks, "measure", slowed([1.0] * 99))
    monkeypatch.setattr(clocks, "measure_switch", lambda *_, **__: 0.5)
    bench = bench_of(exported, tmp_path, "edit", max_loss=100.0)
    return Contest(Workshop(bench, tmp_path / "work"))


def ratio_of(value: float) -> Callable[..., Compared]:
    rounds = {"candidate": np.full(9, 10.0 * value), "best": np.full(9, 10.0)}
    return lambda *_, **__: Compared(rounds, 0)


def test_a_result_has_a_schedule_for_each_task_within_the_budgets(contest: Contest) -> None:
    asked = asking(contest, latency_ms=44.0)
    result = run_trial(asked, asked.shop.default, 3, None)
    assert result.failed is None
    assert result.number == 3
    assert result.feasible
    assert set(result.tasks) == {"edit"}
    assert result.cost <= 44.0
    assert result.low is not None and result.high is not None
    assert result.low <= result.cost <= result.high
    assert result.tasks["edit"]["latency_ms"] <= 44.0
    assert len(result.tasks["edit"]["schedule"]) == 3
    assert set(result.violations) == {"edit: loss", "edit: latency_ms"}
    assert result.device == asked.bench.device
    assert result.machine["load"] >= 0.0
    assert set(result.distances) == {"int8"}
    assert TrialResult.from_json(result.to_json()) == result


def test_a_uniform_schedule_outside_a_budget_is_infeasible_by_as_much(contest: Contest) -> None:
    asked = asking(contest, latency_ms=44.0, memory_mib=1e-3)
    result = run_trial(asked, asked.shop.default.changed(schedule="uniform-fp32"), 0, None)
    assert result.violations["memory_mib"] > 0.0
    assert not result.feasible
    loose = asking(contest, latency_ms=44.0)
    result = run_trial(loose, loose.shop.default.changed(schedule="uniform-fp32"), 0, None)
    assert result.tasks["edit"]["schedule"] == ["fp32"] * 3
    assert result.violations["edit: latency_ms"] == pytest.approx(48.0 - 44.0)
    assert not result.feasible


def test_rules_of_one_setting_run_the_same_engines_and_differ_in_cost(contest: Contest) -> None:
    costs = [
        run_trial(contest, contest.shop.default.changed(schedule=rule), 0, None).cost
        for rule in ("uniform-fp32", "spend-50", "uniform-int8")
    ]
    assert costs == sorted(costs, reverse=True)
    assert len(set(costs)) == 3


def test_a_budget_that_nothing_meets_puts_a_candidate_out_with_what_it_could_meet(
    contest: Contest,
) -> None:
    asked = asking(contest, latency_ms=35.9)
    result = run_trial(asked, asked.shop.default, 4, None)
    assert not result.feasible
    assert result.nearest == {"latency_ms": pytest.approx(36.0)}
    assert "the smallest that fits is 36 ms a sequence" in str(result.failed)


@pytest.mark.parametrize(
    "error", [BackendError("no kernel; use another"), BudgetError("no; more")]
)
def test_what_fails_puts_a_candidate_out_with_the_reason(
    contest: Contest, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(rooms, "prompt_tables", broken)
    result = run_trial(contest, contest.shop.default, 0, None)
    assert result.failed == str(error)
    assert result.distances, "what was found out before is kept"


def test_a_recipe_that_cannot_be_made_puts_its_candidate_out(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise InputError("window 1 of 12 is never reached; use fewer windows")

    monkeypatch.setattr(workshop, "requantize", refused)
    result = run_trial(contest, contest.shop.default.changed(windows=2), 0, None)
    assert result.failed == "window 1 of 12 is never reached; use fewer windows"


def test_a_loss_above_the_floor_of_a_task_is_a_violation_by_as_much(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = asking(contest, max_loss=50.0, max_losses=(("edit", 1.0),))
    monkeypatch.setattr(Contest, "_graded", lambda *_: None)
    result = run_trial(strict, strict.shop.default.changed(schedule="uniform-int8"), 0, None)
    assert result.loss > 1.0
    assert result.violations == {"edit: loss": pytest.approx(result.loss - 1.0)}
    assert not result.feasible


def test_engines_that_are_far_off_answer_no_prompt(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = asking(contest, gates=(("cos", 0.0), ("l1", 1e9)))
    monkeypatch.setattr(rooms, "answer", None)
    result = run_trial(strict, strict.shop.default, 0, None)
    assert result.failed is not None
    assert "int8: cos" in result.failed
    assert "above 0 at the first look" in result.failed


def test_logits_that_are_not_finite_are_refused_whatever_the_gates(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = contest.shop.engines(contest.shop.default)
    vocab = engines.folder.model.vocab

    def logits(ids: Ids, mask: Mask, positions: Ids) -> Floats:
        found = np.zeros((*positions.shape, vocab), np.float32)
        found[0, 0, 1] = np.nan
        return found

    broken: dict[str, Any] = dict(engines.fleet.engines)
    broken["int8"] = FakeBackend(precision_from_name("int8"), logits)
    odd = replace(engines, fleet=replace(engines.fleet, engines=broken))
    loose = asking(contest, gates=())
    monkeypatch.setattr(Workshop, "engines", lambda *_: odd)
    result = run_trial(loose, loose.shop.default, 0, None)
    assert "int8 gives logits that are not finite" in str(result.failed)
    assert set(result.distances["int8"].values()) == {None}
    assert TrialResult.from_json(result.to_json()) == result


def test_a_precision_that_is_refused_costs_the_schedules_that_run_it_alone(
    contest: Contest,
) -> None:
    strict = asking(contest, gates=(("cos", 0.0),))
    default = strict.shop.default
    assert run_trial(strict, default, 0, None).failed is not None
    assert run_trial(strict, default.changed(schedule="uniform-int8"), 1, None).failed is not None
    spared = run_trial(strict, default.changed(schedule="uniform-fp32"), 2, None)
    assert spared.failed is None
    assert spared.loss == 0.0


def test_a_best_trial_that_makes_no_sense_fails_nobody_else(contest: Contest) -> None:
    default = contest.shop.default
    first = run_trial(contest, default, 0, None)
    for odd in (
        replace(first, cost=0.0),
        replace(first, tasks={n: {**t, "schedule": ["nope"]} for n, t in first.tasks.items()}),
    ):
        again = run_trial(contest, default.changed(schedule="uniform-int8"), 1, odd)
        assert again.failed is None
        assert again.against is None


def test_the_first_look_is_taken_once(contest: Contest, monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(contest, contest.shop.default)
    monkeypatch.setattr(trials, "first_look", None)
    assert look(contest, contest.shop.default.changed(schedule="spend-50")) == found


@pytest.mark.parametrize(("ratio", "wins"), [(0.9, True), (1.1, False), (1.0, False)])
def test_a_candidate_close_to_the_best_is_timed_against_it(
    contest: Contest, monkeypatch: pytest.MonkeyPatch, ratio: float, wins: bool
) -> None:
    first = run_trial(contest, contest.shop.default, 0, None)
    monkeypatch.setattr(trials, "compare_schedules", ratio_of(ratio))
    other = contest.shop.default.changed(threads=1)
    second = run_trial(contest, other, 1, first)
    assert second.against == {"trial": 0.0, "ratio": ratio, "low": ratio, "high": ratio}
    assert (second.against["high"] < 1.0) == wins


def test_nothing_is_timed_against_itself_nor_against_what_is_far_away(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_trial(contest, contest.shop.default, 0, None)
    monkeypatch.setattr(trials, "compare_schedules", None)
    assert run_trial(contest, contest.shop.default, 1, first).against is None
    far = replace(first, cost=3.0 * first.cost)
    other = contest.shop.default.changed(threads=1)
    assert run_trial(contest, other, 1, far).against is None


def test_a_machine_that_drifts_while_a_candidate_is_timed_is_told(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(lanes: Any, sampler: object, windows: int, *_: object, **__: object) -> Latencies:
        rounds = tuple(4.0 * (1.0 + 0.15 * each / 29) for each in range(30))
        return Latencies(
            8, 16, tuple(Latency(n, 4.0, 4.0, 4.0, (4.0,) * windows, 9, rounds) for n in lanes)
        )

    steady = run_trial(contest, contest.shop.default, 0, None)
    assert "drift_within" not in steady.machine
    monkeypatch.setattr(clocks, "measure", measure)
    found = run_trial(contest, contest.shop.default.changed(threads=1), 1, None)
    assert 1.05 < found.machine["drift_within"] < 1.15
