"""Laws of the built-in tasks: right answers pass, damaged ones do not."""

from __future__ import annotations

import random

import pytest

from calib_data.tasks import BRACKETS, DIGITS, LETTERS, PLACEHOLDERS, TASKS, Task

N = 200

every_task = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())


def drawn(task: Task, count: int = N) -> list[tuple[str, str]]:
    rng = random.Random(f"test/{task.name}")
    return [task.draw(rng) for _ in range(count)]


@every_task
def test_the_drawn_answer_is_right(task: Task) -> None:
    assert all(task.grade(prompt, answer) for prompt, answer in drawn(task))


@every_task
def test_the_same_seed_draws_the_same_prompts(task: Task) -> None:
    assert drawn(task) == drawn(task)


@every_task
def test_an_answer_fits_the_generated_length_in_single_character_tokens(task: Task) -> None:
    alphabet = {*LETTERS, *DIGITS, *PLACEHOLDERS, *BRACKETS, *BRACKETS.values(), ","}
    for prompt, answer in drawn(task):
        assert 1 <= len(answer) <= task.gen_length or task.name == "close"
        assert len(answer) <= task.gen_length
        assert set(answer) <= alphabet
        assert set(prompt.removeprefix(f"{task.name}:")) <= alphabet


@every_task
def test_a_change_in_the_scored_part_is_refused(task: Task) -> None:
    rng = random.Random(7)
    for prompt, answer in drawn(task):
        if not answer:
            continue
        at = {
            "all": rng.randrange(len(answer)),
            "start": 0,
            "end": len(answer) - 1,
        }[task.scored]
        assert not task.grade(prompt, answer[:at] + "," + answer[at + 1 :])


@every_task
def test_an_empty_answer_is_refused(task: Task) -> None:
    assert not any(task.grade(prompt, "") for prompt, answer in drawn(task) if answer)


@pytest.mark.parametrize("name", ["edit", "rename", "close"])
def test_a_token_too_many_or_too_few_is_refused_where_all_is_scored(name: str) -> None:
    task = TASKS[name]
    for prompt, answer in drawn(task):
        assert not task.grade(prompt, answer + answer[-1:] + "a")
        if answer:
            assert not task.grade(prompt, answer[:-1])


def test_most_ignores_the_chatter_and_chain_all_but_the_last_digit() -> None:
    for prompt, answer in drawn(TASKS["most"]):
        assert TASKS["most"].grade(prompt, answer[:1] + "zzzz")
        assert not TASKS["most"].grade(prompt, "z" + answer)
    for prompt, answer in drawn(TASKS["chain"]):
        assert TASKS["chain"].grade(prompt, "0" * 15 + answer[-1])


def test_rename_takes_any_two_fresh_names_and_no_others() -> None:
    grade = TASKS["rename"].grade
    assert grade("rename:aXbYX", "acbic")
    assert grade("rename:aXbYX", "ahbph")
    assert not grade("rename:aXbYX", "apbop"), "X takes the letters a to h"
    assert not grade("rename:aXbYX", "acbdc"), "Y takes the letters i to p"
    assert not grade("rename:aXbYX", "aabia"), "a name already in use"
    assert not grade("rename:aXbYX", "acbid"), "X under two names"
    assert not grade("rename:aXbYX", "a1b21"), "not a letter"
    assert not grade("rename:aXbYX", "ccbic"), "a letter changed that was not to be"


def test_close_is_empty_when_nothing_is_open() -> None:
    assert TASKS["close"].grade("close:([])", "")
    assert not TASKS["close"].grade("close:([])", ")")
    assert TASKS["close"].grade("close:([<", ">])")
    assert not TASKS["close"].grade("close:([<", "])>")


def test_two_tasks_are_scored_in_part_one_at_each_end() -> None:
    assert {"start", "end"} <= {task.scored for task in TASKS.values()}
