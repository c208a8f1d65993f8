from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tuner.costs import Reals
from tuner.gain import PROXIES, alike_windows, gain_from, isotonic, summarize
from tuner.sensitivity import PromptTables

NAMES = ("p0", "p1", "p2", "p3")


def tables(
    kl: Reals, influence: Reals, flips: Reals | None = None, moves: Reals | None = None
) -> PromptTables:
    return PromptTables(
        precisions=NAMES[: kl.shape[-1]],
        kl=kl,
        flips=np.zeros_like(kl) if flips is None else flips,
        moves=moves,
        influence=influence,
        passes=np.ones_like(influence),
        rows=0,
    )


def drawn(seed: int, count: int = 9, windows: int = 6, precisions: int = 4) -> PromptTables:
    rng = np.random.default_rng(seed)
    shape = (count, windows, precisions)
    found = tables(
        rng.gamma(1.0, 1.0, shape),
        1 + rng.gamma(1.0, 1.0, shape[:2]),
        rng.poisson(1.0, shape).astype(float),
        rng.poisson(2.0, shape).astype(float),
    )
    return replace(found, rollout=rng.random(shape))


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


@pytest.mark.parametrize("proxy", PROXIES)
def test_gain_is_zero_at_the_base_and_does_not_fall_with_bits(proxy: str) -> None:
    found = drawn(3)
    for base in range(4):
        gain = gain_from(found, (8, 3, 4, 6), NAMES[base], proxy)
        assert (gain[:, base] == 0).all()
        assert (np.diff(gain[:, [1, 2, 3, 0]], axis=1) >= -1e-12).all()


def test_each_proxy_is_its_formula() -> None:
    found = drawn(4, precisions=2)
    assert found.moves is not None and found.rollout is not None
    k, i = found.kl.mean(0), found.influence.mean(0)
    root = np.sqrt(found.kl * found.influence[..., None]).mean(0)
    want = {
        "kl*influence": (k[:, 0] - k[:, 1]) * i,
        "sqrt": root[:, 0] - root[:, 1],
        "kl": k[:, 0] - k[:, 1],
        "influence": (k[:, 0] - k[:, 1]).mean() * i,
        "flips": (found.flips[..., 0] - found.flips[..., 1]).mean(0),
        "moves": (found.moves[..., 0] - found.moves[..., 1]).mean(0),
        "rollout": (found.rollout[..., 0] - found.rollout[..., 1]).mean(0),
    }
    assert set(want) == set(PROXIES)
    for proxy, expected in want.items():
        got = gain_from(found, (3, 8), "p0", proxy, monotone=False)
        assert got[:, 1] == pytest.approx(expected), proxy
        assert (got[:, 0] == 0).all()


@pytest.mark.parametrize("proxy", PROXIES)
def test_weights_choose_prompts_as_well_as_the_choice_of_prompts_does(proxy: str) -> None:
    found, bits = drawn(5), (3, 4, 6, 8)
    picks = np.array([[0, 2, 5], [1, 1, 8]])
    weights = np.zeros((2, 9))
    for row, pick in enumerate(picks):
        np.add.at(weights[row], pick, 1 / 3)
    both = gain_from(found, bits, "p0", proxy, weights)
    for row, pick in enumerate(picks):
        assert both[row] == pytest.approx(gain_from(found.only(pick), bits, "p0", proxy))


def test_gain_is_the_divergence_saved_times_the_influence() -> None:
    kl = np.array([[[3.0, 1.0, 0.0], [2.0, 2.0, 0.5]]])
    found = tables(kl, np.array([[1.0, 2.0]]))
    assert gain_from(found, (3, 4, 32), "p0") == pytest.approx(
        np.array([[0.0, 2.0, 3.0], [0.0, 0.0, 3.0]])
    )


def test_the_raw_gain_is_kept_beside_the_monotone_fit() -> None:
    kl = np.array([[[3.0, 1.0, 2.0]]])
    found = summarize(tables(kl, np.ones((1, 1))), (3, 4, 32))
    assert found.raw_gain == pytest.approx(np.array([[0.0, 2.0, 1.0]]))
    assert found.gain == pytest.approx(np.array([[0.0, 1.5, 1.5]]))


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(4)
    hits = []
    for seed in range(60):
        kl = rng.gamma(2.0, (1.0, 0.4), (120, 3, 2))
        influence = 1 + rng.gamma(2.0, 0.5, (120, 3))
        found = summarize(tables(kl, influence), (4, 8), seed=seed, resamples=300)
        hits.append((found.kl_low[:, 0] <= 2.0) & (found.kl_high[:, 0] >= 2.0))
        hits.append((found.influence_low <= 2.0) & (found.influence_high >= 2.0))
        hits.append((found.gain_low[:, 1] <= 2.4) & (found.gain_high[:, 1] >= 2.4))
    assert 0.9 <= np.mean(hits) <= 0.99


@pytest.mark.parametrize("proxy", PROXIES)
def test_every_value_lies_in_its_interval_and_the_same_seed_gives_the_same(proxy: str) -> None:
    one, two = (summarize(drawn(6), (3, 4, 6, 8), proxy=proxy, seed=7) for _ in range(2))
    assert one.to_json() == two.to_json()
    for value, low, high in (
        (one.kl, one.kl_low, one.kl_high),
        (one.influence, one.influence_low, one.influence_high),
        (one.gain, one.gain_low, one.gain_high),
    ):
        assert (low <= value).all() and (value <= high).all()
    assert (one.proxy, one.base, one.n_prompts) == (proxy, "p0", 9)


def test_equal_windows_are_rarely_told_apart_and_different_ones_are() -> None:
    rng = np.random.default_rng(8)
    apart = 0
    for seed in range(60):
        kl = rng.gamma(1.0, 1.0, (80, 5, 2)) * (1.0, 0.0)
        found = summarize(tables(kl, np.ones((80, 5))), (4, 8), seed=seed, resamples=300)
        apart += not found.indistinct
    assert apart <= 8  # about 3 of 60
    kl = rng.gamma(1.0, 1.0, (80, 3, 2)) * (1.0, 0.0) * np.array([1.0, 1.0, 3.0])[:, None]
    found = summarize(tables(kl, np.ones((80, 3))), (4, 8))
    assert found.alike == ((True, True, False), (True, True, False), (False, False, True))
    assert not found.indistinct


def test_pairing_tells_windows_apart_that_share_their_prompts_noise() -> None:
    rng = np.random.default_rng(9)
    shared = rng.gamma(1.0, 5.0, (50, 1))
    scores = shared + rng.normal(0.0, 0.1, (50, 2)) + np.array([0.0, 0.3])
    weights = rng.multinomial(50, np.full(50, 0.02), 400) / 50
    assert alike_windows(scores.mean(0), weights @ scores) == ((True, False), (False, True))
    assert alike_windows(np.zeros(3), np.zeros((10, 3))) == ((True,) * 3,) * 3
    assert alike_windows(np.zeros(1), np.zeros((10, 1))) == ((True,),)


def test_one_window_has_no_other_to_be_alike() -> None:
    assert not summarize(drawn(1, windows=1), (3, 4, 6, 8)).indistinct


def test_what_does_not_fit_and_what_is_not_finite_is_refused() -> None:
    found = drawn(7, precisions=3)
    bits = (3, 4, 8)
    for bad in (
        replace(found, influence=np.ones((4, 3))),
        found.only([]),
        replace(found, kl=found.kl * np.nan),
        replace(found, influence=found.influence * np.inf),
        replace(found, flips=found.flips[:, :1]),
    ):
        with pytest.raises(ValueError, match="kl"):
            summarize(bad, bits)
    with pytest.raises(ValueError, match="base is one of p0, p1, p2"):
        gain_from(found, bits, "p3")
    with pytest.raises(ValueError, match="shapes"):
        gain_from(found, (3, 4), "p0")
    with pytest.raises(ValueError, match="proxy is one of"):
        gain_from(found, bits, "p0", "luck")
    with pytest.raises(ValueError, match="with_moves"):
        gain_from(replace(found, moves=None), bits, "p0", "moves")
