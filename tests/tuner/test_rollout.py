"""Rollouts: single changes of the base, measured to the end of answers and paid for once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engines.build import Cache
from engines.schedule import Schedule
from tests.tuner.test_evaluate import SAMPLER, fleet, items, passes
from tuner.evaluate import answer, read_positions, token_agreement
from tuner.gain import gain_from
from tuner.rollout import single_changes, with_rollout
from tuner.sensitivity import PromptTables

NAMES = ("int8", "fp32")


def empty(prompts: int, windows: int) -> PromptTables:
    shape = (prompts, windows, len(NAMES))
    return PromptTables(
        precisions=NAMES,
        kl=np.zeros(shape),
        flips=np.zeros(shape),
        moves=None,
        influence=np.ones(shape[:2]),
        passes=np.ones(shape[:2]),
        rows=5,
    )


def test_a_single_change_is_the_base_but_for_one_window() -> None:
    found = single_changes("a", ("a", "b"), 3)
    assert found[1, 1] == Schedule(("a", "b", "a"))
    assert all(found[w, 0] == Schedule.uniform("a", 3) for w in range(3))


def test_rollouts_are_what_the_changed_answers_differ_in(tmp_path: Path) -> None:
    crew, asked = fleet(), items(3, 4, 5, 5)
    full = answer(asked, SAMPLER, Schedule.uniform("fp32", 3), crew, Cache(tmp_path / "full")).ids
    read = read_positions("all", full, crew.model.eos_id)
    before = passes(crew)
    found = with_rollout(
        empty(4, 3), asked, SAMPLER, "int8", crew, Cache(tmp_path / "a"), full, read
    )
    assert found.rollout is not None
    for (window, column), schedule in single_changes("int8", NAMES, 3).items():
        alone = answer(asked, SAMPLER, schedule, fleet(), Cache(tmp_path / f"{window}{column}"))
        wrong = 1.0 - token_agreement(alone.ids, full, read)
        assert found.rollout[:, window, column].tolist() == wrong.tolist()
    # One batch: a pass serves all rows, so what is counted in rows is four times what ran.
    assert found.rows - 5 == 4 * (passes(crew) - before)
    gain = gain_from(found, (8.0, 32.0), "int8", "rollout")
    assert (gain[:, 1] >= 0).all() and (gain[:, 0] == 0).all()


def test_what_a_grader_reads_is_the_text_its_end_or_a_part_of_it() -> None:
    eos = 9
    ids = np.array([[1, 2, 9, 9], [1, 2, 3, 4], [9, 9, 9, 9]])
    assert read_positions("all", ids, eos).tolist() == [
        [True, True, True, False],
        [True, True, True, True],
        [True, False, False, False],
    ]
    assert read_positions("start", ids, eos).argmax(axis=1).tolist() == [0, 0, 0]
    assert read_positions("end", ids, eos).argmax(axis=1).tolist() == [1, 3, 0]
    for scored in ("start", "end"):
        assert (read_positions(scored, ids, eos).sum(axis=1) == 1).all()


@pytest.mark.parametrize("seed", range(5))
def test_tokens_that_nobody_reads_do_not_count(seed: int) -> None:
    rng = np.random.default_rng(seed)
    full, ids = rng.integers(0, 5, (6, 8)), rng.integers(0, 5, (6, 8))
    read = rng.random((6, 8)) < 0.5
    read[:, 0] = True
    changed = np.where(read, ids, rng.integers(0, 5, (6, 8)))
    assert (
        token_agreement(ids, full, read).tolist() == token_agreement(changed, full, read).tolist()
    )
    everything = np.ones((6, 8), np.bool_)
    assert token_agreement(ids, full, everything) == pytest.approx(token_agreement(ids, full))
