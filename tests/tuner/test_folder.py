"""A tune's folder: one command's, one process's, and nobody's work is thrown away unasked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines.errors import InputError
from tuner.folder import TRIALS, tune_folder, worker_of

HOLDER = """
import sys
from pathlib import Path
from tuner.folder import tune_folder, worker_of
with tune_folder(Path(sys.argv[1]), "a", False):
    print("ready", flush=True)
    sys.stdin.read()
"""


def finish_a_trial(folder: Path) -> None:
    (folder / TRIALS).write_text(json.dumps({"failed": None}) + "\n")


def test_a_second_process_is_refused_and_told_the_first_one_s_number(tmp_path: Path) -> None:
    output = tmp_path / "BUNDLE"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, output],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "ready\n"
        with (
            pytest.raises(InputError, match=f"in use by process {first.pid}; wait for it"),
            tune_folder(output, "a", force=True),
        ):
            pass
        first.communicate("")
    with tune_folder(output, "a", force=False) as folder:
        assert (folder / "lock").read_text() == f"{os.getpid()}\n"


def test_the_same_command_finds_its_work_again(tmp_path: Path) -> None:
    for force in (False, False, True):
        with tune_folder(tmp_path / "B", "a", force) as folder:
            finish_a_trial(folder)
            (folder / "recipes").mkdir(exist_ok=True)
    assert {path.name for path in folder.iterdir()} == {"lock", "command.json", TRIALS, "recipes"}
    assert folder.name == "B.tune"


def test_another_command_needs_force_once_a_trial_has_a_result(tmp_path: Path) -> None:
    output = tmp_path / "B"
    with tune_folder(output, "a", force=False) as folder:
        finish_a_trial(folder)
        (folder / "recipes" / "x").mkdir(parents=True)
    with (
        pytest.raises(InputError, match="the work of another command; give --force"),
        tune_folder(output, "b", force=False),
    ):
        pass
    assert (folder / "recipes" / "x").is_dir()
    with tune_folder(output, "b", force=True):
        assert {path.name for path in folder.iterdir()} == {"lock", "command.json"}


@pytest.mark.parametrize("log", [None, "", '{"failed": "no schedule is within 2 mean bits"}\n'])
def test_a_command_that_came_to_nothing_is_in_nobody_s_way(
    tmp_path: Path, log: str | None
) -> None:
    with tune_folder(tmp_path / "B", "a", force=False) as folder:
        if log is not None:
            (folder / TRIALS).write_text(log)
    with tune_folder(tmp_path / "B", "b", force=False) as folder:
        assert not (folder / TRIALS).exists()


@pytest.mark.parametrize("log", ["{", "[1]\n", "{}\n"])
def test_a_log_that_cannot_be_read_is_somebody_s_work(tmp_path: Path, log: str) -> None:
    with tune_folder(tmp_path / "B", "a", force=False) as folder:
        (folder / TRIALS).write_text(log)
    with (
        pytest.raises(InputError, match="another command"),
        tune_folder(tmp_path / "B", "b", False),
    ):
        pass


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_no_tune_made_is_left_as_it_is(tmp_path: Path, force: bool) -> None:
    thesis = tmp_path / "B.tune" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    with (
        pytest.raises(InputError, match="is not the folder of a tune"),
        tune_folder(tmp_path / "B", "a", force),
    ):
        pass
    assert thesis.read_text() == "years of work"


def test_what_a_kill_left_while_the_claim_was_written_is_no_obstacle(tmp_path: Path) -> None:
    folder = tmp_path / "BUNDLE.tune"
    folder.mkdir()
    (folder / "lock").touch()
    (folder / ".command.json.abcd1234").write_text('{"ident')
    with tune_folder(tmp_path / "BUNDLE", "identity", force=False) as work:
        assert (work / "command.json").is_file()
        assert not (work / ".command.json.abcd1234").exists()


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match="choose another --output"),
        tune_folder(tmp_path / "file" / "B", "a", force=False),
    ):
        pass


def test_a_folder_keeps_its_name_among_workers_and_no_other_has_it(tmp_path: Path) -> None:
    names = []
    for output in ("one", "one", "two"):
        with tune_folder(tmp_path / output, "a", force=False) as folder:
            names.append(worker_of(folder))
    assert names[0] == names[1] != names[2]
    assert len(names[0]) == 16
