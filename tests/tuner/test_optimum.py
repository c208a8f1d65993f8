from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tests.tuner.enumeration import large
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
    up_to = float(cut_off.reason.split("up to ")[1].split(" nats")[0])
    assert cut_off.gain <= proven.gain <= cut_off.gain + up_to * 1.01


@pytest.mark.slow
@pytest.mark.parametrize("switch_ms", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.filterwarnings("default")  # scipy's own
def test_equals_an_integer_program_on_large_problems(seed: int, switch_ms: float) -> None:
    optimize = pytest.importorskip("scipy.optimize", reason="pip install 'cadenza[dev]'")
    rng = np.random.default_rng(seed)
    passes = None if seed == 0 else rng.uniform(0.5, 3.0, 40)
    gain, costs, budget = large(40, 5, seed, switch_ms, passes)
    windows, count = gain.shape
    switches = windows - 1
    one = np.kron(np.eye(windows), np.ones(count))
    spent = np.zeros((2, gain.size + switches))
    spent[0, : gain.size] = costs.window_bits.ravel()
    spent[1, : gain.size] = costs.window_ms.ravel()
    spent[1, gain.size :] = switch_ms
    step = np.zeros((switches * count, gain.size + switches))
    for row, (window, index) in enumerate(itertools.product(range(switches), range(count))):
        step[row, (window + 1) * count + index] = 1
        step[row, window * count + index] = -1
        step[row, gain.size + window] = -1
    assert budget.mean_bits is not None and budget.latency_ms is not None
    bounds = [budget.mean_bits * costs.passes.sum(), budget.latency_ms]
    solved = optimize.milp(
        -np.append(gain.ravel(), np.zeros(switches)),
        integrality=np.append(np.ones(gain.size), np.zeros(switches)),
        bounds=optimize.Bounds(0, 1),
        constraints=[
            optimize.LinearConstraint(np.hstack((one, np.zeros((windows, switches)))), 1, 1),
            optimize.LinearConstraint(spent, -np.inf, bounds),
            optimize.LinearConstraint(step, -np.inf, 0),
        ],
        options={"mip_rel_gap": 0.0},
    )
    answer = allocate(gain, costs, replace(budget, memory_mib=None), front_limit=0)
    assert answer.gain == pytest.approx(-solved.fun, rel=1e-6)
