"""Laws of bundles: written whole, read hostile, and the same answers have the same digest."""

from __future__ import annotations

import json
import os
import shutil
import stat
from hashlib import sha256
from pathlib import Path
from typing import Any

import onnx
import pytest

from engines.bundle import Golden, external_data, is_bundle, read_bundle, write_bundle
from engines.errors import BackendError, BundleError, InputError
from engines.manifest import Shape
from engines.ort import OrtBackend
from engines.precision import FULL_PRECISION
from tests.engines.tiny_bundle import (
    CPU,
    ENGINE,
    FP32,
    SCHEDULES,
    Edit,
    drop,
    edit_manifest,
    edited,
    external_graph,
    put,
    read_manifest,
    relist,
    tiny_files,
    tiny_manifest,
)


def test_what_is_written_is_read(bundle_folder: Path) -> None:
    bundle = read_bundle(bundle_folder)
    manifest = bundle.manifest
    assert {
        name: task.targets["cpu"].schedule.precisions for name, task in manifest.tasks.items()
    } == SCHEDULES
    assert manifest.serving("cpu").keys() == {"fp32", "int8"}
    assert manifest.shape == Shape((1, 2, 4), (1, 4, 20))
    assert len(bundle.golden) == 8
    assert manifest.graphs["int8.serve"].weights == ("weights/int8.bin",)
    assert bundle.path("weights/int8.bin").is_file()
    with pytest.raises(ValueError, match="is not a file of the bundle"):
        bundle.path("manifest.json")


def test_the_manifest_holds_the_keys_of_the_design(bundle_folder: Path) -> None:
    manifest = read_manifest(bundle_folder)
    assert set(manifest) - {"cadenza"} == {
        "format", "model", "sampler", "targets", "shape", "precisions", "families", "graphs",
        "engines", "tasks", "environment", "degraded", "requires", "files",
    }  # fmt: skip
    engine = next(iter(manifest["engines"].values()))
    assert {"file", "graph", "precision", "target", "sha256", "bytes", "built"} <= set(engine)
    assert "manifest.json" not in manifest["files"]
    on_disk = {
        path.relative_to(bundle_folder).as_posix()
        for path in bundle_folder.rglob("*")
        if path.is_file()
    }
    assert on_disk == set(manifest["files"]) | {"manifest.json"}


def test_a_bundle_is_read_from_any_folder_and_a_read_only_one(
    bundle_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "模型 é 🚀 $HOME 'a\" \n-x"
    shutil.copytree(bundle_folder, folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    before = sorted(folder.rglob("*"))
    assert read_bundle(folder).digest == read_bundle(bundle_folder).digest
    assert sorted(folder.rglob("*")) == before
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        path.chmod(0o755)


@pytest.mark.parametrize("name", ["fp32.serve.onnx", "weights/int8.bin", "golden.jsonl"])
@pytest.mark.parametrize("at", [0, -1])
def test_a_changed_byte_is_refused(bundle_copy: Path, name: str, at: int) -> None:
    data = bytearray((bundle_copy / name).read_bytes())
    data[at] ^= 1
    (bundle_copy / name).write_bytes(data)
    with pytest.raises(BundleError, match=f"is damaged: '{name}' has the sha256 .*; copy it"):
        read_bundle(bundle_copy)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("name", ["weights/fp32.bin", "int8.serve.onnx"])
def test_a_truncated_file_is_refused(bundle_copy: Path, name: str, share: float) -> None:
    data = (bundle_copy / name).read_bytes()
    (bundle_copy / name).write_bytes(data[: int(len(data) * share)])
    for verify in (True, False):
        with pytest.raises(BundleError, match=f"'{name}' has .* bytes, listed are"):
            read_bundle(bundle_copy, verify=verify)


@pytest.mark.parametrize(
    "name", ["weights/fp32.bin", "int8.serve.onnx", "tokenizer/tokenizer.json", "golden.jsonl"]
)
def test_a_missing_file_is_refused(bundle_copy: Path, name: str) -> None:
    (bundle_copy / name).unlink()
    with pytest.raises(BundleError, match=f"the file '{name}' is missing"):
        read_bundle(bundle_copy)


def test_a_missing_manifest_and_a_missing_folder_are_refused(bundle_copy: Path) -> None:
    (bundle_copy / "manifest.json").unlink()
    with pytest.raises(BundleError, match=r"'manifest\.json' is missing"):
        read_bundle(bundle_copy)
    for path in (bundle_copy / "nowhere", bundle_copy / "golden.jsonl"):
        with pytest.raises(BundleError, match="is not a folder; give the folder that"):
            read_bundle(path)


def test_a_manifest_cut_anywhere_is_refused(bundle_copy: Path) -> None:
    text = (bundle_copy / "manifest.json").read_text()
    for end in range(0, len(text) - 2, 97):
        edit_manifest(bundle_copy, text[:end])
        with pytest.raises(BundleError, match="not valid JSON"):
            read_bundle(bundle_copy)


@pytest.mark.parametrize("file", ["manifest.json", "weights/fp32.bin", "golden.jsonl"])
def test_a_link_in_place_of_a_file_is_refused(bundle_copy: Path, file: str) -> None:
    outside = bundle_copy.parent / "outside"
    (bundle_copy / file).rename(outside)
    (bundle_copy / file).symlink_to(outside)
    with pytest.raises(BundleError, match="is a symbolic link"):
        read_bundle(bundle_copy)


def test_a_linked_folder_and_a_pipe_are_refused(bundle_copy: Path) -> None:
    (bundle_copy / "weights").rename(bundle_copy.parent / "weights")
    (bundle_copy / "weights").symlink_to(bundle_copy.parent / "weights")
    with pytest.raises(BundleError, match="'weights' is a symbolic link"):
        read_bundle(bundle_copy)
    (bundle_copy / "weights").unlink()
    (bundle_copy.parent / "weights").rename(bundle_copy / "weights")
    (bundle_copy / "golden.jsonl").unlink()
    os.mkfifo(bundle_copy / "golden.jsonl")
    with pytest.raises(BundleError, match="is not a regular file"):
        read_bundle(bundle_copy)


@pytest.mark.parametrize(
    "path",
    ["../outside", "/etc/passwd", "weights/../../outside", "C:\\x", "a\\b", "a\0b", "\0", "", "."],
)
def test_a_path_that_leaves_is_refused_wherever_it_stands(bundle_copy: Path, path: str) -> None:
    (bundle_copy.parent / "outside").write_bytes(b"x")
    entry = {"sha256": sha256(b"x").hexdigest(), "bytes": 1}
    edits: tuple[Edit, ...] = (
        lambda m: m["files"].update({path: entry}),
        lambda m: m["graphs"]["fp32.serve"].update(file=path),
        lambda m: m["graphs"]["fp32.serve"].update(weights=[path]),
        lambda m: m["engines"]["fp32.serve.cpu"].update(file=path),
    )
    whole = read_manifest(bundle_copy)
    for edit in edits:
        edit_manifest(bundle_copy, whole)
        with pytest.raises(BundleError):
            read_bundle(edited(bundle_copy, edit))


def test_external_data_outside_the_folder_or_not_in_the_manifest_is_refused(
    bundle_copy: Path,
) -> None:
    (bundle_copy.parent / "secret.bin").write_bytes(b"0" * 4096)
    (bundle_copy / "weights/unlisted.bin").write_bytes(b"0" * 4096)
    for location in ("../secret.bin", "weights/unlisted.bin", "weights/../../secret.bin"):
        model = onnx.load(bundle_copy / "fp32.serve.onnx", load_external_data=False)
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = location
        (bundle_copy / "fp32.serve.onnx").write_bytes(model.SerializeToString())
        relist(bundle_copy, "fp32.serve.onnx")
        with pytest.raises(BundleError, match=r"graph 'fp32.serve': .* reads .*, its 'weights'"):
            read_bundle(bundle_copy)
        if location != "weights/unlisted.bin":  # the second lock, should the first be picked
            with pytest.raises(BackendError):
                OrtBackend.load(bundle_copy / "fp32.serve.onnx", None, FULL_PRECISION)


def test_external_data_is_found_in_what_onnx_writes(tmp_path: Path) -> None:
    graph = external_graph(tmp_path / "g.onnx", "serve", "weights/模型 é.bin")
    assert external_data(graph) == {"weights/模型 é.bin"}
    (tmp_path / "empty").touch()
    assert external_data(tmp_path / "empty") == set()
    (tmp_path / "odd").write_bytes(b"\x0a\x08location\x12\xff\xff\xff\xff\xff\xff")
    assert external_data(tmp_path / "odd") == {""}


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (put("cadenza-bundle/2", "format"), "this version reads 'cadenza-bundle/1'"),
        (put("cadenza-bundle/11", "format"), "this version reads"),
        (put("cadenza-export/1", "format"), "this version reads"),
        (put(1, "format"), "format: must be text"),
        (put(["kv-cache"], "requires"), "'kv-cache' is unknown; install a newer Cadenza"),
        (drop("requires"), "the key 'requires' is missing"),
        *((drop(key), f"the key '{key}' is missing") for key in ("format", "model", "files")),
        *((drop(key), f"the key '{key}' is missing") for key in ("tasks", "engines", "targets")),
        (put([], "targets"), "one at least"),
        (put(["cpu", "cpu"], "targets"), "each target once"),
        (put(["cpu", "trt"], "targets"), "must be cpu, trt, each once"),
        (put(52, "model", "mask_id"), "0 <= mask_id < vocab must hold"),
        (put(17, "model", "mask_id"), "mask_id and eos_id must differ"),
        (put(7, "sampler", "steps"), "steps must be a multiple"),
        (put(True, "sampler", "steps"), "must be an integer"),
        (put([4, 2, 1], "shape", "batch"), "1 <= min <= opt <= max must hold for batch"),
        (put([1, 2], "shape", "prompt"), r"must be \[min, opt, max\]"),
        (put("both", *FP32, "tail"), "must be one of serve, trace"),
        (put("bf16", *FP32, "precision"), "'bf16' is not there; known are fp32, int8"),
        (put("weights/none.bin", *FP32, "weights", 0), "'weights/none.bin' is not there"),
        (put([[1.0], [2.0, 3.0]], *FP32, "scales"), "as many in each window"),
        (put([[1.0], [0.0]], *FP32, "scales"), "must be positive"),
        (put([], *FP32, "scales"), "must be positive"),
        (put("fp32", *FP32, "windows"), "windows: must be a list"),
        (put("none", *ENGINE, "graph"), "'none' is not there; known are fp32.serve"),
        (put("trt", *ENGINE, "target"), "'trt' is not there; known are cpu"),
        (put("int8", *ENGINE, "precision"), "its graph is 'fp32'"),
        (put("0" * 64, *ENGINE, "sha256"), "are not those under 'files'"),
        (put("0" * 63, *ENGINE, "sha256"), "64 hexadecimal digits"),
        (put("A" * 64, *ENGINE, "sha256"), "in lower case"),
        (put(1, *ENGINE, "bytes"), "are not those under 'files'"),
        (put("fp32.serve", "engines", "fp32.trace.cpu", "graph"), "is a second engine for cpu"),
        (drop("tasks", "default"), "there is no 'default'"),
        (put(["fp32", "fp16", "fp32"], *CPU, "schedule"), "'fp16' is not there; known are"),
        (put(["fp32"], *CPU, "schedule"), "has 1 windows, 'windows' is 3"),
        (put([], *CPU, "schedule"), "name a precision for each window"),
        (put("fp32", *CPU, "schedule"), "must be a list"),
        (put(7, "tasks", "edit", "windows"), "more windows than steps"),
        (drop(*CPU), "must be cpu, each once"),
        (put("yes", "degraded"), "degraded: must be true or false"),
        (drop("files", "golden.jsonl"), "'golden.jsonl' is not listed"),
        (drop("files", "tokenizer/tokenizer.json"), "'tokenizer/tokenizer.json' is not listed"),
        (put({"sha256": "0" * 64, "bytes": 1}, "files", "manifest.json"), "lists 'manifest.json'"),
        (put(-1, "files", "golden.jsonl", "bytes"), "must be an integer from 0"),
        (put({}, "tasks", "a\0b"), "printable characters"),
        (put({}, "tasks", "\x1b[2J"), "printable characters"),
    ],
)  # fmt: skip
def test_a_manifest_that_does_not_fit_together_is_refused(
    bundle_copy: Path, edit: Edit, says: str
) -> None:
    with pytest.raises(BundleError, match=says) as caught:
        read_bundle(edited(bundle_copy, edit))
    assert str(caught.value).isprintable()


def test_a_manifest_of_random_damage_is_never_more_than_a_bundle_error(bundle_copy: Path) -> None:
    values: tuple[object, ...] = (None, -1, 1e300, "", "\0", "../x", [], {}, [[]], True, "é" * 999)

    def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        keys = node.keys() if isinstance(node, dict) else range(len(node))
        found = []
        for key in keys:
            found.append((*path, key))
            if isinstance(node[key], dict | list):
                found += places(node[key], (*path, key))
        return found

    whole = read_manifest(bundle_copy)
    for number, path in enumerate(places(whole)):
        edit_manifest(bundle_copy, whole)
        edited(bundle_copy, put(values[number % len(values)], *path))
        try:
            read_bundle(bundle_copy, verify=False)
        except BundleError as error:
            assert str(error).isprintable()


def test_a_huge_manifest_is_refused_unread(bundle_copy: Path) -> None:
    with (bundle_copy / "manifest.json").open("r+b") as stream:
        stream.truncate((64 << 20) + 1)
    with pytest.raises(BundleError, match="more than any manifest"):
        read_bundle(bundle_copy)


def test_a_later_minor_version_and_unknown_keys_are_kept(bundle_copy: Path) -> None:
    edited(bundle_copy, put("cadenza-bundle/1.7", "format"))
    edited(bundle_copy, put({"deep": [1]}, "news"))
    edited(bundle_copy, put("x", *ENGINE, "news"))
    bundle = read_bundle(bundle_copy)
    assert bundle.manifest.raw["news"] == {"deep": [1]}
    (bundle_copy / "README").touch()
    assert read_bundle(bundle_copy).digest == bundle.digest


def test_a_schedule_edited_by_hand_is_read_and_changes_the_digest(bundle_copy: Path) -> None:
    before = read_bundle(bundle_copy)
    after = read_bundle(edited(bundle_copy, put(["fp32"] * 3, *CPU, "schedule")))
    assert after.manifest.tasks["edit"].targets["cpu"].schedule.is_uniform
    assert after.digest != before.digest
    assert after.manifest.schedule_digest("edit", "cpu") != before.golden[1].schedule_digest
    assert after.manifest.schedule_digest("default", "cpu") == before.golden[0].schedule_digest


@pytest.mark.parametrize(
    ("edit", "same"),
    [
        (put({"latency_ms": 9}, *CPU, "measured"), True),
        (put({}, "environment"), True),
        (put(True, "degraded"), True),
        (put("else", "tasks", "edit", "says"), True),
        (put({}, *ENGINE, "built"), True),
        (put({"threads": 2}, *ENGINE, "options"), False),
        (put(12, "tasks", "edit", "sampler", "block_length"), False),
        (put(0.6, "graphs", "int8.serve", "scales", 0, 0), False),
        (put("0" * 64, "files", "weights/int8.bin", "sha256"), False),
        (put("0" * 64, "files", "tokenizer/tokenizer.json", "sha256"), False),
    ],
)
def test_the_digest_is_of_what_decides_answers(bundle_copy: Path, edit: Edit, same: bool) -> None:
    before = read_bundle(bundle_copy).digest
    after = read_bundle(edited(bundle_copy, edit), verify=False).digest
    assert (after == before) == same


def test_two_bundles_of_the_same_parts_have_the_same_digest(tmp_path: Path) -> None:
    files = tiny_files(tmp_path / "files")
    one, other = (write_bundle(tmp_path / n, tiny_manifest(), files, []) for n in ("a", "b"))
    assert one.digest == other.digest


def test_golden_lines_come_back_and_damaged_ones_are_refused(bundle_copy: Path) -> None:
    lines = (bundle_copy / "golden.jsonl").read_text().splitlines()
    for broken, says in (
        ("{", "line 9: not valid JSON"),
        ('{"id": "x"}', "the key 'task' is missing"),
        (json.dumps({**json.loads(lines[0]), "ids": [-1]}), "ids: 0: must be an integer"),
        (json.dumps({**json.loads(lines[0]), "ids": "no"}), "ids: must be a list"),
    ):
        (bundle_copy / "golden.jsonl").write_text("\n".join([*lines, broken]))
        relist(bundle_copy, "golden.jsonl")
        with pytest.raises(BundleError, match=f"golden.jsonl, .*{says}|{says}"):
            read_bundle(bundle_copy)


def test_writing_refuses_what_reading_would_and_leaves_nothing(tmp_path: Path) -> None:
    files = tiny_files(tmp_path / "files")
    for edit in (
        put(["fp16"] * 3, *CPU, "schedule"),
        drop("model"),
        drop("engines"),
        put("none.onnx", *FP32, "file"),
        put("none.onnx", *ENGINE, "file"),
    ):
        manifest = tiny_manifest()
        edit(manifest)
        with pytest.raises(BundleError):
            write_bundle(tmp_path / "out", manifest, files, [])
    with pytest.raises(InputError, match="for the bundle is missing"):
        write_bundle(tmp_path / "out", tiny_manifest(), {"x": tmp_path / "none"}, [])
    for path in ("../x", "/x", "a\0b"):
        with pytest.raises(InputError, match="outside the folder"):
            write_bundle(
                tmp_path / "out", tiny_manifest(), {**files, path: files["fp32.serve.onnx"]}, []
            )
    assert {path.name for path in tmp_path.iterdir()} == {"files"}


def test_force_replaces_a_bundle_even_a_damaged_one_and_nothing_else(tmp_path: Path) -> None:
    files, out = tiny_files(tmp_path / "files"), tmp_path / "out"
    write_bundle(out, tiny_manifest(), {**files, "extra": next(iter(files.values()))}, [])
    with pytest.raises(InputError, match="--force"):
        write_bundle(out, tiny_manifest(), files, [])
    (out / "golden.jsonl").write_text("damage")
    write_bundle(out, tiny_manifest(), files, [], force=True)
    assert read_bundle(out).golden == ()
    assert not (out / "extra").exists()
    assert is_bundle(out)
    assert not is_bundle(tmp_path)
    with pytest.raises(InputError, match="holds other files"):
        write_bundle(tmp_path, tiny_manifest(), files, [], force=True)
    assert {path.name for path in tmp_path.iterdir()} == {"files", "out"}


def test_a_golden_prompt_may_be_any_text(tmp_path: Path) -> None:
    line = Golden(
        id="a\nb",
        task="gone",
        prompt="é\u2028\n\x1b",
        ids=(1, 2),
        full_precision_ids=(),
        schedule_digest="x",
    )
    files = tiny_files(tmp_path / "files")
    assert write_bundle(tmp_path / "out", tiny_manifest(), files, [line]).golden == (line,)
