"""The choice of states: shares by bucket, short buckets made good, and the seed's alone."""

from __future__ import annotations

import numpy as np
import pytest

from exporter.states import SHARES, State, buckets, quotas, sample_states


def states(*masked: float) -> list[State]:
    """Return states that can be told apart by their one token."""
    return [
        State(np.array([number], np.int32), np.zeros(1, np.int32), share)
        for number, share in enumerate(masked)
    ]


def counts(chosen: list[State]) -> list[int]:
    return np.bincount(buckets([state.masked for state in chosen], 4), minlength=4).tolist()


MANY = states(*np.random.default_rng(0).uniform(0.01, 1.0, 4000).tolist())


def test_each_bucket_gives_its_share() -> None:
    assert counts(sample_states(MANY, 100, 0)) == [30, 20, 20, 30]
    assert counts(sample_states(MANY, 512, 0)) == [154, 102, 102, 154]


def test_the_most_masked_states_are_in_the_first_bucket() -> None:
    assert buckets([1.0, 0.76, 0.75, 0.5, 0.25, 1 / 24], 4).tolist() == [0, 0, 1, 2, 3, 3]


def test_a_short_bucket_gives_all_and_the_others_the_rest_by_their_shares() -> None:
    short = states(*[0.9] * 100, *[0.6] * 3, *[0.4] * 100, *[0.1] * 100)
    assert counts(sample_states(short, 83, 0)) == [30, 3, 20, 30]
    empty = states(*[0.9] * 7, *[0.1] * 100)
    assert counts(sample_states(empty, 60, 0)) == [7, 0, 0, 53]


@pytest.mark.parametrize("seed", range(30))
def test_quotas_sum_up_and_never_exceed_what_is_there(seed: int) -> None:
    rng = np.random.default_rng(seed)
    there = rng.integers(0, 50, 4) * rng.integers(0, 2, 4)
    for count in {0, int(there.sum()) // 2, int(there.sum())}:
        given = quotas(there, count, SHARES)
        assert given.sum() == count
        assert (given <= there).all()
    given = quotas(there, int(there.sum()), (1.0, 0.0, 0.0, 0.0))
    np.testing.assert_array_equal(given, there)


def test_no_state_is_taken_twice_and_few_are_taken_all() -> None:
    chosen = sample_states(MANY, 700, 1)
    ids = [int(state.ids[0]) for state in chosen]
    assert len(set(ids)) == 700
    assert ids == sorted(ids)
    assert sample_states(MANY[:9], 512, 1) == MANY[:9]
    assert sample_states([], 512, 1) == []


def test_the_seed_decides() -> None:
    one, again, other = (
        [int(state.ids[0]) for state in sample_states(MANY, 100, seed)] for seed in (1, 1, 2)
    )
    assert one == again != other


def test_impossible_choices_are_mistakes_of_the_caller() -> None:
    for count, shares in ((0, SHARES), (5, (0.5, 0.4)), (5, (1.5, -0.5)), (5, ())):
        with pytest.raises(ValueError, match="need count"):
            sample_states(MANY, count, 0, shares)
    with pytest.raises(ValueError, match="wanted of"):
        quotas(np.array([1, 1]), 3, (0.5, 0.5))
