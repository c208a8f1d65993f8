"""Statistics of the evidence: right where the answer is known, honest about noise."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from tests.evidence.statistics import (
    correlation_interval,
    mean_over_tasks,
    pearson,
    ranks,
    reliability,
    spearman,
)


@pytest.mark.parametrize("seed", range(20))
def test_correlations_equal_scipys(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.integers(0, 5, 12).astype(float), rng.normal(size=12)
    assert pearson(x, y) == pytest.approx(stats.pearsonr(x, y).statistic)
    assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic)
    assert ranks(x).tolist() == (stats.rankdata(x) - 1).tolist()


def test_a_row_that_does_not_vary_has_no_correlation() -> None:
    assert np.isnan(pearson([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]))
    found = correlation_interval(np.ones(3), np.random.default_rng(0).normal(size=(9, 3)))
    assert np.isnan(found.mean)


def test_the_mean_over_tasks_counts_each_task_once() -> None:
    found = mean_over_tasks({"many": np.zeros(1000), "few": np.ones(10)})
    assert (found.mean, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))


def test_the_interval_over_tasks_covers_the_truth_about_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        values = {"a": rng.normal(0.3, 1.0, 60), "b": rng.normal(-0.1, 2.0, 90)}
        found = mean_over_tasks(values, seed)
        covered += found.low <= 0.1 <= found.high
    assert 0.9 <= covered / 200 <= 0.99


@pytest.mark.parametrize("noise", [0.01, 1.0, 5.0])
def test_reliability_falls_with_noise_and_bounds_what_a_perfect_proxy_reaches(
    noise: float,
) -> None:
    rng = np.random.default_rng(3)
    truth = np.linspace(0.0, 1.0, 8)
    found, reached = [], []
    for _ in range(40):
        gains = truth + rng.normal(0.0, noise, (400, 8))
        found.append(reliability(gains, splits=10))
        reached.append(pearson(truth, gains.mean(axis=0)))
    assert np.mean(reached) == pytest.approx(np.sqrt(np.mean(found)), abs=0.15)
    assert (np.mean(found) > 0.95) == (noise < 5)


def test_the_interval_of_a_correlation_is_wide_where_gains_are_noise() -> None:
    rng = np.random.default_rng(0)
    proxy = np.arange(6.0)
    sure = correlation_interval(proxy, proxy + rng.normal(0, 0.1, (300, 6)))
    unsure = correlation_interval(proxy, rng.normal(0, 1.0, (300, 6)))
    assert sure.high - sure.low < 0.01 < 0.5 < unsure.high - unsure.low
