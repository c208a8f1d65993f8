"""Laws of recorded trajectories."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engines.backend import FakeBackend
from engines.errors import BackendError
from engines.precision import precision_from_name
from engines.sampler import Pass, generate
from engines.schedule import Schedule, passes_by_window
from engines.trace import expected_passes, record
from tests.engines.test_sampler import (
    BY_THRESHOLD,
    MASK,
    MODEL,
    fake,
    random_requests,
    row_logits,
)

REQUESTS = random_requests(np.random.default_rng(5), 7)


def test_a_trace_is_the_run_of_the_sampler_at_full_precision() -> None:
    uniform = [replace(r, schedule=Schedule.uniform("fp32", r.schedule.windows)) for r in REQUESTS]
    plain = generate(uniform, {"fp32": fake("fp32", 1)}, MODEL)
    traces = record(REQUESTS, fake("fp32", 1), MODEL)
    assert [t.generation.ids for t in traces] == [g.ids for g in plain]
    assert [t.generation.commit_step for t in traces] == [g.commit_step for g in plain]
    assert [t.request for t in traces] == REQUESTS


def test_replaying_the_commits_of_a_trace_gives_each_next_state_and_the_answer() -> None:
    for trace in record(REQUESTS, fake("fp32", 1), MODEL):
        sampler = trace.request.sampler
        canvas = np.array([*trace.request.prompt, *[MASK] * sampler.gen_length])
        for index, step in enumerate(trace.steps):
            assert np.array_equal(step.ids, canvas)
            assert len(step.positions) == sampler.commits[index]
            assert step.committed == sum(sampler.commits[:index])
            assert trace.progress(index) == step.committed / sampler.gen_length
            assert (canvas[step.positions] == MASK).all()
            canvas[step.positions] = step.tokens
        assert tuple(canvas[len(trace.request.prompt) :]) == trace.generation.ids


def test_log_probabilities_are_those_of_the_engine_at_the_committed_positions() -> None:
    for trace in record(REQUESTS, fake("fp32", 1), MODEL):
        for step in trace.steps:
            logits = row_logits(
                1, step.ids[None], np.ones((1, len(step.ids)), bool), step.positions[None]
            )[0].astype(np.float64)
            expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            assert step.log_p.dtype == np.float32
            assert np.allclose(step.log_p, expected, rtol=1e-5)
            assert np.array_equal(step.log_p.argmax(-1), step.tokens)


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_the_batch_changes_no_trace(batch: int) -> None:
    for one, other in zip(
        record(REQUESTS, fake("fp32", 1), MODEL),
        record(REQUESTS, fake("fp32", 1), MODEL, batch=batch),
        strict=True,
    ):
        assert one.generation.ids == other.generation.ids
        for a, b in zip(one.steps, other.steps, strict=True):
            assert np.array_equal(a.log_p, b.log_p) and np.array_equal(a.ids, b.ids)


def test_the_hook_is_called_before_every_pass() -> None:
    seen: list[Pass] = []
    engine = fake("fp32", 1)
    record(REQUESTS, engine, MODEL, batch=4, on_pass=seen.append)
    assert len(seen) == engine.passes


def test_logits_that_are_not_finite_are_an_error() -> None:
    sick = FakeBackend(
        precision_from_name("fp32"),
        lambda ids, mask, positions: np.full((*positions.shape, 17), np.nan, np.float32),
    )
    with pytest.raises(BackendError, match="step 1 of"):
        record(REQUESTS[:1], sick, MODEL)
    with pytest.raises(ValueError, match="batch >= 1"):
        record(REQUESTS, sick, MODEL, batch=0)
    assert record([], sick, MODEL) == []


def test_expected_passes_of_fixed_steps_are_those_of_every_answer() -> None:
    for trace in record(REQUESTS, fake("fp32", 1), MODEL):
        sampler = trace.request.sampler
        for windows in range(1, sampler.steps + 1):
            found = expected_passes([trace], windows)
            assert tuple(found) == passes_by_window(sampler, windows)


def test_expected_passes_by_threshold_are_the_mean_over_traces_of_different_length() -> None:
    rng = np.random.default_rng(3)
    sampler = BY_THRESHOLD[0]
    requests = [replace(r, sampler=sampler) for r in random_requests(rng, 6)]
    traces = record(requests, fake("fp32", 1), MODEL)
    assert len({len(trace.steps) for trace in traces}) > 1
    for windows in (1, 3, 24):
        by_hand = np.zeros(windows)
        for trace in traces:
            for step in trace.steps:
                by_hand[step.committed * windows // sampler.gen_length] += 1 / len(traces)
        assert np.allclose(expected_passes(traces, windows), by_hand)
    assert expected_passes(traces, 1)[0] == np.mean([t.generation.passes for t in traces])
    for wrong in ((traces, 0), ([], 3)):
        with pytest.raises(ValueError, match="need traces and windows >= 1"):
            expected_passes(*wrong)
