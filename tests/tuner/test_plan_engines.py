"""A tune whose engines are plans on this machine's GPU; a given loader where there is none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from engines.backend import FakeBackend, Floats, Ids, Mask
from engines.buckets import Buckets
from engines.build import BuildLog, Cache
from engines.errors import InputError
from engines.manifest import Shape
from engines.options import OrtOptions
from engines.ort import OrtBackend
from engines.precision import Precision, precision_from_name
from engines.targets import SMS, target_from_name
from engines.trt import TrtOptions
from engines.trt_run import Device
from exporter.export import export
from exporter.folder import Export, read_export
from tests.tiny_export import small_export
from tests.tuner.tuning import Tuner, bench_of
from tuner import workshop
from tuner.best import best_trial
from tuner.contest import Contest
from tuner.finish import Asked, finish
from tuner.latencies import elsewhere, given_latencies
from tuner.plan_engines import Split, plan_fleet
from tuner.trial import run_trial
from tuner.workbench import Workbench
from tuner.workshop import Workshop

pytest.importorskip("tensorrt_rtx_bindings", reason="pip install 'cadenza[tensorrt-rtx]'")
pytestmark = pytest.mark.usefixtures("small_effort")

TARGET, MOST = "rtx-sm89", 4
GPU = cast("Device", SimpleNamespace(name="a GPU of a test", version="1", sm=89))


@pytest.fixture(scope="module")
def ahead(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Return the shared checkpoint's export for TensorRT; not to be written into."""
    config = small_export(
        checkpoint,
        tmp_path_factory.mktemp("ahead") / "EXPORT",
        target=TARGET,
        precisions=("fp32", "fp16", "int8"),
        shape=Shape((1, 2, MOST), (1, 16, 40)),
    )
    return read_export(export(config))


@dataclass
class StandIn:
    """What a plan computes, by the graph that stands in for it; no row more than a plan takes."""

    whole: OrtBackend
    closed: list[str]
    built: dict[str, int] = field(default_factory=lambda: {"given x given": 1})

    @property
    def precision(self) -> Precision:
        return self.whole.precision

    def serve(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Any:
        assert len(ids) <= MOST
        return self.whole.serve(ids, mask, positions, progress)

    def logits(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Floats:
        assert len(ids) <= MOST
        return self.whole.logits(ids, mask, positions, progress)

    def close(self) -> None:
        self.closed.append(self.precision.name)


@dataclass
class Given:
    """A loader: keeps what it was given, and loads what stands in."""

    export: Export
    asked: dict[str, dict[str, Any]] = field(default_factory=dict)
    closed: list[str] = field(default_factory=list)

    def __call__(
        self,
        *,
        serve: Path | None,
        trace: Path | None,
        precision: Precision,
        scales: NDArray[np.float32] | None,
        weights: Sequence[Path],
        device: Device,
        buckets: Buckets,
        pad_id: int,
    ) -> StandIn:
        assert serve is not None and trace is not None and serve != trace
        assert {each.read_bytes()[:4] for each in (serve, trace)} == {b"vtrt"}
        assert all(each.is_file() and each.suffix == ".safetensors" for each in weights)
        assert device is GPU and buckets.batches[-1] == MOST
        assert pad_id == self.export.model.eos_id
        self.asked[precision.name] = {"weights": list(weights), "scales": scales}
        stem = precision.name if precision.name == "fp32" else f"{precision.name}.sim"
        if precision.has_static_scales and scales is None:
            stem = f"{precision.name}.all.sim"
        paths = [self.export.path(f"{stem}.{tail}") for tail in ("serve", "trace")]
        whole = OrtBackend.load(*paths, precision, scales, OrtOptions(exact=True), read_back=False)
        return StandIn(whole, self.closed)


@pytest.fixture
def bench(ahead: Export, shared_cache: Path, tmp_path: Path) -> Workbench:
    found = bench_of(ahead, tmp_path, target=TARGET, precisions=("fp16", "int8"), max_loss=100.0)
    return replace(found, plans_here=True, latencies=None, cache=Cache(shared_cache))


def test_rows_beyond_what_a_plan_takes_are_run_in_parts_with_the_same_answers() -> None:
    rng = np.random.default_rng(7)
    rows, length, asked = 11, 6, 3
    ids = rng.integers(0, 9, (rows, length))
    positions = rng.integers(0, length, (rows, asked))
    mask, progress = np.ones((rows, length), np.bool_), np.zeros(rows, np.float32)
    counts: list[int] = []

    def logits(ids: Ids, mask: Mask, positions: Ids) -> Floats:
        counts.append(len(ids))
        places = ids[np.arange(len(ids))[:, None], positions]
        return np.sin(places[..., None] * np.arange(1.0, 6.0)).astype(np.float32)

    class Whole(FakeBackend):
        built: ClassVar[dict[str, int]] = {}

        def close(self) -> None:
            """Nothing is held."""

    whole = Whole(precision_from_name("int8"), logits)
    served, seen = whole.serve(ids, mask, positions, progress), whole.logits
    for most in (1, 4, 11, 64):
        counts.clear()
        split = Split(whole, most)
        found = split.serve(ids, mask, positions, progress)
        for name in ("tokens", "probability", "entropy"):
            np.testing.assert_array_equal(getattr(found, name), getattr(served, name))
        assert sum(counts) == rows
        assert max(counts) <= most
        np.testing.assert_array_equal(
            split.logits(ids, mask, positions, progress), seen(ids, mask, positions, progress)
        )
    assert split.precision.name == "int8"


def test_each_precision_is_loaded_from_both_tails_with_the_weights_that_its_plan_reads(
    bench: Workbench, tmp_path: Path
) -> None:
    default = Workshop(bench, tmp_path).default
    load, log = Given(bench.export), BuildLog()
    made = plan_fleet(bench, bench.export, default, TrtOptions(), GPU, log, load)
    assert set(made.fleet.engines) == {"fp32", "fp16", "int8"}
    assert made.graphs == {
        "fp32": "fp32.serve",
        "fp16": "fp16.bare.serve",
        "int8": "int8.all.bare.serve",
    }
    assert not load.asked["fp32"]["weights"]
    assert load.asked["fp16"]["weights"] and load.asked["int8"]["weights"]
    assert made.built["int8"] == {"given x given": 1}
    inside = Given(bench.export)
    constant = default.changed(weights="constant")
    other = plan_fleet(bench, bench.export, constant, TrtOptions(), GPU, log, inside)
    assert not any(each["weights"] for each in inside.asked.values())
    assert other.graphs["int8"] == "int8.all.serve"
    keys, others = made.fleet.keys, other.fleet.keys
    assert keys["fp32"] == others["fp32"]
    assert keys["int8"] != others["int8"]
    again = plan_fleet(bench, bench.export, default, TrtOptions(), GPU, BuildLog(), load)
    assert again.fleet.keys == keys
    made.close()
    assert sorted(load.closed) == ["fp16", "fp32", "int8"]
    windows = Given(bench.export)
    by_window = default.changed(scales="window")
    third = plan_fleet(bench, bench.export, by_window, TrtOptions(), GPU, log, windows)
    assert windows.asked["int8"]["scales"].shape[0] == bench.export.windows
    assert third.fleet.keys["int8"] not in (keys["int8"], others["int8"])


def test_where_plans_run_they_are_the_engines_that_are_timed_and_stand_ins_ship_beside(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Given(bench.export)
    monkeypatch.setattr(workshop, "plan_fleet", partial(plan_fleet, load=load))
    opened = SimpleNamespace(open=lambda target: GPU)
    monkeypatch.setattr(workshop, "Device", opened)
    work = tmp_path / "work"
    work.mkdir()
    shop = Workshop(bench, work)
    contest = Contest(shop)
    assert bench.timed and not bench.stands_in and bench.latency_from == ""
    result = run_trial(contest, shop.default, 0, None)
    assert result.failed is None
    assert result.cost > 0.0
    timing = contest.timing(shop.default, bench.jobs["edit"].sampler)
    assert timing is not None and set(timing.by_window) == {"fp32", "fp16", "int8"}
    best = best_trial([result], bench.config.goal)
    asked = Asked(identity="0" * 64, force=False, interrupted=False, began=0.0)
    finish(contest, work, [best], asked)
    raw = json.loads((bench.config.output / "manifest.json").read_text())
    assert raw["targets"] == [TARGET, "cpu"]
    for engine in raw["engines"].values():
        if engine["target"] == TARGET:
            assert engine["built"]["executed"] == "executed by this tune on a GPU of a test"
    for task in raw["tasks"].values():
        told = task["targets"][TARGET]["measured"]
        assert "latency_from" not in told
        assert told["latency_ms"][0] > 0.0
        assert task["targets"]["cpu"]["measured"] == {"stands_in_for": TARGET}


def test_latencies_are_not_asked_for_where_plans_are_timed(bench: Workbench) -> None:
    config, precisions = bench.config, bench.precisions
    assert given_latencies(config, bench.export, precisions, True) is None
    for more in ({"latencies": Path("L4.json")}, {"gpu": "L4"}):
        asked = replace(config, **more)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="rtx-sm89 is timed here; leave --latencies and"):
            given_latencies(asked, bench.export, precisions, True)


def test_a_machine_without_the_gpu_says_why_plans_are_not_timed() -> None:
    here = [sm for sm in SMS if elsewhere(target_from_name(f"rtx-sm{sm}")) is None]
    for sm in SMS:
        why = elsewhere(target_from_name(f"rtx-sm{sm}"))
        assert (why is None) == (sm in here)
        assert why is None or f"sm{sm}" in why
    assert len(here) <= 1
    assert 75 not in here  # full precision is not built for it


@pytest.mark.gpu
def test_on_a_gpu_a_tune_times_its_own_plans(
    ahead: Export, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = next(
        (f"rtx-sm{sm}" for sm in SMS if elsewhere(target_from_name(f"rtx-sm{sm}")) is None), None
    )
    if target is None:
        pytest.skip(str(elsewhere(target_from_name(TARGET))))
    tuner = Tuner(ahead.folder, tmp_path / "BUNDLE", tmp_path / "cache", capsys)
    said = tuner("--target", target, "--max-loss", "100", "--json")
    assert said.code == 0, said.err
    raw = json.loads((said.bundle / "manifest.json").read_text())
    assert raw["tune"]["unit"] == "ms a sequence"
    executed = [e["built"]["executed"] for e in raw["engines"].values() if e["target"] == target]
    assert executed and all(each.startswith("executed by this tune on") for each in executed)
