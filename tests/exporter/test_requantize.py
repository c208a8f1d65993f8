"""Another recipe of an export: weights shared where they can be, no torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.errors import InputError
from engines.ort import OrtBackend
from exporter.folder import Export, Recipe, read_export
from exporter.requantize import requantize
from exporter.weights import Item, mapped, read_header, write_family

CALIBRATION = "calibration.json"
WEIGHTS = "weights/int8.safetensors"


def contents(export: Export, path: str = WEIGHTS) -> dict[str, bytes]:
    """Return the tensors of a weight file."""
    stored = read_header(export.folder / path)
    return {name: mapped(where).tobytes() for name, where in stored.items()}


def test_another_recipe_shares_weights_and_needs_no_torch(
    exported: Export, tmp_path: Path
) -> None:
    code = (
        "import sys; from pathlib import Path; from exporter.export import requantize\n"
        "from exporter.folder import Recipe\n"
        "requantize(Path(sys.argv[1]), Path(sys.argv[2]), Recipe(windows=2, clip=0.5))\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    out = tmp_path / "OTHER"
    done = subprocess.run(
        [sys.executable, "-c", code, exported.folder, out], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    other = read_export(out, verify=True)
    assert other.recipe == Recipe(windows=2, clip=0.5)
    weights = {path for path in exported.files if path.startswith("weights/")}
    assert {path: other.files[path] for path in weights} == {
        path: exported.files[path] for path in weights
    }
    assert other.model == exported.model
    assert len(other.graphs["int8.serve"].scales or ()) == 2
    assert "int8.w2.serve" not in other.graphs
    assert other.files["fp32.serve.onnx"] == exported.files["fp32.serve.onnx"]
    assert other.files["w4a4.serve.onnx"] != exported.files["w4a4.serve.onnx"]


def test_the_same_recipe_gives_the_same_graphs(exported: Export, tmp_path: Path) -> None:
    out = requantize(exported.folder, tmp_path / "SAME", exported.recipe)
    same = read_export(out)
    assert dict(same.files) == dict(exported.files)
    before = os.stat(out / "export.json").st_mtime_ns
    requantize(exported.folder, out, exported.recipe)
    assert os.stat(out / "export.json").st_mtime_ns == before


def test_kept_blocks_stay_in_fp32(exported: Export, tmp_path: Path) -> None:
    out = requantize(exported.folder, tmp_path / "KEPT", Recipe(windows=3, keep=(1,)))
    kept = read_export(out)
    assert exported.families["int8"] < kept.families["int8"] < kept.families["fp32"]
    engine = OrtBackend.load(
        kept.path("int8.w0.serve"), None, kept.precisions["int8"], read_back=True
    )
    assert engine.built == {"MatMul(float)": 8, "MatMulIntegerToFloat(uint8)": 7}


def test_a_recipe_that_does_not_fit_is_refused(exported: Export, tmp_path: Path) -> None:
    for recipe, says in (
        (Recipe(windows=13), "use fewer --windows"),
        (Recipe(windows=3, keep=(2,)), "block 2 cannot be kept"),
    ):
        with pytest.raises(InputError, match=says):
            requantize(exported.folder, tmp_path / "NO", recipe)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("family", ["int8", "w4", "w16"])
def test_a_calibrated_export_s_integers_are_taken_and_never_made_again(
    family: str, rotated_export: Export, tmp_path: Path
) -> None:
    path = f"weights/{family}.safetensors"
    recipe = replace(rotated_export.recipe, keep=(1,), windows=2, clip=0.9)
    code = (
        "import sys; from pathlib import Path; from exporter.requantize import requantize\n"
        "from exporter.folder import Recipe\n"
        "recipe = Recipe(windows=2, clip=0.9, keep=(1,), quantizer='gptq-hadamard')\n"
        "requantize(Path(sys.argv[1]), Path(sys.argv[2]), recipe)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    out = tmp_path / "KEPT"
    done = subprocess.run(
        [sys.executable, "-c", code, rotated_export.folder, out], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    kept = read_export(out, verify=True)
    assert kept.recipe == recipe
    before, after = contents(rotated_export, path), contents(kept, path)
    shared = {name for name in after if "blocks.1." not in name}
    assert {name: after[name] for name in shared} == {name: before[name] for name in shared}
    assert any(name.endswith(".quantized") for name in shared)
    assert "model.transformer.blocks.1.ff_out.weight" in after
    full = contents(rotated_export, "weights/model.safetensors")
    for name in set(after) - shared:
        assert after[name] == full[name]


def test_windows_and_clip_leave_a_calibrated_export_s_weights_as_they_are(
    rotated_export: Export, tmp_path: Path
) -> None:
    recipe = replace(rotated_export.recipe, windows=2, clip=0.5)
    other = read_export(requantize(rotated_export.folder, tmp_path / "OTHER", recipe))
    assert other.files[WEIGHTS] == rotated_export.files[WEIGHTS]
    assert other.files[CALIBRATION] == rotated_export.files[CALIBRATION]
    same = read_export(requantize(rotated_export.folder, tmp_path / "SAME", rotated_export.recipe))
    assert dict(same.files) == dict(rotated_export.files)


def test_blocks_can_be_taken_back_by_rounding_to_the_nearest_alone(
    exported: Export, rotated_export: Export, tmp_path: Path
) -> None:
    recipe = Recipe(windows=3, keep=(0,))
    kept = requantize(exported.folder, tmp_path / "KEPT", recipe)
    back = requantize(kept, tmp_path / "BACK", exported.recipe)
    assert contents(read_export(back)) == contents(exported)
    rotated = replace(recipe, quantizer="gptq-hadamard")
    kept = requantize(rotated_export.folder, tmp_path / "ROTATED", rotated)
    with pytest.raises(InputError, match=r"keeps block 0 in fp32.*export again"):
        requantize(kept, tmp_path / "NO", rotated_export.recipe)
    assert not (tmp_path / "NO").exists()


def test_another_quantizer_is_refused(
    exported: Export, rotated_export: Export, tmp_path: Path
) -> None:
    for source, quantizer in ((exported, "gptq"), (rotated_export, "gptq"), (exported, "rtn")):
        recipe = replace(source.recipe, quantizer=quantizer, clip=0.9)
        if quantizer == source.recipe.quantizer:
            requantize(source.folder, tmp_path / "SAME", recipe)
            continue
        with pytest.raises(InputError, match=f"export again with --quantizer {quantizer}"):
            requantize(source.folder, tmp_path / "NO", recipe)


def edited_calibration(damage: str, plain: dict[str, Any]) -> None:
    if damage == "rotated":
        plain["rotated"] = False
    elif damage == "no flag":
        plain["rotated"] = "yes"
    elif damage == "site":
        plain["sites"][0] = "blocks.7.attn_in"
    elif damage == "twice":
        plain["sites"][0] = plain["sites"][1]
    elif damage == "silent":
        plain["absmax"] = [[0.0, *row[1:]] for row in plain["absmax"]]
    elif damage == "negative":
        plain["absmax"][0][0] = -1.0
    elif damage == "huge":
        plain["absmax"][0][0] = 1e200
    elif damage == "ragged":
        plain["absmax"][0].pop()
    elif damage == "empty":
        plain["absmax"] = plain["progress"] = []


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("rotated", "plain activations"),
        ("no flag", "rotated: must be true or false"),
        ("site", "lacks the site blocks.0.attn_in"),
        ("twice", "must differ"),
        ("silent", "no range for the site"),
        ("negative", "not negative"),
        ("huge", "above 1e"),
        ("ragged", "inhomogeneous|absmax must be"),
        ("empty", "absmax must be|point of progress"),
    ],
)
def test_a_damaged_calibration_gets_its_sentence(
    damage: str, says: str, rotated_export: Export, tmp_path: Path
) -> None:
    folder = tmp_path / "EXPORT"
    shutil.copytree(rotated_export.folder, folder)
    plain = json.loads((folder / CALIBRATION).read_text())
    edited_calibration(damage, plain)
    (folder / CALIBRATION).write_text(json.dumps(plain))
    listed(folder, CALIBRATION)
    with pytest.raises(InputError, match=says):
        requantize(folder, tmp_path / "NO", replace(rotated_export.recipe, clip=0.9))
    assert not (tmp_path / "NO").exists()


@pytest.mark.parametrize("keep", [(), (1,)])
@pytest.mark.parametrize("damage", ["lost", "reshaped", "retyped", "no rotation"])
def test_a_damaged_family_gets_its_sentence(
    damage: str, keep: tuple[int, ...], rotated_export: Export, tmp_path: Path
) -> None:
    folder = tmp_path / "EXPORT"
    shutil.copytree(rotated_export.folder, folder)
    stored = read_header(folder / WEIGHTS)
    lost = "model.transformer.blocks.0.attn_out.weight.quantized"
    items = []
    for name, where in stored.items():
        values, kind, shape = mapped(where).copy(), where.kind, where.shape
        if damage == "lost" and name == lost:
            continue
        if damage == "no rotation" and name == "rotation.32":
            continue
        if damage == "reshaped" and name == lost:
            shape = (shape[0] // 2, shape[1] * 2)
        if damage == "retyped" and name == lost:
            kind = "U8"
        items.append(Item(name, kind, shape, lambda values=values: values))
    (folder / WEIGHTS).unlink()
    write_family(folder / WEIGHTS, items)
    listed(folder, WEIGHTS)
    recipe = replace(rotated_export.recipe, clip=0.9, keep=keep)
    if damage == "no rotation" and keep:  # it is computed, not taken
        requantize(folder, tmp_path / "YES", recipe)
        return
    with pytest.raises(InputError, match="export again"):
        requantize(folder, tmp_path / "NO", recipe)
    assert not (tmp_path / "NO").exists()


def listed(folder: Path, path: str) -> None:
    """List the size of a file that was edited, so that the export reads as whole."""
    plain = json.loads((folder / "export.json").read_text())
    plain["files"][path]["bytes"] = (folder / path).stat().st_size
    (folder / "export.json").write_text(json.dumps(plain))
