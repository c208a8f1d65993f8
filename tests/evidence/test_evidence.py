"""`make evaluate`, in its quick form: whole, resumable, and never over the full results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.calib_data.test_harness import TASKS, needs_harness
from tests.evidence import __main__ as evidence
from tests.evidence import document
from tests.evidence.choices import METHODS, with_high_windows
from tests.evidence.config import FULL, QUICK, ROOT
from tests.evidence.headline import bits_at_uniform_quality

# What DESIGN promises of each entry of results.json.
KEYS = {
    "pearson_mean",
    "spearman_mean",
    "dp_minus_uniform",
    "dp_minus_random",
    "dp_minus_bisection",
    "bits_at_uniform_quality",
    "uniform_loss",
    "default_minus_task",
    "n_test",
}
WHOLE = {"verdict_regret", "false_mixed", "transfer_diagonal_wins", "latency_saved"}


@pytest.mark.slow
def test_the_quick_study_is_whole_and_goes_on_where_it_was(tmp_path: Path) -> None:
    said: list[str] = []
    first = evidence.run(QUICK, tmp_path / "work", tmp_path / "out", said.append)
    assert "answers: sensitivity" in said[0]
    again = evidence.run(QUICK, tmp_path / "work", tmp_path / "out", said.append)
    assert len(again["seconds"]) == 2
    assert again["seconds"][1] < first["seconds"][0]
    assert {**first, "seconds": 0} == {**again, "seconds": 0}
    results = json.loads((tmp_path / "out" / "results.json").read_text("utf-8"))
    assert results["format"] == "cadenza-results/1"
    assert list(results["quantizers"]) == list(QUICK.quantizers)
    for entry in results["quantizers"].values():
        assert set(entry["all"]) >= KEYS | WHOLE
        assert list(entry["tasks"]) == list(QUICK.tasks)
        for task in entry["tasks"].values():
            assert set(task) >= KEYS
            bits = {label: row["mean_bits"] for label, row in task["rows"].items()}
            for method in METHODS:
                same = [bits[label] for label in bits if label.startswith(f"{method} permuted")]
                assert all(each == pytest.approx(bits[method]) for each in same)
                assert bits[method] <= QUICK.mean_bits
        choices = json.loads((tmp_path / "work" / "choices.rtn.json").read_text("utf-8"))
        assert set(choices) == {"sha256", *QUICK.tasks}
    text = (tmp_path / "out" / "RESULTS.md").read_text("utf-8")
    for figure in (tmp_path / "out" / "results").iterdir():
        assert f"results/{figure.name}" in text
        assert figure.read_text("utf-8").startswith("<?xml")


@pytest.mark.slow
@needs_harness
def test_the_study_takes_another_checkpoint_as_it_is_and_a_task_of_the_harness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = replace(
        QUICK,
        factor=1.0,
        tasks=(f"harness:{TASKS / 'letters.yaml'}?steps=12",),
        quantizers=("rtn",),
        main="rtn",
    )
    results = evidence.run(config, tmp_path / "work", tmp_path / "out", lambda text: None)
    assert list(results["quantizers"]["rtn"]["tasks"]) == ["letters"]
    assert list(results["engines"]) == ["rtn"]
    full = results["quantizers"]["rtn"]["tasks"]["letters"]["rows"]["full precision"]
    assert full["accuracy"]["mean"] > 90.0


def test_the_quick_study_never_writes_over_the_full_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[object, Path]] = []
    monkeypatch.setattr(
        evidence, "run", lambda config, work, out, say: asked.append((config, out))
    )
    evidence.main(["--quick"])
    evidence.main(["--model", "elsewhere"])
    evidence.main([])
    assert asked[0] == (QUICK, ROOT / "evidence" / "out")
    assert asked[1][1] != ROOT
    assert asked[2] == (FULL, ROOT)


def test_the_results_in_the_project_are_of_the_full_study_and_their_document_says_the_same() -> (
    None
):
    results = json.loads((ROOT / "results.json").read_text("utf-8"))
    assert results["config"]["test"] == FULL.test >= 1000
    assert (ROOT / "RESULTS.md").read_text("utf-8") == document.text(results)


def test_bits_at_uniform_quality_are_read_from_the_most_down_to_the_first_loss() -> None:
    def gap(mean: float) -> dict[str, object]:
        return {"all": {"mean": mean}, "tasks": {}}

    found = {
        "dp_minus_uniform": gap(1.0),
        "dp at 3.75 minus uniform": gap(0.0),
        "dp at 3.5 minus uniform": gap(-0.1),
        "dp at 3.25 minus uniform": gap(2.0),
    }
    assert bits_at_uniform_quality(found, (3.25, 3.5, 3.75), 4.0, None) == 3.75
    found["dp_minus_uniform"] = gap(-1.0)
    assert bits_at_uniform_quality(found, (3.25, 3.5, 3.75), 4.0, None) is None


@pytest.mark.parametrize("seed", range(5))
def test_each_number_of_high_windows_has_the_best_schedule_within_the_bits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    gain = np.sort(rng.normal(size=(4, 4)), axis=1)
    bits = np.array([3.0, 4.0, 6.0, 8.0])
    found = with_high_windows(gain, bits, 4.5)
    for number, schedule in found.items():
        assert schedule.precisions.count("w4a8") == number
    assert 0 in found
