"""export.json: what it says is read back, and what does not fit is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from engines.errors import InputError
from exporter.folder import QUANTIZERS, Export, Recipe, read_export


@pytest.mark.parametrize(
    "damage", ["missing", "changed", "climbing", "format", "no json", "unknown precision"]
)
def test_a_damaged_export_is_refused(damage: str, exported: Export, tmp_path: Path) -> None:
    folder = tmp_path / "EXPORT"
    shutil.copytree(exported.folder, folder)
    file = folder / "export.json"
    plain = json.loads(file.read_text())
    if damage == "missing":
        (folder / "int8.serve.onnx").unlink()
    elif damage == "changed":
        content = bytearray((folder / "weights/int8.safetensors").read_bytes())
        content[-1] ^= 1
        (folder / "weights/int8.safetensors").write_bytes(content)
    elif damage == "climbing":
        plain["graphs"]["fp32.serve"]["file"] = "../fp32.serve.onnx"
    elif damage == "format":
        plain["format"] = "cadenza-export/9"
    elif damage == "unknown precision":
        plain["graphs"]["fp32.serve"]["precision"] = "fp7"
    file.write_text("{" if damage == "no json" else json.dumps(plain))
    with pytest.raises(InputError):
        read_export(folder, verify=True)


def test_the_folder_says_what_it_was_asked(exported: Export) -> None:
    plain = json.loads((exported.folder / "export.json").read_text())
    assert plain["format"] == "cadenza-export/1"
    assert plain["windows"] == plain["recipe"]["windows"] == 3
    assert plain["model"] == asdict(exported.model)
    assert plain["shape"] == {"batch": [1, 8, 64], "prompt": [1, 16, 40]}
    assert set(plain["tasks"]) == {"edit", "close"}
    assert plain["environment"]["torch"]
    assert read_export(exported.folder) == exported


@pytest.mark.parametrize(
    "values", [{"windows": 0}, {"clip": 0.0}, {"clip": 1.1}, {"keep": (2, 1)}, {"quantizer": "x"}]
)
def test_an_impossible_recipe_is_a_mistake_of_the_caller(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must"):
        Recipe(**values)  # type: ignore[arg-type]


def test_an_unknown_graph_is_named_with_the_ones_there_are(exported: Export) -> None:
    with pytest.raises(InputError, match=r"no graph 'w4a3\.serve', only fp32\.serve"):
        exported.path("w4a3.serve")


def test_the_recipe_s_quantizer_is_read_back_and_an_unknown_one_refused(
    rotated_export: Export, tmp_path: Path
) -> None:
    assert rotated_export.recipe.method == QUANTIZERS[2]
    assert [each.name for each in QUANTIZERS] == ["rtn", "gptq", "gptq-hadamard"]
    folder = tmp_path / "EXPORT"
    shutil.copytree(rotated_export.folder, folder)
    plain = json.loads((folder / "export.json").read_text())
    assert plain["recipe"]["quantizer"] == "gptq-hadamard"
    plain["recipe"]["quantizer"] = "awq"
    (folder / "export.json").write_text(json.dumps(plain))
    with pytest.raises(InputError, match=r"must be one of rtn, gptq.*export again"):
        read_export(folder)
