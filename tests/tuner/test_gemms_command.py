"""`cadenza inspect --gemms`: tables that add up, data alone on stdout, and who is asked for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import cadenza
from exporter.folder import Export
from exporter.gemms import pass_from_file
from tuner.gemms_command import rows_from_pass

Out = pytest.CaptureFixture[str]


def command(capsys: Out, *argv: object) -> tuple[int, str, str]:
    code = cadenza.main([str(arg) for arg in argv])
    return code, *capsys.readouterr()


def test_the_table_names_each_shape_once_and_its_layers_add_up(
    capsys: Out, exported: Export
) -> None:
    work = pass_from_file(exported.path("fp32.serve"), 2, 9, 4)
    rows = rows_from_pass(work)
    assert sum(row.layers for row in rows) == len(work.products)
    assert sum(row.layers * row.product.operations for row in rows) == work.operations
    keys = [(r.product.kind, r.product.m, r.product.k, r.product.n) for r in rows]
    assert len(set(keys)) == len(keys)
    argv = ("inspect", exported.folder, "--gemms", "--batch", 2, "--length", 9, "--asked", 4)
    code, out, err = command(capsys, *argv)
    assert (code, err) == (0, "")
    assert "at batch 2, 9 tokens, 4 asked" in out
    assert sum(line.startswith(("linear", "scores", "mixture")) for line in out.splitlines()) == (
        len(rows)
    )
    assert "w4a4, w8a8, w16a16 left out" in out
    assert "predicted" not in out


def test_without_sizes_the_export_s_own_are_taken(capsys: Out, exported: Export) -> None:
    code, out, _ = command(capsys, "inspect", exported.folder, "--gemms", "--json")
    found = json.loads(out)
    sampler = exported.sampler
    assert code == 0
    assert found["batch"] == exported.shape.batch[1]
    assert found["length"] == exported.shape.prompt[1] + sampler.gen_length
    assert found["asked"] == sampler.block_length
    assert found["predicted"] == []
    assert found["gpu"] is found["pays"] is None


def test_a_gpu_gives_roofs_and_predictions_that_say_so(capsys: Out, exported: Export) -> None:
    argv = ("inspect", exported.folder, "--gemms", "--gpu", "rtx-4090")
    code, out, err = command(capsys, *argv)
    assert (code, err) == (0, "")
    assert "predicted on RTX 4090, not measured (rates: NVIDIA Ada GPU Architecture" in out
    assert "Activation precision" in out.splitlines()[-1]
    code, out, _ = command(capsys, *argv, "--json")
    found = json.loads(out)
    assert {row["source"] for row in found["predicted"]} == {"predicted"}
    named = [row["precision"] for row in found["predicted"]]
    assert named == ["fp32", "int8", "fp16", "int8-w", "fp8"]
    assert sum(row["operations"] for row in found["products"]) == found["operations"]
    for row in found["products"]:
        assert {each["bound"] for each in row["precisions"].values()} <= {"compute", "memory"}


def test_a_precision_that_the_gpu_lacks_is_left_out(capsys: Out, exported: Export) -> None:
    _, out, _ = command(capsys, "inspect", "--gemms", exported.folder, "--gpu", "T4", "--json")
    named = [row["precision"] for row in json.loads(out)["predicted"]]
    assert named == ["fp32", "int8", "fp16", "int8-w"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--gpu", "RTX 4091"), "the nearest are RTX 4090"),
        (("--gpu", ""), "known are T4"),
        (("--batch", "0"), "batch must be from 1"),
        (("--length", "-3"), "length must be from 1"),
        (("--asked", "99999999"), "asked must be from 1"),
    ],
)
def test_what_is_at_fault_is_told_in_one_line_with_code_2(
    argv: tuple[str, ...], says: str, capsys: Out, exported: Export
) -> None:
    code, out, err = command(capsys, "inspect", exported.folder, "--gemms", *argv)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1


def test_a_folder_that_is_no_export_and_a_graph_that_is_none_are_refused(
    capsys: Out, exported: Export, tmp_path: Path
) -> None:
    code, _, err = command(capsys, "inspect", tmp_path, "--gemms")
    assert code == 2
    assert "is no export" in err
    shutil.copytree(exported.folder, tmp_path / "copy")
    graph = tmp_path / "copy" / exported.graphs["fp32.serve"].file
    graph.write_bytes(b"\xff" * graph.stat().st_size)
    code, _, err = command(capsys, "inspect", tmp_path / "copy" / "export.json", "--gemms")
    assert code == 2
    assert "is no ONNX graph" in err


def test_the_flag_alone_brings_this_part_and_not_after_a_double_dash() -> None:
    def part(*argv: str) -> str:
        return cadenza.command_from_argv(argv).module

    assert part("inspect", "EXPORT") == "engines.cli"
    assert part("inspect", "EXPORT", "--gemms") == "tuner.gemms_command"
    assert part("inspect", "--gemms", "--help") == "tuner.gemms_command"
    assert part("inspect", "--", "--gemms") == "engines.cli"
    assert part("verify", "--gemms") == "engines.cli"


def test_help_gives_an_example(capsys: Out) -> None:
    code, out, _ = command(capsys, "inspect", "--gemms", "--help")
    assert code == 0
    assert "cadenza inspect EXPORT --gemms --gpu 'RTX 4090'" in out
    code, out, _ = command(capsys, "inspect", "--help")
    assert "--gemms" in out
