"""Answers: made once, kept by everything that decides them, and rightly counted."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from calib_data.prompts import Prompt
from calib_data.workload import workload_from_name
from engines.backend import FakeBackend, Floats, Ids, Mask
from engines.build import Cache
from engines.model import ModelInfo
from engines.precision import EXECUTED
from engines.schedule import SamplerConfig, Schedule
from tuner import evaluate
from tuner.evaluate import (
    Answers,
    Fleet,
    Item,
    answer,
    answer_all,
    graded,
    same_answers,
    sampler_of,
    token_agreement,
)

MODEL = ModelInfo(
    name="fake",
    architecture="llada",
    vocab=20,
    mask_id=19,
    eos_id=18,
    max_length=40,
    digest="0" * 64,
)
SAMPLER = SamplerConfig(steps=3, gen_length=6, block_length=6)
INT8, FP32 = Schedule.uniform("int8", 3), Schedule.uniform("fp32", 3)


def engine(name: str, shift: int) -> FakeBackend:
    """Return an engine whose token depends on the prompt's first one and on the place."""

    def logits_of(ids: Ids, mask: Mask, positions: Ids) -> Floats:
        wanted = (ids[:, :1] + positions * (1 + shift)) % 18
        return np.asarray(np.eye(20, dtype=np.float32)[wanted] * 5, np.float32)

    return FakeBackend(EXECUTED[name], logits_of)


def fleet() -> Fleet:
    engines = {"fp32": engine("fp32", 0), "int8": engine("int8", 1)}
    return Fleet(engines, {"fp32": "a" * 64, "int8": "b" * 64}, MODEL)


def passes(crew: Fleet) -> int:
    return sum(one.passes for one in crew.engines.values())  # type: ignore[attr-defined]


def items(*lengths: int) -> list[Item]:
    rng = np.random.default_rng(0)
    return [
        Item(Prompt(str(n), f"p{n}"), tuple(rng.integers(0, 18, length).tolist()))
        for n, length in enumerate(lengths)
    ]


def same(one: Answers, other: Answers) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("ids", "commit_step", "bits")
    )


def test_answers_are_in_the_order_of_the_items_whatever_their_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = items(5, 1, 9, 3, 3, 7, 2)
    whole = answer(asked, SAMPLER, INT8, fleet(), Cache(tmp_path / "a"))
    assert whole.ids.shape == whole.commit_step.shape == (7, 6)
    assert set(np.unique(whole.commit_step)) == {1, 2, 3}
    assert whole.bits.tolist() == [8.0] * 7
    monkeypatch.setattr(evaluate, "EVALUATION_BATCH", 2)
    assert same(whole, answer(asked, SAMPLER, INT8, fleet(), Cache(tmp_path / "b")))
    for row, item in enumerate(asked):
        alone = answer([item], SAMPLER, INT8, fleet(), Cache(tmp_path / "c"))
        assert np.array_equal(alone.ids[0], whole.ids[row])


def test_the_same_answers_are_made_once(tmp_path: Path) -> None:
    cache, crew, asked = Cache(tmp_path), fleet(), items(3, 4, 5)
    first = answer(asked, SAMPLER, INT8, crew, cache)
    ran = passes(crew)
    assert same(first, answer(asked, SAMPLER, INT8, crew, cache))
    assert passes(crew) == ran > 0


def test_a_uniform_schedule_is_the_same_with_any_number_of_windows(tmp_path: Path) -> None:
    cache, crew, asked = Cache(tmp_path), fleet(), items(3, 4)
    first = answer(asked, SAMPLER, INT8, crew, cache)
    ran = passes(crew)
    assert same(first, answer(asked, SAMPLER, Schedule.uniform("int8", 2), crew, cache))
    assert passes(crew) == ran


def test_whatever_decides_an_answer_makes_it_anew(tmp_path: Path) -> None:
    cache, crew, asked = Cache(tmp_path), fleet(), items(3, 4)
    answer(asked, SAMPLER, INT8, crew, cache)
    other_key = replace(crew, keys={**crew.keys, "int8": "c" * 64})
    for case in (
        (asked[:1], SAMPLER, INT8, crew),
        (asked[::-1], SAMPLER, INT8, crew),
        (asked, replace(SAMPLER, steps=6), INT8, crew),
        (asked, SAMPLER, FP32, crew),
        (asked, SAMPLER, Schedule(("int8", "int8", "fp32")), crew),
        (asked, SAMPLER, Schedule(("fp32", "int8", "int8")), crew),
        (asked, SAMPLER, INT8, other_key),
        (asked, SAMPLER, INT8, replace(crew, model=replace(MODEL, eos_id=17))),
    ):
        ran = passes(crew)
        answer(*case, cache)
        assert passes(crew) > ran


def test_agreement_is_of_whole_answers_and_of_tokens() -> None:
    full = np.array([[1, 2, 3, 4], [1, 2, 3, 4], [5, 6, 7, 8]])
    ids = np.array([[1, 2, 3, 4], [1, 2, 0, 0], [0, 0, 0, 0]])
    assert same_answers(ids, full).tolist() == [True, False, False]
    assert token_agreement(ids, full).tolist() == [1.0, 0.5, 0.0]


def test_a_grader_reads_the_text_of_each_answer_and_none_grades_nothing() -> None:
    workload = workload_from_name("chain")
    asked = [Item(Prompt("1", "chain:12"), (0,)), Item(Prompt("2", "chain:44"), (0,))]
    ids = np.array([[1, 3], [4, 4]])

    def text(row: object) -> str:
        return "".join(map(str, row))  # type: ignore[call-overload]

    found = graded(workload, asked, ids, text)
    assert found is not None
    assert found.tolist() == [True, False]
    assert graded(replace(workload, grade=None), asked, ids, text) is None


def test_a_workload_s_settings_are_its_sampler_s() -> None:
    workload = workload_from_name("edit")
    sampler = sampler_of(workload)
    assert (sampler.steps, sampler.gen_length) == (workload.steps, workload.gen_length)
    with pytest.raises(ValueError, match="steps"):
        sampler_of(replace(workload, steps=7, block_length=12))


@pytest.mark.parametrize("seed", range(6))
def test_what_schedules_share_at_their_start_is_run_once_and_changes_no_answer(
    seed: int, tmp_path: Path
) -> None:
    rng = np.random.default_rng(seed)
    samplers = (
        SAMPLER,
        SamplerConfig(steps=4, gen_length=6, block_length=6),
        SamplerConfig(steps=6, gen_length=6, block_length=3),
    )
    sampler, asked = samplers[seed % 3], items(3, 4, 5)
    every = list(itertools.product(("int8", "fp32"), repeat=3))
    schedules = [Schedule(every[index]) for index in rng.permutation(8)[:5].tolist()]
    schedules += [Schedule(("int8", "fp32")), schedules[0]]
    together, apart = fleet(), fleet()
    found = answer_all(asked, sampler, schedules, together, Cache(tmp_path / "together"))
    for schedule in set(schedules):
        alone = answer(asked, sampler, schedule, apart, Cache(tmp_path / f"{schedule}"))
        assert same(found[schedule], alone)
    assert passes(together) < passes(apart)


def test_progress_is_told_of_every_answer_kept_or_made(tmp_path: Path) -> None:
    cache, asked, told = Cache(tmp_path), items(3, 4), []
    answer_all(asked, SAMPLER, [INT8], fleet(), cache)
    answer_all(asked, SAMPLER, [INT8, FP32, INT8], fleet(), cache, told.append)
    assert told == [2, 2]
