"""Which schedule a group of tasks ships: measured, within budget, and uniform where it is best."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from engines.errors import BudgetError
from engines.schedule import Schedule
from tuner.choice import Choice, Measures, Priced, choose_schedule, mixture, within_memory
from tuner.costs import Budget, Costs

NAMES = ("w4", "int8", "fp32")
WINDOWS = 3
MS = {"w4": 1.0, "int8": 2.0, "fp32": 4.0}
PROMPTS = 200


def table(budget: Budget | None = None, seed: int = 0, timed: bool = True) -> Priced:
    gain = np.sort(np.random.default_rng(seed).uniform(0, 3, (WINDOWS, 3)), axis=1)
    return Priced(
        gain=gain - gain[:, :1],
        costs=Costs(
            names=NAMES,
            bits=np.array([4.0, 8.0, 32.0]),
            passes=np.array([4.0, 4.0, 4.0]),
            latency_ms=np.array([MS[name] for name in NAMES]) if timed else None,
            families=NAMES,
            family_mib={"w4": 1.0, "int8": 2.0, "fp32": 8.0},
        ),
        budget=budget or Budget(),
    )


def measures(
    share_lost: Callable[[Schedule], float], tasks: tuple[str, ...] = ("edit",)
) -> tuple[Measures, list[Schedule]]:
    """Return measures of schedules that get a share of prompts wrong, and what was measured."""
    seen: list[Schedule] = []

    def agreement(schedule: Schedule) -> Mapping[str, NDArray[np.float64]]:
        seen.append(schedule)
        wrong = round(share_lost(schedule) * PROMPTS)
        return {task: (np.arange(PROMPTS) >= wrong).astype(np.float64) for task in tasks}

    def loss(schedule: Schedule) -> Mapping[str, float]:
        return dict.fromkeys(tasks, 100.0 * share_lost(schedule))

    return Measures(agreement, loss), seen


def first_window_matters(schedule: Schedule) -> float:
    return {"w4": 0.3, "int8": 0.0, "fp32": 0.0}[schedule.precisions[0]]


def every() -> list[Schedule]:
    return [Schedule(names) for names in itertools.product(NAMES, repeat=WINDOWS)]


def test_without_budgets_the_fastest_within_the_loss_ships_mixed_where_that_pays() -> None:
    measured, _ = measures(first_window_matters)
    found = choose_schedule(table(), measured, "latency", 1.0, 4, 0)
    assert found.schedule.precisions[0] == "int8"
    assert not found.schedule.is_uniform
    assert found.loss == 0.0
    assert "(tuning prompts)" in found.reason and "against uniform fp32" in found.reason


def test_where_everything_is_harmless_the_fastest_is_uniform() -> None:
    found = choose_schedule(table(), measures(lambda s: 0.0)[0], "latency", 1.0, 4, 0)
    assert found.schedule == Schedule.uniform("w4", WINDOWS)


def test_where_nothing_cheaper_is_good_enough_full_precision_ships() -> None:
    hurt = measures(lambda s: 0.0 if set(s.precisions) == {"fp32"} else 0.5)[0]
    for goal in ("latency", "quality", "memory"):
        found = choose_schedule(table(), hurt, goal, 1.0, 4, 0)
        assert found.schedule == Schedule.uniform("fp32", WINDOWS)


def test_for_memory_the_smallest_set_of_weights_ships() -> None:
    measured, _ = measures(first_window_matters)
    found = choose_schedule(table(), measured, "memory", 1.0, 4, 0)
    assert found.schedule == Schedule.uniform("int8", WINDOWS)
    assert found.memory_mib == 2.0


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("goal", ["latency", "quality", "memory"])
def test_what_ships_and_all_that_is_measured_is_within_every_budget(goal: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    budget = Budget(mean_bits=rng.uniform(4, 32), latency_ms=rng.uniform(12, 48))
    priced = table(budget, seed)
    measured, seen = measures(lambda s: 0.01 * s.precisions.count("w4"))
    found = choose_schedule(priced, measured, goal, 100.0, 3, seed)
    for schedule in (found.schedule, *seen):
        assert priced.fits(schedule)
    assert found.mean_bits <= (budget.mean_bits or 0)
    assert found.latency_ms is not None
    assert found.latency_ms == pytest.approx(sum(4 * MS[n] for n in found.schedule.precisions))
    assert found.gain == pytest.approx(priced.predicted(found.schedule))
    assert found.measured >= 1


def test_under_a_budget_quality_beats_every_uniform_schedule_that_loses_more() -> None:
    measured, _ = measures(first_window_matters)
    priced = table(Budget(latency_ms=20.0))  # int8 throughout takes 24 ms
    found = choose_schedule(priced, measured, "quality", 1.0, 8, 0)
    assert found.reference == Schedule.uniform("w4", WINDOWS)
    assert found.schedule.precisions[0] != "w4"
    assert found.loss == 0.0


def test_where_no_uniform_schedule_fits_the_reason_says_so() -> None:
    priced = Priced(
        gain=np.array([[0.0, 1.0], [0.0, 1.0]]),
        costs=Costs(
            names=("a", "b"),
            bits=np.array([4.0, 8.0]),
            passes=np.array([1.0, 1.0]),
            latency_ms=np.array([[1.0, 9.0], [9.0, 1.0]]),
        ),
        budget=Budget(latency_ms=5.0),
    )
    found = choose_schedule(priced, measures(lambda s: 0.0)[0], "quality", 1.0, 2, 0)
    assert found.schedule == Schedule(("a", "b"))
    assert found.reference is None
    assert found.reason.endswith("no uniform schedule is within the budgets")


def test_a_budget_that_nothing_meets_is_told_before_anything_is_measured() -> None:
    measured, seen = measures(lambda s: 0.0)
    with pytest.raises(BudgetError) as caught:
        choose_schedule(table(Budget(mean_bits=3.0)), measured, "latency", 1.0, 4, 0)
    assert caught.value.nearest == {"mean_bits": 4.0}
    assert seen == []


def test_what_is_not_timed_costs_its_bits() -> None:
    priced = table(timed=False)
    for schedule in every():
        bits = np.mean([{"w4": 4.0, "int8": 8.0, "fp32": 32.0}[n] for n in schedule.precisions])
        assert priced.cost(schedule) == pytest.approx(bits)
        assert table().cost(schedule) == sum(4 * MS[name] for name in schedule.precisions)
    found = choose_schedule(priced, measures(lambda s: 0.0)[0], "latency", 1.0, 4, 0)
    assert found.latency_ms is None
    assert found.schedule == Schedule.uniform("w4", WINDOWS)


def test_uniform_schedules_within_the_budgets_come_most_bits_first() -> None:
    assert [each.precisions[0] for each in table().uniform()] == ["fp32", "int8", "w4"]
    assert [e.precisions[0] for e in table(Budget(mean_bits=8.0)).uniform()] == ["int8", "w4"]


def test_a_group_ships_nothing_that_hurts_one_of_its_tasks() -> None:
    def loss(schedule: Schedule) -> Mapping[str, float]:
        return {"edit": 0.0, "close": 0.0 if "w4" not in schedule.precisions else 5.0}

    def agreement(schedule: Schedule) -> Mapping[str, NDArray[np.float64]]:
        return {task: np.full(PROMPTS, 1 - lost / 100) for task, lost in loss(schedule).items()}

    found = choose_schedule(table(), Measures(agreement, loss), "latency", 1.0, 4, 0)
    assert found.schedule == Schedule.uniform("int8", WINDOWS)


def test_a_mixture_counts_each_task_once() -> None:
    one, other = np.array([[0.0, 1.0]]), np.array([[2.0, 5.0]])
    assert mixture({"a": one, "b": other}).tolist() == [[1.0, 3.0]]


def test_the_engines_of_all_tasks_together_are_within_the_memory() -> None:
    costs = Costs(
        names=("int8", "fp32"),
        bits=np.array([8.0, 32.0]),
        passes=np.full(4, 2.0),
        latency_ms=np.array([1.0, 2.0]),
        family_mib={"int8": 1.0, "fp32": 3.0},
    )
    gain = np.tile([0.0, 1.0], (4, 1))

    def chosen(table: Priced, names: tuple[str, ...]) -> dict[str, Choice]:
        wishes = {"one": "int8", "two": "fp32"}
        return {
            task: replace_schedule(table.only(names), wish if wish in names else names[0])
            for task, wish in wishes.items()
        }

    def replace_schedule(table: Priced, name: str) -> Choice:
        schedule = Schedule.uniform(name, 4)
        return Choice(
            schedule=schedule,
            mean_bits=table.costs.bits_of(table.indices(schedule)),
            latency_ms=table.cost(schedule),
            memory_mib=table.memory({name}),
            gain=table.predicted(schedule),
            loss={"int8": 2.0, "fp32": 0.0}[name],
            reference=None,
            reason="as wished",
            measured=1,
        )

    for bound, expected in ((4.0, {"int8", "fp32"}), (3.5, {"fp32"}), (1.5, {"int8"})):
        table = Priced(gain, costs, Budget(memory_mib=bound))
        found = within_memory(table, partial(chosen, table))
        assert {choice.schedule.precisions[0] for choice in found.values()} == expected


@pytest.mark.parametrize("goal", ["quality", "latency"])
def test_no_mixed_schedule_ships_that_is_worse_than_uniform_on_one_of_the_tasks(goal: str) -> None:
    priced = table(Budget(mean_bits=20.0))

    def agreement(schedule: Schedule) -> dict[str, NDArray[np.float64]]:
        share = {"gains": 0.2 if schedule.is_uniform else 0.9}
        share["loses"] = 0.9 if schedule.is_uniform else 0.2
        return {task: np.arange(PROMPTS) < value * PROMPTS for task, value in share.items()}

    hurts = Measures(agreement, lambda schedule: {"gains": 0.0, "loses": 0.0})
    assert choose_schedule(priced, hurts, goal, 100.0, 8, 0).schedule.is_uniform


def random_agreement(
    better: float, seed: int
) -> Callable[[Schedule], Mapping[str, NDArray[np.float64]]]:
    """Return agreements that differ by noise, and where mixed by `better`."""

    def agreement(schedule: Schedule) -> Mapping[str, NDArray[np.float64]]:
        order = list(NAMES).index
        rng = np.random.default_rng([seed, *(order(name) for name in schedule.precisions)])
        shift = 0.0 if schedule.is_uniform else better
        return {"edit": rng.random(PROMPTS) < 0.5 + shift}

    return agreement


@pytest.mark.parametrize("refinements", [1, 12])
def test_a_mixed_schedule_that_noise_alone_favours_is_rarely_believed(refinements: int) -> None:
    priced = table(Budget(mean_bits=8.0), timed=False)
    mixed = 0
    for seed in range(60):
        agreement = random_agreement(0.0, seed)

        def loss(
            schedule: Schedule, of: Callable[..., Mapping[str, NDArray[np.float64]]] = agreement
        ) -> dict[str, float]:
            return {"edit": 100.0 * (1.0 - float(of(schedule)["edit"].mean()))}

        measured = Measures(agreement, loss)
        found = choose_schedule(priced, measured, "quality", 0.0, refinements, seed)
        mixed += not found.schedule.is_uniform and found.mean_bits > 0.95 * 8.0
    assert mixed <= 0.1 * 60


def test_a_mixed_schedule_that_is_better_on_prompts_it_was_not_chosen_on_is_believed() -> None:
    priced = table(Budget(mean_bits=12.0), timed=False)
    agreement = random_agreement(0.4, 0)
    measured = Measures(agreement, lambda s: {"edit": 100.0 * (1 - agreement(s)["edit"].mean())})
    found = choose_schedule(priced, measured, "quality", 0.0, 4, 0)
    assert not found.schedule.is_uniform


def test_a_baseline_competes_where_it_fits_and_only_there() -> None:
    best = Schedule(("fp32", "w4", "w4"))
    agreement = lambda s: {"edit": np.arange(PROMPTS) < (PROMPTS if s == best else 100)}  # noqa: E731
    measured = Measures(agreement, lambda s: {"edit": 0.0 if s == best else 50.0})
    for bits, expected in ((14.0, best), (12.0, None)):
        priced = table(Budget(mean_bits=bits), timed=False)
        found = choose_schedule(priced, measured, "quality", 1.0, 1, 0, [best])
        assert (found.schedule == best) == (expected is not None)
