"""Laws of `cadenza run`, `inspect` and `verify`: data on stdout, words on stderr, exit codes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from engines.bundle import read_bundle
from engines.cli import main
from engines.runtime import Runtime
from tests.engines.tiny_bundle import (
    CPU,
    PROMPTS,
    edited,
    external_graph,
    put,
    read_manifest,
    relist,
)

Out = pytest.CaptureFixture[str]


def command(capsys: Out, *argv: object) -> tuple[int, str, str]:
    """Run a command and return (exit code, stdout, stderr)."""
    code = main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return code, out, err


def prompts_file(folder: Path, *lines: object) -> Path:
    file = folder / "prompts.jsonl"
    text = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    file.write_text("".join(f"{line}\n" for line in text))
    return file


@pytest.mark.parametrize("name", ["run", "inspect", "verify"])
def test_help_has_examples_and_exits_0(capsys: Out, name: str) -> None:
    code, out, err = command(capsys, name, "--help")
    assert code == 0
    assert f"usage: cadenza {name}" in out
    assert f"examples:\n  cadenza {name}" in out
    assert err == ""


@pytest.mark.parametrize("name", ["run", "inspect", "verify"])
def test_a_missing_bundle_and_an_unknown_option_exit_2_without_a_traceback(
    capsys: Out, tmp_path: Path, name: str
) -> None:
    prompt = ["abc"] if name == "run" else []
    for argv in ([tmp_path / "none", *prompt], [tmp_path, *prompt], [], ["--nonsense"]):
        code, out, err = command(capsys, name, *argv)
        assert (code, out) == (2, "")
        assert err.splitlines()[-1].startswith(f"cadenza {name}: error: ")
        assert "Traceback" not in err


def test_verbose_shows_the_traceback(capsys: Out, tmp_path: Path) -> None:
    code, _, err = command(capsys, "verify", "-v", tmp_path / "none")
    assert code == 2
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("cadenza verify: error: ")


def test_an_unknown_command_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="one of run, inspect, verify"):
        main(["tune"])
    with pytest.raises(ValueError, match="one of run, inspect, verify"):
        main([])


def test_run_prints_the_answer_alone_on_stdout(capsys: Out, bundle_folder: Path) -> None:
    code, out, err = command(capsys, "run", bundle_folder, "abc", "--task", "edit")
    assert code == 0
    assert out == f"{Runtime.load(bundle_folder).generate('abc', task='edit')[0].text}\n"
    assert "tokens in 6 passes, mean bits 24" in err


def test_options_may_stand_between_the_bundle_and_the_prompt(
    capsys: Out, bundle_folder: Path
) -> None:
    after = command(capsys, "run", bundle_folder, "abc", "--task", "edit")
    between = command(capsys, "run", bundle_folder, "--task", "edit", "abc")
    before = command(capsys, "run", "--task", "edit", bundle_folder, "--", "abc")
    assert after[0] == between[0] == before[0] == 0
    assert after[1] == between[1] == before[1]


def test_nothing_after_two_dashes_is_an_option(capsys: Out, bundle_folder: Path) -> None:
    code, _, err = command(capsys, "run", bundle_folder, "--task", "edit", "--", "--json")
    assert code == 2 and "the prompt '--json'" in err
    assert command(capsys, "inspect", "--", bundle_folder)[0] == 0


def test_more_threads_than_any_machine_has_are_refused(capsys: Out, bundle_folder: Path) -> None:
    code, _, err = command(capsys, "run", bundle_folder, "abc", "--threads", str(10**30))
    assert code == 2 and "--threads must be from 0 to" in err


def test_run_lines_hold_what_the_design_lists(
    capsys: Out, bundle_folder: Path, tmp_path: Path
) -> None:
    lines = [{"id": f"n{n}", "prompt": prompt} for n, prompt in enumerate(PROMPTS)]
    lines[1]["task"] = "default"
    file = prompts_file(tmp_path, *lines, "", "  ")
    code, out, _ = command(
        capsys, "run", bundle_folder, "--input", file, "--task", "edit", "--json"
    )
    assert code == 0
    answers = [json.loads(line) for line in out.splitlines()]
    assert [answer["id"] for answer in answers] == [line["id"] for line in lines]
    keys = {"id", "task", "text", "ids", "passes", "tokens", "bits", "engine_ms"}
    assert all(set(answer) == keys for answer in answers)
    assert [answer["task"] for answer in answers[:3]] == ["edit", "default", "edit"]
    assert all(len(answer["engine_ms"]) == 3 for answer in answers)
    code, out, _ = command(capsys, "run", bundle_folder, "--input", file)
    assert [line.split("\t")[0] for line in out.splitlines()] == [line["id"] for line in lines]


def test_run_reads_stdin(
    capsys: Out, bundle_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"id": "x", "prompt": "abc"}\n'))
    code, out, _ = command(capsys, "run", bundle_folder, "--input", "-", "--json")
    assert code == 0
    assert json.loads(out)["id"] == "x"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "give either a PROMPT or --input"),
        (["abc", "--input", "x.jsonl"], "give either a PROMPT or --input"),
        (["--input", "none.jsonl"], "cannot read the prompts 'none.jsonl'"),
        (["abc", "--task", "sort"], "unknown task 'sort'; this bundle has default, edit"),
        (["ab<mask>"], "holds the mask token '<mask>'"),
        ([""], "must not be empty"),
        (["xyz"], "cannot be tokenized"),
        (["a" * 21], "has 21 tokens, the bundle is made for 20 at most"),
        (["abc", "--policy", "fast"], "invalid choice: 'fast'"),
        (["abc", "--batch", "9"], "the batch must be from 1 to 4"),
        (["abc", "--threads", "-1"], "--threads must be from 0 to"),
        (["abc", "--target", "trt"], "has no target 'trt'; it has cpu"),
        (["abc", "--expect", "0" * 64], "expected is 0000"),
    ],
)
def test_run_says_what_is_at_fault_and_exits_2(
    capsys: Out, bundle_folder: Path, argv: list[str], says: str
) -> None:
    code, out, err = command(capsys, "run", bundle_folder, *argv)
    assert (code, out) == (2, "")
    assert says in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "are empty"),
        (["{"], "line 1: not valid JSON"),
        ([{"id": "1", "prompt": "a"}, {"id": "1", "prompt": "b"}], "line 2: id: '1' is another"),
        ([{"id": "1"}], "the key 'prompt' is missing"),
        ([{"prompt": "a"}], "the key 'id' is missing"),
        ([{"id": "1", "prompt": 5}], "prompt: must be text"),
        ([{"id": "1", "prompt": "a", "task": "sort"}], "unknown task 'sort'"),
    ],
)
def test_run_refuses_a_bad_prompt_file(
    capsys: Out, bundle_folder: Path, tmp_path: Path, lines: list[object], says: str
) -> None:
    code, out, err = command(
        capsys, "run", bundle_folder, "--input", prompts_file(tmp_path, *lines)
    )
    assert (code, out) == (2, "")
    assert says in err


def test_run_takes_the_digest_that_verify_prints(capsys: Out, bundle_folder: Path) -> None:
    _, out, _ = command(capsys, "verify", bundle_folder, "--json")
    digest = json.loads(out)["digest"]
    assert command(capsys, "run", bundle_folder, "abc", "--expect", digest)[0] == 0


def test_verify_accepts_a_whole_bundle_and_says_what_it_checked(
    capsys: Out, bundle_folder: Path
) -> None:
    code, out, _ = command(capsys, "verify", bundle_folder)
    assert code == 0
    assert "8 files are as listed" in out
    assert "3 on cpu loaded" in out
    assert "8 of 8 answers equal, token for token (tolerance: none)" in out
    code, out, _ = command(capsys, "verify", bundle_folder, "--json")
    result: dict[str, Any] = json.loads(out)
    assert code == 0
    assert result["ok"] is True
    assert result["golden"] == {
        "checked": 8, "equal": 8, "of_other_schedules": 0, "differences": [],
    }  # fmt: skip
    assert result["tolerance"] == 0
    assert len(result["engines"]) == 3


@pytest.mark.parametrize(
    "name", ["manifest.json", "int8.serve.onnx", "weights/fp32.bin", "tokenizer/tokenizer.json"]
)
@pytest.mark.parametrize("damage", ["missing", "empty", "changed"])
def test_verify_refuses_damage_with_exit_2(
    capsys: Out, bundle_copy: Path, name: str, damage: str
) -> None:
    file = bundle_copy / name
    data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(b"" if damage == "empty" else data.replace(b"e", b"f", 1)[:-1] + b"\0")
    code, out, err = command(capsys, "verify", bundle_copy)
    assert (code, out) == (2, "")
    assert err.startswith("cadenza verify: error: ")
    assert err.count("\n") == 1


def test_verify_finds_an_answer_that_differs_and_exits_1(capsys: Out, bundle_copy: Path) -> None:
    lines = [json.loads(line) for line in (bundle_copy / "golden.jsonl").read_text().splitlines()]
    lines[2]["ids"][3] = (lines[2]["ids"][3] + 1) % 17
    (bundle_copy / "golden.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    relist(bundle_copy, "golden.jsonl")
    code, out, err = command(capsys, "verify", bundle_copy, "--json")
    assert code == 1
    assert json.loads(out)["ok"] is False
    assert "1 of 8 golden answers differ on cpu; g2: first at token 3" in err


def test_verify_finds_an_engine_that_is_not_the_one(capsys: Out, bundle_copy: Path) -> None:
    external_graph(bundle_copy / "int8.serve.onnx", "serve", "weights/int8.bin", poison=True)
    for name in ("int8.serve.onnx", "weights/int8.bin"):
        relist(bundle_copy, name)
    code, out, err = command(capsys, "verify", bundle_copy)
    assert (code, out) == (1, "")
    assert err.startswith("cadenza verify: error: ")


def test_verify_leaves_out_answers_of_a_schedule_edited_since(
    capsys: Out, bundle_copy: Path
) -> None:
    edited(bundle_copy, put(["fp32"] * 3, *CPU, "schedule"))
    code, out, _ = command(capsys, "verify", bundle_copy)
    assert code == 0
    assert "4 of 4 answers equal" in out
    assert "4 were made by other schedules" in out


def test_verify_and_inspect_write_nothing(capsys: Out, bundle_copy: Path) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in bundle_copy.parent.rglob("*"))
    assert command(capsys, "verify", bundle_copy)[0] == 0
    assert command(capsys, "inspect", bundle_copy)[0] == 0
    after = sorted((path, path.stat().st_mtime_ns) for path in bundle_copy.parent.rglob("*"))
    assert after == before


def test_inspect_shows_schedules_engines_weights_files_and_the_digest(
    capsys: Out, bundle_folder: Path
) -> None:
    code, out, err = command(capsys, "inspect", bundle_folder)
    assert (code, err) == (0, "")
    digest = read_bundle(bundle_folder).digest
    for shown in (
        digest, "▁▁█", "█▁█", "2 int8, 1 fp32", "int8.serve.cpu", "weights/int8.bin", "mean_bits",
        "threads 1", "a processor", "8 answers, 8 made by", "executed", "1.44 KiB",
    ):  # fmt: skip
        assert shown in out


def test_inspect_json_is_the_manifest(capsys: Out, bundle_folder: Path) -> None:
    code, out, _ = command(capsys, "inspect", bundle_folder / "manifest.json", "--json")
    assert code == 0
    shown = json.loads(out)
    assert shown["kind"] == "bundle"
    assert shown["manifest"] == read_manifest(bundle_folder)
    assert shown["digest"] == read_bundle(bundle_folder).digest


def test_inspect_makes_words_of_a_hostile_bundle_plain(capsys: Out, bundle_copy: Path) -> None:
    edited(bundle_copy, put("\x1b[2J\nowned", "tasks", "edit", "says"))
    edited(bundle_copy, put({"a\nb": "\x1b[31m"}, "environment"))
    edited(bundle_copy, put({"deep": ["\x1b[2J", {"x\n": None}]}, *CPU, "measured"))
    code, out, _ = command(capsys, "inspect", bundle_copy)
    assert code == 0
    assert all(line.isprintable() for line in out.splitlines())


def export_of(bundle_folder: Path) -> dict[str, Any]:
    """Turn the manifest of a bundle into that of an export."""
    manifest = read_manifest(bundle_folder)
    return {
        "format": "cadenza-export/1",
        **{key: manifest[key] for key in ("model", "sampler", "shape", "precisions", "families")},
        **{key: manifest[key] for key in ("graphs", "environment", "files")},
        "tasks": {
            name: {"sampler": task["sampler"], "says": task["says"], "source": "builtin"}
            for name, task in manifest["tasks"].items()
        },
        "windows": 3,
        "target": "cpu",
        "recipe": {"quantizer": "rtn", "clip": 1.0, "keep": []},
        "parity": {"max_error": 1e-5, "argmax_agreement": 1.0},
    }


def test_inspect_shows_an_export(capsys: Out, bundle_copy: Path) -> None:
    export = export_of(bundle_copy)
    (bundle_copy / "manifest.json").unlink()
    (bundle_copy / "export.json").write_text(json.dumps(export))
    code, out, _ = command(capsys, "inspect", bundle_copy)
    assert code == 0
    for shown in (
        "fp32.trace",
        "0-2",
        "an input",
        "weights/int8.bin",
        "argmax_agreement  1",
        "rtn",
    ):
        assert shown in out
    code, out, _ = command(capsys, "inspect", bundle_copy, "--json")
    assert json.loads(out) == {"kind": "export", "path": str(bundle_copy), "export": export}


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (put("cadenza-export/2", "format"), "is not 'cadenza-export/1'"),
        (put({"sha256": "0" * 64, "bytes": 1}, "files", "../x"), "outside the folder"),
        (put({"sha256": "0" * 64, "bytes": 1}, "files", "gone"), "'gone' is missing"),
        (put([], "graphs"), "graphs: must be an object"),
    ],
)
def test_inspect_refuses_a_bad_export(
    capsys: Out, bundle_copy: Path, edit: Any, says: str
) -> None:
    export = export_of(bundle_copy)
    edit(export)
    (bundle_copy / "manifest.json").unlink()
    (bundle_copy / "export.json").write_text(json.dumps(export))
    code, out, err = command(capsys, "inspect", bundle_copy)
    assert (code, out) == (2, "")
    assert says in err
