"""The sweeps: in their order, nothing twice, lazily, and promoting only what deserves it."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest

from tests.tuner.spaces import SMALL, Landscape, large
from tuner.space import Candidate, Knob, default_candidate, size
from tuner.strategies import MOST_POSITIVE, STRATEGIES, candidate_at, every, proposed
from tuner.trials import TrialResult

HUGE = (*SMALL[:-1], *(Knob(f"o{n}", tuple(range(10)), "backend", "o") for n in range(9)))


def walk(strategy: str, space: tuple[Knob, ...], most: int, seed: int = 3) -> list[TrialResult]:
    land, results = Landscape(space, 0), list[TrialResult]()
    while len(results) < most:
        taken = {result.candidate for result in results}
        found = proposed(strategy, space, results, taken, seed + len(results))
        if found is None:
            break
        results.append(land(found, len(results)))
    return results


def changes(candidate: Candidate, space: tuple[Knob, ...]) -> int:
    default = default_candidate(space).values
    return sum(value != default[name] for name, value in candidate.items)


def test_fast_changes_one_knob_at_a_time_and_is_spent() -> None:
    walked = walk("fast", SMALL, 99)
    assert walked[0].candidate == default_candidate(SMALL)
    assert all(changes(each.candidate, SMALL) == 1 for each in walked[1:])
    assert len({each.candidate for each in walked}) == len(walked)
    assert len(walked) == 1 + sum(len(knob.choices) - 1 for knob in SMALL)


def test_full_goes_through_every_candidate_once_in_order() -> None:
    walked = [each.candidate for each in walk("full", SMALL, 999)]
    names = [knob.name for knob in SMALL]
    product = itertools.product(*(knob.choices for knob in SMALL))
    assert walked == [Candidate(tuple(zip(names, each, strict=True))) for each in product]


def test_random_draws_every_candidate_once() -> None:
    walked = [each.candidate for each in walk("random", SMALL, 999)]
    assert set(walked) == set(every(SMALL))
    assert len(walked) == size(SMALL) == 72
    assert walked != [each.candidate for each in walk("random", SMALL, 999, seed=8)]


def test_mixed_goes_on_with_combinations_of_what_was_positive_alone() -> None:
    walked = walk("mixed", SMALL, 999)
    singles = walk("fast", SMALL, 99)
    assert [each.candidate for each in walked[: len(singles)]] == [e.candidate for e in singles]
    default = walked[0]
    good = {
        item
        for each in singles[1:]
        if each.feasible and each.interval[1] < default.interval[0]
        for item in set(each.candidate.items) - set(default.candidate.items)
    }
    assert good
    for each in walked[len(singles) :]:
        assert set(each.candidate.items) - set(default.candidate.items) <= good
    counts = [1 + sum(name == knob.name for name, _ in good) for knob in SMALL]
    combinations = 1
    for count in counts:
        combinations *= count
    assert len(walked) == len(singles) + combinations - 1 - len(good)


def test_mixed_promotes_nothing_that_failed_or_misses_a_constraint() -> None:
    results = [
        replace(each, violations={"loss": 1.0}) if number % 2 else replace(each, failed="crashed")
        for number, each in enumerate(walk("fast", SMALL, 99))
    ]
    results[0] = Landscape(SMALL, 0)(default_candidate(SMALL))
    taken = {each.candidate for each in results}
    assert proposed("mixed", SMALL, results, taken, 0) is None


def test_mixed_combines_ten_knobs_at_most_and_those_that_gain_most() -> None:
    many = (*SMALL[:7], *(Knob(f"o{n}", (0, 1), "backend", "o") for n in range(14)))
    results = []
    for each in walk("fast", many, 99):
        ones = [int(name[1:]) for name, value in each.candidate.options.items() if value]
        cost = 50.0 - sum(ones) - len(ones)
        results.append(replace(each, cost=cost, low=cost, high=cost, violations={}))
    taken = {each.candidate for each in results}
    combined = set()
    for _ in range(40):
        found = proposed("mixed", many, results, taken, 0)
        assert found is not None
        taken.add(found)
        combined |= {name for name, value in found.options.items() if value}
    assert MOST_POSITIVE == 10
    assert combined <= {f"o{n}" for n in range(4, 14)}


@pytest.mark.parametrize("strategy", [each for each in STRATEGIES if each != "tpe"])
def test_a_space_of_billions_is_never_written_out(strategy: str) -> None:
    began = time.monotonic()
    assert size(HUGE) > 10**9
    assert len(walk(strategy, HUGE, 60)) == 60
    assert time.monotonic() - began < 30.0  # a product would never end


def test_a_candidate_s_number_counts_in_mixed_radix() -> None:
    space = large()
    assert candidate_at(space, 0) == default_candidate(space)
    assert len({candidate_at(space, index) for index in range(0, size(space), 7)}) == -(
        -size(space) // 7
    )


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="strategy is one of tpe, fast, full, mixed, random"):
        proposed("best", SMALL, [], set(), 0)
