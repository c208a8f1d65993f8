"""The guide: proposes what is left, near the front, and with the options that proved best."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tuner.hypervolume import hypervolume
from tests.tuner.spaces import SMALL, Landscape, large
from tuner.guide import guided, nondominated
from tuner.space import default_candidate, first_candidates, offers
from tuner.trials import TrialResult


def begun(space: tuple, seed: int) -> list[TrialResult]:  # type: ignore[type-arg]
    land = Landscape(space, seed)
    return [land(each, number) for number, each in enumerate(first_candidates(space))]


@pytest.mark.parametrize("seed", range(4))
def test_a_proposal_is_offered_and_not_taken(seed: int) -> None:
    space = large()
    results = begun(space, seed)
    land = Landscape(space, seed)
    taken = {each.candidate for each in results}
    for number in range(len(results), 60):
        found = guided(space, results, taken, number)
        if found is None:
            break
        assert offers(space, found)
        assert found not in taken
        taken.add(found)
        results.append(land(found, number))
    assert len(results) > 30


def test_a_proposal_has_the_options_that_made_others_cheapest() -> None:
    space = large()
    land, results = Landscape(space, 3), begun(space, 3)
    default = default_candidate(space)
    best = {}
    for knob in space:
        if knob.kind == "backend":
            costs = {
                each: land.result(default.changed(**{knob.name: each})).cost
                for each in knob.choices
            }
            best[knob.name] = min(costs, key=lambda each: costs[each])
    found = guided(space, results, {each.candidate for each in results}, 0)
    assert found is not None
    assert found.options == best


def test_where_nothing_is_feasible_there_is_no_front_to_guide() -> None:
    land = Landscape(SMALL, 0)
    failed = TrialResult(
        number=0, candidate=default_candidate(SMALL), cost=0.0, loss=100.0, failed="crashed"
    )
    assert guided(SMALL, [failed], set(), 0) is None
    assert guided(SMALL, [], set(), 0) is None
    begun_ = [land(each) for each in first_candidates(SMALL)]
    assert guided(SMALL, begun_, {each.candidate for each in begun_}, 0) is not None


def test_nothing_is_left_where_everything_is_taken() -> None:
    land = Landscape(SMALL, 1)
    results = land.everything()
    assert guided(SMALL, results, {each.candidate for each in results}, 0) is None


@pytest.mark.parametrize("seed", range(5))
def test_the_nondominated_points_are_those_that_no_other_dominates(seed: int) -> None:
    points = np.random.default_rng(seed).integers(0, 5, (40, 3)).astype(float)
    kept = nondominated(points)
    for index, point in enumerate(points):
        dominated = any((other <= point).all() and (other < point).any() for other in points)
        assert any((points[each] == point).all() for each in kept) == (not dominated), index
    assert len({tuple(points[each]) for each in kept}) == len(kept)


@pytest.mark.parametrize("seed", range(5))
def test_the_hypervolume_equals_a_count_of_cells(seed: int) -> None:
    points = np.random.default_rng(seed).integers(0, 6, (12, 3)).astype(float)
    cells = np.stack(np.meshgrid(*[np.arange(6)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    dominated = (points[:, None, :] <= cells[None, :, :]).all(axis=2).any(axis=0)
    assert hypervolume(points, (6.0, 6.0, 6.0)) == dominated.sum()
