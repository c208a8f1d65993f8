"""`cadenza tune` for a GPU that is not here: real plans, given or predicted latencies, told so."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cadenza import main
from engines.bindings import Tensor, bindings_of
from engines.bundle import read_bundle
from engines.cuda import no_gpu
from engines.errors import InputError
from engines.machine import machine
from engines.manifest import Shape
from engines.runtime import Runtime
from engines.targets import target_from_name
from engines.tensor_file import tensors_of
from engines.trt import tensorrt_module
from exporter.export import export
from exporter.folder import Export, read_export
from tests.tiny_export import small_export
from tests.tuner.tuning import Said, Tuner, bench_of
from tuner.contest import Contest
from tuner.latencies import Latencies, latencies_from_file, predicted_latencies, shape_of
from tuner.plan_knobs import weights_knob
from tuner.workshop import Workshop

pytest.importorskip("tensorrt_rtx_bindings", reason="pip install 'cadenza[tensorrt-rtx]'")

NAMES = ("fp32", "fp16", "int8", "int8-w")
ASKED = ("--target", "rtx-sm89", "--precision", "fp16", "--precision", "int8")


@pytest.fixture(scope="module")
def ahead(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Return the shared checkpoint's export for TensorRT; not to be written into."""
    config = small_export(
        checkpoint,
        tmp_path_factory.mktemp("ahead") / "EXPORT",
        target="rtx-sm89",
        precisions=NAMES,
        shape=Shape((1, 4, 8), (1, 16, 40)),
    )
    return read_export(export(config))


def content(export_: Export, **changes: object) -> dict[str, Any]:
    batch, prompt, answer = shape_of(export_)
    whole: dict[str, Any] = {
        "format": "cadenza-latencies/1",
        "source": "measured",
        "device": "a test's GPU",
        "target": "rtx-sm89",
        "shape": {"batch": batch, "prompt": prompt, "answer": answer},
        "rows": [row(name, ms) for name, ms in zip(NAMES, (4.0, 2.0, 1.0, 1.9), strict=True)],
        "switch_ms": 0.25,
    }
    return whole | changes


def row(name: str, ms: float, **more: object) -> dict[str, Any]:
    return {
        "precision": name,
        "latency_ms": ms,
        "low": 0.98 * ms,
        "high": 1.03 * ms,
        "n": 90,
        **more,
    }


@pytest.fixture
def file(ahead: Export, tmp_path: Path) -> Path:
    made = tmp_path / "latencies.json"
    made.write_text(json.dumps(content(ahead)))
    return made


@pytest.fixture
def tuner(
    small_effort: None,
    ahead: Export,
    shared_cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> Tuner:
    return Tuner(ahead.folder, tmp_path / "BUNDLE", shared_cache, capsys)


@pytest.fixture
def measured(tuner: Tuner, file: Path) -> Said:
    said = tuner(*ASKED, "--latencies", file, "--latency-ms", "60%", "--max-loss", "100", "--json")
    assert said.code == 0, said.err
    return said


def test_a_tune_for_a_gpu_that_is_not_here_ends_with_plans_and_what_stands_in(
    measured: Said, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = read_bundle(measured.bundle).manifest
    assert manifest.targets == ("rtx-sm89", "cpu")
    plans = {name: e for name, e in manifest.engines.items() if e.target == "rtx-sm89"}
    assert plans
    for name, engine in plans.items():
        assert engine.file == f"engines/{name}.plan"
        assert (measured.bundle / engine.file).read_bytes()[:4] == b"vtrt"
        assert engine.built["executed"] == "not executed: no GPU was asked"
        assert engine.built["mismatch"] == []
        (audit,) = engine.built["audit"]  # type: ignore[misc]
        assert audit["sm"] == "sm89"
        assert audit["share"] > 0.8  # the rest is the LM head
    answers = Runtime.load(measured.bundle).generate(["edit:ab,abc"] * 2, "edit")
    assert answers[0].ids == answers[1].ids
    capsys.readouterr()
    assert main(["verify", str(measured.bundle)]) == 0
    out = capsys.readouterr().out
    assert "whole, for sm89, by version 1.7" in out
    assert "not run" in out
    if no_gpu() is None:
        return
    # What can be told is told, and that nothing ran is no success.
    assert main(["verify", str(measured.bundle), "--target", "rtx-sm89"]) == 1
    said = capsys.readouterr()
    assert "no answer was made on rtx-sm89" in said.out
    assert "target rtx-sm89 cannot run here" in said.err
    assert "Traceback" not in said.err
    argv = ["run", str(measured.bundle), "--target", "rtx-sm89", "edit:ab,abc"]
    assert main(argv) == 1
    assert "--target cpu" in capsys.readouterr().err
    assert Runtime.load(measured.bundle).target == "cpu"
    assert manifest.buckets is not None
    assert manifest.buckets.lengths[-1] == 64
    assert {engine.built["system"] for engine in plans.values()} == {machine()["system"]}


def test_plans_to_be_built_are_counted_and_those_that_are_there_are_told(
    measured: Said, tuner: Tuner, file: Path
) -> None:
    asked = (*ASKED, "--latencies", file, "--dry-run")
    found = tuner(*asked, "--json").json
    assert found["plans"] == 2  # fp16 and int8
    cached, of = found["plans_cached"]
    used = [name for name in read_bundle(measured.bundle).manifest.engines if "rtx" in name]
    assert len(used) <= cached <= of == 2
    told = next(line for line in tuner(*asked).out.splitlines() if "plans of TensorRT" in line)
    assert f"2 at most; of the default's {cached} of 2 are in the cache" in told
    fresh = tuner(*asked, "--json", "--cache", tuner.bundle.parent / "empty").json
    assert fresh["plans_cached"] == [0, 2]


def test_what_was_measured_elsewhere_is_told_as_such(measured: Said) -> None:
    raw = json.loads((measured.bundle / "manifest.json").read_text())
    for task in raw["tasks"].values():
        told = task["targets"]["rtx-sm89"]["measured"]
        assert told["latency_from"] == "measured on a test's GPU"
        assert told["quality_from"] == "the graphs that stand in, on cpu"
        assert task["targets"]["cpu"]["measured"] == {"stands_in_for": "rtx-sm89"}
        schedule = task["targets"]["rtx-sm89"]["schedule"]
        changes = sum(a != b for a, b in pairwise(schedule))
        passes = task["sampler"]["steps"] / len(schedule)
        ms = sum(passes * {"fp16": 2.0, "int8": 1.0}[name] for name in schedule)
        assert told["latency_ms"][0] == pytest.approx(ms + 0.25 * changes)
    assert raw["tune"]["unit"] == "ms a sequence, measured on a test's GPU"


def test_without_a_file_latencies_are_predicted_and_said_to_be(tuner: Tuner) -> None:
    said = tuner(*ASKED, "--gpu", "L4", "--max-loss", "100")
    assert said.code == 0, said.err
    assert "No engine was timed here: milliseconds are predicted for" in said.out
    assert "L4" in said.out
    assert ", predicted for" in said.err
    raw = json.loads((said.bundle / "manifest.json").read_text())
    told = raw["tasks"]["edit"]["targets"]["rtx-sm89"]["measured"]
    assert told["latency_from"].startswith("predicted for")


def both_ways(fp16: float, constant: float) -> list[dict[str, Any]]:
    return [
        row("fp32", 4.0),
        row("fp16", fp16, weights="input"),
        row("fp16", constant, weights="constant"),
    ]


# Nothing but the weights can be turned.
ALONE = ("--target", "rtx-sm89", "--precision", "fp16", "--max-loss", "100", "--strategy", "fast")


def graphs_of(bundle: Path) -> dict[str, str]:
    manifest = read_bundle(bundle).manifest
    return {name: each.graph for name, each in manifest.engines.items()}


def test_the_faster_way_to_give_a_plan_its_weights_is_found_and_ships_and_is_rebuilt(
    tuner: Tuner, ahead: Export, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(json.dumps(content(ahead, rows=both_ways(2.0, 1.5))))
    said = tuner(*ALONE, "--latencies", file, "--json")
    assert said.code == 0, said.err
    assert graphs_of(said.bundle) == {"fp16.cpu": "fp16.sim.serve", "fp16.rtx-sm89": "fp16.serve"}
    raw = json.loads((said.bundle / "manifest.json").read_text())
    assert raw["tune"]["candidate"]["weights"] == "constant"
    task = raw["tasks"]["edit"]
    ms = task["targets"]["rtx-sm89"]["measured"]["latency_ms"][0]
    assert ms == pytest.approx(1.5 * task["sampler"]["steps"])
    search = json.loads((said.bundle.parent / "BUNDLE.tune/search.json").read_text())
    (knob,) = [each for each in search["space"] if each["name"] == "weights"]
    assert knob["choices"] == ["input", "constant"]
    assert main(["rebuild", str(said.bundle), "--target", "rtx-sm120"]) == 0
    capsys.readouterr()
    assert graphs_of(said.bundle)["fp16.rtx-sm120"] == "fp16.serve"


def test_weights_are_inputs_where_these_are_faster(
    tuner: Tuner, ahead: Export, file: Path
) -> None:
    file.write_text(json.dumps(content(ahead, rows=both_ways(1.5, 2.0))))
    said = tuner(*ALONE, "--latencies", file, "--json")
    assert said.code == 0, said.err
    assert graphs_of(said.bundle)["fp16.rtx-sm89"] == "fp16.bare.serve"


def test_a_prediction_offers_no_choice_of_weights_but_lets_one_be_pinned(tuner: Tuner) -> None:
    asked = (*ALONE, "--gpu", "L4", "--dry-run")
    dry = tuner(*asked, "--json")
    assert dry.code == 0, dry.err
    assert any("take equally long by a prediction" in note for note in dry.json["notes"])
    pinned = tuner(*asked, "--set", "space.weights=constant", "--json")
    assert pinned.json["candidates"] == dry.json["candidates"] == 1
    assert "pinned: weights constant" in pinned.json["notes"]
    refused = tuner(*asked, "--set", "space.weights=both")
    assert refused.code == 2
    assert "knob 'weights' has input, constant, not 'both'" in refused.err


def test_memory_counts_shared_weights_once_and_constants_in_every_plan(
    small_effort: None, ahead: Export, file: Path, tmp_path: Path
) -> None:
    (tmp_path / "work").mkdir()
    asked = {"target": "rtx-sm89", "precisions": ("fp16", "int8", "int8-w"), "latencies": file}
    shop = Workshop(bench_of(ahead, tmp_path, **asked), tmp_path / "work")
    contest, mib = Contest(shop), 1 << 20
    fp16, int8 = (ahead.families[name] / mib for name in ("fp16", "int8"))
    used = {
        ("int8", "int8-w"): (int8, 2 * int8),
        ("fp16", "int8"): (fp16 + int8, fp16 + int8),
        ("fp16", "int8", "int8-w"): (fp16 + int8, fp16 + 2 * int8),
    }
    for column, weights in enumerate(("input", "constant")):
        table = contest.priced(shop.default.changed(weights=weights), "edit")
        for names, wanted in used.items():
            assert table.memory(set(names)) == pytest.approx(wanted[column]), (names, weights)


@pytest.mark.parametrize(
    ("rows", "offered", "says"),
    [
        ([row("fp32", 4), row("fp16", 2), row("int8", 1)], ("input",), "not told apart"),
        ([*both_ways(2, 1), row("int8", 1)], ("input",), "constants the latencies lack int8"),
        (
            [row("fp32", 4), *(row(n, 2, weights="constant") for n in ("fp16", "int8"))],
            ("constant",),
            "inputs the latencies lack fp16, int8",
        ),
        (
            [row("fp32", 4), row("fp16", 2, weights="constant"), row("int8", 2, weights="input")],
            (),
            "measure the missing ones",
        ),
    ],
)
def test_weights_are_offered_as_far_as_a_file_tells_of_every_precision(
    rows: list[dict[str, Any]],
    offered: tuple[str, ...],
    says: str,
    ahead: Export,
    tmp_path: Path,
) -> None:
    made, names = tmp_path / "latencies.json", ["fp32", "fp16", "int8"]
    made.write_text(json.dumps(content(ahead, rows=rows)))
    found = latencies_from_file(made, ahead, names, "rtx-sm89")
    if not offered:
        with pytest.raises(InputError, match=says):
            weights_knob(ahead, names, found, runs=False)
        return
    knob = weights_knob(ahead, names, found, runs=False)
    assert knob.choices["weights"] == offered
    assert says in knob.notes[0]
    assert weights_knob(ahead, names, None, runs=True).choices["weights"] == ("input", "constant")


def test_a_damaged_plan_is_found(measured: Said, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = json.loads((measured.bundle / "manifest.json").read_text())
    (file, *_) = [e["file"] for e in manifest["engines"].values() if e["target"] != "cpu"]
    plan = measured.bundle / file
    data = plan.read_bytes()
    plan.unlink()  # the cache has it by another name
    plan.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    capsys.readouterr()
    assert main(["verify", str(measured.bundle)]) == 2
    assert file in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (("--target", "rtx-sm75", "--precision", "fp32"), "sm75 lacks fp32"),
        (("--target", "rtx-sm89", "--precision", "nvfp4"), "has no precision nvfp4"),
        (("--target", "cpu"), "the export is for target 'rtx-sm89'"),
        (("--target", "trt"), "nothing says which GPU trt is"),
        (("--target", "rtx-sm89", "--gpu", "RTX 9999"), "is not known"),
        (("--target", "rtx-sm90"), "has no 'sm90'"),
    ],
)
def test_what_cannot_be_had_is_told_before_anything_is_built(
    asked: tuple[str, ...], says: str, tuner: Tuner
) -> None:
    said = tuner(*asked)
    assert said.code == 2
    assert says in said.err
    assert not tuner.bundle.exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": "cadenza-latencies/9"}, "is not 'cadenza-latencies/1'"),
        ({"switch_ms": -0.5}, "switch_ms: must be at least 0 and at most"),
        ({"source": "guessed"}, "must be measured or predicted"),
        ({"shape": {"batch": 2, "prompt": 16, "answer": 24}}, "was measured at a batch of 2"),
        ({"rows": [row("fp32", 1.0)]}, "has no latency of fp16"),
        ({"rows": [row("fp16", 1.0, low=2)]}, "0 < low <= latency_ms <= high"),
        ({"rows": [row("fp16", 1.0, latency_ms="1")]}, "must be a finite number"),
        ({"rows": [row("fp16", 1.0, n=0)]}, "rows: 0: n: must be"),
        ({"rows": [row("fp16", 1.0, n="many")]}, "rows: 0: n: must be"),
        (
            {"rows": [row("fp16", 1.0, weights="both")]},
            "must be input or constant, or absent; mend it",
        ),
        ({"rows": [row("fp16", 1.0), row("fp16", 2.0)]}, "fp16 stands there twice; keep one"),
        (
            {"rows": [row("fp16", 1.0, weights="input"), row("fp16", 2.0, weights="input")]},
            "rows: 1: fp16 with weights input stands there twice",
        ),
        ({"rows": []}, "must be 1 to 256 rows, got 0"),
        ({"rows": [{k: v for k, v in row("fp16", 1.0).items() if k != "n"}]}, "needs 'n'"),
        ({"rows": [row("fp17", 1.0)]}, "precision: is none of fp32"),
        (
            {"rows": [row("fp16", 1.0, weights="input"), row("fp16", 2.0)]},
            "fp16 stands there twice",
        ),
        ({"target": "rtx-sm86"}, "is of rtx-sm86, engines are built for rtx-sm89"),
        ({"rows": {"fp16": 1.0}}, "rows: must be a list"),
    ],
)
def test_a_file_at_fault_is_refused(
    changes: dict[str, object], says: str, ahead: Export, tmp_path: Path
) -> None:
    made = tmp_path / "latencies.json"
    made.write_text(json.dumps(content(ahead, **changes)))
    with pytest.raises(InputError, match=says):
        latencies_from_file(made, ahead, ["fp16"], "rtx-sm89")


def test_a_file_of_rows_alone_is_a_measured_one(ahead: Export, file: Path, tmp_path: Path) -> None:
    plain = json.loads(file.read_text())
    wanted = latencies_from_file(file, ahead, ["fp16"], "rtx-sm89")
    for key in ("format", "source", "switch_ms", "how"):
        plain.pop(key, None)
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(plain))
    found = latencies_from_file(bare, ahead, ["fp16"], "rtx-sm89")
    assert (found.rows, found.source, found.switch_ms) == (wanted.rows, "measured", 0.0)


def test_latencies_come_back_from_their_file(ahead: Export, file: Path, tmp_path: Path) -> None:
    found = latencies_from_file(file, ahead, NAMES, "rtx-sm89")
    again = tmp_path / "again.json"
    again.write_text(json.dumps(found.to_json()))
    assert latencies_from_file(again, ahead, NAMES, "rtx-sm89") == found
    assert isinstance(found, Latencies)


def test_predictions_rank_what_a_gpu_multiplies_faster(ahead: Export) -> None:
    from engines.gpus import gpu_from_name

    names = [ahead.precisions[name] for name in NAMES]
    found = predicted_latencies(ahead, gpu_from_name("L4"), "rtx-sm89", names)
    assert found.source == "predicted"
    ms = {name: each.median for name, each in found.passes().items()}
    assert ms["int8"] <= ms["fp16"] <= ms["fp32"]
    assert all(each.low == each.median == each.high for each in found.passes().values())
    assert all(each.n is None and each.weights is None for each in found.rows)


def test_every_tensor_of_an_exported_graph_is_bound_as_a_plan_s_would_be(ahead: Export) -> None:
    trt = tensorrt_module(target_from_name("rtx-sm89"))
    bare = 0
    for name, graph in ahead.graphs.items():
        if ".sim" in name or graph.precision == "fp32":
            continue
        logger = trt.Logger(trt.ILogger.Severity.ERROR)
        network = trt.Builder(logger).create_network(0)
        parser = trt.OnnxParser(network, logger)
        if not parser.parse_from_file(str(ahead.folder / graph.file)):
            continue  # a simulation, for ONNX Runtime alone
        reads = [network.get_input(index) for index in range(network.num_inputs)]
        writes = [network.get_output(index) for index in range(network.num_outputs)]
        tensors = tuple(
            Tensor(each.name, read, each.dtype.name, tuple(each.shape))
            for read, side in ((True, reads), (False, writes))
            for each in side
        )
        files = [ahead.folder / path for path in graph.weights]
        stored = {file: tensors_of(file) for file in files if file.suffix == ".safetensors"}
        sites = 0 if graph.scales is None else len(graph.scales[0])
        bound = bindings_of(name, tensors, graph.tail, sites, stored)
        bare += bool(bound.weights)
    assert bare >= 3, "fp16, int8 and int8-w read their weights as inputs"
