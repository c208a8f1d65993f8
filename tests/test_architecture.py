"""The house's plan, read from the syntax tree of every file: who may import whom, and how big."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A room may import itself and these.  Imports run one way.
MAY_IMPORT: dict[str, set[str]] = {
    "cadenza": {"engines", "calib_data", "exporter", "tuner"},
    "tuner": {"engines", "calib_data", "exporter"},
    "exporter": {"engines", "calib_data"},
    "engines": set(),
    "calib_data": set(),
}

# A guest package, and the places that may import it: a room, or one file.
AT_HOME: dict[str, tuple[str, ...]] = {
    "torch": ("exporter/",),
    "safetensors": ("exporter/",),
    "onnxscript": ("exporter/",),
    "onnx": ("exporter/", "engines/ort.py"),
    "optuna": ("tuner/search.py", "tuner/study.py"),
    "sqlalchemy": ("tuner/study.py",),
    "onnxruntime": ("engines/ort.py",),
    "tensorrt": ("engines/trt.py",),
    "tensorrt_rtx": ("engines/trt.py",),
    "polygraphy": ("exporter/compare_runs.py",),
    "cuda": ("engines/cuda.py",),
    "tokenizers": ("engines/", "exporter/"),
    "lm_eval": ("calib_data/harness.py",),
    "datasets": ("calib_data/harness.py",),
}

# What a serving machine surely has: all that these rooms may import when they are imported.
AT_IMPORT: dict[str, set[str]] = {"engines": {"numpy"}, "calib_data": {"numpy"}, "cadenza": set()}

LONGEST_FILE = 400


@dataclass(frozen=True)
class Import:
    """One import: its top-level package, its line, and whether importing the file runs it."""

    package: str
    line: int
    at_import: bool


def imports_of(source: str) -> Iterator[Import]:
    """Yield every import in a source, also `import_module("x")` and `require("x", ...)`."""

    def walk(node: ast.AST, at_import: bool) -> Iterator[Import]:
        match node:
            case ast.Import(names=names):
                for name in names:
                    yield Import(name.name.partition(".")[0], node.lineno, at_import)
            case ast.ImportFrom(module=str(module), level=0):
                yield Import(module.partition(".")[0], node.lineno, at_import)
            case ast.Call(
                func=ast.Name(id="require" | "import_module" | "__import__")
                | ast.Attribute(attr="require" | "import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield Import(module.partition(".")[0], node.lineno, at_import)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, at_import and not inside and not typing_only)

    yield from walk(ast.parse(source), True)


def faults(path: str, source: str) -> list[str]:
    """Return what a file's imports break, a line each; `path` is relative to the root, with /."""
    room = path.partition("/")[0].removesuffix(".py")
    found = []
    for one in imports_of(source):
        where = f"{path}:{one.line}"
        if one.package in MAY_IMPORT or one.package == "tests":
            if one.package != room and one.package not in MAY_IMPORT[room]:
                found.append(f"{where}: {room} must not import {one.package}")
        elif one.package in AT_HOME and not path.startswith(AT_HOME[one.package]):
            found.append(
                f"{where}: {one.package} is imported only in {', '.join(AT_HOME[one.package])}"
            )
        elif (
            one.at_import
            and room in AT_IMPORT
            and one.package not in AT_IMPORT[room] | sys.stdlib_module_names
        ):
            found.append(f"{where}: {room} imports {one.package} before anybody asked for it")
    return found


def house() -> list[Path]:
    """Return every file of the product."""
    rooms = [path for room in MAY_IMPORT for path in (ROOT / room).rglob("*.py")]
    return [ROOT / "cadenza.py", *sorted(rooms)]


@pytest.mark.parametrize("path", house(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_imports_only_what_its_room_may(path: Path) -> None:
    assert faults(path.relative_to(ROOT).as_posix(), path.read_text("utf-8")) == []


@pytest.mark.parametrize(
    ("path", "source", "says"),
    [
        ("engines/x.py", "import calib_data.tasks", "engines must not import calib_data"),
        ("engines/x.py", "def f():\n    from exporter import graph", "must not import exporter"),
        ("calib_data/x.py", "from engines.errors import InputError", "must not import engines"),
        ("exporter/x.py", "import tuner", "exporter must not import tuner"),
        ("tuner/x.py", "import cadenza", "tuner must not import cadenza"),
        ("tuner/x.py", "import tests.bench", "tuner must not import tests"),
        ("tuner/x.py", "def f():\n    import torch", "torch is imported only in exporter/"),
        (
            "tuner/x.py",
            "import optuna.trial",
            "optuna is imported only in tuner/search.py, tuner/study.py",
        ),
        ("engines/x.py", "def f():\n    require('onnxruntime', 'ort', '')", "only in engines/ort"),
        ("engines/x.py", "import importlib as i\ni.import_module('torch')", "only in exporter/"),
        ("engines/ort.py", "import onnxruntime", "before anybody asked"),
        ("engines/x.py", "class A:\n    import tokenizers", "before anybody asked"),
        ("calib_data/x.py", "import requests", "before anybody asked"),
        ("cadenza.py", "import numpy", "before anybody asked"),
    ],
)
def test_an_offending_import_is_found(path: str, source: str, says: str) -> None:
    assert len(found := faults(path, source)) == 1
    assert says in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("engines/ort.py", "def load():\n    import onnxruntime"),
        ("engines/x.py", "import json\nimport numpy as np\nfrom engines import errors"),
        ("engines/x.py", "if TYPE_CHECKING:\n    import tokenizers"),
        ("exporter/x.py", "import torch\nfrom engines.model import IDS"),
        ("tuner/search.py", "import optuna"),
        ("tuner/x.py", "from calib_data.tasks import TASKS\nfrom exporter.folder import read"),
    ],
)
def test_an_allowed_import_is_not(path: str, source: str) -> None:
    assert faults(path, source) == []


def test_every_room_has_files() -> None:
    assert {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in house()} == set(
        MAY_IMPORT
    )


def test_no_file_is_longer_than_a_reader_s_patience() -> None:
    lines = {path: path.read_text("utf-8").count("\n") for path in house()}
    assert {path.name: n for path, n in lines.items() if n > LONGEST_FILE} == {}


def test_every_folder_of_tests_is_a_package() -> None:
    # Or pytest puts the folder itself on the path, where it shadows the package it mirrors.
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []
