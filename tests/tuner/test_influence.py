"""The counterfactual form of influence; the re-mask form is tested with the tables."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from engines.backend import Backend, FakeBackend
from engines.errors import BackendError
from engines.precision import precision_from_name
from engines.trace import Trace
from tests.tuner.test_sensitivity import (
    BY_THRESHOLD,
    MASK,
    MODEL,
    SAMPLER,
    W,
    engine,
    logits_of,
    traces,
)
from tuner.sensitivity import PromptTables, prompt_tables

STEPS = SAMPLER.steps // W


def counterfactual(
    made: list[Trace], *engines: Backend, target: str | None = None
) -> PromptTables:
    named = {each.precision.name: each for each in engines}
    return prompt_tables(
        made,
        named,
        engine(),
        windows=W,
        model=MODEL,
        influence="counterfactual",
        target=target,
        batch=3,
    )


def denoise(ids: NDArray[np.int64], with_: FakeBackend, steps: int) -> NDArray[np.int64]:
    """The sampler written out: two tokens a step of the first block that is not decided."""
    ids = ids.copy()
    for _ in range(steps):
        masked = np.flatnonzero(ids == MASK)
        asked = masked[: (len(masked) - 1) % 6 + 1]
        out = with_.serve(ids[None], np.ones((1, len(ids)), bool), asked[None], np.zeros(1, "f4"))
        first = np.argsort(-out.probability[0], kind="stable")[:2]
        ids[asked[first]] = out.tokens[0][first]
    return ids


@pytest.mark.parametrize("noise", [0.0, 0.5, 2.0])
def test_counterfactual_influence_is_what_other_commits_of_a_window_change_later(
    noise: float,
) -> None:
    full, other = engine(), engine("int8", noise)
    made = traces(full)
    got = counterfactual(made, other)
    want = np.ones((len(made), W))
    flipped = 0
    for index, trace in enumerate(made):
        final = denoise(trace.steps[0].ids, full, SAMPLER.steps)
        assert tuple(final[len(trace.request.prompt) :]) == trace.generation.ids
        for window in range(W - 1):
            before = trace.steps[window * STEPS].ids
            after = trace.steps[(window + 1) * STEPS].ids
            mine = denoise(before, other, STEPS)
            wrong = (before == MASK) & (mine != MASK) & (mine != after)
            if not wrong.any():
                flipped += 1
                commits = [
                    (np.sort(np.exp(log_p))[-1] - np.sort(np.exp(log_p))[-2], place, log_p)
                    for step in trace.steps[window * STEPS : (window + 1) * STEPS]
                    for place, log_p in zip(step.positions.tolist(), step.log_p, strict=True)
                ]
                _, place, log_p = min(commits, key=lambda commit: commit[0])
                mine[place] = np.argsort(log_p)[-2]
                wrong = mine != after
            end = denoise(mine, full, SAMPLER.steps - (window + 1) * STEPS)
            later = mine == MASK
            want[index, window] += (end != final)[later].sum() / wrong.sum()
    assert got.influence == pytest.approx(want)
    assert (got.influence[:, -1] == 1.0).all() and (got.influence > 1.0).any()
    assert (flipped == len(made) * (W - 1)) if noise == 0.0 else flipped < len(made) * (W - 1)


def test_nothing_travels_where_the_model_reads_no_commits() -> None:
    blind = engine(reads=False)
    found = prompt_tables(
        traces(blind),
        {"fp32": blind},
        blind,
        windows=W,
        model=MODEL,
        influence="counterfactual",
    )
    assert (found.influence == 1.0).all()


def test_by_threshold_the_answer_goes_on_from_wherever_the_target_left_the_window() -> None:
    made = traces(engine(), sampler=BY_THRESHOLD)
    found = counterfactual(made, engine("int8", 1.0), engine())
    assert (found.influence >= 1.0).all() and (found.influence > 1.0).any()
    whole = sum(len(trace.steps) for trace in made)
    assert whole < found.rows < whole * (1 + W)


def test_the_target_is_the_one_named_else_the_one_of_fewest_bits() -> None:
    made = traces(engine())
    engines = (engine("int8", 0.1), engine("w4a4", 2.0), engine())
    base = counterfactual(made, *engines).influence
    assert (base == counterfactual(made, *engines, target="w4a4").influence).all()
    assert (base != counterfactual(made, *engines, target="int8").influence).any()


def test_it_costs_the_window_s_passes_and_all_that_follow() -> None:
    made = traces(engine())
    found = counterfactual(made, engine("int8", 0.5))
    for_influence = sum(SAMPLER.steps - window * STEPS for window in range(W - 1))
    assert found.rows == len(made) * (SAMPLER.steps + for_influence)


def test_an_engine_that_fails_in_the_middle_names_the_prompt() -> None:
    def logits(*given: object) -> NDArray[np.float32]:
        return logits_of()(*given) * np.float32(np.nan)  # type: ignore[arg-type]

    broken = FakeBackend(precision_from_name("int8"), logits)
    with pytest.raises(BackendError, match=r"window 0, step 1 of 6.*prompt 'b'"):
        prompt_tables(
            traces(engine(), 2)[1:],
            {"int8": broken},
            engine(),
            windows=W,
            model=MODEL,
            influence="counterfactual",
            prompt_ids=["b"],
        )


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="remask, counterfactual, got 'luck'"):
        prompt_tables(
            traces(engine(), 1),
            {"fp32": engine()},
            engine(),
            windows=W,
            model=MODEL,
            influence="luck",  # type: ignore[arg-type]
        )
