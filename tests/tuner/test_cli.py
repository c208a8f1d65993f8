"""`cadenza tune` and `cadenza eval`: arguments, exit codes, and what goes to which stream."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cadenza import main
from calib_data.workload import workload_from_name
from exporter.export import export
from tests.calib_data.test_harness import TASKS, needs_harness
from tests.tiny_export import small_export
from tests.tuner.tuning import Said, Tuner
from tuner import cli


def run_eval(capsys: pytest.CaptureFixture[str], *argv: object) -> Said:
    capsys.readouterr()
    code = main(["eval", *map(str, argv)])
    said = capsys.readouterr()
    return Said(code, said.out, said.err, Path(str(argv[0])))


@pytest.mark.parametrize("command", ["tune", "eval", "allocate"])
def test_help_gives_examples_and_defaults(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    said = capsys.readouterr().out
    assert f"  cadenza {command} " in said
    assert "default: " in said


def test_a_command_that_is_not_ours_is_a_caller_s_mistake() -> None:
    for argv in ([], ["run"]):
        with pytest.raises(
            ValueError, match="the command is one of profile, tune, eval, allocate"
        ):
            cli.main(argv)


def test_the_closing_table_is_on_stdout_with_the_digest_and_progress_on_stderr(
    tuned: Said, tuner: Tuner
) -> None:
    said = tuner("--precision", "int8", "--max-loss", "100")
    assert said.code == 0
    assert said.out.startswith("task ")
    assert said.out.endswith(f"{tuner.bundle}: digest {tuned.json['digest']}\n")
    assert "▁" in said.out or "█" in said.out
    assert "trial 1/2: " in said.err
    again = tuner("--precision", "int8", "--max-loss", "100")
    assert again.out == f"{tuner.bundle}: digest {tuned.json['digest']}\n"


def test_a_terminal_without_blocks_gets_ascii(
    tuned: Said, tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    terminal = io.TextIOWrapper(raw, "ascii", write_through=True)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        tuner("--precision", "int8", "--max-loss", "100")
    assert b"ships" in raw.getvalue()
    assert b"\\u25" not in raw.getvalue()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--precision", "int9"), "unknown precision 'int9'; known are"),
        (("--precision", "w4a6"), "export again with --precision w4a6"),
        (("--precision", "int8", "--precision", "int8"), "each precision is named once"),
        (("--precision", "int8", "--precision", "w4a4"), "name only one kind"),
        (("--precision", "w4a4", "--latency-ms", "3"), "budget them with --mean-bits"),
        (("--precision", "w4a4", "--latency-ms", "80%"), "budget them with --mean-bits"),
        (("--target", "cuda"), "export again with --target cuda"),
        (("--task", "poem"), "unknown task 'poem'; built-in tasks are"),
        (("--task", "chain"), "export again with --task chain"),
        (("--task", "edit", "--task", "edit"), "name it once"),
        (("--task", "default=x.jsonl"), "choose another name"),
        (("--latency-ms", "fast"), "for instance 12.5 or 80%"),
        (("--latency-ms", "-3"), "latency_ms > 0 must hold"),
        (("--mean-bits", "nan"), "mean_bits > 0 must hold"),
        (("--max-loss", "-1"), "max_loss >= 0 must hold"),
        (("--trials", "0"), "trials >= 1 must hold"),
        (("--seed", "-1"), "seed >= 0 must hold"),
        (("--storage", "nonsense"), "give the URL of a database"),
        (("--strategy", "luck"), "invalid choice: 'luck'"),
        (("--frobnicate",), "unrecognized arguments"),
    ],
)
def test_an_argument_at_fault_exits_2_with_the_mend_and_writes_no_bundle(
    argv: tuple[str, ...], says: str, tuner: Tuner
) -> None:
    said = tuner(*argv, "--json")
    assert (said.code, said.out) == (2, "")
    assert says in said.err
    assert "Traceback" not in said.err
    assert not tuner.bundle.exists()
    if "--storage" not in argv:
        assert list(tuner.bundle.parent.iterdir()) == []


def test_eval_measures_every_built_in_task_of_a_bundle(
    tuned: Said, capsys: pytest.CaptureFixture[str]
) -> None:
    said = run_eval(capsys, tuned.bundle, "--limit", 5, "--json")
    assert said.code == 0, said.err
    assert said.out.count("\n") == 1
    tasks = said.json["tasks"]
    assert set(tasks) == {"edit", "close"}
    for name, task in tasks.items():
        assert task["schedule"] == name
        assert task["n"] == 5
        assert task["mean_bits"] == 8
        assert task["passes"] == 12
        for share in (task["accuracy"], task["agreement"]):
            assert 0 <= share["low"] <= share["mean"] <= share["high"] <= 1
            assert share["n"] == 5


def test_eval_agrees_with_what_the_tune_measured_on_the_same_prompts(
    tuned: Said, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_eval(capsys, tuned.bundle, "--limit", 5, "--json").json["tasks"]
    for name, task in found.items():
        shipped = tuned.json["tasks"][name]["shipped"]
        assert task["accuracy"]["mean"] == shipped["accuracy"][0]
        assert task["agreement"]["mean"] == shipped["agreement"][0]


def test_eval_s_table_has_a_row_a_task(tuned: Said, capsys: pytest.CaptureFixture[str]) -> None:
    said = run_eval(capsys, tuned.bundle, "--task", "edit", "--limit", 3)
    assert said.code == 0
    header, row = said.out.splitlines()
    assert header.split()[:2] == ["task", "prompts"]
    assert row.split()[:2] == ["edit", "3"]


def test_eval_of_a_file_without_answers_has_no_accuracy_and_follows_default(
    tuned: Said, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.jsonl"
    lines = [{"id": str(n), "prompt": f"edit:ab,a{n}", "split": "test"} for n in range(3)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = run_eval(capsys, tuned.bundle, "--task", f"mine={file}", "--json")
    assert said.code == 0, said.err
    task = said.json["tasks"]["mine"]
    assert task["schedule"] == "default"
    assert task["accuracy"] is None
    assert task["agreement"] is None  # no full precision in the bundle, no golden answer of these


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--task", "poem"), "unknown task 'poem'"),
        (("--task", "mine=none.jsonl"), "give a file of JSON lines"),
        (("--target", "tpu"), "has no target 'tpu'"),
        (("--limit", "0"), "--limit >= 1 must hold"),
        (("--limit", "many"), "invalid int value"),
    ],
)
def test_an_argument_of_eval_at_fault_exits_2_with_the_mend(
    argv: tuple[str, ...], says: str, tuned: Said, capsys: pytest.CaptureFixture[str]
) -> None:
    said = run_eval(capsys, tuned.bundle, *argv)
    assert (said.code, said.out) == (2, "")
    assert says in said.err
    assert "Traceback" not in said.err


def test_eval_of_no_bundle_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = run_eval(capsys, tmp_path / "none")
    assert said.code == 2
    assert "give the folder that cadenza tune wrote" in said.err


RULE = """\
def first_letter(prompt, text, answer):
    return text[:1] < "i"


def none(prompt, text, answer):
    return None


def failing(prompt, text, answer):
    return text[10_000]
"""


def own_task(folder: Path, patch: pytest.MonkeyPatch) -> str:
    """Write prompts without answers, and a module that judges them; return the spec."""
    patch.chdir(folder)
    (folder / "own_rule.py").write_text(RULE)
    patch.delitem(sys.modules, "own_rule", raising=False)
    lines = [
        {"id": prompt.id, "prompt": prompt.prompt, "split": split}
        for split in ("calibration", "tuning", "test")
        for prompt in workload_from_name("edit").prompts(split, 5)  # type: ignore[arg-type]
    ]
    file = folder / "mine.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"mine={file}"


def test_a_grader_of_one_s_own_judges_a_tune_and_its_evaluation(
    tuner: Tuner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec, grader = own_task(tmp_path, monkeypatch), "python:own_rule.first_letter"
    asked = ("--task", spec, "--grader", grader, "--max-loss", "100", "--precision", "int8")
    said = tuner(*asked, "--json")
    assert said.code == 0
    assert said.json["tasks"]["mine"]["shipped"]["accuracy"] is not None
    manifest = json.loads((said.bundle / "manifest.json").read_text())
    assert manifest["tasks"]["mine"]["grader"].startswith(f"{grader} sha256:")
    judged = run_eval(capsys, said.bundle, "--task", spec, "--grader", grader, "--json")
    found = judged.json["tasks"]["mine"]
    assert found["accuracy"]["n"] == 5
    assert found["grader"] == manifest["tasks"]["mine"]["grader"]
    # The bundle's word is not code to run: without the argument nobody knows what is right.
    plain = run_eval(capsys, said.bundle, "--task", spec, "--json").json["tasks"]["mine"]
    assert (plain["accuracy"], plain["grader"]) == (None, None)
    again = tuner(*asked)
    assert "nothing was changed" in again.err
    other = tuner("--task", spec, *asked[4:])
    assert other.code == 2
    assert "--force" in other.err


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("none", "prompt 'edit/test/0/"),
        ("none", "returned None, of type NoneType; let it return True or False"),
        ("failing", "own_rule.py, line 10, in failing: IndexError: string index out of range"),
    ],
)
def test_a_grader_that_fails_exits_2_with_its_place_and_the_prompt(
    function: str,
    says: str,
    tuned: Said,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = own_task(tmp_path, monkeypatch)
    asked = (tuned.bundle, "--task", spec, "--grader", f"python:own_rule.{function}")
    said = run_eval(capsys, *asked)
    assert (said.code, said.out) == (2, "")
    assert says in said.err
    assert "Traceback" not in said.err
    loud = run_eval(capsys, *asked, "-v")
    assert "Traceback" in loud.err
    assert (f"in {function}" in loud.err) or function == "none"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--grader", "exact"), "no --task is one"),
        (("--task", "edit", "--grader", "edit=exact"), "no --task is one"),
        (("--task", "mine=FILE", "--grader", "exact"), 'add "answer" to every line'),
        (("--task", "mine=FILE", "--grader", "regex:("), "does not compile"),
        (("--task", "mine=FILE", "--grader", "python:own_rule.no"), "has no function 'no'"),
        (("--task", "mine=FILE", "--grader", "yours=exact"), "prompt files are given for mine"),
    ],
)
@pytest.mark.parametrize("command", ["tune", "eval"])
def test_a_grader_at_fault_exits_2_before_anything_is_run(
    command: str,
    argv: tuple[str, ...],
    says: str,
    tuned: Said,
    tuner: Tuner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = own_task(tmp_path, monkeypatch)
    given = [spec if each == "mine=FILE" else each for each in argv]
    said = tuner(*given) if command == "tune" else run_eval(capsys, tuned.bundle, *given)
    assert (said.code, said.out) == (2, "")
    assert says in said.err
    assert "trial" not in said.err


@needs_harness
def test_a_harness_task_goes_from_export_to_evaluation(
    checkpoint: Path,
    tuner: Tuner,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = f"harness:{TASKS / 'letters.yaml'}?steps=12"
    out = tmp_path / "EXPORT"
    export(small_export(checkpoint, out, tasks=(spec,), precisions=("fp32", "int8")))
    again = replace(tuner, export=out)
    said = again("--task", spec, "--max-loss", "100", "--json")
    assert said.code == 0
    assert said.json["tasks"]["letters"]["shipped"]["accuracy"] is not None
    found = run_eval(capsys, said.bundle, "--task", spec, "--json").json["tasks"]["letters"]
    assert found["n"] == 40
    assert found["grader"].startswith("harness:letters.yaml")
    unnamed = again("--force")
    assert unnamed.code == 2
    assert "--task harness:TASK" in unnamed.err
