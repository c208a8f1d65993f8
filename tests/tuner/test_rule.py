"""Rules become schedules: the optimum of a share of the budget, uniform ones, and by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from engines.errors import BackendError
from engines.schedule import Schedule
from tuner.allocate import allocate
from tuner.choice import Priced
from tuner.costs import Budget, Costs
from tuner.rule import check_rule, narrowed, schedule_of
from tuner.space import SHARES

NAMES = ("int8", "fp16", "fp32")


def table(seed: int, latency: float | None = None, bits: float | None = None) -> Priced:
    rng = np.random.default_rng(seed)
    gain = np.sort(rng.gamma(1.0, 1.0, (6, 3)), axis=1)
    gain[:, 0] = 0.0
    costs = Costs(
        names=NAMES,
        bits=np.array([8.0, 16.0, 32.0]),
        passes=np.full(6, 2.0),
        latency_ms=np.array([2.0, 3.0, 4.5]),
        switch_ms=0.1,
    )
    return Priced(gain, costs, Budget(bits, latency, None))


@pytest.mark.parametrize("name", NAMES)
def test_uniform_is_uniform_whatever_the_budget(name: str) -> None:
    found = schedule_of(f"uniform-{name}", table(0, latency=25.0), {})
    assert found == Schedule.uniform(name, 6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("latency", [None, 40.0, 30.0])
def test_spending_everything_is_the_allocation_s_own_answer(
    seed: int, latency: float | None
) -> None:
    priced = table(seed, latency)
    own = allocate(priced.gain, priced.costs, priced.budget, 0)
    assert schedule_of("spend-100", priced, {}).precisions == own.schedule


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("latency", [None, 40.0])
def test_the_less_is_spent_the_cheaper_it_is_and_the_less_it_gains(
    seed: int, latency: float | None
) -> None:
    priced = table(seed, latency)
    walked = [schedule_of(f"spend-{share}", priced, {}) for share in SHARES]
    costs = [priced.cost(each) for each in walked]
    gains = [priced.predicted(each) for each in walked]
    assert costs[0] > costs[-1]
    assert all(a >= b - 1e-9 for a, b in itertools.pairwise(gains))
    least, most = 6 * 2 * 2.0, min(latency or 1e9, 6 * 2 * 4.5)
    for share, cost in zip(SHARES, costs, strict=True):
        assert cost <= least + share / 100 * (most - least) + 1e-6


def test_spending_nothing_is_the_cheapest_schedule() -> None:
    assert schedule_of("spend-0", table(1), {}) == Schedule.uniform("int8", 6)


def test_a_budget_below_the_cheapest_stays_as_it_is() -> None:
    assert narrowed(table(1, latency=10.0), 0.5).latency_ms == 10.0


def test_where_nothing_is_timed_bits_are_spent() -> None:
    priced = table(2, bits=20.0)
    costs = Costs(names=NAMES, bits=priced.costs.bits, passes=priced.costs.passes)
    simulated = Priced(priced.gain, costs, priced.budget)
    assert narrowed(simulated, 0.5).mean_bits == pytest.approx(14.0)
    found = schedule_of("spend-50", simulated, {})
    assert simulated.costs.bits_of(simulated.indices(found)) <= 14.0 + 1e-6


def test_a_schedule_by_hand_is_taken_as_it_is_and_others_spend_their_budget() -> None:
    mine = Schedule(("fp32", "int8", "int8", "int8", "int8", "fp32"))
    priced = table(3, latency=40.0)
    assert schedule_of("baseline-mine", priced, {"mine": mine}) == mine
    assert schedule_of("baseline-mine", priced, {}) == schedule_of("spend-100", priced, {})


def test_a_schedule_by_hand_of_other_windows_is_refused_and_not_replaced() -> None:
    other = {"five": Schedule(("int8",) * (len(table(0).gain) + 1))}
    with pytest.raises(BackendError, match=r"the schedule five has \d+ windows, not"):
        schedule_of("baseline-five", table(0), other)


@pytest.mark.parametrize("rule", ["uniform-int8", "spend-0", "spend-100", "baseline-mine"])
def test_a_rule_that_is_possible_is_let_through(rule: str) -> None:
    check_rule(rule, ["fp32", "int8"], ["mine"])


@pytest.mark.parametrize(
    "rule", ["foo", "uniform-fp8", "uniform-", "spend-101", "spend--1", "spend-x", "baseline-no"]
)
def test_a_rule_that_is_not_possible_is_refused_beforehand(rule: str) -> None:
    with pytest.raises(ValueError, match=r"rule|names none"):
        check_rule(rule, ["fp32", "int8"], ["mine"])


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="a schedule's rule is"):
        schedule_of("best", table(0), {})
