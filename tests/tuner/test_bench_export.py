"""`cadenza bench EXPORT` for TensorRT: real plans, on a device that this machine does not have."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

import cadenza
from engines.backend import FakeBackend, Floats, Ids, Mask
from engines.buckets import Buckets
from engines.manifest import Shape
from engines.precision import Precision
from engines.targets import SMS, Target, target_from_name
from engines.trt_run import cannot_run
from exporter.export import export
from exporter.folder import Export, read_export
from tests.tiny_export import small_export
from tests.tuner.tuning import Tuner
from tuner import bench_export
from tuner.latencies import latencies_from_file, shape_of

pytest.importorskip("tensorrt_rtx_bindings", reason="pip install 'cadenza[tensorrt-rtx]'")

Out = pytest.CaptureFixture[str]
TARGET = "rtx-sm86"
NAMES = ("fp32", "fp16", "int8", "fp8")
BEST = (2, 8)


@pytest.fixture(scope="module")
def ahead(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Return the shared checkpoint's export for TensorRT; not to be written into."""
    config = small_export(
        checkpoint,
        tmp_path_factory.mktemp("ahead") / "EXPORT",
        target="rtx-sm120",
        precisions=NAMES,
        shape=Shape((1, BEST[0], 4), (1, BEST[1], 40)),
    )
    return read_export(export(config))


class GivenDevice:
    """A GPU as `engines.trt_run.Device` opens one; it is not there."""

    name = "a GPU of a test"
    closed: ClassVar[int] = 0

    @classmethod
    def open(cls, target: Target, ordinal: int = 0) -> GivenDevice:
        assert target.name == TARGET
        return cls()

    def __enter__(self) -> GivenDevice:
        return self

    def __exit__(self, *error: object) -> None:
        GivenDevice.closed += 1

    def memory_bytes(self) -> dict[str, int]:
        return {"activations": 1, "weights": 2, "graphs": 3}


class GivenPlan(FakeBackend):
    """A plan that takes a millisecond, and two where its weights are inputs; nothing executes it.

    What it is given is held to what `engines.trt_run.PlanBackend` asks for.
    """

    loaded: ClassVar[list[tuple[str, int]]] = []

    @classmethod
    def load(
        cls,
        *,
        serve: Path | None,
        trace: Path | None,
        precision: Precision,
        scales: NDArray[np.float32] | None,
        weights: Sequence[Path],
        device: GivenDevice,
        buckets: Buckets,
        runtime_cache: Path | None = None,
        pad_id: int = 0,
    ) -> GivenPlan:
        assert serve is not None and trace is None and isinstance(device, GivenDevice)
        assert serve.read_bytes()[:4] == b"vtrt"
        assert all(path.suffix == ".safetensors" and path.is_file() for path in weights)
        assert scales is None  # shared ones are constants of the graph
        cls.loaded.append((precision.name, len(weights)))

        def logits(ids: Ids, mask: Mask, positions: Ids) -> Floats:
            return np.zeros((*positions.shape, 4), np.float32)

        return cls(precision, logits, 2.0 if weights else 1.0, time.sleep)


def stand_in(patch: pytest.MonkeyPatch, why: str | None) -> None:
    GivenPlan.loaded.clear()
    GivenDevice.closed = 0
    patch.setattr(bench_export, "cannot_run", lambda target: why)
    patch.setattr(bench_export, "Device", GivenDevice)
    patch.setattr(bench_export, "PlanBackend", GivenPlan)


def command(capsys: Out, *argv: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cadenza.main(["bench", *map(str, argv)])
    return code, *capsys.readouterr()


@pytest.fixture
def document(
    ahead: Export,
    shared_cache: Path,
    tmp_path: Path,
    capsys: Out,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Any]:
    """Return what is written of an export whose plans run."""
    stand_in(monkeypatch, None)
    file = tmp_path / "latencies.json"
    argv = (ahead.folder, "--target", TARGET, "--repeats", "3", "--output", file)
    code, out, err = command(capsys, *argv, "--cache", shared_cache)
    assert code == 0, err
    assert "sm86 lacks fp8" in err and "fp8 is left out" in err
    assert out.endswith(f"--target {TARGET} --latencies {file} -o BUNDLE\n")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_each_precision_is_built_and_timed_with_its_weights_inside_and_as_inputs(
    document: dict[str, Any], ahead: Export
) -> None:
    batch, prompt, answer = shape_of(ahead)
    assert (batch, prompt) == BEST
    assert document["shape"] == {"batch": batch, "prompt": prompt, "answer": answer}
    assert (document["format"], document["source"]) == ("cadenza-latencies/1", "measured")
    assert (document["target"], document["device"]) == (TARGET, "a GPU of a test")
    rows = {(row["precision"], row.get("weights")): row for row in document["rows"]}
    assert list(rows) == [
        ("fp32", None),  # the export has it one way only
        ("fp16", "input"),
        ("fp16", "constant"),
        ("int8", "input"),
        ("int8", "constant"),
    ]
    for (name, weights), row in rows.items():
        given = 2.0 if weights == "input" else 1.0
        assert given <= row["low"] <= row["latency_ms"] <= row["high"], name
        assert row["n"] == 3 * document["how"]["steps"]
    for name in ("fp16", "int8"):
        assert rows[name, "input"]["low"] > rows[name, "constant"]["latency_ms"]
    assert GivenDevice.closed == 1
    given_files = dict.fromkeys(GivenPlan.loaded)
    assert {name for name, files in given_files if files} == {"fp16", "int8"}
    assert {name for name, files in given_files if not files} == {"fp32", "fp16", "int8"}


def test_the_file_is_what_tune_reads(
    document: dict[str, Any],
    ahead: Export,
    small_effort: None,
    shared_cache: Path,
    tmp_path: Path,
    capsys: Out,
) -> None:
    file = tmp_path / "latencies.json"  # where the fixture's command wrote it
    read = latencies_from_file(file, ahead, ["fp32", "fp16", "int8"], TARGET)
    assert (read.source, read.device, read.target) == ("measured", "a GPU of a test", TARGET)
    assert read.to_json() == document
    tuner = Tuner(ahead.folder, tmp_path / "BUNDLE", shared_cache, capsys)
    asked = ("--target", TARGET, "--precision", "fp16", "--precision", "int8")
    said = tuner(*asked, "--latencies", file, "--max-loss", "100", "--json")
    assert said.code == 0, said.err
    raw = json.loads((said.bundle / "manifest.json").read_text())
    for task in raw["tasks"].values():
        told = task["targets"][TARGET]["measured"]
        assert told["latency_from"] == "measured on a GPU of a test"


def test_where_plans_cannot_run_that_is_said_before_anything_is_built(
    ahead: Export, tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, "rtx-sm86 needs a GPU of sm86, here is none.")
    cache, file = tmp_path / "cache", tmp_path / "latencies.json"
    argv = (ahead.folder, "--target", TARGET, "--cache", cache, "--output", file, "--json")
    code, out, err = command(capsys, *argv)
    assert (code, out) == (1, "")
    assert err.startswith("cadenza bench: error: rtx-sm86 needs a GPU of sm86, here is none; copy")
    assert str(ahead.folder) in err and "run the same command there" in err
    assert f"cadenza tune {ahead.folder} --target {TARGET} --gpu NAME" in err
    assert not list(cache.rglob("*.plan")) and not file.exists()
    assert GivenPlan.loaded == []


def test_this_machine_s_own_reason_is_told_where_it_cannot_run(
    ahead: Export, tmp_path: Path, capsys: Out
) -> None:
    if cannot_run(target_from_name(TARGET)) is None:
        pytest.skip("this machine has the GPU")
    code, out, err = command(capsys, ahead.folder, "--target", TARGET, "--cache", tmp_path / "c")
    assert (code, out) == (1, "")
    assert "run the same command there" in err
    assert not list((tmp_path / "c").rglob("*.plan"))


@pytest.mark.gpu
def test_on_a_gpu_the_plans_are_timed(ahead: Export, tmp_path: Path, capsys: Out) -> None:
    targets = [target_from_name(f"rtx-sm{sm}") for sm in SMS]
    here = next((each for each in targets if cannot_run(each) is None), None)
    if here is None:
        pytest.skip(str(cannot_run(targets[-1])))
    argv = (ahead.folder, "--target", here.name, "--cache", tmp_path / "cache", "--repeats", "9")
    code, out, err = command(capsys, *argv, "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["target"] == here.name
    assert {row["precision"] for row in document["rows"]} >= {"fp16", "int8"}
    for row in document["rows"]:
        assert 0.0 < row["low"] <= row["latency_ms"] <= row["high"]
