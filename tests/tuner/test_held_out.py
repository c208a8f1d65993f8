"""`cadenza eval` from the inside: agreement with full precision, with and without its engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines.bundle import read_bundle
from engines.errors import InputError
from engines.runtime import Answer
from tests.tuner.tuning import Said, Tuner
from tuner.held_out import evaluate_bundle, held_out_table, scored_step


def test_with_full_precision_on_board_every_prompt_is_compared(tuner: Tuner) -> None:
    assert tuner("--precision", "fp32", "--max-loss", "100").code == 0
    found = evaluate_bundle(tuner.bundle, ["edit", "chain"], "cpu", 9, seed=5)
    for task in found.values():
        assert task["agreement"]["n"] == 9
        assert task["agreement"]["mean"] == 1.0
    assert found["chain"]["schedule"] == "default"


def test_without_it_the_prompts_are_compared_whose_answers_the_bundle_holds(
    tuned: Said, tmp_path: Path
) -> None:
    golden = [each for each in read_bundle(tuned.bundle).golden if each.task == "edit"]
    lines = [{"id": each.id, "prompt": each.prompt, "split": "test"} for each in golden]
    lines.append({"id": "new", "prompt": "edit:ab,abcabc", "split": "test"})
    file = tmp_path / "edit.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = evaluate_bundle(tuned.bundle, [f"edit={file}"], "cpu", 99, seed=0)["edit"]
    assert found["n"] == len(golden) + 1
    assert found["agreement"]["n"] == len(golden)
    same = sum(each.ids == each.full_precision_ids for each in golden) / len(golden)
    assert found["agreement"]["mean"] == pytest.approx(same)


def test_a_file_without_test_prompts_is_told_with_the_mend(tuned: Said, tmp_path: Path) -> None:
    file = tmp_path / "edit.jsonl"
    file.write_text('{"id": "1", "prompt": "edit:ab,ab", "split": "tuning"}\n')
    with pytest.raises(InputError, match='or set their "split" to "test"'):
        evaluate_bundle(tuned.bundle, [f"edit={file}"], "cpu", 9, seed=0)


def answer_of(tokens: int, *steps: int) -> Answer:
    return Answer(
        text="",
        ids=(0,) * len(steps),
        passes=3,
        tokens=tokens,
        bits=8.0,
        engine_ms=(1.0,),
        task="edit",
        commit_step=steps,
    )


@pytest.mark.parametrize(("scored", "step"), [("all", 2.0), ("start", 3.0), ("end", 1.0)])
def test_the_scored_step_is_of_the_tokens_that_the_grader_reads(scored: str, step: float) -> None:
    assert scored_step(scored, [answer_of(3, 3, 2, 1, 9, 9)]) == step


def test_an_empty_answer_is_decided_where_its_end_is() -> None:
    for scored in ("all", "start", "end"):
        assert scored_step(scored, [answer_of(0, 4, 1, 1)]) == 4.0


def test_what_is_not_known_is_a_dash_in_the_table() -> None:
    share = {"mean": 0.5, "low": 0.25, "high": 0.75, "n": 4}
    known = {"n": 4, "mean_bits": 8.0, "passes": 12.0, "scored_step": 3.0}
    text = held_out_table(
        {
            "edit": {**known, "accuracy": share, "agreement": share},
            "mine": {**known, "accuracy": None, "agreement": None},
        }
    )
    _, graded, ungraded = text.splitlines()
    assert "50.0 [25.0, 75.0]" in graded
    assert ungraded.split()[2:5] == ["-", "-", "-"]
