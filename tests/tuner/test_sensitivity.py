from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from engines.backend import FakeBackend, Floats, Ids, Mask
from engines.errors import BackendError
from engines.model import ModelInfo
from engines.precision import Precision, precision_from_name
from engines.sampler import Request
from engines.schedule import SamplerConfig, Schedule, passes_by_window
from engines.trace import Trace, record
from tuner.gain import kl_divergence, log_softmax
from tuner.sensitivity import (
    TaskSensitivity,
    divergence,
    influence,
    sensitivity_of,
    window_divergence,
)

V, MASK, EOS = 13, 12, 11
MODEL = ModelInfo(
    name="fake",
    architecture="llada",
    vocab=V,
    mask_id=MASK,
    eos_id=EOS,
    max_length=64,
    digest="0" * 64,
)
SAMPLER = SamplerConfig(steps=6, gen_length=12, block_length=6)
W = 3


def logits_of(noise: float = 0.0, reads: bool = True) -> Callable[[Ids, Mask, Ids], Floats]:
    """A denoiser of fixed random weights; it reads the canvas or only each row's first token."""
    rng = np.random.default_rng(0)
    own, other = rng.normal(size=(64, V)) * 2, rng.normal(size=(V, V))
    extra = rng.normal(size=(V, V)) * noise

    def logits(ids: Ids, mask: Mask, positions: Ids) -> Floats:
        seen = mask & (ids != MASK)
        counts = np.stack([((ids == token) & seen).sum(1) for token in range(V)], axis=1)
        if not reads:
            counts = np.eye(V, dtype=int)[ids[:, 0]]
        bias = counts @ (other + extra) / 4
        out = own[positions] + bias[:, None, :]
        out[..., MASK] = -1e9
        return out.astype(np.float32)

    return logits


def engine(name: str = "fp32", noise: float = 0.0, reads: bool = True) -> FakeBackend:
    return FakeBackend(precision_from_name(name), logits_of(noise, reads))


def traces(full: FakeBackend, count: int = 5) -> list[Trace]:
    rng = np.random.default_rng(1)
    prompts = [tuple(rng.integers(0, EOS, rng.integers(1, 7)).tolist()) for _ in range(count)]
    schedule = Schedule.uniform("fp32", W)
    return record(
        [
            Request(prompt=prompt, sampler=SAMPLER, schedule=schedule, task="t")
            for prompt in prompts
        ],
        full,
        MODEL,
    )


def test_equal_engines_do_not_diverge() -> None:
    made = traces(engine())
    assert window_divergence(made, engine(), W).values == pytest.approx(0.0, abs=1e-12)


def test_divergence_is_the_kl_of_the_committed_positions_summed_over_the_steps_of_a_window() -> (
    None
):
    made, other = traces(engine()), engine("int8", noise=0.5)
    got = window_divergence(made, other, W, batch=3)
    want = np.zeros((len(made), W))
    for index, trace in enumerate(made):
        for step in trace.steps:
            ids = step.ids[None]
            logits = other.logits_of(ids, np.ones(ids.shape, bool), step.positions[None])[0]
            p, q = np.exp(step.log_p.astype(float)), np.exp(log_softmax(logits))
            kl = np.where(p > 0, p * (np.log(np.maximum(p, 1e-300)) - np.log(q + 1e-300)), 0).sum()
            want[index, step.committed * W // SAMPLER.gen_length] += kl
    assert got.values == pytest.approx(want, abs=1e-5)
    assert (got.values > 0).all()
    assert got.rows == len(made) * SAMPLER.steps


@pytest.mark.parametrize("batch", [1, 2, 64])
def test_divergence_does_not_depend_on_the_batch(batch: int) -> None:
    made, other = traces(engine()), engine("int8", noise=0.5)
    want = window_divergence(made, other, W, batch=7).values
    assert window_divergence(made, other, W, batch=batch).values == pytest.approx(want)


def test_divergence_adds_up_over_windows() -> None:
    made, other = traces(engine()), engine("int8", noise=0.5)
    whole = window_divergence(made, other, 1).values.sum(axis=1)
    for windows in (2, 3, 6):
        parts = window_divergence(made, other, windows).values.sum(axis=1)
        assert parts == pytest.approx(whole)
    assert divergence(made, other) == pytest.approx(whole.mean())


def test_influence_is_at_least_one_and_one_in_the_last_window() -> None:
    found = influence(traces(engine()), engine(), W, MASK)
    assert (found.values >= 1.0).all()
    assert (found.values[:, -1] == 1.0).all()
    assert (found.values[:, 0] > 1.0).any()


def test_influence_is_one_where_the_model_reads_no_commits() -> None:
    blind = engine(reads=False)
    found = influence(traces(blind), blind, W, MASK)
    assert found.values == pytest.approx(1.0, abs=1e-9)


def test_influence_is_what_masking_a_window_again_does_downstream() -> None:
    full = engine()
    made = traces(full, 2)
    got = influence(made, full, W, MASK, batch=1)
    trace = made[1]
    of_step = [step.committed * W // SAMPLER.gen_length for step in trace.steps]
    then = trace.steps[of_step.index(1)]  # the state after window 0
    changed = np.concatenate(
        [s.positions for s, w in zip(trace.steps, of_step, strict=True) if w == 0]
    )
    masked = np.flatnonzero(then.ids == MASK)
    again = then.ids.copy()
    again[changed] = MASK
    everything = np.ones((1, len(again)), bool)
    p, q = (full.logits_of(ids[None], everything, masked[None])[0] for ids in (then.ids, again))
    want = 1 + kl_divergence(log_softmax(p), q).sum() / len(changed)
    assert got.values[1, 0] == pytest.approx(want)
    assert got.rows == 2 * (W - 1) * len(made)


def test_the_cost_is_a_generation_a_precision_and_two_passes_a_window_but_the_last() -> None:
    full = engine()
    made = traces(full)
    engines = {"int8": engine("int8", 0.5), "w4a4": engine("w4a4", 1.0), "fp32": full}
    full.passes = 0
    found = sensitivity_of(made, engines, full, windows=W, model=MODEL, seed=0)
    assert found.rows == len(made) * (2 * SAMPLER.steps + 2 * (W - 1))
    assert passes_by_window(SAMPLER, W) == (2, 2, 2)
    assert found.base == "w4a4"
    assert (found.kl[:, 2] == 0).all()
    assert (found.gain[:, 1] == 0).all()
    assert (found.gain[:, 2] >= found.gain[:, 0] - 1e-12).all()
    assert (found.gain[:, 0] >= 0).all()
    for value, low, high in (
        (found.kl, found.kl_low, found.kl_high),
        (found.influence, found.influence_low, found.influence_high),
        (found.gain, found.gain_low, found.gain_high),
    ):
        assert (low <= value).all() and (value <= high).all()


def test_a_task_sensitivity_survives_json() -> None:
    full = engine()
    found = sensitivity_of(
        traces(full),
        {"int8": engine("int8", 0.5), "fp32": full},
        full,
        windows=W,
        model=MODEL,
        seed=0,
        base="fp32",
    )
    again = TaskSensitivity.from_json(found.to_json())
    assert again.to_json() == found.to_json()
    assert again.precisions == ("int8", "fp32")
    assert again.gain.shape == (W, 2)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_name_window_step_and_prompt(value: float) -> None:
    made = traces(engine())
    bad = made[3].steps[4]

    def logits(ids: Ids, mask: Mask, positions: Ids) -> Floats:
        out = logits_of()(ids, mask, positions)
        for row in range(len(ids)):
            own = ids[row, mask[row]]
            if len(own) == len(bad.ids) and (own == bad.ids).all():
                out[row, 0, 5] = value
        return out

    broken = FakeBackend(Precision("int8", "int8", 8, 8), logits)
    with pytest.raises(BackendError, match=r"int8.*window 2, step 5 of 6, prompt 3 \(task 't'\)"):
        window_divergence(made, broken, W)


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(ValueError, match="need traces"):
        window_divergence([], engine(), W)
    with pytest.raises(ValueError, match="windows >= 1"):
        influence(traces(engine(), 1), engine(), 0, MASK)
    with pytest.raises(ValueError, match="base"):
        sensitivity_of(
            traces(engine(), 1),
            {"fp32": engine()},
            engine(),
            windows=W,
            model=MODEL,
            seed=0,
            base="int8",
        )
