"""Which trial is best: within the floors, by the goal, and never by noise."""

from __future__ import annotations

import pytest

from engines.errors import BackendError, BudgetError
from tests.tuner.spaces import SMALL
from tuner.best import best_of, best_trial, cheaper
from tuner.space import default_candidate
from tuner.trials import TrialResult


def trial(
    number: int, cost: float, loss: float, missed: float = 0.0, **more: object
) -> TrialResult:
    return TrialResult(
        number=number,
        candidate=default_candidate(SMALL),
        cost=cost,
        loss=loss,
        violations={"edit: loss": missed},
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("goal", "trials", "best"),
    [
        ("latency", [trial(0, 3, 0), trial(1, 2, 0.9), trial(2, 1, 5, missed=4)], 1),
        ("latency", [trial(0, 2, 0), trial(1, 2, 0)], 0),
        ("quality", [trial(0, 3, 0.0), trial(1, 2, 0.4), trial(2, 1, 0.9)], 1),
        ("latency", [trial(0, 3, 9, missed=8), trial(1, 1, 20, missed=19)], 0),
        ("latency", [trial(0, 0, 0, failed="no engine"), trial(1, 9, 0)], 1),
        ("memory", [trial(0, 1, 0, memory_mib=4.0), trial(1, 9, 0, memory_mib=3.0)], 1),
        ("memory", [trial(0, 2, 0, memory_mib=3.0), trial(1, 1, 0, memory_mib=3.0)], 1),
    ],
)
def test_the_cheapest_trial_within_the_loss_ships(
    goal: str, trials: list[TrialResult], best: int
) -> None:
    assert best_trial(trials, goal).number == best


def test_costs_within_noise_are_a_tie_that_the_earliest_wins() -> None:
    first = trial(0, 10.0, 0, low=9.8, high=10.3)
    near = trial(1, 9.7, 0, low=9.5, high=9.9)
    far = trial(2, 9.0, 0, low=8.9, high=9.2)
    assert not cheaper(near, first)
    assert cheaper(far, first)
    assert best_trial([first, near], "latency").number == 0
    assert best_trial([first, near, far], "latency").number == 2


def test_rounds_in_which_two_ran_in_turns_decide_between_them() -> None:
    first = trial(0, 10.0, 0, low=9.0, high=11.0)
    shown = trial(1, 9.9, 0, low=9.0, high=11.0, against=held(0, 0.97, 0.96, 0.98))
    equal = trial(1, 5.0, 0, low=4.9, high=5.1, against=held(0, 0.99, 0.95, 1.02))
    assert cheaper(shown, first)
    assert best_trial([first, shown], "latency").number == 1
    assert not cheaper(equal, first)
    assert best_trial([first, equal], "latency").number == 0
    slower = trial(1, 5.0, 0, low=4.9, high=5.1, against=held(0, 1.2, 1.1, 1.3))
    assert cheaper(first, slower)


def held(number: int, ratio: float, low: float, high: float) -> dict[str, float]:
    return {"trial": float(number), "ratio": ratio, "low": low, "high": high}


def test_a_trial_is_never_cheaper_than_itself() -> None:
    one = trial(0, 10.0, 0, low=9.0, high=11.0)
    assert not cheaper(one, one)


def test_the_best_so_far_is_feasible_or_none() -> None:
    assert best_of([], "latency") is None
    assert best_of([trial(0, 1, 9, missed=8)], "latency") is None
    found = best_of([trial(0, 1, 9, missed=8), trial(1, 2, 0)], "latency")
    assert found is not None and found.number == 1


def test_where_every_trial_failed_the_first_reason_is_told() -> None:
    with pytest.raises(BackendError, match="the first with: no kernel"):
        best_trial([trial(0, 0, 0, failed="no kernel"), trial(1, 0, 0, failed="?")], "latency")
    nearest = {"latency_ms": 3.0}
    with pytest.raises(BudgetError, match="too little") as caught:
        best_trial([trial(0, 0, 0, failed="too little", nearest=nearest)], "latency")
    assert caught.value.nearest == nearest
