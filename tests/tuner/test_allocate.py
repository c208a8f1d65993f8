from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from engines.errors import BudgetError
from tests.tuner.enumeration import CLOSE, SLACK, Enumeration, draw, large, problems
from tuner.allocate import Allocation, Budget, Costs, Point, allocate


def check_against_enumeration(every: Enumeration, budget: Budget, front: bool) -> None:
    most = every.most(budget)
    if most is None:
        with pytest.raises(BudgetError) as caught:
            allocate(every.gain, every.costs, budget)
        nearest = every.nearest(budget)
        assert caught.value.nearest.keys() == nearest.keys()
        for name, value in nearest.items():
            assert caught.value.nearest[name] == (value if value is None else pytest.approx(value))
            if value is not None:  # and it does fit
                allocate(
                    every.gain, every.costs, replace(budget, **{name: caught.value.nearest[name]})
                )
        return
    answer = allocate(every.gain, every.costs, budget, front_limit=10_000 if front else 0)
    check_point(every, answer.point)
    assert answer.gain == pytest.approx(most, abs=CLOSE)
    fits = every.fits(budget)
    assert fits[(every.all == answer.indices).all(1)].item()
    # Ties return the reference; without one that is as good, a uniform schedule if there is any.
    references = every.reference(budget)
    gains = {tuple(s): g for s, g in zip(every.all.tolist(), every.gains, strict=True)}
    if any(gains[reference] >= most - CLOSE for reference in references):
        assert answer.indices in references
    elif any(fits & (every.switches == 0) & (every.gains >= most - CLOSE)):
        assert answer.uniform
    # Runner-up.
    others = every.gains[fits & (every.all != answer.indices).any(1)]
    if len(others):
        assert answer.runner_up is not None and answer.runner_up.indices != answer.indices
        check_point(every, answer.runner_up)
        assert fits[(every.all == answer.runner_up.indices).all(1)].item()
        assert answer.runner_up.gain == pytest.approx(others.max(), abs=CLOSE)
    else:
        assert answer.runner_up is None
    # Prices.
    for name, price in zip(
        ("mean_bits", "latency_ms", "memory_mib"),
        (answer.prices.bit, answer.prices.ms, answer.prices.mib),
        strict=True,
    ):
        bound = getattr(budget, name)
        if bound is None:
            assert price is None
        else:
            raised = every.most(replace(budget, **{name: bound + 1}))
            assert raised is not None
            assert price == pytest.approx(raised - most, abs=CLOSE)
    if front:
        check_front(every, budget, answer)


def check_point(every: Enumeration, point: Point) -> None:
    row = int(np.flatnonzero((every.all == point.indices).all(1))[0])
    assert point.schedule == tuple(every.costs.names[index] for index in point.indices)
    assert point.mean_bits == pytest.approx(every.bits[row])
    assert point.gain == pytest.approx(every.gains[row], abs=CLOSE)
    for value, spent in ((point.latency_ms, every.ms[row]), (point.memory_mib, every.mib[row])):
        assert np.isnan(spent) if value is None else value == pytest.approx(spent)


def check_front(every: Enumeration, budget: Budget, answer: Allocation) -> None:
    assert answer.front_complete
    for point in answer.front:
        check_point(every, point)
    got = [
        (p.mean_bits, np.inf if p.latency_ms is None else p.latency_ms, p.gain)
        for p in answer.front
    ]
    want = every.front(budget)
    assert len(got) == len(want)
    for point in want:
        assert np.isclose(got, point, rtol=0, atol=1e-7).all(axis=1).any()


def test_equals_enumeration_on_small_problems() -> None:
    for every, budget in problems(0, 700):
        check_against_enumeration(every, budget, front=False)


def test_the_front_equals_enumeration_on_small_problems() -> None:
    for every, budget in problems(1, 300, windows=4, count=3):
        check_against_enumeration(every, budget, front=True)


@pytest.mark.parametrize("most_ways", [1, 2, 5])
def test_equals_enumeration_however_windows_are_joined_and_labels_compared(
    most_ways: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small problems are settled before there is much to compare: let it compare always.
    monkeypatch.setattr("tuner.carry._MOST_WAYS", most_ways)
    monkeypatch.setattr("tuner.carry._FEW_LABELS", 1)
    monkeypatch.setattr("tuner.labels._BLOCK", 3)
    for every, budget in problems(10 + most_ways, 200, windows=6):
        check_against_enumeration(every, budget, front=len(every.all) < 100)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
def test_equals_enumeration_on_thousands_of_problems(seed: int) -> None:
    for every, budget in problems(seed, 1000):
        check_against_enumeration(every, budget, front=len(every.all) < 100)


# What the answer must be, whatever the numbers.


def three(windows: int = 4, **others: object) -> Costs:
    values: dict[str, object] = {
        "names": ("low", "mid", "high"),
        "bits": np.array([4.0, 8.0, 16.0]),
        "passes": np.full(windows, 2.0),
        "latency_ms": np.array([1.0, 2.0, 4.0]),
    }
    return Costs(**(values | others))  # type: ignore[arg-type]


def test_gains_of_zero_return_the_uniform_schedule_of_most_bits_within_the_budgets() -> None:
    gain = np.zeros((4, 3))
    assert allocate(gain, three(), Budget()).schedule == ("high",) * 4
    answer = allocate(gain, three(), Budget(mean_bits=9.0))
    assert answer.schedule == ("mid",) * 4
    assert answer.uniform and answer.reason.startswith("uniform mid")
    assert allocate(gain, three(), Budget(latency_ms=8.0)).schedule == ("low",) * 4


def test_a_gain_that_only_rounding_makes_is_a_tie() -> None:
    gain = np.tile([0.1, 0.1, 0.1], (7, 1))
    gain[3, 0] = np.nextafter(0.1, 1)
    answer = allocate(gain, three(7), Budget(mean_bits=10))
    assert answer.schedule == ("mid",) * 7


def test_of_uniform_schedules_of_equal_bits_the_faster_is_the_reference() -> None:
    costs = three(bits=np.array([8.0, 8.0, 16.0]), latency_ms=np.array([3.0, 2.0, 4.0]))
    assert allocate(np.zeros((4, 3)), costs, Budget(mean_bits=8)).schedule == ("mid",) * 4


def test_without_a_uniform_schedule_ties_go_to_the_fewest_switches() -> None:
    # low is too slow, high has too many bits: two of each, in any order, and all gain the same.
    costs = Costs(
        names=("low", "high"),
        bits=np.array([4.0, 12.0]),
        passes=np.ones(4),
        latency_ms=np.array([4.0, 2.0]),
        switch_ms=0.01,
    )
    answer = allocate(np.zeros((4, 2)), costs, Budget(mean_bits=8, latency_ms=12.1))
    assert sum(a != b for a, b in itertools.pairwise(answer.indices)) == 1
    assert not answer.uniform
    assert "no uniform schedule is within the budgets" in answer.reason


def test_the_gain_does_not_fall_when_a_budget_rises() -> None:
    rng = np.random.default_rng(11)
    for _ in range(20):
        gain, costs = draw(rng, 6, 4)
        every = Enumeration(gain, costs)
        for name, spent in (("mean_bits", every.bits), ("memory_mib", every.mib)):
            spent = spent[np.isfinite(spent)]
            if not len(spent):
                continue
            gains = [
                allocate(gain, costs, Budget(**{name: bound}), front_limit=0).gain
                for bound in np.linspace(spent.min(), spent.max() + 0.1, 5)
            ]
            assert (np.diff(gains) >= -CLOSE).all()


def test_a_budget_is_met_to_within_a_billionth_and_numbers_are_not_rounded() -> None:
    gain = np.array([[0.0, 1.0, 2.0]] * 3)
    costs = three(3, passes=np.array([0.1, 0.2, 0.3]), bits=np.array([0.1, 0.3, 0.7]))
    answer = allocate(gain, costs, Budget(mean_bits=0.3))
    assert answer.schedule != ("low",) * 3
    assert answer.mean_bits <= 0.3 * SLACK
    assert allocate(gain, costs, Budget(mean_bits=0.7)).schedule == ("high",) * 3
    assert allocate(gain, costs, Budget(mean_bits=0.7 * (1 - 1e-8))).schedule != ("high",) * 3


def test_the_switch_cost_joins_windows() -> None:
    gain = np.array([[0.0, 0.0, 1.0], [0.0, 0.0, 0.9], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    budget = Budget(latency_ms=2 * 4 + 2 * 4 + 2 * 1 + 2 * 1)  # two windows at high
    apart = allocate(gain, three(), budget)
    assert apart.schedule == ("high", "low", "high", "low")
    together = allocate(gain, three(switch_ms=0.9), replace(budget, latency_ms=20.9))
    assert together.schedule[:2] == ("high", "high") and together.latency_ms is not None
    assert together.latency_ms <= 20.9 * SLACK


def test_families_are_paid_for_once() -> None:
    costs = three(
        families=("w", "w", "full"),
        family_mib={"w": 10.0, "full": 40.0},
        alone_mib=np.array([1.0, 2.0, 4.0]),
        activation_mib=5.0,
    )
    gain = np.array([[0.0, 1.0, 5.0], [0.0, 0.1, 0.2], [0.0, 2.0, 2.0], [0.0, 0.0, 0.0]])
    answer = allocate(gain, costs, Budget(mean_bits=6, memory_mib=18.0))
    assert set(answer.schedule) == {"low", "mid"}
    assert answer.memory_mib == 18.0
    assert answer.prices.mib == 0.0
    assert allocate(gain, costs, Budget(mean_bits=6, memory_mib=17.9)).schedule == ("low",) * 4
    assert allocate(gain, costs, Budget(mean_bits=6, memory_mib=17.5)).prices.mib == pytest.approx(
        3.0
    )


def test_what_is_not_known_is_no_candidate_under_its_budget_and_null_without() -> None:
    gain = np.array([[0.0, 1.0, 2.0]] * 4)
    costs = three(latency_ms=[1.0, None, 4.0], alone_mib=[0.0, 1.0, None])
    assert "mid" not in allocate(gain, costs, Budget(latency_ms=20.0)).schedule
    assert "high" not in allocate(gain, costs, Budget(memory_mib=20.0)).schedule
    free = allocate(gain, costs, Budget(mean_bits=9))
    assert "mid" in free.schedule
    assert free.latency_ms is None
    assert allocate(gain, costs, Budget()).memory_mib is None


def test_simulated_precisions_compete_among_themselves_and_never_claim_a_latency() -> None:
    costs = three(simulated=(True, True, True))
    answer = allocate(np.array([[0.0, 1.0, 2.0]] * 4), costs, Budget(mean_bits=8))
    assert answer.latency_ms is None
    assert all(point.latency_ms is None for point in answer.front)
    with pytest.raises(BudgetError, match="simulated") as caught:
        allocate(np.zeros((4, 3)), costs, Budget(latency_ms=100.0))
    assert caught.value.nearest == {"latency_ms": None}
    with pytest.raises(ValueError, match=r"simulated and executed .* only low, high, or only mid"):
        three(simulated=(False, True, False))


def test_the_message_names_the_smallest_budget_and_it_fits() -> None:
    gain = np.zeros((3, 3))
    costs = three(3, latency_ms=np.array([1.0, 2.0, 4.0]) / 3)
    with pytest.raises(BudgetError, match="within 2 mean bits; the smallest that fits is 4 mean"):
        allocate(gain, costs, Budget(mean_bits=2))
    with pytest.raises(BudgetError) as caught:
        allocate(gain, costs, Budget(mean_bits=5, latency_ms=1.9))
    assert caught.value.nearest == {"mean_bits": None, "latency_ms": pytest.approx(2.0)}
    assert caught.value.exit_code == 3
    said = str(caught.value).split("smallest that fits is ")[1].split(" ms")[0]
    allocate(gain, costs, Budget(mean_bits=5, latency_ms=float(said)))
    with pytest.raises(BudgetError, match="only one is raised") as caught:
        allocate(gain, costs, Budget(mean_bits=2, latency_ms=1.0))
    assert caught.value.nearest == {"mean_bits": None, "latency_ms": None}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"names": ("low", "low", "high")}, "differ"),
        ({"names": ()}, "must be given"),
        ({"bits": np.array([4.0, np.nan, 16.0])}, "bits .* nan at"),
        ({"bits": np.array([4.0, 8.0])}, "shape"),
        ({"bits": np.array([4.0, 0.0, 8.0])}, "positive"),
        ({"passes": np.array([1.0, -2.0, 1.0, 1.0])}, "passes .* -2.0"),
        ({"passes": np.zeros(4)}, "more than 0"),
        ({"passes": np.array([np.inf, 1, 1, 1])}, "passes .* inf"),
        ({"latency_ms": np.array([1.0, -1.0, 1.0])}, "latency_ms .* -1.0"),
        ({"latency_ms": np.ones((3, 3))}, r"latency_ms .* \(4, 3\), got \(3, 3\)"),
        ({"latency_ms": np.array([1.0, np.inf, 1.0])}, "inf"),
        ({"families": ("a", "b")}, "families"),
        ({"family_mib": {"low": -1.0}}, "family_mib of 'low'"),
        ({"alone_mib": np.array([1.0, -1.0, 0.0])}, "alone_mib"),
        ({"activation_mib": np.nan}, "activation_mib"),
        ({"switch_ms": -0.1}, "switch_ms"),
        ({"simulated": (True,)}, "simulated"),
        ({"bits": np.array([1e308, 1.0, 1.0])}, "too large"),
    ],
)
def test_costs_that_make_no_sense_are_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        three(**change)


def test_gains_and_budgets_that_make_no_sense_are_refused() -> None:
    for bad in (np.nan, np.inf, 1e308):
        gain = np.zeros((4, 3))
        gain[2, 1] = bad
        with pytest.raises(ValueError, match=r"finite, got .* at \[2, 1\]"):
            allocate(gain, three(), Budget())
    with pytest.raises(ValueError, match=r"\(4, 3\), got \(3, 4\)"):
        allocate(np.zeros((3, 4)), three(), Budget())
    with pytest.raises(ValueError, match="front_limit"):
        allocate(np.zeros((4, 3)), three(), Budget(), front_limit=-1)
    for bad in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="mean_bits"):
            Budget(mean_bits=bad)


def test_a_front_over_the_limit_is_thinned_to_the_best_of_equal_steps_and_says_so() -> None:
    gain, costs, budget = large(16, 4, 0)
    whole = allocate(gain, costs, budget, front_limit=10_000)
    assert whole.front_complete and len(whole.front) > 40
    thin = allocate(gain, costs, budget, front_limit=10)
    assert not thin.front_complete
    assert {point.indices for point in thin.front} <= {point.indices for point in whole.front}
    assert 10 < len(thin.front) <= 20  # two axes have a budget
    for axis in ("mean_bits", "latency_ms"):
        spent = np.array([getattr(point, axis) for point in whole.front])
        gains = np.array([point.gain for point in whole.front])
        kept = np.isin(gains, [point.gain for point in thin.front])
        for low, high in itertools.pairwise(np.linspace(spent.min(), spent.max(), 11)):
            inside = (spent > low + CLOSE) & (spent < high - CLOSE)
            if inside.any():
                mine = kept & (spent >= low - CLOSE) & (spent <= high + CLOSE)
                assert gains[mine].max() >= gains[inside].max()
    assert allocate(gain, costs, budget, front_limit=0).front == ()


def test_a_front_too_large_to_list_is_scanned_and_what_it_has_is_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gain, costs, budget = large(10, 4, 1, switch_ms=0.2)
    whole = allocate(gain, costs, budget, front_limit=10_000)
    monkeypatch.setattr("tuner.problem._MOST_FRONT_LABELS", 10)
    scanned = allocate(gain, costs, budget, front_limit=10)
    assert whole.front_complete and not scanned.front_complete
    assert len(scanned.front) >= 10
    all_ = np.array([(p.mean_bits, p.latency_ms, -p.gain) for p in whole.front])
    for point in scanned.front:
        mine = np.array([point.mean_bits, point.latency_ms, -point.gain])
        assert not ((all_ < mine - 1e-9).any(1) & (all_ <= mine + 1e-9).all(1)).any()


def test_the_answer_is_the_same_without_a_front_and_prints_as_the_contract_says() -> None:
    gain, costs, budget = large(12, 4, 2, switch_ms=0.1)
    whole, bare = allocate(gain, costs, budget), allocate(gain, costs, budget, front_limit=0)
    assert whole.point == bare.point and whole.runner_up == bare.runner_up
    printed = whole.to_json()
    assert list(printed) == [
        "schedule",
        "mean_bits",
        "latency_ms",
        "memory_mib",
        "gain",
        "uniform",
        "reason",
        "runner_up",
        "front",
        "front_complete",
        "prices",
    ]
    assert printed["prices"].keys() == {"bit", "ms", "mib"}
    assert printed["front"][0].keys() == {
        "mean_bits",
        "latency_ms",
        "memory_mib",
        "gain",
        "schedule",
    }


def test_many_equal_windows_are_no_trouble() -> None:
    rng = np.random.default_rng(3)
    row = np.sort(rng.uniform(0, 1, 5))
    _, costs, budget = large(60, 5, 3, passes=np.full(60, 1.7))
    answer = allocate(np.tile(row, (60, 1)), costs, budget, front_limit=0)
    assert answer.gain > 0
