"""A bundle for another GPU: its own graphs built again, measurements marked stale."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from cadenza import main
from engines.bundle import read_bundle
from engines.manifest import Shape
from exporter.export import export
from tests.tiny_export import small_export
from tests.tuner.tuning import Tuner

pytest.importorskip("tensorrt_rtx_bindings", reason="pip install 'cadenza[tensorrt-rtx]'")


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle for rtx-sm89; its copies are rebuilt."""
    folder = tmp_path_factory.mktemp("rebuilt")
    config = small_export(
        checkpoint,
        folder / "EXPORT",
        target="rtx-sm89",
        precisions=("fp16", "int8", "fp8"),
        shape=Shape((1, 4, 8), (1, 16, 40)),
        tasks=("edit",),
    )
    tuner = Tuner(export(config), folder / "BUNDLE", folder / "cache")
    with pytest.MonkeyPatch.context() as patch:
        asked = ("--target", "rtx-sm89", "--precision", "int8", "--trials", "1")
        said = tuner.run_quietly(patch, *asked, "--max-loss", "100")
    assert said.code == 0, said.err
    return said.bundle


def test_a_rebuilt_bundle_has_one_target_more_and_verifies(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "NEW"
    cache = ("--cache", str(tmp_path / "cache"))
    argv = ["rebuild", str(bundle), "--target", "rtx-sm120+sm86", "-o", str(out), *cache, "--json"]
    assert main(argv) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["targets"] == ["rtx-sm89", "cpu", "rtx-sm86+sm120"]
    assert said["built"] == 1
    made, before = read_bundle(out), read_bundle(bundle)
    assert made.golden == before.golden
    (engine,) = made.manifest.serving("rtx-sm86+sm120").values()
    assert engine.built["mismatch"] == []
    task = made.manifest.tasks["edit"]
    assert task.targets["rtx-sm86+sm120"].schedule == task.targets["rtx-sm89"].schedule
    assert "carried over from rtx-sm89" in str(task.targets["rtx-sm86+sm120"].measured["stale"])
    assert main(["verify", str(out)]) == 0
    assert "whole, for sm86, sm120" in capsys.readouterr().out
    assert main([*argv[:6], *cache]) == 2  # the new one is there, and is not replaced


def test_in_place_the_old_one_is_replaced_when_the_new_one_is_whole(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "OWN"
    shutil.copytree(bundle, own)
    argv = ["rebuild", str(own), "--target", "rtx-sm86", "--cache", str(tmp_path / "cache")]
    assert main(argv) == 0
    assert read_bundle(own).manifest.targets == ("rtx-sm89", "cpu", "rtx-sm86")
    digest = read_bundle(own).digest
    assert main(argv) == 0
    assert read_bundle(own).digest == digest
    assert "1 reused" in capsys.readouterr().out


def test_a_build_route_stays_with_the_target_that_it_was_found_on(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, out = tmp_path / "OWN", tmp_path / "NEW"
    shutil.copytree(bundle, own)
    manifest = json.loads((own / "manifest.json").read_text())
    (name,) = [name for name, e in manifest["engines"].items() if e["target"] == "rtx-sm89"]
    manifest["engines"][name]["options"]["route"] = "-kgen:codegen:cuda_tile=2"
    (own / "manifest.json").write_text(json.dumps(manifest))
    cache = ("--cache", str(tmp_path / "cache"))
    assert main(["rebuild", str(own), "--target", "rtx-sm86", "-o", str(out), *cache]) == 0
    said = capsys.readouterr().err
    assert "int8: its build route, -kgen:codegen:cuda_tile=2, was found on rtx-sm89" in said
    assert "means nothing for rtx-sm86" in said
    before, made = read_bundle(own).manifest, read_bundle(out).manifest
    (engine,) = made.serving("rtx-sm86").values()
    assert engine.options["route"] == ""
    assert engine.graph == before.serving("rtx-sm89")["int8"].graph == "int8.all.bare.serve"
    # For its own target it is asked for again, and this module's answer is that it has none.
    assert main(["rebuild", str(own), "--target", "rtx-sm89", "-o", str(out / "2"), *cache]) == 1
    assert "has no build routes, so '-kgen:codegen:cuda_tile=2'" in capsys.readouterr().err


def test_what_cannot_be_rebuilt_is_told(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for target, says in (
        ("cpu", "cpu has no engines that are built ahead"),
        ("rtx-sm90", "has no 'sm90'"),
    ):
        assert main(["rebuild", str(bundle), "--target", target, "-o", str(tmp_path / "N")]) == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "N").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"colour": "red"}, "knows only optimization_level, route"),
        ({"optimization_level": "3"}, "must be an integer from 0 to 5"),
        ({"optimization_level": 9}, "must be an integer from 0 to 5"),
        ({"route": 3}, "must be text"),
    ],
)
def test_options_at_fault_are_refused_before_anything_is_built(
    options: dict[str, object],
    says: str,
    bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = tmp_path / "OWN"
    shutil.copytree(bundle, own)
    manifest = json.loads((own / "manifest.json").read_text())
    manifest["engines"]["int8.rtx-sm89"]["options"] = options
    (own / "manifest.json").write_text(json.dumps(manifest))
    assert main(["rebuild", str(own), "--target", "rtx-sm86", "--cache", str(tmp_path / "c")]) == 2
    assert says in capsys.readouterr().err


def test_golden_answers_are_rerun_before_anything_is_built(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, out = tmp_path / "OWN", tmp_path / "NEW"
    shutil.copytree(bundle, own)
    cache = ("--cache", str(tmp_path / "cache"))
    argv = ("rebuild", str(own), "--target", "rtx-sm86", "-o", str(out), *cache)
    assert main([*argv, "--json"]) == 0
    told = capsys.readouterr()
    assert "golden answers are equal on cpu" in told.err
    assert "the plans for rtx-sm86 were not run: " in told.err
    assert json.loads(told.out)["agreement"] is None
    lines = (own / "golden.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    first["ids"][0] = (first["ids"][0] + 1) % 4
    data = "".join(f"{line}\n" for line in [json.dumps(first), *lines[1:]]).encode()
    (own / "golden.jsonl").write_bytes(data)
    manifest = json.loads((own / "manifest.json").read_text())
    entry = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    manifest["files"]["golden.jsonl"] = entry
    (own / "manifest.json").write_text(json.dumps(manifest))
    shutil.rmtree(out)
    assert main([*argv]) == 1
    assert "golden answers differ on cpu" in capsys.readouterr().err
    assert not out.exists()


def test_a_timing_cache_miss_is_no_error_of_a_module_without_timing_caches(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("rebuild", str(bundle), "--target", "rtx-sm86", "-o", str(tmp_path / "NEW"))
    assert main([*argv, "--cache", str(tmp_path / "c"), "--timing-cache-miss", "error"]) == 2
    assert "leave --timing-cache-miss out" in capsys.readouterr().err
