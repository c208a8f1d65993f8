from __future__ import annotations

import numpy as np
import pytest

from tuner.objective import (
    Option,
    bootstrap_interval,
    choose,
    dominates,
    loss_in_points,
    paired_interval,
    wilson_interval,
)


def coverage(hits: list[bool]) -> float:
    return float(np.mean(hits))


def test_bootstrap_intervals_cover_the_mean_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    hits = []
    for seed in range(200):
        found = bootstrap_interval(rng.gamma(2.0, 1.0, 100), seed, resamples=300)
        hits.append(found.low <= 2.0 <= found.high)
    assert 0.89 <= coverage(hits) <= 0.99


def test_paired_intervals_see_differences_that_unpaired_ones_would_not() -> None:
    rng = np.random.default_rng(1)
    hard = rng.uniform(size=300)
    found = paired_interval(hard + rng.normal(0.02, 0.05, 300), hard, seed=0)
    assert found.low > 0.0
    assert found.low <= found.mean <= found.high


def test_intervals_are_the_same_for_the_same_seed() -> None:
    values = np.random.default_rng(2).uniform(size=50)
    assert bootstrap_interval(values, 3) == bootstrap_interval(values, 3)
    assert bootstrap_interval(values, 3) != bootstrap_interval(values, 4)


@pytest.mark.parametrize("share", [0.02, 0.5, 0.9])
def test_wilson_intervals_cover_the_share(share: float) -> None:
    rng = np.random.default_rng(3)
    hits = []
    for accepted in rng.binomial(80, share, 400):
        found = wilson_interval(int(accepted), 80)
        hits.append(found.low <= share <= found.high)
        assert 0.0 <= found.low <= found.mean <= found.high <= 1.0
    assert coverage(hits) >= 0.91


def test_all_right_is_no_proof_of_perfection() -> None:
    assert wilson_interval(20, 20).low < 0.9
    assert loss_in_points(np.ones(20, bool), None).high > 10.0
    same = np.random.default_rng(4).random(20) < 0.7
    assert loss_in_points(same, same).high > 1.0


def test_loss_is_what_accuracy_falls_behind_or_agreement_lacks() -> None:
    full = np.array([True, True, True, False])
    scores = np.array([True, False, True, False])
    assert loss_in_points(scores, full).mean == 25.0
    assert loss_in_points(scores, None).mean == 50.0
    assert loss_in_points(full, scores).mean == -25.0


def test_paired_losses_cover_the_truth() -> None:
    rng = np.random.default_rng(5)
    hits = []
    for _ in range(400):
        full = rng.random(150) < 0.8
        scores = np.where(rng.random(150) < 0.1, rng.random(150) < 0.4, full)
        found = loss_in_points(scores, full)  # truth: 0.1 * (0.8 - 0.4) = 4 points
        hits.append(found.low <= 4.0 <= found.high)
    assert 0.91 <= coverage(hits) <= 0.995


def test_dominance_is_strict_and_has_no_cycles() -> None:
    rng = np.random.default_rng(6)
    points = rng.integers(0, 3, (40, 3)).tolist()
    for a in points:
        assert not dominates(a, a)
        for b in points:
            assert not (dominates(a, b) and dominates(b, a))


N = 400


def option(
    name: str, cost: float, share: float, uniform: bool = False, mib: float = 1.0, seed: int = 0
) -> Option:
    """A candidate that fails on the hardest prompts, so worse ones fail where better ones do."""
    hard = np.random.default_rng(seed).permutation((np.arange(N) + 0.5) / N)
    scores = {"a": hard < share, "b": hard[::-1] < share}
    return Option(
        name=name,
        cost=cost,
        memory_mib=mib,
        uniform=uniform,
        loss={task: 100.0 * (1.0 - float(score.mean())) for task, score in scores.items()},
        scores=scores,
    )


def test_latency_takes_the_fastest_within_the_loss_of_every_task() -> None:
    options = [option("full", 9, 1.0, True), option("mixed", 5, 0.9975), option("fast", 3, 0.9)]
    found = choose(options, "latency", 1.5, seed=0)
    assert (found.index, found.within) == (1, True)
    assert choose(options, "latency", 50.0, seed=0).index == 2
    lame = option("lame", 2, 1.0)
    lame = Option(
        **{
            **{k: getattr(lame, k) for k in ("name", "cost", "memory_mib", "uniform", "scores")},
            "loss": {"a": 0.0, "b": 9.0},
        }
    )
    assert choose([*options, lame], "latency", 1.5, seed=0).index == 1


def test_quality_takes_the_fastest_of_those_that_cannot_be_told_from_the_best() -> None:
    options = [option("full", 9, 1.0, True), option("mixed", 5, 0.9975), option("fast", 3, 0.9)]
    found = choose(options, "quality", 50.0, seed=0)
    assert options[found.index].name == "mixed"
    assert "cannot be told from full" in found.reason


def test_memory_takes_the_smallest() -> None:
    options = [option("a", 9, 1.0, mib=5.0), option("b", 20, 1.0, mib=2.0)]
    assert choose(options, "memory", 1.0, seed=0).index == 1


@pytest.mark.parametrize("objective", ["latency", "quality", "memory"])
def test_ties_go_to_uniform(objective: str) -> None:
    options = [option("mixed", 5, 1.0), option("plain", 5, 1.0, uniform=True)]
    assert choose(options, objective, 1.0, seed=0).index == 1
    assert choose(options[::-1], objective, 1.0, seed=0).index == 0


def test_with_none_within_the_loss_the_smallest_loss_is_taken_and_said() -> None:
    options = [option("a", 1, 0.5), option("b", 9, 0.8)]
    found = choose(options, "latency", 1.0, seed=0)
    assert (found.index, found.within) == (1, False)
    assert "none is within 1 points" in found.reason


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="objective is one of"):
        choose([option("a", 1, 1.0)], "speed", 1.0, seed=0)
    with pytest.raises(ValueError, match="at least one"):
        choose([], "latency", 1.0, seed=0)
    with pytest.raises(ValueError, match="same prompts"):
        paired_interval(np.ones(3), np.ones(4), seed=0)
    with pytest.raises(ValueError, match="finite values"):
        bootstrap_interval(np.array([1.0, np.nan]), seed=0)
    with pytest.raises(ValueError, match="accepted"):
        wilson_interval(3, 2)
    other = Option(
        name="x", cost=1, memory_mib=1, uniform=True, loss={"z": 0}, scores={"z": np.ones(3)}
    )
    with pytest.raises(ValueError, match="same tasks"):
        choose([option("a", 1, 1.0), other], "latency", 1.0, seed=0)
