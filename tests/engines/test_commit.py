"""Laws of the commit rule, against sorting by hand; and of the passes that it leads to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engines.backend import FakeBackend, Floats, Ids, Mask, Served
from engines.commit import choose
from engines.precision import precision_from_name
from engines.sampler import Generation, Request, generate
from engines.schedule import SamplerConfig, Schedule
from tests.engines.test_sampler import MODEL, engines, random_requests


@pytest.mark.parametrize("seed", range(20))
def test_each_row_commits_its_most_probable_or_all_that_reach_its_threshold(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, width = int(rng.integers(1, 6)), int(rng.integers(1, 9))
    probability = rng.integers(0, 5, (rows, width)).astype(np.float32) / 4  # ties, and exact edges
    asked = rng.integers(1, width + 1, rows)
    due = np.array([rng.integers(1, count + 1) for count in asked])
    threshold = rng.choice([0.25, 0.5, 1.0, np.inf], rows)
    counts, of, columns = choose(probability, asked, due, threshold)
    for row in range(rows):
        own = probability[row, : asked[row]].tolist()
        ranked = sorted(range(len(own)), key=lambda i: (-own[i], i))
        wanted = max(due[row], sum(p >= threshold[row] for p in own))
        assert counts[row] == wanted
        assert columns[of == row].tolist() == ranked[:wanted]
    fixed = choose(probability, asked, due, None)
    same = choose(probability, asked, due, np.full(rows, np.inf))
    assert all(np.array_equal(one, other) for one, other in zip(fixed, same, strict=True))


def test_a_probability_is_compared_in_float64() -> None:
    below = np.array([[0.9, 0.9]], np.float32)  # 0.89999998
    one, both = (choose(below, np.array([2]), np.array([1]), np.array([t])) for t in (0.9, 0.8999))
    assert (one.counts.tolist(), both.counts.tolist()) == ([1], [2])


@pytest.mark.parametrize("seed", range(4))
def test_threshold_one_is_one_token_a_step_where_no_token_is_sure(seed: int) -> None:
    rng = np.random.default_rng(seed)
    fixed = [
        replace(r, sampler=replace(r.sampler, steps=r.sampler.gen_length))
        for r in random_requests(rng, 6)
    ]
    sure = [replace(r, sampler=replace(r.sampler, rule="threshold", threshold=1.0)) for r in fixed]
    for one, other in zip(
        generate(fixed, engines(), MODEL, policy="split"),
        generate(sure, engines(), MODEL, policy="split"),
        strict=True,
    ):
        assert replace(one, engine_ms=()) == replace(other, engine_ms=())


def answer_at(threshold: float, block: int, seed: int) -> Generation:
    """Return the answer of a model whose probabilities depend on the place alone."""
    sure = np.random.default_rng(seed).random(64).astype(np.float32)

    class Fixed(FakeBackend):
        def serve(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Served:
            return Served(positions % 11, sure[positions], sure[positions])

    sampler = SamplerConfig(rule="threshold", threshold=threshold, block_length=block)
    request = Request(prompt=(1, 2), sampler=sampler, schedule=Schedule(("fp32",)))
    engine = Fixed(precision_from_name("fp32"), lambda *_: np.zeros(0, np.float32))
    return generate([request], {"fp32": engine}, MODEL)[0]


@pytest.mark.parametrize("block", [24, 8, 1])
@pytest.mark.parametrize("seed", range(3))
def test_a_lower_threshold_never_takes_more_passes(seed: int, block: int) -> None:
    passes = [answer_at(t, block, seed).passes for t in np.linspace(0.01, 1.0, 25).tolist()]
    assert passes == sorted(passes)
    assert passes[0] < passes[-1] == 24 or block == 1
    assert passes[0] >= 24 // block


def test_blocks_are_decided_from_the_left_one_in_a_pass() -> None:
    steps = np.array(answer_at(1e-6, 8, 0).commit_step)
    assert steps.tolist() == [1] * 8 + [2] * 8 + [3] * 8
