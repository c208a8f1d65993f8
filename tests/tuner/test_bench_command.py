"""`cadenza bench`: real bundles and exports, tables and JSON that agree, resuming, refusals."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cadenza
from engines.errors import InputError
from engines.manifest import Shape
from exporter.folder import Export
from tests.engines.tiny_bundle import (
    CPU,
    LARGEST_BATCH,
    LONGEST_PROMPT,
    SAMPLER,
    SCHEDULES,
    edited,
    put,
    write_tiny_bundle,
)
from tuner import bench_bundle
from tuner.bench_config import BenchConfig, ranges_from_text
from tuner.latencies import shape_of

Out = pytest.CaptureFixture[str]
ROOT = Path(__file__).resolve().parent.parent.parent
FEW = ("--repeats", "2", "--threads", "1")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny bundle's folder; not to be written into."""
    scratch = tmp_path_factory.mktemp("tiny")
    return write_tiny_bundle(scratch / "bundle", scratch).folder


@pytest.fixture
def own_bundle(tmp_path: Path) -> Path:
    """Return the folder of a bundle that may be changed."""
    return write_tiny_bundle(tmp_path / "own", tmp_path / "scratch").folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CADENZA_CACHE_DIR", str(tmp_path / "cache"))


def command(capsys: Out, *argv: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cadenza.main(["bench", *map(str, argv)])
    return code, *capsys.readouterr()


def bench(capsys: Out, *argv: object) -> Any:
    code, out, err = command(capsys, *argv, "--json")
    assert code == 0, err
    return json.loads(out)


def test_every_task_has_every_batch_and_every_uniform_schedule_beside_what_ships(
    capsys: Out, bundle: Path
) -> None:
    found = bench(capsys, bundle, *FEW)
    # At each of three batches: two tasks' speed, and the memory of four schedules, two of them
    # of both tasks.
    assert (found["measured"], found["resumed"]) == (3 * (2 + 4), 0)
    assert (found["format"], found["kind"], found["target"]) == (
        ("cadenza-bench/1", "bundle", "cpu")
    )
    assert set(found["tasks"]) == set(SCHEDULES)
    for name, task in found["tasks"].items():
        assert task["schedule"] == list(SCHEDULES[name])
        assert [row["batch"] for row in task["batches"]] == [1, 2, LARGEST_BATCH]
        for row in task["batches"]:
            labels = [lane["label"] for lane in row["lanes"]]
            assert labels == ["ships", "uniform fp32", "uniform int8"]
            assert row["tokens"] == row["batch"] * SAMPLER.gen_length
            assert row["full_precision"] == "uniform fp32"
            for lane in row["lanes"]:
                speed, middle = lane["tokens_per_s"], lane["latency_ms"]["p50"]
                assert 0 < speed["low"] <= speed["median"] <= speed["high"]
                assert (middle["value"], middle["n"], middle["needed"]) == (None, 2, 6)
                assert lane["passes"] == SAMPLER.steps
                assert lane["peak_mib"] > 10.0 and lane["device_bytes"] is None
            bits = [lane["mean_bits"] for lane in row["lanes"]]
            assert bits[1:] == [32.0, 8.0] and 8.0 < bits[0] < 32.0


def test_medians_and_ratios_come_from_the_same_rounds(capsys: Out, bundle: Path) -> None:
    argv = (bundle, "--task", "edit", "--batch", "2", "--repeats", "80", "--threads", "1")
    (row,) = bench(capsys, *argv)["tasks"]["edit"]["batches"]
    ships, *uniform = row["lanes"]
    assert ships["ships_over_this"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    for lane in row["lanes"]:
        p50, p95, p99 = (lane["latency_ms"][name] for name in ("p50", "p95", "p99"))
        assert p50["low"] <= p50["value"] <= p50["high"] <= p95["high"]
        assert p50["value"] <= p95["value"]
        assert (p99["value"], p99["n"], p99["needed"]) == (None, 80, 368)
        wanted = row["tokens"] / p50["value"] * 1000.0
        assert lane["tokens_per_s"]["median"] == pytest.approx(wanted, rel=0.01)
    best = max(uniform, key=lambda lane: lane["tokens_per_s"]["median"])
    assert row["best_uniform"] == best["label"]
    against = row["ships_over_best_uniform"]
    assert against["median"] == best["ships_over_this"]["median"]
    assert against["told_apart"] == (not against["low"] <= 1.0 <= against["high"])


def test_tasks_alike_are_measured_once_and_a_uniform_one_that_ships_has_no_double(
    capsys: Out, own_bundle: Path
) -> None:
    for task in SCHEDULES:
        edited(own_bundle, put(["int8"] * 3, "tasks", task, "targets", "cpu", "schedule"))
    found = bench(capsys, own_bundle, *FEW, "--batch", "1")
    tasks = found["tasks"]
    assert {task["measured_with"] for task in tasks.values()} == {next(iter(tasks))}
    assert found["measured"] == 3  # the speed of two schedules, and the memory of each
    (row,) = tasks["edit"]["batches"]
    assert [lane["label"] for lane in row["lanes"]] == ["ships", "uniform fp32"]
    code, out, _ = command(capsys, own_bundle, *FEW, "--batch", "1")
    assert code == 0
    assert out.count("batch  schedule") == 1


def test_the_table_says_what_the_json_does(capsys: Out, bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "speed.json"
    argv = (bundle, "--task", "edit", "--repeats", "8", "--threads", "1", "--output", file)
    code, out, err = command(capsys, *argv)
    assert code == 0
    found = json.loads(file.read_text())
    lines = [line.split() for line in out.splitlines()]
    for row in found["tasks"]["edit"]["batches"]:
        (said,) = (line for line in lines if line[:2] == [str(row["batch"]), "ships"])
        assert float(said[2]) == pytest.approx(row["lanes"][0]["tokens_per_s"]["median"], rel=1e-3)
        assert f"batch {row['batch']}, 8 rounds: " in out
    assert "p95 72, p99 368 are needed" in out
    assert "bench: " in err and "bench: " not in out


def test_prompts_of_a_file_are_answered_by_their_tasks_or_by_every_one(
    capsys: Out, bundle: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "abc"}\n{"prompt": "noon", "task": "edit"}\n\n')
    found = bench(capsys, bundle, *FEW, "--input", file, "--batch", "2")
    assert set(found["tasks"]) == set(SCHEDULES)
    assert found["prompt"] is None and found["input"] == str(file)
    file.write_text('{"prompt": "noon", "task": "edit"}\n')
    code, _, err = command(capsys, bundle, "--input", file)
    assert code == 2 and "has no prompt for default" in err
    assert command(capsys, bundle, *FEW, "--input", file, "--task", "edit")[0] == 0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "abc", "task": "nope"}', "'nope' is no task; this bundle has default, edit"),
        ('{"prompt": "a?c"}', "cannot be tokenized"),
        ('{"prompt": "%s"}' % ("a" * (LONGEST_PROMPT + 1)), "has 21 tokens"),
        ('{"text": "abc"}', "the key 'prompt' is missing"),
        ('{"prompt": 3}', "must be text"),
        ("[]", "must be an object"),
        ("not json", "not valid JSON"),
        (" ", "is empty"),
    ],
)
def test_a_line_at_fault_is_named_before_anything_runs(
    line: str, says: str, capsys: Out, bundle: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(line + "\n")
    code, out, err = command(capsys, bundle, "--input", file)
    assert (code, out) == (2, "")
    assert says in err and str(file) in err
    assert "bench: " not in err.replace("cadenza bench: ", "")


def test_an_interrupted_bench_goes_on_where_it_was_and_a_finished_one_measures_anew(
    capsys: Out, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = (bundle, *FEW, "--task", "edit", "--batch", "1", "--batch", "2")
    real, calls = bench_bundle.footprint, []

    def interrupted(*args: Any) -> dict[str, Any]:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(bench_bundle, "footprint", interrupted)
        code, out, err = command(capsys, *argv)
    assert (code, out) == (130, "")
    assert "the same command goes on from there" in err
    again = bench(capsys, *argv)
    assert (again["resumed"], again["measured"]) == (3, 5)
    third = bench(capsys, *argv)
    assert (third["resumed"], third["measured"]) == (0, 8)
    assert third["tasks"] != again["tasks"]


def test_another_command_takes_nothing_from_an_interrupted_one(
    capsys: Out, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    argv = (bundle, "--task", "edit", "--batch", "1", "--threads", "1")
    with monkeypatch.context() as patch:
        patch.setattr(bench_bundle, "footprint", interrupted)
        assert command(capsys, *argv, "--repeats", "2")[0] == 130
    assert bench(capsys, *argv, "--repeats", "3")["resumed"] == 0
    assert bench(capsys, *argv, "--repeats", "2", "--seed", "1")["resumed"] == 0
    assert bench(capsys, *argv, "--repeats", "2")["resumed"] == 1


def test_speed_of_engines_that_stand_in_is_told_as_such(capsys: Out, own_bundle: Path) -> None:
    edited(own_bundle, put({"stands_in_for": "rtx-sm89"}, *CPU, "measured"))
    found = bench(capsys, own_bundle, *FEW, "--task", "edit", "--batch", "1")
    assert any("only stand in for rtx-sm89" in note for note in found["warnings"])


def test_a_simulated_precision_has_no_speed(capsys: Out, own_bundle: Path) -> None:
    edited(own_bundle, put(True, "precisions", 1, "simulated"))
    code, out, err = command(capsys, own_bundle, *FEW)
    assert (code, out) == (2, "")
    assert "task 'default' runs int8, which is simulated" in err
    edited(own_bundle, put(["fp32"] * 3, *CPU, "schedule"))
    found = bench(capsys, own_bundle, *FEW, "--task", "edit", "--batch", "1")
    (row,) = found["tasks"]["edit"]["batches"]
    assert [lane["label"] for lane in row["lanes"]] == ["ships"]
    assert row["best_uniform"] == row["full_precision"] == "ships"


def test_threshold_without_prompts_of_your_own_is_doubted(capsys: Out, own_bundle: Path) -> None:
    sampler = {"gen_length": 12, "steps": 12, "rule": "threshold", "threshold": 0.3}
    edited(own_bundle, put({**sampler, "block_length": 6}, "tasks", "edit", "sampler"))
    found = bench(capsys, own_bundle, *FEW, "--task", "edit", "--batch", "1")
    assert any("passes by threshold" in note for note in found["warnings"])
    (row,) = found["tasks"]["edit"]["batches"]
    assert all(2 <= lane["passes"] <= 12 for lane in row["lanes"])


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--task", "nope"), "unknown task 'nope'; this bundle has default, edit"),
        (("--target", "cuda"), "has no target 'cuda'; it has cpu"),
        (("--target", "cpux"), "unknown target 'cpux'; did you mean 'cpu'?"),
        (("--batch", "5"), "the batch must be from 1 to 4, as declared, got 5"),
        (("--batch", "0"), "the batch must be from 1 to 4, as declared, got 0"),
        (("--shape", "batch=1:8:64"), "the batch must be from 1 to 4"),
        (("--shape", "prompt=1:4:99"), "the prompt must be from 1 to 20"),
        (("--shape", "batch=4:2:1"), "1 <= MIN <= OPT <= MAX must hold for batch, got 4:2:1"),
        (("--shape", "batch=1:2"), "--shape is batch=MIN:OPT:MAX"),
        (("--shape", "rows=1:2:3"), "--shape is batch=MIN:OPT:MAX"),
        (("--shape", "batch=1:²:4"), "--shape is batch=MIN:OPT:MAX"),
        (("--shape", "batch=1:2:4", "--batch", "1"), "by batches or by a shape, not by both"),
        (("--repeats", "0"), "repeats >= 1 must hold"),
        (("--seconds", "nan"), "seconds >= 0 must hold"),
        (("--seconds", "-1"), "seconds >= 0 must hold"),
        (("--threads", "-1"), "0 <= threads"),
        (("--seed", "-1"), "seed >= 0 must hold"),
        (("--input", "/nowhere/x"), "cannot be read"),
    ],
)
def test_an_argument_at_fault_is_named_with_its_mend(
    argv: tuple[str, ...], says: str, capsys: Out, bundle: Path
) -> None:
    code, out, err = command(capsys, bundle, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("cadenza bench: error: ") and says in err


def test_what_is_neither_bundle_nor_export_is_refused(capsys: Out, tmp_path: Path) -> None:
    code, out, err = command(capsys, tmp_path)
    assert (code, out) == (2, "")
    assert "is neither a bundle (no manifest.json) nor an export (no export.json)" in err


def test_a_damaged_bundle_is_refused_before_it_is_loaded(capsys: Out, own_bundle: Path) -> None:
    with (own_bundle / "int8.serve.onnx").open("r+b") as file:
        file.seek(10)
        file.write(b"?")
    code, _, err = command(capsys, own_bundle, *FEW)
    assert code == 2 and "its content has changed" in err


def test_an_output_is_replaced_only_by_force_and_only_if_it_is_ours(
    capsys: Out, bundle: Path, tmp_path: Path
) -> None:
    file = tmp_path / "new" / "speed.json"
    argv = (bundle, *FEW, "--task", "edit", "--batch", "1", "--output", file)
    assert command(capsys, *argv)[0] == 0
    first = file.read_text()
    code, _, err = command(capsys, *argv)
    assert code == 2 and "is there already; give --force" in err and file.read_text() == first
    assert command(capsys, *argv, "--force")[0] == 0
    assert file.read_text() != first
    file.write_text("mine")
    code, _, err = command(capsys, *argv, "--force")
    assert code == 2 and "was not written by cadenza bench" in err and file.read_text() == "mine"
    assert list(file.parent.iterdir()) == [file]


def test_an_output_that_cannot_be_written_is_found_before_anything_runs(
    capsys: Out, bundle: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "file" / "x.json", tmp_path / ("x" * 300), tmp_path):
        code, out, err = command(capsys, bundle, *FEW, "--output", wrong)
        assert (code, out) == (2, "")
        assert "choose another --output" in err and "bench: 0" not in err and "/3 in" not in err


def test_folders_of_any_name_are_taken(capsys: Out, tmp_path: Path) -> None:
    odd = tmp_path / "-模型 é 🚀 $HOME\n'\""
    write_tiny_bundle(odd, tmp_path / "scratch")
    code, out, err = command(capsys, *FEW, "--batch", "1", "--task", "edit", "--", odd)
    assert code == 0, err
    assert "模型 é" in out and len(out.splitlines()[0]) > 20


def test_an_export_gives_a_latency_of_each_executed_precision(
    capsys: Out, exported: Export
) -> None:
    found = bench(capsys, exported.folder, "--repeats", "4", "--threads", "1")
    batch, prompt, answer = shape_of(exported)
    assert found["format"] == "cadenza-latencies/1"
    assert (found["source"], found["target"]) == ("measured", "cpu")
    assert found["shape"] == {"batch": batch, "prompt": prompt, "answer": answer}
    assert [row["precision"] for row in found["rows"]] == ["fp32", "int8"]  # none simulated
    for row in found["rows"]:
        assert set(row) == {"precision", "latency_ms", "low", "high", "n"}
        assert 0.0 < row["low"] <= row["latency_ms"] <= row["high"]
        assert row["n"] == 4 * found["how"]["steps"]
    assert found["switch_ms"] >= 0.0 and math.isfinite(found["switch_ms"])
    code, out, err = command(capsys, exported.folder, "--repeats", "2")
    assert code == 0
    assert f"a batch of {batch}, prompts of {prompt} and answers of {answer} tokens" in out
    assert "2 engines built" in err or "2 reused" in err
    assert "next: " not in out  # tune --target cpu takes no file


def test_an_export_at_another_shape_says_that_tune_will_not_read_it(
    capsys: Out, exported: Export
) -> None:
    argv = (exported.folder, "--repeats", "1", "--shape", "batch=1:2:4", "--json")
    code, out, err = command(capsys, *argv)
    assert code == 0
    assert json.loads(out)["shape"]["batch"] == 2
    assert "tune reads latencies at the export's own shape alone" in err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--task", "edit"), "--task is for bundles"),
        (("--batch", "2"), "--batch is for bundles"),
        (("--input", "x"), "--input is for bundles"),
        (("--target", "cuda"), "the export is for target 'cpu', asked was 'cuda'"),
        (("--target", "rtx-sm88"), "target 'rtx-sm88' has no 'sm88'"),
    ],
)
def test_what_an_export_does_not_take_is_refused(
    argv: tuple[str, ...], says: str, capsys: Out, exported: Export
) -> None:
    code, out, err = command(capsys, exported.folder, *argv)
    assert (code, out) == (2, "")
    assert says in err


def test_the_batches_are_powers_of_two_with_the_best_and_both_ends() -> None:
    def rows(declared: tuple[int, int, int], **asked: Any) -> tuple[int, ...]:
        config = BenchConfig(path=Path(), **asked)
        return config.rows(Shape(declared, (1, 1, 1)))

    assert rows((1, 8, 64)) == (1, 2, 4, 8, 16, 32, 64)
    assert rows((3, 6, 20)) == (3, 4, 6, 8, 16, 20)
    assert rows((1, 8, 64), batch=(2, 4, 8)) == (2, 4, 8)
    assert rows((1, 8, 64), batches=(8, 3, 8)) == (3, 8)
    assert rows((1, 1, 1)) == (1,)
    with pytest.raises(InputError, match="from 1 to 64"):
        rows((1, 8, 64), batches=(65,))


def test_a_shape_names_ranges_in_any_order_and_one_alone() -> None:
    both = {"batch": (1, 8, 64), "prompt": (1, 16, 40)}
    assert ranges_from_text("batch=1:8:64,prompt=1:16:40") == both
    assert ranges_from_text("prompt=1:16:40,batch=1:8:64") == both
    assert ranges_from_text("prompt=1:16:40") == {"prompt": (1, 16, 40)}
    rng = np.random.default_rng(0)
    for _ in range(200):
        text = "".join(rng.choice(list("batchprom=:,0123456789- ")) for _ in range(12))
        with pytest.raises(InputError, match="--shape is"):
            ranges_from_text(text)


def test_a_bundle_is_measured_with_only_what_the_ort_extra_brings(
    bundle: Path, tmp_path: Path
) -> None:
    absent = ("torch", "onnx", "onnxscript", "optuna", "sqlalchemy", "safetensors", "ml_dtypes")
    code = (
        "import sys\n"
        f"absent = {(*absent, 'yaml', 'jinja2', 'matplotlib', 'scipy')}\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in absent:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import cadenza\n"
        "sys.exit(cadenza.main(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "bench", bundle, *FEW, "--batch", "1", "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "CADENZA_CACHE_DIR": str(tmp_path / "cache")},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["tasks"]) == set(SCHEDULES)


def test_help_gives_examples_and_says_which_targets_the_file_is_for(capsys: Out) -> None:
    code, out, _ = command(capsys, "--help")
    assert code == 0
    assert "  cadenza bench BUNDLE" in out and "default: 5.0" in out
    assert "for targets of TensorRT" in " ".join(out.split())
