"""The measured refinement: never worse, never out of budget, never above its effort."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from engines.schedule import Schedule
from tuner.refine import neighbours, refine

NAMES = ("fp32", "int8", "w4")
PROMPTS = 64


class Bench:
    """Schedules whose worth is known, measured with the noise of prompts."""

    def __init__(self, seed: int, noise: float = 0.1) -> None:
        rng = np.random.default_rng(seed)
        self.worth = {
            Schedule(names): rng.uniform(0.2, 0.8) for names in itertools.product(NAMES, repeat=3)
        }
        self.of_prompt = rng.normal(0, noise, PROMPTS)
        self.seen: list[Schedule] = []

    def measure(self, schedule: Schedule) -> NDArray[np.float64]:
        self.seen.append(schedule)
        wiggle = np.random.default_rng(len(self.seen)).normal(0, 0.01, PROMPTS)
        return self.worth[schedule] + self.of_prompt + wiggle


def few_fp32(schedule: Schedule) -> bool:
    return schedule.precisions.count("fp32") <= 1


def test_neighbours_differ_in_one_window_or_have_two_swapped_each_once() -> None:
    now = Schedule(("fp32", "int8", "int8"))
    found = list(neighbours(now, NAMES))
    assert len(found) == len(set(found))
    assert now not in found
    for each in found:
        differ = [w for w in range(3) if each.precisions[w] != now.precisions[w]]
        assert len(differ) == 1 or (
            len(differ) == 2 and sorted(each.precisions) == sorted(now.precisions)
        )
    assert len(found) == 3 * 2 + 2


@pytest.mark.parametrize("seed", range(20))
def test_the_end_is_no_worse_than_the_start_within_budget_and_effort(seed: int) -> None:
    bench, start = Bench(seed), Schedule(("int8", "int8", "w4"))
    effort = 1 + seed
    found = refine(start, NAMES, few_fp32, lambda s: 0.0, bench.measure, effort, seed)
    assert found.tried == len(bench.seen) <= effort
    assert len(set(bench.seen)) == len(bench.seen)
    assert all(few_fp32(schedule) for schedule in bench.seen)
    assert bench.worth[found.schedule] >= bench.worth[start] - 0.01


@pytest.mark.parametrize("seed", range(5))
def test_with_effort_enough_it_ends_where_no_neighbour_is_better(seed: int) -> None:
    bench = Bench(seed)
    found = refine(Schedule(("w4",) * 3), NAMES, few_fp32, lambda s: 0.0, bench.measure, 99, seed)
    best = bench.worth[found.schedule]
    near = [each for each in neighbours(found.schedule, NAMES) if few_fp32(each)]
    assert all(bench.worth[each] < best + 0.01 for each in near)


def test_the_most_promising_neighbour_is_tried_first() -> None:
    bench, start = Bench(1), Schedule(("w4", "w4", "w4"))
    promised = Schedule(("w4", "int8", "w4"))
    refine(start, NAMES, lambda s: True, lambda s: float(s == promised), bench.measure, 2)
    assert bench.seen == [start, promised]


def test_what_noise_could_explain_moves_nothing() -> None:
    start = Schedule(("int8", "int8"))

    def noise(schedule: Schedule) -> NDArray[np.float64]:
        return np.random.default_rng(len(set(schedule.precisions))).normal(0.5, 0.2, PROMPTS)

    found = refine(start, NAMES, lambda s: True, lambda s: 0.0, noise, 50)
    assert found.schedule == start


def test_an_effort_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="evaluations >= 1"):
        refine(Schedule(("int8",)), NAMES, few_fp32, lambda s: 0.0, Bench(0).measure, 0)
