from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engines.errors import BudgetError
from tests.tuner.enumeration import realistic
from tuner.allocate import Budget, Costs, allocate


def test_a_search_that_is_cut_off_says_by_how_much_it_may_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # All but proportional gains and costs: nothing but trying tells one schedule from another.
    rng = np.random.default_rng(0)
    passes = rng.uniform(1.0, 2.0, 30)
    costs = Costs(names=("a", "b", "c"), bits=np.array([1.0, 2.0, 3.0]), passes=passes)
    gain = costs.window_bits + rng.normal(0, 1e-3, (30, 3))
    proven = allocate(gain, costs, Budget(mean_bits=2.01), front_limit=0)
    monkeypatch.setattr("tuner.optimum._LOOKS", ())
    monkeypatch.setattr("tuner.optimum._MOST_LABELS", 60)
    cut_off = allocate(gain, costs, Budget(mean_bits=2.01), front_limit=0)
    assert "cut off" not in proven.reason
    assert "the search was cut off, and another may gain up to" in cut_off.reason
    up_to = float(cut_off.reason.split("up to ")[1].split(" more")[0])
    assert "the search for the runner-up was cut off, up to" in cut_off.reason
    assert cut_off.gain <= proven.gain <= cut_off.gain + up_to * 1.01


SIZES = [(16, 4), (64, 6), (64, 8)]


def check_against_program(gain: np.ndarray, costs: Costs, budget: Budget) -> None:
    from tests.tuner.program import Program

    windows = len(gain)
    solved = Program.of(gain, costs, budget).solve()
    if solved is None:
        with pytest.raises(BudgetError):
            allocate(gain, costs, budget, front_limit=0)
        return
    answer = allocate(gain, costs, budget, front_limit=0)
    assert costs.within(np.array(answer.indices), budget)
    # Its schedule may exceed a budget by the solver's own tolerance, and so gain a little more.
    top = float(gain[np.arange(windows), solved[1]].sum())
    if costs.within(solved[1], budget):
        assert answer.gain >= top - 1e-9 * abs(top)
    assert answer.gain == pytest.approx(solved[0], rel=1e-6)
    assert "cut off" not in answer.reason


@pytest.mark.parametrize("switch_share", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.filterwarnings("default")  # scipy's own
def test_equals_an_integer_program_under_three_budgets(seed: int, switch_share: float) -> None:
    pytest.importorskip("scipy.optimize", reason="pip install 'cadenza[dev]'")
    check_against_program(*realistic(16, 4, seed, switch_share))


@pytest.mark.slow
@pytest.mark.parametrize("switch_share", [0.0, 0.02, 0.3])
@pytest.mark.parametrize(("windows", "count"), SIZES)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.filterwarnings("default")  # scipy's own
def test_equals_an_integer_program_on_large_problems(
    seed: int, windows: int, count: int, switch_share: float
) -> None:
    pytest.importorskip("scipy.optimize", reason="pip install 'cadenza[dev]'")
    rng = np.random.default_rng(seed)
    gain, costs, budget = realistic(windows, count, seed, switch_share)
    check_against_program(gain, costs, budget)
    # Passes of any number, and a latency of their own for each window.
    passes = rng.uniform(0.2, 3.0, windows) * (rng.random(windows) > 0.05)
    own = np.asarray(costs.latency_ms) * rng.uniform(0.8, 1.25, (windows, 1))
    uneven = replace(costs, passes=passes, latency_ms=own)
    spent = uneven.window_ms
    low, high = spent.min(axis=1).sum(), spent.max(axis=1).sum()
    ms = float(low + rng.uniform(0.2, 0.7) * (high - low))
    check_against_program(gain, uneven, replace(budget, latency_ms=ms))
