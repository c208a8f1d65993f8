"""Another recipe of an export: weights shared where they can be, no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines.errors import InputError
from engines.ort import OrtBackend
from exporter.folder import Export, Recipe, read_export
from exporter.requantize import requantize


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
