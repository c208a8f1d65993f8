"""Laws of the splits: disjoint, stable, drawn from seeds."""

from __future__ import annotations

from itertools import combinations
from typing import get_args

import pytest

from calib_data.prompts import Split, draw_prompts, split_of
from calib_data.tasks import TASKS, Task

SPLITS = get_args(Split)

every_task = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())


@every_task
def test_no_prompt_is_in_two_splits_whatever_the_seed(task: Task) -> None:
    texts = {
        split: {p.prompt for seed in range(3) for p in draw_prompts(task, split, 60, seed)}
        for split in SPLITS
    }
    for one, other in combinations(SPLITS, 2):
        assert not texts[one] & texts[other]


@every_task
@pytest.mark.parametrize("split", SPLITS)
def test_a_prompt_lands_in_the_split_that_its_text_decides(task: Task, split: Split) -> None:
    assert all(split_of(p.prompt) == split for p in draw_prompts(task, split, 40))


@every_task
def test_prompts_and_ids_are_all_different(task: Task) -> None:
    prompts = draw_prompts(task, "test", 100)
    assert len({p.prompt for p in prompts}) == len({p.id for p in prompts}) == 100


@every_task
def test_more_prompts_begin_with_the_fewer(task: Task) -> None:
    assert draw_prompts(task, "tuning", 40)[:10] == draw_prompts(task, "tuning", 10)


@every_task
def test_another_seed_draws_other_prompts(task: Task) -> None:
    first, second = ({p.prompt for p in draw_prompts(task, "test", 20, seed)} for seed in (0, 1))
    assert first != second


@every_task
def test_every_prompt_carries_a_right_answer(task: Task) -> None:
    for prompt in draw_prompts(task, "calibration", 40):
        assert prompt.answer is not None
        assert task.grade(prompt.prompt, prompt.answer)


def test_zero_prompts_are_none_and_a_negative_count_is_refused() -> None:
    assert draw_prompts(TASKS["edit"], "test", 0) == []
    with pytest.raises(ValueError, match="count >= 0"):
        draw_prompts(TASKS["edit"], "test", -1)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="split is one of"):
        draw_prompts(TASKS["edit"], "dev", 1)  # type: ignore[arg-type]
