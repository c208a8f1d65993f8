"""Bisection finds the window that mends most where errors add up, within its measurements."""

from __future__ import annotations

import numpy as np
import pytest

from engines.schedule import Schedule
from tests.evidence.bisection import bisect


@pytest.mark.parametrize("seed", range(20))
def test_where_errors_add_up_bisection_raises_the_window_that_mends_most(seed: int) -> None:
    # One large contribution among small ones: whatever half holds it is the better half.
    rng = np.random.default_rng(seed)
    windows = int(rng.integers(2, 12))
    mends = rng.uniform(0.0, 0.01, windows)
    mends[rng.integers(windows)] = 1.0
    asked: list[Schedule] = []

    def error(schedule: Schedule) -> float:
        asked.append(schedule)
        return float(mends[[name != "a8" for name in schedule.precisions]].sum())

    def fits(schedule: Schedule) -> bool:
        return schedule.precisions.count("a8") <= 1

    found = bisect(windows, "a3", "a8", error, fits)
    assert found.schedule.precisions[int(mends.argmax())] == "a8"
    assert fits(found.schedule)
    assert len(asked) == len(set(asked)) == found.measured <= windows + 1


def test_without_a_budget_bisection_raises_all_and_within_none_it_says_so() -> None:
    found = bisect(4, "a3", "a8", lambda s: float(s.precisions.count("a3")), lambda s: True)
    assert found.schedule == Schedule.uniform("a8", 4)
    with pytest.raises(ValueError, match="uniform a3"):
        bisect(4, "a3", "a8", lambda s: 0.0, lambda s: False)
