"""`cadenza report`: what it writes, what it leaves alone, and what it says."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import cadenza
from tests.tuner.tune_folders import results, tune_folder
from tuner.report_page import MARKER


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a small tune folder, quick to show."""
    return tune_folder(tmp_path, results(3), result=None, sensitivity=None)


def report(*argv: object) -> int:
    return cadenza.main(["report", *map(str, argv)])


def test_a_report_is_written_whole_and_may_be_written_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "new" / "report.html"
    for _ in range(2):
        assert report(folder, "-o", page) == 0
        assert page.read_text("utf-8").startswith(MARKER)
        assert page.read_text("utf-8").endswith("</html>\n")
    assert list(page.parent.iterdir()) == [page]
    said = capsys.readouterr()
    assert said.out == ""
    assert "3 trials, 3 tasks" in said.err
    assert "note: result.json is missing" in said.err


def test_json_prints_data_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    assert report(folder, "-o", page, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "file": str(page),
        "trials": 3,
        "tasks": ["edit", "rename", "chain"],
    }


def test_another_file_is_replaced_only_by_force(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "thesis.html"
    page.write_text("<!doctype html>")
    assert report(folder, "-o", page) == 2
    assert "is there and no report; give --force" in capsys.readouterr().err
    assert page.read_text() == "<!doctype html>"
    assert report(folder, "-o", page, "--force") == 0
    assert page.read_text("utf-8").startswith(MARKER)


def test_a_file_of_the_tune_is_never_replaced(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (folder / "trials.jsonl").read_bytes()
    link = tmp_path / "link.html"
    link.symlink_to(folder / "trials.jsonl")
    for page in (folder / "trials.jsonl", link):
        assert report(folder, "-o", page, "--force") == 2
        assert "a file of the tune itself" in capsys.readouterr().err
    assert (folder / "trials.jsonl").read_bytes() == before


def test_what_is_no_file_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for page in (tmp_path, tmp_path / "pipe"):
        assert report(folder, "-o", page, "--force") == 2
        assert "is no file; choose another --output" in capsys.readouterr().err


def test_a_folder_that_is_none_is_the_user_s_fault_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(tmp_path, "-o", tmp_path / "report.html") == 2
    assert "is not the folder of a tune" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_missing_package_names_the_extra(
    package: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert report(folder, "-o", tmp_path / "report.html") == 2
    said = capsys.readouterr().err
    assert f"{package!r}" in said
    assert "pip install 'cadenza[report]'" in said


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert report("--help") == 0
    assert "cadenza report BUNDLE.tune -o report.html" in capsys.readouterr().out
