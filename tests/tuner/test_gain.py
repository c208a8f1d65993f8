from __future__ import annotations

import itertools

import numpy as np
import pytest

from tuner.gain import gain_from, isotonic, kl_divergence, summarize


def test_kl_is_zero_only_between_equal_distributions() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 7))
    assert kl_divergence(logits, logits + 3.0) == pytest.approx(0.0, abs=1e-12)
    assert (kl_divergence(logits, rng.normal(size=(4, 7))) > 0.01).all()


def test_kl_bears_logits_far_apart() -> None:
    sure, other = np.array([[0.0, -1e9]]), np.array([[-1e9, 0.0]])
    assert np.isfinite(kl_divergence(sure, other)).all()


def test_isotonic_is_the_closest_that_does_not_fall() -> None:
    rng = np.random.default_rng(1)
    bits = (3.0, 4.0, 6.0, 8.0)
    values = rng.normal(size=(50, 4))
    fitted = isotonic(values, bits)
    assert (np.diff(fitted, axis=-1) >= -1e-12).all()
    # No monotone point of a fine grid around it is closer.
    steps = np.array(list(itertools.product((-0.05, 0.0, 0.05), repeat=4)))
    for row, fit in zip(values, fitted, strict=True):
        near = fit + steps
        near = near[(np.diff(near, axis=1) >= 0).all(axis=1)]
        assert ((near - row) ** 2).sum(axis=1).min() >= ((fit - row) ** 2).sum() - 1e-12


def test_isotonic_keeps_what_rises_and_does_not_care_for_the_order_of_precisions() -> None:
    rng = np.random.default_rng(2)
    rising = np.sort(rng.normal(size=(6, 4)), axis=-1)
    assert isotonic(rising, (1, 2, 3, 4)) == pytest.approx(rising)
    values, order = rng.normal(size=(6, 4)), [2, 0, 3, 1]
    bits = np.array([3.0, 4.0, 6.0, 8.0])
    assert isotonic(values[:, order], bits[order]) == pytest.approx(
        isotonic(values, bits)[:, order]
    )


def test_precisions_of_equal_bits_are_not_pooled() -> None:
    values = np.array([[0.0, 5.0, 2.0]])
    assert isotonic(values, (4, 8, 8)) == pytest.approx(values)


def test_gain_is_zero_at_the_base_and_does_not_fall_with_bits() -> None:
    rng = np.random.default_rng(3)
    kl, influence = rng.gamma(1.0, 1.0, (6, 4)), 1 + rng.gamma(1.0, 1.0, 6)
    for base in range(4):
        gain = gain_from(kl, influence, (8, 3, 4, 6), base)
        assert (gain[:, base] == 0).all()
        assert (np.diff(gain[:, [1, 2, 3, 0]], axis=1) >= -1e-12).all()


def test_gain_is_the_divergence_saved_times_the_influence() -> None:
    kl, influence = np.array([[3.0, 1.0, 0.0], [2.0, 2.0, 0.5]]), np.array([1.0, 2.0])
    assert gain_from(kl, influence, (3, 4, 32), 0) == pytest.approx(
        np.array([[0.0, 2.0, 3.0], [0.0, 0.0, 3.0]])
    )


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(4)
    hits = []
    for seed in range(60):
        kl = rng.gamma(2.0, (1.0, 0.4), (120, 3, 2))
        influence = 1 + rng.gamma(2.0, 0.5, (120, 3))
        k, i, gain = summarize(kl, influence, (4, 8), 0, seed, resamples=300)
        hits.append((k.low[:, 0] <= 2.0) & (k.high[:, 0] >= 2.0))
        hits.append((i.low <= 2.0) & (i.high >= 2.0))
        hits.append((gain.low[:, 1] <= 2.4) & (gain.high[:, 1] >= 2.4))
    assert 0.9 <= np.mean(hits) <= 0.99


def test_the_same_seed_gives_the_same_intervals() -> None:
    rng = np.random.default_rng(5)
    kl, influence = rng.gamma(1.0, 1.0, (9, 2, 3)), 1 + rng.gamma(1.0, 1.0, (9, 2))
    one, two = (summarize(kl, influence, (3, 4, 8), 0, seed=7) for _ in range(2))
    assert (one[2].low == two[2].low).all()


def test_shapes_that_disagree_and_what_is_not_finite_are_refused() -> None:
    kl, influence = np.ones((4, 2, 3)), np.ones((4, 2))
    for bad_kl, bad_influence in (
        (kl, np.ones((4, 3))),
        (kl[:0], influence[:0]),
        (kl * np.nan, influence),
        (kl, influence * np.inf),
    ):
        with pytest.raises(ValueError, match="kl"):
            summarize(bad_kl, bad_influence, (3, 4, 8), 0, seed=0)
    with pytest.raises(ValueError, match="0 <= base < 3"):
        gain_from(kl[0], influence[0], (3, 4, 8), 3)
    with pytest.raises(ValueError, match="shapes"):
        gain_from(kl[0], influence[0], (3, 4), 0)
