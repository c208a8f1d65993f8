"""The distances equal their definitions, over any split of the elements; NaN never passes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engines.distance import DISTANCES, Distances, distances


def pair(seed: int, shape: tuple[int, ...] = (4, 7)) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    reference = rng.normal(size=shape).astype(np.float32)
    return (reference + 0.1 * rng.normal(size=shape)).astype(np.float32), reference


@pytest.mark.parametrize("seed", range(5))
def test_the_distances_are_what_their_definitions_say(seed: int) -> None:
    a, r = (each.astype(np.float64) for each in pair(seed))
    found = distances([(a, r)], atol=0.05, rtol=0.01)
    gap = np.abs(a - r)
    assert found.l0 == np.mean(gap > 0.05 + 0.01 * np.abs(r))
    assert found.l1 == pytest.approx(gap.mean())
    assert found.l2 == pytest.approx((gap**2).mean())
    assert found.lInf == gap.max()
    assert found.cos == pytest.approx(1 - (a * r).sum() / np.linalg.norm(a) / np.linalg.norm(r))


@pytest.mark.parametrize("seed", range(5))
def test_any_split_of_the_elements_gives_the_same(seed: int) -> None:
    a, r = pair(seed, (12, 5))
    whole = distances([(a, r)])
    parts = distances([(a[:1], r[:1]), (a[1:1], r[1:1]), (a[1:9], r[1:9]), (a[9:], r[9:])])
    for name in DISTANCES:
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-12)


def test_equal_tensors_are_at_no_distance_and_opposite_ones_far() -> None:
    a, _ = pair(0)
    same = distances([(a, a)])
    assert (same.l0, same.l1, same.l2, same.lInf) == (0.0, 0.0, 0.0, 0.0)
    assert same.cos == pytest.approx(0.0, abs=1e-12)
    assert distances([(-a, a)]).cos == pytest.approx(2.0)


def test_nothing_but_zeros_has_no_direction() -> None:
    zeros = np.zeros((2, 3))
    assert distances([(zeros, zeros)]) == Distances(0.0, 0.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_value_that_is_not_finite_anywhere_makes_every_distance_infinite(
    value: float, side: int, which: int
) -> None:
    pairs = [pair(seed) for seed in range(3)]
    pairs[which][side][0, 0] = value
    found = distances(pairs)
    assert all(getattr(found, name) == math.inf for name in DISTANCES)
    assert not found.finite
    assert not any(getattr(found, name) <= 1e300 for name in DISTANCES)
    assert set(found.to_json().values()) == {None}


def test_the_worst_pass_counts_wherever_it_stands() -> None:
    near, far = pair(1), (np.full((2, 2), 9.0), np.ones((2, 2)))
    assert distances([near, far]).lInf == distances([far, near]).lInf == 8.0
    assert distances([near, far]).l1 == pytest.approx(distances([far, near]).l1)


def test_other_shapes_and_no_elements_are_refused() -> None:
    with pytest.raises(ValueError, match="one shape"):
        distances([(np.ones(3), np.ones((3, 1)))])
    with pytest.raises(ValueError, match="at least one element"):
        distances([])
