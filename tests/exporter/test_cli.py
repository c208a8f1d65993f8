"""`cadenza export`: arguments, exit codes, and what goes to which stream."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines.schedule import SamplerConfig
from exporter.cli import main
from exporter.folder import Export, read_export
from exporter.requests import tasks_from_specs


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = main(["export", *map(str, argv)])
    said = capsys.readouterr()
    return code, said.out, said.err


def same(exported: Export, checkpoint: Path) -> list[object]:
    """Return the arguments that made the shared export."""
    precisions = ("--precision", "int8,w4a4", "--precision", "w8a8", "--precision", "w16a16")
    tasks = ("--task", "edit", "--task", "close", "--prompts-per-task", 3)
    return [checkpoint, "-o", exported.folder, *precisions, "--windows", 3, *tasks]


def test_help_gives_examples_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert (
        "cadenza export MODEL -o EXPORT --task mine=prompts.jsonl --task-set mine.steps=16" in out
    )
    assert "default: 6" in out


def test_the_arguments_are_the_config_and_json_is_alone_on_stdout(
    exported: Export, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *same(exported, checkpoint), "--json")
    assert code == 0
    assert "nothing was changed" in err
    assert json.loads(out)["precisions"] == ["fp32", "int8", "w4a4", "w8a8", "w16a16"]


def test_progress_goes_to_stderr_and_the_end_says_what_is_next(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out_folder = tmp_path / "EXPORT"
    settings = ("--task-set", "edit.steps=6", "--shape", "batch=1:2:4,prompt=1:8:20")
    code, out, err = run(
        capsys, checkpoint, "-o", out_folder, "--precision", "fp32", "--task", "edit", *settings,
        "--prompts-per-task", 1, "--copy",
    )  # fmt: skip
    assert code == 0
    assert "calibrating, prompts: 1/1" in err
    assert "as asked" in err
    assert out.endswith(f"next: cadenza tune {out_folder} -o BUNDLE\n")
    made = read_export(out_folder)
    assert made.tasks["edit"].sampler.steps == made.sampler.steps == 6
    assert made.shape.prompt == (1, 8, 20)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--precision", "int9"), "unknown precision 'int9'"),
        (("--windows", "0"), "windows >= 1"),
        (("--windows", "99"), "use fewer --windows"),
        (("--task-set", "edit.speed=3"), "--task-set is NAME.KEY=N"),
        (("--task-set", "edit.steps=x"), "--task-set is NAME.KEY=N"),
        (("--shape", "batch=1"), "--shape is batch=MIN:OPT:MAX"),
        (("--shape", "batch=4:2:1,prompt=1:2:3"), "1 <= min <= opt <= max"),
        (("--shape", "batch=1:2:4,prompt=1:2:60"), "more than the model's 64"),
        (("--target", "tpu"), "unknown target 'tpu'; did you mean 'cpu'?"),
        (("--target", "cpu", "--target", "cuda"), "one --target an export"),
        (("--quantizer", "awq"), "quantizer must be one of rtn, gptq, gptq-hadamard"),
        (("--steps", "7", "--block-length", "12"), "steps must be a multiple"),
        (("--steps", "6", "--threshold", "0.9"), "leave one out"),
        (("--task-set", "edit.steps=6", "--task-set", "edit.threshold=0.9"), "leave one out"),
        (("--threshold", "0"), "0 < threshold <= 1 must hold, got threshold=0.0; give"),
        (("--threshold", "nan"), "0 < threshold <= 1"),
        (("--threshold", "sure"), "invalid float value"),
        (("--task-set", "edit.threshold=x"), "for instance edit.steps=8 or edit.threshold=0.9"),
        (("--threshold", "0.9", "--windows", "25"), "use fewer --windows"),
        (("--frobnicate",), "unrecognized arguments"),
    ],
)
def test_an_argument_at_fault_exits_2_with_one_line_and_writes_nothing(
    argv: tuple[str, ...],
    says: str,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = run(capsys, checkpoint, "-o", tmp_path / "EXPORT", *argv)
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_checkpoint_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, tmp_path / "none", "-o", tmp_path / "EXPORT")
    assert code == 2
    assert "there is no checkpoint folder" in err


def test_what_one_task_is_told_goes_before_what_all_are() -> None:
    tasks = ("edit", "chain")
    found = tasks_from_specs(tasks, {"threshold": 0.9}, {"chain": {"steps": 6}}, 3)
    assert [sampler.rule for _, sampler in found.values()] == ["threshold", "low_confidence"]
    assert found["edit"][1] == SamplerConfig(rule="threshold", threshold=0.9)
    assert found["chain"][1] == SamplerConfig(steps=6)
    found = tasks_from_specs(
        tasks, {"steps": 6, "gen_length": 12}, {"edit": {"threshold": 0.7}}, 3
    )
    lengths = {"gen_length": 12, "block_length": 12}
    assert found["edit"][1] == SamplerConfig(rule="threshold", threshold=0.7, **lengths)
    assert found["chain"][1] == SamplerConfig(steps=6, **lengths)
