"""Export from end to end: the layout, the bad inputs, resuming, and nothing half-written."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engines.errors import BackendError, InputError
from exporter import parity
from exporter.export import ExportConfig, export
from exporter.folder import Export, Recipe, read_export
from exporter.parity import engine_of
from exporter.weights import read_header
from tests.exporter.test_checkpoint import dream_folder
from tests.exporter.test_graph import states
from tests.tiny_export import random_denoiser, small_export, tiny_config


def digests(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def untouched(checkpoint: Path, tmp_path: Path) -> Iterator[Path]:
    """Give a folder in which nothing may be left, and hold the checkpoint to what it was."""
    before = digests(checkpoint)
    yield tmp_path / "out" / "EXPORT"
    assert digests(checkpoint) == before
    out = tmp_path / "out"
    assert not out.exists() or list(out.iterdir()) == []


def test_the_layout_is_complete(exported: Export) -> None:
    names = {name for name in digests(exported.folder) if name.endswith(".onnx")}
    both = {
        f"{name}.{tail}.onnx"
        for name in ("fp32", "int8", "int8.all", "w4a4", "w8a8", "w16a16")
        for tail in ("serve", "trace")
    }
    assert names == both | {f"int8.w{window}.serve.onnx" for window in range(3)}
    weights = {"model", "int8", "w4", "w8", "w16"}
    assert {path.stem for path in (exported.folder / "weights").iterdir()} == weights
    assert set(exported.families) == {"fp32", "int8", "w4", "w8", "w16"}
    assert exported.tokenizer.is_file()
    assert exported.graphs["int8.w1.serve"].windows == (1,)
    assert exported.graphs["int8.serve"].windows == (0, 1, 2)
    assert {name for name, graph in exported.graphs.items() if graph.scales} == {
        "int8.serve",
        "int8.trace",
    }
    assert {n for n, p in exported.precisions.items() if p.simulated} == {"w4a4", "w8a8", "w16a16"}


def test_weights_stand_on_disk_once_a_family(exported: Export, checkpoint: Path) -> None:
    stored = sum(s.size for s in read_header(checkpoint / "model.safetensors").values())
    assert exported.families["fp32"] == stored
    assert exported.families["w4"] < exported.families["int8"] < exported.families["w16"] < stored
    for graph in exported.graphs.values():
        family = exported.precisions[graph.precision].family
        name = "model" if family == "fp32" else family
        assert graph.weights == (f"weights/{name}.safetensors",)


def test_every_file_is_listed_with_its_digest(exported: Export) -> None:
    found = digests(exported.folder)
    del found["export.json"]
    assert {path: entry.sha256 for path, entry in exported.files.items()} == found
    assert str(exported.folder.parent) not in (exported.folder / "export.json").read_text()


def test_the_same_command_changes_nothing_and_says_so(exported: Export, checkpoint: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in exported.folder.rglob("*")}
    said: list[str] = []
    export(small_export(checkpoint, exported.folder), said.append)
    assert {path: path.stat().st_mtime_ns for path in exported.folder.rglob("*")} == before
    assert said == [f"{exported.folder} is complete already; nothing was changed"]


def test_another_command_wants_force_and_replaces_whole(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "EXPORT"
    few = {"tasks": ("edit",), "prompts": 1}
    export(small_export(checkpoint, out, precisions=("int8",), **few))
    other = {"precisions": ("fp32",), "recipe": Recipe(windows=2), **few}
    with pytest.raises(InputError, match="--force"):
        export(small_export(checkpoint, out, **other))
    assert "int8" in read_export(out).precisions
    export(small_export(checkpoint, out, force=True, **other))
    assert list(read_export(out, verify=True).precisions) == ["fp32"]
    assert not list(out.glob("int8*"))
    assert [path.name for path in tmp_path.iterdir()] == ["EXPORT"]


def test_two_exports_are_byte_for_byte_the_same(
    exported: Export, checkpoint: Path, tmp_path: Path
) -> None:
    out = export(small_export(checkpoint, tmp_path / "模型 é 🚀 'x'", copy=True))
    assert digests(out) == digests(exported.folder)
    linked = (out / "weights" / "model.safetensors").stat()
    assert linked.st_nlink == 1


def test_the_quantizer_and_what_it_looks_at_decide_the_export(
    checkpoint: Path, tmp_path: Path
) -> None:
    few = {"precisions": ("w4a4",), "tasks": ("edit",), "prompts": 2}
    weights, requests = {}, {}
    for name, changes in {
        "rtn": {},
        "rtn, other states": {"states": 7},
        "gptq": {"recipe": Recipe(windows=3, quantizer="gptq")},
        "gptq, few states": {"recipe": Recipe(windows=3, quantizer="gptq"), "states": 7},
        "hadamard": {"recipe": Recipe(windows=3, quantizer="gptq-hadamard")},
    }.items():
        made = read_export(export(small_export(checkpoint, tmp_path / name, **few, **changes)))
        weights[name] = made.files["weights/w4.safetensors"].sha256
        requests[name] = made.request
    for found in (weights, requests):
        assert found["rtn"] == found["rtn, other states"]
        assert len(set(found.values())) == 4


def test_a_dream_checkpoint_in_bf16_is_rotated_without_changing_its_function(
    checkpoint: Path, tmp_path: Path
) -> None:
    model = tmp_path / "dream"
    denoiser = random_denoiser(tiny_config(qkv_bias=True, shifted=True))
    dream_folder(denoiser, model, torch.bfloat16)
    shutil.copy(checkpoint / "tokenizer.json", model)
    recipe = Recipe(windows=3, quantizer="gptq-hadamard")
    precisions = ("int8", "w4a4", "w16a16")
    asked = small_export(model, tmp_path / "EXPORT", recipe=recipe, precisions=precisions)
    made = read_export(export(asked))
    given = states(6, 24, 12)
    full, fine, int8, coarse = (
        engine_of(made, f"{name}.trace").logits(*given)
        for name in ("fp32", "w16a16", "int8", "w4a4")
    )
    np.testing.assert_allclose(fine, full, atol=5e-3)
    costs = [float(np.abs(other - full).mean()) for other in (fine, int8, coarse)]
    assert costs == sorted(costs)


def test_a_calibrated_export_is_byte_for_byte_repeatable(
    rotated_export: Export, checkpoint: Path, tmp_path: Path
) -> None:
    recipe = Recipe(windows=3, quantizer="gptq-hadamard")
    precisions = ("int8", "w4a4", "w16a16")
    changes = {"recipe": recipe, "precisions": precisions, "states": 40}
    out = export(small_export(checkpoint, tmp_path / "AGAIN", **changes))
    assert digests(out) == digests(rotated_export.folder)


def test_large_weights_are_linked_even_through_symbolic_links(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engines.files.LINK_FROM_BYTES", 1)
    links = tmp_path / "links"
    links.mkdir()
    for file in checkpoint.iterdir():
        (links / file.name).symlink_to(file)
    few = {"precisions": ("fp32",), "tasks": ("edit",), "prompts": 1}
    said: list[str] = []
    out = export(small_export(links, tmp_path / "EXPORT", **few), said.append)
    placed = out / "weights" / "model.safetensors"
    assert not placed.is_symlink()
    assert placed.stat().st_ino == (checkpoint / "model.safetensors").stat().st_ino
    assert not any("copied" in line for line in said)
    copied = export(small_export(links, tmp_path / "COPY", copy=True, **few), said.append)
    assert (copied / "weights" / "model.safetensors").stat().st_ino != placed.stat().st_ino
    assert any("copied" in line for line in said)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"precisions": ("fp31",)}, "unknown precision 'fp31'"),
        ({"tasks": ("nonsense",)}, "unknown task 'nonsense'"),
        ({"tasks": ("edit", "edit")}, "given twice"),
        ({"recipe": Recipe(windows=13)}, "windows=13, steps=12; use fewer --windows"),
        ({"settings": {"steps": 25}}, "steps <= gen_length"),
        ({"settings": {"gen_length": 20, "block_length": 8}}, "gen_length must be a multiple"),
        ({"settings": {"block_length": 8, "steps": 10}}, "steps must be a multiple of the number"),
        ({"settings": {"gen_length": 64, "block_length": 64}}, "leaves no room|more than"),
        ({"task_settings": {"chain": {"steps": 6}}}, "--task-set names the task 'chain'"),
        ({"recipe": Recipe(windows=3, keep=(7,))}, "block 7 cannot be kept, there are 2 blocks"),
    ],
)
def test_an_argument_at_fault_gets_its_sentence(
    changes: dict[str, object], says: str, checkpoint: Path, untouched: Path
) -> None:
    with pytest.raises(InputError, match=says):
        export(small_export(checkpoint, untouched, **changes))


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("", "is empty"),
        ('{"id": "1", "prompt": "edit:<mask>", "split": "calibration"}', "mask token"),
        ('{"id": "1", "prompt": "edit:ß", "split": "calibration"}', "cannot be tokenized"),
        ('{"id": "1", "prompt": "edit:a", "split": "test"}', "has no calibration prompts"),
        (
            '{"id": "1", "prompt": "' + "a" * 41 + '", "split": "calibration"}',
            "41 tokens, with the answer's 24 more than the model's 64",
        ),
        ("not json", "not JSON"),
    ],
)
def test_a_prompt_file_at_fault_gets_its_sentence(
    lines: str, says: str, checkpoint: Path, untouched: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(lines)
    with pytest.raises(InputError, match=says):
        export(small_export(checkpoint, untouched, tasks=(f"mine={file}",)))


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "config.json"])
def test_a_missing_file_gets_its_sentence(
    name: str, checkpoint: Path, untouched: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    (copy / name).unlink()
    with pytest.raises(InputError, match=name):
        export(small_export(copy, untouched))


def test_a_failed_gate_leaves_nothing(
    checkpoint: Path, untouched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exporter.export.check_parity", lambda p: parity.check_parity(p, gate=0))
    with pytest.raises(BackendError, match="nothing was exported"):
        export(small_export(checkpoint, untouched, precisions=("fp32",)))


def test_an_interrupt_leaves_nothing(
    checkpoint: Path, untouched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("exporter.export.write_variants", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(small_export(checkpoint, untouched, precisions=("fp32",)))


def test_nothing_is_written_into_the_checkpoint_s_folder(checkpoint: Path) -> None:
    before = digests(checkpoint)
    with pytest.raises(InputError, match="lies in the checkpoint's folder"):
        export(small_export(checkpoint, checkpoint / "EXPORT"))
    assert digests(checkpoint) == before


def test_a_folder_of_something_else_is_never_replaced(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(InputError, match="holds other files"):
        export(small_export(checkpoint, tmp_path, force=True))


def test_a_config_checks_itself() -> None:
    with pytest.raises(ValueError, match="prompts >= 1"):
        ExportConfig(model=Path(), out=Path(), prompts=0)
    with pytest.raises(ValueError, match="states >= 1"):
        ExportConfig(model=Path(), out=Path(), states=0)
    with pytest.raises(InputError, match="unknown target 'tpu'"):
        ExportConfig(model=Path(), out=Path(), target="tpu")
    with pytest.raises(ValueError, match="rtx-sm89 needs shape"):
        ExportConfig(model=Path(), out=Path(), target="rtx-sm89")
