from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engines.backend import Backend, FakeBackend, Floats, Ids, Mask
from engines.errors import BackendError
from engines.model import ModelInfo
from engines.precision import Precision, precision_from_name
from engines.sampler import Request
from engines.schedule import SamplerConfig, Schedule, passes_by_window
from engines.trace import Trace, record
from tuner.replay import kl_divergence, log_softmax
from tuner.sensitivity import PromptTables, divergence, prompt_tables

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
BY_THRESHOLD = SamplerConfig(gen_length=12, block_length=6, rule="threshold", threshold=0.6)
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


def traces(full: FakeBackend, count: int = 5, sampler: SamplerConfig = SAMPLER) -> list[Trace]:
    rng = np.random.default_rng(1)
    prompts = [tuple(rng.integers(0, EOS, rng.integers(1, 7)).tolist()) for _ in range(count)]
    schedule = Schedule.uniform("fp32", W)
    return record(
        [
            Request(prompt=prompt, sampler=sampler, schedule=schedule, task="t")
            for prompt in prompts
        ],
        full,
        MODEL,
    )


def tables(made: list[Trace], *engines: FakeBackend, windows: int = W, **how: Any) -> PromptTables:
    named: dict[str, Backend] = {each.precision.name: each for each in engines}
    return prompt_tables(made, named, engine(), windows=windows, model=MODEL, **how)


def test_equal_engines_do_not_differ_in_anything() -> None:
    made = traces(engine())
    found = tables(made, engine("int8"), with_moves=True)
    assert found.kl == pytest.approx(0.0, abs=1e-12)
    assert (found.flips == 0).all()
    assert found.moves is not None and (found.moves == 0).all()


def test_kl_is_the_divergence_of_the_committed_positions_summed_over_the_steps_of_a_window() -> (
    None
):
    made, other = traces(engine()), engine("int8", noise=0.5)
    got = tables(made, other, batch=3)
    want, flips = np.zeros((len(made), W)), np.zeros((len(made), W))
    for index, trace in enumerate(made):
        for step in trace.steps:
            ids = step.ids[None]
            logits = other.logits_of(ids, np.ones(ids.shape, bool), step.positions[None])[0]
            p, q = np.exp(step.log_p.astype(float)), np.exp(log_softmax(logits))
            kl = np.where(p > 0, p * (np.log(np.maximum(p, 1e-300)) - np.log(q + 1e-300)), 0).sum()
            window = step.committed * W // SAMPLER.gen_length
            want[index, window] += kl
            flips[index, window] += (logits.argmax(axis=1) != step.tokens).sum()
    assert got.kl[..., 0] == pytest.approx(want, abs=1e-5)
    assert (got.kl > 0).all()
    assert (got.flips[..., 0] == flips).all() and flips.any()


def test_moves_are_the_commits_that_the_sampler_would_not_make_from_the_same_state() -> None:
    made, other = traces(engine()), engine("int8", noise=0.5)
    got = tables(made, other, with_moves=True, batch=4)
    want = np.zeros((len(made), W))
    for index, trace in enumerate(made):
        start = len(trace.request.prompt)
        for step in trace.steps:
            # The sampler's own first step on this canvas, of what is left of the active block.
            left = 6 - step.committed % 6
            asked = np.flatnonzero(step.ids == MASK)[:left]
            ids = step.ids[None]
            served = other.serve(
                ids, np.ones(ids.shape, bool), asked[None], np.zeros(1, np.float32)
            )
            first = np.argsort(-served.probability[0], kind="stable")[: len(step.positions)]
            makes = set(zip(asked[first].tolist(), served.tokens[0][first].tolist(), strict=True))
            own = set(zip(step.positions.tolist(), step.tokens.tolist(), strict=True))
            want[index, step.committed * W // SAMPLER.gen_length] += len(own - makes)
            assert step.positions.min() >= start
    assert got.moves is not None and (got.moves[..., 0] == want).all()
    assert want.sum() > got.flips.sum()  # it sees order, too


def test_by_threshold_moves_are_counted_by_its_own_rule() -> None:
    made, other = traces(engine(), sampler=BY_THRESHOLD), engine("int8", noise=0.5)
    assert len({len(step.positions) for trace in made for step in trace.steps}) > 1
    got = tables(made, other, engine("w16a16"), with_moves=True)
    assert got.moves is not None and (got.moves[..., 1] == 0).all()
    want = 0
    for trace in made:
        for step in trace.steps:
            asked = np.flatnonzero(step.ids == MASK)[: 6 - step.committed % 6]
            ids = step.ids[None]
            served = other.serve(ids, np.ones(ids.shape, bool), asked[None], np.zeros(1, "f4"))
            sure = served.probability[0] >= 0.6
            sure[served.probability[0].argmax()] = True
            makes = set(zip(asked[sure].tolist(), served.tokens[0][sure].tolist(), strict=True))
            want += len(
                set(zip(step.positions.tolist(), step.tokens.tolist(), strict=True)) - makes
            )
    assert got.moves[..., 0].sum() == want > 0
    assert (got.passes.sum(axis=1) == [len(trace.steps) for trace in made]).all()


def test_moves_cost_no_pass_more_and_change_nothing_else() -> None:
    made, other = traces(engine()), engine("int8", noise=0.5)
    without, with_moves = tables(made, other), tables(made, other, with_moves=True)
    assert without.rows == with_moves.rows
    assert without.moves is None
    assert without.kl == pytest.approx(with_moves.kl)
    assert (without.flips == with_moves.flips).all()


@pytest.mark.parametrize("batch", [1, 2, 64])
def test_tables_do_not_depend_on_the_batch(batch: int) -> None:
    made, other = traces(engine()), engine("int8", noise=0.5)
    want, got = (tables(made, other, with_moves=True, batch=size) for size in (7, batch))
    assert got.kl == pytest.approx(want.kl)
    assert got.influence == pytest.approx(want.influence)
    assert (got.moves == want.moves).all()
    assert got.rows == want.rows


def test_divergence_adds_up_over_windows() -> None:
    made, other = traces(engine()), engine("int8", noise=0.5)
    whole = tables(made, other, windows=1).kl.sum(axis=(1, 2))
    for windows in (2, 3, 6):
        parts = tables(made, other, windows=windows).kl.sum(axis=(1, 2))
        assert parts == pytest.approx(whole)
    assert divergence(made, other) == pytest.approx(whole.mean())


def test_only_scored_positions_count_in_what_compares_engines_and_all_in_influence() -> None:
    made, other = traces(engine()), engine("int8", noise=0.5)
    early = np.arange(SAMPLER.gen_length) < 5
    every = tables(made, other, with_moves=True)
    first = tables(made, other, with_moves=True, scored=lambda trace: early)
    rest = tables(made, other, with_moves=True, scored=lambda trace: ~early)
    assert first.kl + rest.kl == pytest.approx(every.kl)
    assert (first.flips + rest.flips == every.flips).all()
    assert first.moves is not None and rest.moves is not None
    assert (first.moves + rest.moves == every.moves).all()
    assert first.kl[:, -1].sum() == 0.0 < rest.kl[:, -1].sum()  # the second block comes last
    assert (first.influence == every.influence).all()


def test_influence_is_at_least_one_and_one_in_the_last_window() -> None:
    found = tables(traces(engine()), engine()).influence
    assert (found >= 1.0).all()
    assert (found[:, -1] == 1.0).all()
    assert (found[:, 0] > 1.0).any()


def test_influence_is_one_where_the_model_reads_no_commits() -> None:
    blind = engine(reads=False)
    found = prompt_tables(traces(blind), {"fp32": blind}, blind, windows=W, model=MODEL)
    assert found.influence == pytest.approx(1.0, abs=1e-9)


def test_influence_is_what_masking_a_window_again_does_downstream() -> None:
    full = engine()
    made = traces(full, 2)
    got = tables(made, full, batch=1)
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
    assert got.influence[1, 0] == pytest.approx(want)
    assert got.rows == 2 * (W - 1) * len(made)


def test_the_cost_is_a_generation_a_precision_and_two_passes_a_window_but_the_last() -> None:
    made, told = traces(engine()), []
    engines = (engine("int8", 0.5), engine("w4a4", 1.0), engine())
    found = tables(made, *engines, advance=told.append)
    assert found.precisions == ("int8", "w4a4", "fp32")
    assert found.rows == len(made) * (2 * SAMPLER.steps + 2 * (W - 1)) == sum(told)
    assert passes_by_window(SAMPLER, W) == (2, 2, 2)
    assert engines[2].passes == 0
    assert (found.kl[..., 2] == 0).all()
    assert (found.passes == passes_by_window(SAMPLER, W)).all()


def test_prompt_tables_survive_json_and_the_choice_of_prompts() -> None:
    found = tables(traces(engine()), engine("int8", 0.5), with_moves=True)
    again = PromptTables.from_json(json.loads(json.dumps(found.to_json())))
    assert again.to_json() == found.to_json()
    few = found.only([3, 1])
    assert (few.kl == found.kl[[3, 1]]).all() and (few.influence == found.influence[[3, 1]]).all()
    without = PromptTables.from_json(tables(traces(engine()), engine()).to_json())
    assert without.moves is None and without.only([0]).moves is None


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
        tables(made, broken)
    with pytest.raises(BackendError, match=r"window 2, step 5 of 6, prompt 'd' \(task 't'\)"):
        tables(made, broken, prompt_ids=list("abcde"))


def test_nothing_to_measure_is_refused() -> None:
    made = traces(engine(), 1)
    with pytest.raises(ValueError, match="need traces"):
        tables([], engine())
    with pytest.raises(ValueError, match="windows >= 1"):
        tables(made, engine(), windows=0)
    with pytest.raises(ValueError, match="need engines"):
        tables(made)
    with pytest.raises(ValueError, match="target"):
        tables(made, engine(), target="int8")
