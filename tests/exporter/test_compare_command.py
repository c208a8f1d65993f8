"""`cadenza compare`: planted faults are named where they are, sound exports agree."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import cadenza
from engines.errors import InputError
from engines.files import digest_file
from engines.manifest import Shape
from engines.plans import profile_of
from engines.trt import BuildRequest, build_plan
from exporter.compare_command import main
from exporter.export import export
from exporter.folder import Export, read_export, write_export
from exporter.quantize import quantized_name, scale_name
from exporter.weights import read_header
from tests.tiny_export import random_denoiser, small_export, tiny_config

pytest.importorskip("polygraphy", reason="pip install 'cadenza[compare]'")

KEY = "model.transformer.blocks.1.{}.weight"
RUNNABLE = ("fp16", "int8", "int8-w", "fp8", "fp8-w", "int4-w", "int4-int8")
REFERENCE = Path(__file__).resolve().parents[2] / "calib_data" / "reference"


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Return an export of random weights for TensorRT, every precision; not written into."""
    from exporter.checkpoint import save_checkpoint
    from exporter.train import vocabulary

    folder = tmp_path_factory.mktemp("compare")
    save_checkpoint(random_denoiser(tiny_config(ffn=64)), vocabulary(), folder / "tiny")
    asked = small_export(
        folder / "tiny",
        folder / "EXPORT",
        target="rtx-sm120",
        precisions=(*RUNNABLE, "bf16", "nvfp4"),
        shape=Shape((1, 2, 4), (1, 8, 40)),
    )
    return read_export(export(asked))


def compared(
    folder: Path, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, list[dict[str, Any]]]:
    code = main(["compare", str(folder), "--json", "--limit", "1", *options])
    return code, json.loads(capsys.readouterr().out)["pairs"]


def faulty(made: Export, graph: str, out: Path, fault: Callable[[onnx.ModelProto], None]) -> Path:
    """Return a copy of an export in which one graph has a fault that no digest tells."""
    shutil.copytree(made.folder, out)
    file = out / made.graphs[graph].file
    model = onnx.load(str(file), load_external_data=False)
    fault(model)
    file.write_bytes(model.SerializeToString())
    path = made.graphs[graph].file
    write_export(replace(made, folder=out, files={**made.files, path: digest_file(file)}))
    return out


def changed(name: str, made: Export, change: Callable[[np.ndarray], None]) -> Callable[..., None]:
    """Return the fault that a tensor, which a graph has outside, holds other numbers there."""

    def fault(model: onnx.ModelProto) -> None:
        (one,) = [each for each in model.graph.initializer if each.name == name]
        (place,) = [each.value for each in one.external_data if each.key == "location"]
        stored = read_header(made.folder / place)[name]
        data = np.fromfile(stored.file, np.uint8, stored.size, offset=stored.start)
        del one.external_data[:]
        one.ClearField("data_location")
        kind = {1: np.float32, 3: np.int8, 10: np.float16}[one.data_type]
        values = data.view(kind).reshape(list(one.dims)).copy()
        change(values)
        one.raw_data = values.tobytes()

    return fault


def flip_the_largest(values: np.ndarray) -> None:
    at = np.unravel_index(np.abs(values.astype(float)).argmax(), values.shape)
    values[at] = -values[at]


def spoil(values: np.ndarray) -> None:
    values[3] = np.nan


@pytest.mark.parametrize(
    ("precision", "runner"), [("int8", "cpu"), ("int8", "ort"), ("fp16", "ort"), ("int8-w", "ort")]
)
def test_one_changed_weight_is_named_by_node_and_site(
    precision: str,
    runner: str,
    exported: Export,
    ahead: Export,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = exported if runner == "cpu" else ahead
    key = KEY.format("up_proj")
    stored = key if precision == "fp16" else quantized_name(key)
    graph = f"{precision}.trace"
    out = faulty(made, graph, tmp_path / "E", changed(stored, made, flip_the_largest))
    code, pairs = compared(out, capsys, "--precision", precision, "--runner", "ort")
    assert code == 1
    first = pairs[0]["first"]
    assert (first["place"], first["weight"]) == ("blocks.1.ff_in", key)
    model = onnx.load(str(made.path(graph)), load_external_data=False)
    (node,) = [each for each in model.graph.node if first["tensor"] in each.output]
    assert first["node"] == node.name
    assert first["relative"] > first["tolerance"]
    assert sum(each["differs"] for each in pairs[0]["layers"]) == 1, "and not all that follow"
    assert [pair["agrees"] for pair in pairs[1:]] == [True] * (len(pairs) - 1)


@pytest.mark.parametrize(("precision", "kind"), [("int8", "back"), ("fp8", "back")])
def test_one_node_s_other_scale_is_named(
    precision: str, kind: str, ahead: Export, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site, found = "blocks.1.ff_down", []

    def fault(model: onnx.ModelProto) -> None:
        (old,) = [each for each in model.graph.initializer if each.name == f"{site}.scale"]
        wrong = numpy_helper.from_array(numpy_helper.to_array(old) * np.float32(1.25), "wrong")
        model.graph.initializer.append(wrong)
        nodes = [n for n in model.graph.node if n.op_type == "DequantizeLinear"]
        (node,) = [n for n in nodes if n.input[1] == old.name]
        node.input[1] = "wrong"
        found.append(node.name)

    out = faulty(ahead, f"{precision}.trace", tmp_path / "E", fault)
    code, pairs = compared(out, capsys, "--precision", precision, "--runner", "ort")
    assert code == 1
    first = pairs[0]["first"]
    assert (first["node"], first["op"], first["place"]) == (found[0], "DequantizeLinear", site)
    assert first["relative"] == pytest.approx(0.25, rel=0.01)


@pytest.mark.parametrize("which", ["cpu", "ahead"])
def test_a_nan_is_named_where_it_is_made(
    which: str, exported: Export, ahead: Export, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = exported if which == "cpu" else ahead
    key = KEY.format("v_proj")
    out = faulty(made, "int8.trace", tmp_path / "E", changed(scale_name(key), made, spoil))
    code, pairs = compared(out, capsys, "--precision", "int8", "--runner", "ort")
    assert code == 1
    first = pairs[0]["first"]
    assert (first["place"], first["weight"]) == ("blocks.1.attn_in", key)
    assert first["relative"] is None, "no number, and JSON says so"


def test_an_export_for_cpu_agrees_with_itself(
    exported: Export, capsys: pytest.CaptureFixture[str]
) -> None:
    code, pairs = compared(exported.folder, capsys)
    assert code == 0
    assert {pair["precision"] for pair in pairs} == set(exported.precisions)
    assert all(pair["compared"] and pair["agrees"] for pair in pairs)
    whole = [pair for pair in pairs if "full precision" in pair["pair"]]
    assert [len(pair["layers"]) > 50 for pair in whole] == [True] * 4


def test_a_rotated_export_agrees_too(
    rotated_export: Export, capsys: pytest.CaptureFixture[str]
) -> None:
    code, pairs = compared(rotated_export.folder, capsys)
    assert (code, all(pair["agrees"] for pair in pairs)) == (0, True)


def test_every_precision_that_onnx_runtime_can_run_agrees_with_its_simulation(
    ahead: Export, capsys: pytest.CaptureFixture[str]
) -> None:
    code, pairs = compared(ahead.folder, capsys)
    assert code == 0
    direct = {
        pair["precision"]: pair for pair in pairs if " by ONNX Runtime against" in pair["pair"]
    }
    assert {name for name, pair in direct.items() if pair["agrees"]} == set(RUNNABLE)
    for name, why in (("bf16", "NOT_IMPLEMENTED"), ("nvfp4", "TRT_FP4DynamicQuantize")):
        assert not direct[name]["compared"]
        assert why in direct[name]["why_not"]
    assert all(pair["agrees"] for pair in pairs if "rewritten" in pair["pair"])


@pytest.mark.slow
def test_the_reference_model_s_exports_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from exporter.export import ExportConfig

    for target, shape in (("cpu", None), ("rtx-sm120", Shape((1, 8, 64), (1, 16, 40)))):
        asked = ExportConfig(
            model=REFERENCE, out=tmp_path / target, target=target, shape=shape, prompts=2
        )
        code, pairs = compared(export(asked), capsys, "--limit", "3")
        assert (code, [p["pair"] for p in pairs if p["compared"] and not p["agrees"]]) == (0, [])


def test_the_folder_that_one_stands_in_changes_nothing(
    exported: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ["compare", os.path.relpath(exported.folder, tmp_path), "--precision", "fp32"]
    monkeypatch.chdir(tmp_path)
    assert main(wanted) == 0


def test_states_are_chosen_by_window_or_drawn_from_a_seed(
    exported: Export, capsys: pytest.CaptureFixture[str]
) -> None:
    # Scales of each token's own: those calibrated on other states may saturate in random ones.
    only = ("--precision", "w8a8", "--runner", "ort")
    runs = [
        compared(exported.folder, capsys, *only, *more)
        for more in (["--window", "2"], ["--seed", "1"], ["--seed", "1"], ["--seed", "2"])
    ]
    assert [code for code, _ in runs] == [0] * 4
    errors = [[each["relative"] for each in pairs[0]["layers"]] for _, pairs in runs]
    assert errors[1] == errors[2]
    assert errors[1] != errors[3]
    assert errors[0] != errors[1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--precision", "fp8"], "no precision 'fp8'"),
        (["--runner", "cuda"], "runners are ort"),
        (["--runner", "tensorrt"], "has no tensorrt"),
        (["--window", "3"], "--window is from 0 to 2"),
        (["--limit", "0"], "limit >= 1"),
        (["--tolerance", "0"], "tolerance > 0"),
        (["--tolerance", "nan"], "tolerance > 0"),
        (["--seed", "-1"], "seed >= 0"),
    ],
)
def test_a_faulty_argument_ends_with_2_and_says_why(
    options: list[str], says: str, exported: Export, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(exported.folder), *options]) == 2
    assert says in capsys.readouterr().err


def test_a_tolerance_of_one_s_own_counts_for_every_layer(
    exported: Export, capsys: pytest.CaptureFixture[str]
) -> None:
    code, pairs = compared(
        exported.folder, capsys, "--precision", "int8", "--tolerance", "1e-5", "--limit", "1"
    )
    assert code == 1
    assert {each["tolerance"] for pair in pairs for each in pair["layers"]} == {1e-5}
    assert pairs[0]["first"]["place"] == "blocks.0.attn_in", "quantization begins there"


def test_people_are_told_the_first_layer_and_with_all_the_table(
    exported: Export, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["compare", str(exported.folder), "--precision", "int8", "--tolerance", "1e-5"]
    assert main([*given, "--all"]) == 1
    said = capsys.readouterr().out
    assert "layers differ; the first:\n  blocks.0.attn_in: Mul 'make linear'" in said
    assert "absolute" in said
    assert said.count("blocks.1.ff_down") > 2


def test_a_folder_that_is_no_export_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(tmp_path)]) == 2
    assert "is no export" in capsys.readouterr().err


def test_weights_outside_the_export_are_refused(
    exported: Export, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fault(model: onnx.ModelProto) -> None:
        one = next(each for each in model.graph.initializer if each.external_data)
        next(e for e in one.external_data if e.key == "location").value = "../../secret"

    out = faulty(exported, "fp32.trace", tmp_path / "E", fault)
    assert main(["compare", str(out), "--precision", "fp32"]) == 2
    assert "'../../secret', which the export does not list" in capsys.readouterr().err


def test_a_graph_that_is_none_is_refused(
    exported: Export, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(exported.folder, tmp_path / "E")
    file = tmp_path / "E" / exported.graphs["int8.trace"].file
    file.write_bytes(b"\xff" * file.stat().st_size)
    assert main(["compare", str(tmp_path / "E"), "--precision", "int8"]) == 2
    assert "is no graph of ours" in capsys.readouterr().err


def test_without_polygraphy_the_extra_is_named(
    exported: Export, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "polygraphy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "polygraphy", None)
    assert cadenza.main(["compare", str(exported.folder)]) == 2
    assert "pip install 'cadenza[compare]'" in capsys.readouterr().err


def test_tensorrt_is_told_to_be_missing_a_gpu_and_not_silently_left_out(
    ahead: Export, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("a GPU is here")
    given = ["compare", str(ahead.folder), "--precision", "fp16", "--runner", "tensorrt"]
    assert main(given) == 1
    assert "cannot run here" in capsys.readouterr().err


def test_marked_tensors_are_outputs_of_the_plan_that_tensorrt_builds(ahead: Export) -> None:
    pytest.importorskip("tensorrt_rtx_bindings", reason="pip install 'cadenza[tensorrt-rtx]'")
    entry = ahead.graphs["fp16.trace"]
    request = BuildRequest(
        graph=ahead.path("fp16.trace"),
        target="rtx-sm89",
        profile=profile_of(ahead.shape, (24,), ahead.model.max_length, entry.scales),
    )
    plain, marked = (
        bytes(build_plan(request, lambda line: None, names))
        for names in ((), ("getitem", "linear_3"))
    )
    assert plain != marked
    assert b"linear_3" in marked
    with pytest.raises(InputError, match="knows no tensor 'nobody'"):
        build_plan(request, lambda line: None, ("nobody",))


@pytest.mark.gpu
def test_tensorrt_agrees_with_what_stands_in_for_it(
    ahead: Export, capsys: pytest.CaptureFixture[str]
) -> None:
    code, pairs = compared(ahead.folder, capsys, "--precision", "fp16", "--runner", "tensorrt")
    assert (code, pairs[0]["compared"]) == (0, True)
