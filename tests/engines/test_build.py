"""Laws of the cache: content-addressed, whole or nothing, and never trusted when damaged."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engines import build
from engines.build import (
    BuildLog,
    Cache,
    EngineSpec,
    digest_json,
    engine_key,
    open_cache,
)
from engines.errors import BackendError, CadenzaError, InputError
from engines.options import OrtOptions
from engines.precision import precision_from_name
from tests.engines.tiny_graph import Weights, tiny_graph

pytest.importorskip("onnxruntime", reason="install with: pip install cadenza[ort]")

FP32, INT8 = precision_from_name("fp32"), precision_from_name("int8")
KEY = digest_json("key")
OPTIONS = OrtOptions(threads=1)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    """An export-like folder: a graph that holds the path of a weight file beside it."""
    folder = tmp_path / "export"
    (folder / "weights").mkdir(parents=True)
    path = tiny_graph(folder / "int8.serve.onnx", "serve", Weights.random(), kind="qdq", sites=2)
    # An unknown field that protobuf readers skip; holds the name as external data would.
    name = b"weights/model.safetensors"
    path.write_bytes(path.read_bytes() + bytes([0xFA, 0x3F, len(name)]) + name)
    (folder / "weights" / "model.safetensors").write_bytes(b"weights")
    (folder / "weights" / "other.safetensors").write_bytes(b"unused")
    return EngineSpec(
        serve=path,
        trace=None,
        precision=INT8,
        scales=np.array([[1, 1], [2, 1]], np.float32),
        options=OPTIONS,
    )


def entries(cache: Cache) -> list[Path]:
    return [path for path in cache.folder.rglob("*") if path.is_file()]


def test_a_second_identical_engine_is_not_built(cache: Cache, spec: EngineSpec) -> None:
    log = BuildLog()
    first = cache.engine(spec, log)
    second = Cache(cache.folder).engine(spec, log)
    assert (log.built, log.reused) == (1, 1) and "1 engines built, 1 reused" in str(log)
    assert first.built == second.built == {"MatMul(float)": 1, "MatMulIntegerToFloat(uint8)": 1}


def test_the_key_changes_with_everything_that_matters_and_with_nothing_else(
    spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert spec.serve is not None and spec.scales is not None
    weights = spec.serve.parent / "weights"
    keys = {"as it is": engine_key(spec)}
    (weights / "other.safetensors").write_bytes(b"changed, but this graph does not name it")
    moved = spec.serve.parent.rename(spec.serve.parent.with_name("moved"))
    spec = replace(spec, serve=moved / spec.serve.name)
    assert spec.serve is not None and spec.scales is not None
    assert engine_key(spec) == keys["as it is"]

    known = "0" * 64
    keys["scales"] = engine_key(replace(spec, scales=spec.scales * 2))
    keys["no scales"] = engine_key(replace(spec, scales=None))
    keys["tail"] = engine_key(replace(spec, serve=None, trace=spec.serve))
    keys["precision"] = engine_key(replace(spec, precision=FP32))
    keys["threads"] = engine_key(replace(spec, options=OrtOptions(threads=2)))
    keys["spinning"] = engine_key(replace(spec, options=OrtOptions(threads=1, spinning=True)))
    keys["digests"] = engine_key(replace(spec, digests={"weights/model.safetensors": known}))
    (moved / "weights" / "model.safetensors").write_bytes(b"Weights")
    keys["weights"] = engine_key(spec)
    spec.serve.write_bytes(spec.serve.read_bytes() + b"\xfa\x3f\x00")
    keys["graph"] = engine_key(spec)
    monkeypatch.setattr(build, "environment", lambda options: {"onnxruntime": "99"})
    keys["version"] = engine_key(spec)
    assert len(set(keys.values())) == len(keys)


def test_a_build_that_fails_leaves_no_entry(cache: Cache, tmp_path: Path) -> None:
    plain = tiny_graph(tmp_path / "plain.onnx", "serve", Weights.random())
    poisoned = tiny_graph(tmp_path / "nan.onnx", "serve", Weights.random(), poison=True)
    log = BuildLog()
    with pytest.raises(BackendError, match="no GEMM was built in integers"):
        cache.engine(EngineSpec(serve=plain, trace=None, precision=INT8, options=OPTIONS), log)
    with pytest.raises(BackendError, match="'fp32' gave values that are not finite"):
        cache.engine(EngineSpec(serve=poisoned, trace=None, precision=FP32, options=OPTIONS), log)
    assert (log.built, log.reused) == (0, 0) and entries(cache) == []


def test_a_graph_that_is_not_there_is_an_input_error(cache: Cache, tmp_path: Path) -> None:
    spec = EngineSpec(serve=tmp_path / "no.onnx", trace=None, precision=FP32, options=OPTIONS)
    with pytest.raises(InputError, match=r"no\.onnx"):
        cache.engine(spec, BuildLog())


@pytest.mark.parametrize(
    "value", [None, 1.5, "é 🚀", [1, [2, {}]], {"rows": [{"low": 0.1, "n": 3}]}]
)
def test_what_was_put_comes_back(cache: Cache, value: object) -> None:
    cache.put("measurement", KEY, value)
    assert Cache(cache.folder).get("measurement", KEY) == value
    assert cache.get("evaluation", KEY) is None


def test_a_later_put_replaces_and_leaves_one_file(cache: Cache) -> None:
    for value in (1, 2):
        cache.put("measurement", KEY, value)
    assert cache.get("measurement", KEY) == 2
    assert [path.name for path in entries(cache)] == [f"{KEY}.json"]


def damaged(text: bytes) -> dict[str, bytes]:
    entry = json.loads(text)
    return {
        "empty": b"",
        "cut": text[: len(text) // 2],
        "no text": b"\xff\xfe\x00",
        "other json": b"[1, 2]",
        "deep": b"[" * 100_000,
        "edited": json.dumps({**entry, "value": 43}).encode(),
        "of another key": json.dumps({**entry, "key": "0" * 64}).encode(),
        "without digest": json.dumps({"format": build.FORMAT, "value": 42}).encode(),
    }


@pytest.mark.parametrize("damage", sorted(damaged(b"{}")))
def test_a_damaged_entry_is_dropped_with_a_warning_and_made_again(
    cache: Cache, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache.put("measurement", KEY, 42)
    (path,) = entries(cache)
    path.write_bytes(damaged(path.read_bytes())[damage])
    with caplog.at_level(logging.WARNING):
        assert cache.get("measurement", KEY) is None
    assert "dropped a damaged cache entry" in caplog.text and not path.exists()
    cache.put("measurement", KEY, 42)
    assert cache.get("measurement", KEY) == 42


def test_an_entry_of_another_format_is_left_alone(cache: Cache) -> None:
    cache.put("measurement", KEY, 42)
    (path,) = entries(cache)
    foreign = path.read_text().replace(build.FORMAT, "cadenza-cache/2")
    path.write_text(foreign)
    assert cache.get("measurement", KEY) is None
    assert path.read_text() == foreign


def test_a_value_with_nan_is_refused_and_nothing_is_written(cache: Cache) -> None:
    with pytest.raises(ValueError, match="JSON"):
        cache.put("measurement", KEY, {"latency_ms": float("nan")})
    assert entries(cache) == []


def test_a_write_that_fails_leaves_the_old_entry_whole(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.put("measurement", KEY, 1)

    def full(source: object, destination: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(CadenzaError, match=r"No space left.*--cache"):
            cache.put("measurement", KEY, 2)
    assert cache.get("measurement", KEY) == 1 and len(entries(cache)) == 1


@pytest.mark.parametrize(("kind", "key"), [("../x", KEY), ("engine", "../../x"), ("", KEY)])
def test_kinds_and_keys_are_no_paths(cache: Cache, kind: str, key: str) -> None:
    with pytest.raises(ValueError, match="sha256 in hex"):
        cache.get(kind, key)


def test_two_processes_may_write_the_same_entries_while_a_third_reads(cache: Cache) -> None:
    code = (
        "import sys, pathlib; from engines.build import Cache, digest_json\n"
        "cache = Cache(pathlib.Path(sys.argv[1]))\n"
        "for turn in range(60):\n"
        "    for i in range(5):\n"
        "        cache.put('evaluation', digest_json(i), {'i': i, 'by': sys.argv[2] * 2000})\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(cache.folder), name]) for name in "ab"
    ]
    while any(writer.poll() is None for writer in writers):
        for i in range(5):
            value = cache.get("evaluation", digest_json(i))
            assert value is None or (value["i"] == i and len(set(value["by"])) == 1)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert len(entries(cache)) == 5


def test_the_folder_is_the_users_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        cache = Cache(tmp_path / "cache")
        cache.put("engine", KEY, 1)
    finally:
        os.umask(old)
    for path in (cache.folder, *entries(cache)):
        assert path.stat().st_mode & 0o077 == 0


def test_argument_then_variable_then_xdg_then_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    xdg = {"XDG_CACHE_HOME": str(tmp_path / "xdg")}
    variable = {**xdg, "CADENZA_CACHE_DIR": str(tmp_path / "variable")}
    assert open_cache(tmp_path / "given", variable).folder == tmp_path / "given"
    assert open_cache(None, variable).folder == tmp_path / "variable"
    assert open_cache(None, xdg).folder == tmp_path / "xdg" / "cadenza"
    home = tmp_path / "home" / ".cache" / "cadenza"
    assert open_cache(None, {}).folder == home
    assert open_cache(None, {"XDG_CACHE_HOME": "relative"}).folder == home
    assert open_cache(None, {"CADENZA_CACHE_DIR": ""}).folder == home


def test_a_folder_that_was_asked_for_and_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for place in (file, file / "below"):
        with pytest.raises(InputError, match=r"cache folder .*--cache or CADENZA_CACHE_DIR"):
            open_cache(place, {})
        with pytest.raises(InputError, match="cache folder"):
            open_cache(None, {"CADENZA_CACHE_DIR": str(place)})


def test_without_a_home_a_private_temporary_folder_is_used_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "home"
    file.write_text("a file, so nothing can be made below")
    monkeypatch.setenv("HOME", str(file))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cache = open_cache(None, {})
    assert cache.folder == tmp_path / f"cadenza-{os.getuid()}"
    assert "set CADENZA_CACHE_DIR" in caplog.text

    cache.folder.rmdir()
    (tmp_path / "planted").mkdir()
    cache.folder.symlink_to(tmp_path / "planted")
    other = open_cache(None, {})
    assert other.folder.resolve() != (tmp_path / "planted").resolve()
    assert not other.folder.is_symlink()


def test_target_and_provider_must_agree(spec: EngineSpec) -> None:
    with pytest.raises(ValueError, match="must be the same"):
        replace(spec, target="cuda")
    with pytest.raises(ValueError, match="needs a graph"):
        replace(spec, serve=None)


def test_what_was_not_used_for_longest_is_evicted_first_and_foreign_files_stay(
    tmp_path: Path,
) -> None:
    cache = Cache(tmp_path / "cache")
    keys = [digest_json(number) for number in range(4)]
    for age, key in enumerate(keys):
        cache.put("kind", key, "x" * 100)
        path = tmp_path / "cache" / "v1" / "kind" / f"{key}.json"
        os.utime(path, (1000.0 + age, 1000.0 + age))
    size = path.stat().st_size
    foreign = path.parent / "notes.json"
    foreign.write_text("mine")
    stale, young = path.parent / ".partial-old", path.parent / ".partial-new"
    for each in (stale, young):
        each.write_text("half")
    os.utime(stale, (1000.0, 1000.0))
    assert cache.get("kind", keys[0]) is not None  # used now
    now = time.time() - 60.0
    assert cache.evict(2 * size, now) == (2, 2 * size)
    left = [key for key in keys if cache.get("kind", key) is not None]
    assert left == [keys[0], keys[3]]
    assert foreign.exists() and young.exists() and not stale.exists()
    assert cache.evict(0, now) == (0, 0), "nothing that this run used may go"
    assert cache.evict(1e12, now) == (0, 0)
