"""The wheel: what is in it, and that it works where numpy is all there is."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("calib_data", "engines", "exporter", "tuner")


def project() -> dict[str, Any]:
    """Return the [project] table of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return table


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command and return what it printed."""
    return subprocess.run(command, capture_output=True, text=True, **options)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    built = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    assert built.returncode == 0, built.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bin folder of an environment with the wheel and numpy alone."""
    folder = tmp_path_factory.mktemp("bare")
    assert run(sys.executable, "-m", "venv", "--without-pip", folder).returncode == 0
    (site,) = folder.glob("lib/python*/site-packages")
    import numpy

    # The very numpy of the tests, so that no package index is needed.
    numpy_folder = Path(numpy.__file__).parent
    for part in (numpy_folder, numpy_folder.with_name("numpy.libs")):
        if part.exists():
            (site / part.name).symlink_to(part)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python")
    done = run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def test_every_file_of_the_packages_is_in_the_wheel(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    on_disk = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert on_disk - inside == set()
    assert {f"{package}/py.typed" for package in PACKAGES} <= inside
    assert "cadenza.py" in inside


def test_the_wheel_ships_the_reference_checkpoint(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert f"calib_data/reference/{name}" in inside


def test_the_wheel_ships_the_template_of_the_report(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert {"tuner/template/report.html", "tuner/template/report.css"} <= inside


def test_nothing_else_is_in_the_wheel(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {*PACKAGES, "cadenza.py"}


def test_the_ground_floor_works_with_numpy_alone(bare: Path, tmp_path: Path) -> None:
    modules = ["cadenza"]
    for room in ("engines", "calib_data"):
        for path in sorted((ROOT / room).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            modules.append(name.removesuffix(".__init__"))
    code = f"import importlib\nfor name in {modules}: importlib.import_module(name)"
    done = run(bare / "python", "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_command_works_with_numpy_alone(bare: Path, tmp_path: Path) -> None:
    done = run(bare / "cadenza", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "usage: cadenza" in done.stdout


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (("export", "MODEL", "-o", "EXPORT"), "export"),
        (("tune", "EXPORT", "-o", "B"), "tune"),
        (("report", "B.tune", "-o", "report.html"), "report"),
    ],
)
def test_a_command_without_its_extra_names_it(
    command: tuple[str, ...], extra: str, bare: Path, tmp_path: Path
) -> None:
    model = ROOT / "calib_data" / "reference"
    done = run(
        bare / "cadenza", *(str(model) if a == "MODEL" else a for a in command), cwd=tmp_path
    )
    assert done.returncode == 2
    assert f"pip install 'cadenza[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_core_installs_from_a_package_index(wheel: Path, tmp_path: Path) -> None:
    assert run(sys.executable, "-m", "venv", tmp_path / "venv").returncode == 0
    here = tmp_path / "venv" / "bin"
    pins = ROOT / "constraints.txt"
    done = run(here / "python", "-m", "pip", "install", "--quiet", "-c", pins, wheel)
    if "Failed to establish a new connection" in done.stderr:
        pytest.skip("needs a package index that pip can reach")
    assert done.returncode == 0, done.stderr
    assert run(here / "cadenza", "--version", cwd=tmp_path).returncode == 0
    assert run(here / "python", "-c", "import tokenizers", cwd=tmp_path).returncode == 0


def requirements() -> list[Requirement]:
    """Return every requirement of the core and of the extras, besides our own extras."""
    lines = [*project()["dependencies"]]
    for extra in project()["optional-dependencies"].values():
        lines += extra
    return [one for one in map(Requirement, lines) if one.name != "cadenza"]


def test_the_tested_versions_lie_within_the_bounds() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = dict(line.lower().split("==") for line in lines if line and not line.startswith("#"))
    tested = {one.name: one for one in requirements() if one.name in pins}
    assert {"numpy", "tokenizers", "torch", "onnx", "onnxruntime", "optuna"} <= set(tested)
    for name, one in tested.items():
        assert one.specifier.contains(pins[name]), f"{one} does not allow {pins[name]}"


def test_every_dependency_has_bounds_and_a_remark_that_says_who_needs_it() -> None:
    for one in requirements():
        operators = {bound.operator for bound in one.specifier}
        assert operators == {">=", "<"}, f"{one} needs a lower and an upper bound"
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    text = text[text.index("\ndependencies = [") : text.index("[project.scripts]")]
    listed = re.findall(r'^    "(.*)",(.*)$', text, re.MULTILINE)
    assert {Requirement(one).name for one, _ in listed} == {
        *(one.name for one in requirements()),
        "cadenza",
    }
    assert [one for one, remark in listed if "#" not in remark] == []


def test_the_extras_are_those_that_the_messages_may_name() -> None:
    assert set(project()["optional-dependencies"]) == {
        *("ort", "ort-gpu", "export", "tune", "tensorrt", "tensorrt-rtx"),
        *("report", "harness", "postgres", "compare", "dev"),
    }
    named = {
        extra
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for extra in re.findall(r'require\(\s*"[\w.]+",\s*"([\w-]+)"', path.read_text("utf-8"))
    }
    assert named <= set(project()["optional-dependencies"])
