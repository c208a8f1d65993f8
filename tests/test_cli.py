"""The command: help, versions, errors and exit codes, interrupts."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

import cadenza
from engines import __version__
from engines.errors import BudgetError


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[list[str]], int]], None]:
    """Return a function that puts another main in the place of exporter's."""

    def put(main: Callable[[list[str]], int]) -> None:
        module = ModuleType("exporter.cli")
        module.main = main  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "exporter.cli", module)

    return put


def test_help_names_every_command_and_gives_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert cadenza.main(["--help"]) == 0
    said = capsys.readouterr().out
    for name in cadenza.COMMANDS:
        assert re.search(rf"^  {name} ", said, re.MULTILINE)
    assert cadenza.EXAMPLES.splitlines()[0] in said


def test_help_imports_nothing_heavy() -> None:
    code = "import cadenza, sys; cadenza.main(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    heavy = {"numpy", "torch", "onnx", "onnxruntime", "optuna", "tokenizers", "argparse"}
    assert loaded & (heavy | {"exporter", "tuner", "calib_data"}) == set()


def test_no_command_says_how_to_use_it_and_is_the_user_s_fault(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cadenza.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "usage: cadenza" in said.err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cadenza.main(["--version"]) == 0
    assert capsys.readouterr().out == f"cadenza {__version__}\n"


@pytest.mark.parametrize(("typed", "meant"), [("tun", "tune"), ("exprot", "export")])
def test_an_unknown_command_is_an_error_that_names_the_nearest(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cadenza.main([typed]) == 2
    assert f"did you mean '{meant}'?" in capsys.readouterr().err


def test_an_unknown_command_with_nothing_near_lists_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cadenza.main(["zzz"]) == 2
    assert "commands are export, profile, allocate, tune" in capsys.readouterr().err


def test_a_part_gets_the_arguments_from_its_own_name_on_and_its_code_is_returned(
    part: Callable[[Callable[[list[str]], int]], None],
) -> None:
    seen: list[str] = []

    def main(argv: list[str]) -> int:
        seen.extend(argv)
        return 4

    part(main)
    assert cadenza.main(["export", "MODEL", "-o", "X"]) == 4
    assert seen == ["export", "MODEL", "-o", "X"]


def test_an_error_of_the_tree_ends_with_its_code_and_without_a_traceback(
    part: Callable[[Callable[[list[str]], int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def main(argv: list[str]) -> int:
        raise BudgetError("nothing fits; raise the budget")

    part(main)
    assert cadenza.main(["export"]) == 3
    assert capsys.readouterr().err == "cadenza export: error: nothing fits; raise the budget\n"


def test_a_package_that_is_missing_is_an_error_that_names_the_extra(
    part: Callable[[Callable[[list[str]], int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def main(argv: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'torch'", name="torch.nn")

    part(main)
    assert cadenza.main(["export"]) == 2
    said = capsys.readouterr().err
    assert "'torch'" in said
    assert "pip install 'cadenza[export]'" in said


def test_a_file_of_our_own_that_is_missing_is_a_fault_of_ours(
    part: Callable[[Callable[[list[str]], int]], None],
) -> None:
    def main(argv: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'exporter.x'", name="exporter.x")

    part(main)
    with pytest.raises(ModuleNotFoundError):
        cadenza.main(["export"])


def test_every_command_s_extra_is_one_that_pyproject_offers() -> None:
    from tests.test_packaging import project

    extras = project()["optional-dependencies"]
    assert {command.extra for command in cadenza.COMMANDS.values()} <= set(extras)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_with_130_and_one_line(sent: signal.Signals) -> None:
    code = (
        "import signal\n"
        # A shell's background job ignores Ctrl-C, and so would we.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import sys, time, types, cadenza\n"
        "def main(argv):\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
        "sys.modules['exporter.cli'] = types.SimpleNamespace(main=main)\n"
        "sys.exit(cadenza.main(['export']))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(sent)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "cadenza export: error: interrupted\n"


def test_a_reader_that_goes_away_is_no_fault() -> None:
    code = (
        "import sys, types, cadenza\n"
        "def main(argv):\n"
        "    for _ in range(100000): print('x' * 99)\n"
        "    return 0\n"
        "sys.modules['exporter.cli'] = types.SimpleNamespace(main=main)\n"
        "sys.exit(cadenza.main(['export']))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_is_no_fault(closed: str) -> None:
    line = f"'{sys.executable}' -m cadenza --version {closed}"
    assert subprocess.run(["bash", "-c", line], capture_output=True, check=False).returncode == 0
