"""Laws of the harness's questions: parts that never meet, examples that give nothing away."""

from __future__ import annotations

import importlib.util
from itertools import combinations

import pytest

from calib_data.errors import WorkloadError
from calib_data.prompts import Split
from calib_data.workload import Workload, workload_from_spec
from tests.calib_data.test_harness import TASKS, needs_harness, offline

__all__ = ["offline"]  # a fixture for every test here

pytestmark = needs_harness

if importlib.util.find_spec("lm_eval"):
    from tests.calib_data.harness_tasks.letters import REPEATED, TEST, TRAIN

USED: tuple[Split, ...] = ("calibration", "tuning", "test")


def letters(arguments: str = "", file: str = "letters.yaml") -> Workload:
    return workload_from_spec(f"harness:{TASKS / file}{arguments}")


def question(prompt: str) -> str:
    """Return a prompt without its examples."""
    return f"edit:{prompt.rpartition('edit:')[2]}"


@pytest.mark.parametrize("file", ["letters.yaml", "letters_cut.yaml"])
@pytest.mark.parametrize("seed", [0, 1])
def test_no_question_is_in_two_parts_nor_an_example_where_it_judges(file: str, seed: int) -> None:
    workload = letters("?fewshot=2", file)
    parts = {split: workload.prompts(split, 999, seed) for split in USED}
    asked = {split: {question(p.prompt) for p in prompts} for split, prompts in parts.items()}
    for one, other in combinations(USED, 2):
        assert asked[one]
        assert not asked[one] & asked[other]
    assert workload.prompts("train", 9) == []
    for prompts in parts.values():
        for prompt in prompts:
            examples = [f"edit:{each}" for each in prompt.prompt.split("edit:")[1:-1]]
            shown = {",".join(each.split(",")[:2]) for each in examples}
            assert len(shown) == 2
            assert question(prompt.prompt) not in shown
            assert not shown & asked["test"]


def test_test_prompts_are_the_test_split_and_the_rest_is_the_training_split_without_repeats() -> (
    None
):
    workload = letters()
    found = {split: workload.prompts(split, 999) for split in USED}
    assert len(found["test"]) == TEST
    assert len(found["calibration"]) + len(found["tuning"]) == TRAIN - REPEATED
    assert {p.id.split("/")[1] for p in found["test"]} == {"test"}
    assert {p.id.split("/")[1] for p in found["tuning"]} == {"training"}


def test_one_split_alone_is_cut_in_the_proportion_of_the_numbers() -> None:
    cut = letters("?calibration=10&tuning=3&test=20&fewshot=0", "letters_cut.yaml")
    assert [len(cut.prompts(split, 999)) for split in USED] == [10, 3, 20]
    plain = letters("?fewshot=0", "letters_cut.yaml")
    sizes = [len(plain.prompts(split, 999)) for split in USED]
    assert sum(sizes) == TEST - REPEATED
    assert sizes == [8, 8, 17]


def test_a_number_in_the_spec_bounds_what_is_drawn() -> None:
    workload = letters("?test=5")
    assert len(workload.prompts("test", 999)) == 5
    assert len(workload.prompts("test", 3)) == 3


def test_prompts_are_the_same_whatever_else_is_drawn() -> None:
    one, other = letters("?fewshot=2"), letters("?fewshot=2")
    other.prompts("calibration", 9)
    assert one.prompts("test", 20)[:7] == other.prompts("test", 7)
    assert one.prompts("test", 20, seed=1) != one.prompts("test", 20, seed=0)


def test_a_text_is_cut_at_the_stop_string_and_judged_by_the_filter_and_the_metric() -> None:
    whole, half = letters(), letters("?filter=half")
    verdict = letters("?metric=verdict", "letters_lengths.yaml")
    for prompt in whole.prompts("test", 5):
        answer = prompt.answer
        assert answer is not None
        for workload in (half, verdict):
            workload.prompts("test", 99)
            assert workload.grade is not None
        assert whole.grade is not None
        assert whole.grade(prompt.prompt, answer)
        assert whole.grade(prompt.prompt, f"{answer}! and more")
        assert not whole.grade(prompt.prompt, f"{answer} and more")
        assert not whole.grade(prompt.prompt, "")
        assert half.grade is not None
        assert not half.grade(prompt.prompt, answer)
        assert verdict.grade is not None
        assert verdict.grade(prompt.prompt, answer)
        assert not verdict.grade(prompt.prompt, answer[1:])


def test_a_prompt_that_was_not_drawn_is_a_caller_s_mistake() -> None:
    grade = letters().grade
    assert grade is not None
    with pytest.raises(ValueError, match="none that was drawn"):
        grade("edit:ab,ab", "")


def test_what_cannot_be_drawn_is_told_with_the_mend() -> None:
    with pytest.raises(WorkloadError, match=r"no test prompts \(40 were too long\)"):
        letters("?longest=5").prompts("test", 9)
    with pytest.raises(WorkloadError, match=r"99 examples are needed, and 53 may be shown"):
        letters("?fewshot=99").prompts("test", 9)
