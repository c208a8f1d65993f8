"""A child may crash, hang or eat memory; its parent tells of what, and goes on."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.child import Child, ChildError
from engines.errors import BackendError, BudgetError, InputError

SERVE = "tests.engines.child_handlers:serve"


@pytest.fixture
def child() -> Iterator[Child]:
    with Child(SERVE, {"name": "é 🚀"}, limit_s=20.0) as made:
        yield made


def gone(pid: int, within_s: float = 10.0) -> bool:
    """Return whether a process ends, or is only a zombie, within some time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_is_asked_comes_back_and_state_is_kept(child: Child, tmp_path: Path) -> None:
    odd = ["模型 \n\x00 </b>", {"a": [1.5, None, True]}]
    first = child.ask({"do": "echo", "value": odd}, tmp_path / "log")
    again = child.ask({"do": "echo", "value": odd}, tmp_path / "deep" / "log")
    assert first["value"] == again["value"] == odd
    assert first["given"] == {"name": "é 🚀"}
    assert (first["seen"], again["seen"]) == (1, 2)
    assert first["pid"] == again["pid"] != os.getpid()


def test_notes_arrive_in_order_one_line_each(child: Child, tmp_path: Path) -> None:
    notes: list[str] = []
    given = ["one", "two\nlines", "x" * 5000]
    child.ask({"do": "notes", "value": given}, tmp_path / "log", notes.append)
    assert notes == ["one", "two lines", "x" * 1000]


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"do": "segfault"}, r"crashed \(SIGSEGV\)"),
        ({"do": "abort"}, r"crashed \(SIGABRT\)"),
        ({"do": "exit", "value": 3}, "exit code 3"),
        ({"do": "kill"}, r"SIGKILL\), most likely for want of memory"),
        ({"do": "fault"}, "exit code 1.*ZeroDivisionError: our own fault"),
        ({"do": "nan"}, "exit code 1.*not JSON compliant"),
    ],
)
def test_a_death_is_told_with_its_reason_and_the_next_request_has_a_new_child(
    child: Child, tmp_path: Path, request_: dict[str, object], reason: str
) -> None:
    before = child.ask({"do": "echo"}, tmp_path / "first")
    with pytest.raises(ChildError, match=reason):
        child.ask(request_, tmp_path / "log")
    after = child.ask({"do": "echo"}, tmp_path / "last")
    assert after["seen"] == 1
    assert after["pid"] != before["pid"]
    assert gone(before["pid"])


def test_the_log_s_tail_is_in_the_error(child: Child, tmp_path: Path) -> None:
    with pytest.raises(ChildError, match="it last said: about to fall") as caught:
        child.ask({"do": "segfault"}, tmp_path / "log")
    assert caught.value.tail[-1] == "about to fall"


def test_each_request_has_its_own_log_for_python_and_native_prints(
    child: Child, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        child.ask({"do": "print", "value": name}, tmp_path / name)
    child.ask({"do": "echo"}, tmp_path / "three")
    for name in ("one", "two"):
        lines = sorted((tmp_path / name).read_text().splitlines())
        assert lines == sorted(
            (f"python says {name}", f"native says {name}", f"native warns {name}")
        )


def test_silence_beyond_the_limit_is_a_hang_and_notes_start_the_clock_anew(
    tmp_path: Path,
) -> None:
    notes: list[str] = []
    with Child(SERVE, None, limit_s=1.0) as child:
        pid = child.ask({"do": "echo"}, tmp_path / "log")["pid"]
        with pytest.raises(ChildError, match="hung: said nothing for 1 s"):
            child.ask({"do": "hang", "value": 7}, tmp_path / "log", notes.append)
        assert len(notes) == 7
        assert gone(pid)


def test_too_much_memory_is_told_and_the_child_lives(tmp_path: Path) -> None:
    with Child(SERVE, None, limit_s=20.0, memory_mib=4096.0) as child:
        pid = child.ask({"do": "echo"}, tmp_path / "log")["pid"]
        with pytest.raises(ChildError, match="ran out of memory"):
            child.ask({"do": "memory"}, tmp_path / "log")
        assert child.ask({"do": "echo"}, tmp_path / "log")["pid"] == pid


def addresses_can_be_fixed() -> bool:
    asked = "import ctypes, sys; sys.exit(ctypes.CDLL(None).personality(0x0040000) == -1)"
    return subprocess.run([sys.executable, "-c", asked]).returncode == 0


@pytest.mark.skipif(not addresses_can_be_fixed(), reason="the system refuses fixed addresses")
def test_a_steady_child_finds_its_memory_where_the_last_one_did(tmp_path: Path) -> None:
    def places(steady: bool) -> set[object]:
        found = set()
        for _ in range(3):
            with Child(SERVE, None, limit_s=20.0, steady=steady) as child:
                found.add(child.ask({"do": "where"}, tmp_path / "log"))
        return found

    assert len(places(steady=True)) == 1
    assert len(places(steady=False)) > 1


def test_the_kernel_takes_the_child_before_its_parent(child: Child, tmp_path: Path) -> None:
    pid = child.ask({"do": "echo"}, tmp_path / "log")["pid"]
    scores = [int(Path(f"/proc/{each}/oom_score_adj").read_text()) for each in (pid, "self")]
    assert scores[0] == 1000 > scores[1]


def test_errors_with_a_mend_travel_back_as_themselves(child: Child, tmp_path: Path) -> None:
    for name, kind in (("input", InputError), ("backend", BackendError), ("budget", BudgetError)):
        with pytest.raises(kind, match="; ") as caught:
            child.ask({"do": "raise", "value": name}, tmp_path / "log")
        assert type(caught.value) is kind
    assert isinstance(caught.value, BudgetError)
    assert caught.value.nearest == {"mean_bits": 4.0, "latency_ms": None}
    assert child.ask({"do": "echo"}, tmp_path / "log")["seen"] == 4


def test_a_child_that_cannot_begin_says_why(tmp_path: Path) -> None:
    with Child(SERVE, "refuse", limit_s=20.0) as child, pytest.raises(InputError, match="another"):
        child.ask({"do": "echo"}, tmp_path / "log")


def test_a_large_answer_comes_whole(child: Child, tmp_path: Path) -> None:
    asked = {"do": "large", "value": 30 << 20}
    assert len(child.ask(asked, tmp_path / "log")) == 30 << 20


def test_ctrl_c_in_the_parent_kills_the_child(child: Child, tmp_path: Path) -> None:
    pid = child.ask({"do": "echo"}, tmp_path / "log")["pid"]
    before = descriptors()
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        child.ask({"do": "hang", "value": 0}, tmp_path / "log")
    timer.join()
    assert gone(pid)
    assert descriptors() == before - 2


def test_no_descriptor_and_no_process_is_left_behind(tmp_path: Path) -> None:
    def round_trip() -> int:
        child = Child(SERVE, None, limit_s=20.0)
        pid: int = child.ask({"do": "echo"}, tmp_path / "log")["pid"]
        return pid  # not closed: collecting it must be enough

    pids = [round_trip()]
    gc.collect()
    before = descriptors()
    pids += [round_trip() for _ in range(6)]
    gc.collect()
    assert descriptors() == before
    assert all(map(gone, pids))


def test_close_may_be_said_twice(child: Child, tmp_path: Path) -> None:
    child.ask({"do": "echo"}, tmp_path / "log")
    child.close()
    child.close()
    assert child.ask({"do": "echo"}, tmp_path / "log")["seen"] == 1


@pytest.mark.parametrize("do", ["hang", "orphan"])
def test_a_parent_killed_by_sigkill_takes_its_child_along(tmp_path: Path, do: str) -> None:
    code = (
        "import sys, pathlib; from engines.child import Child\n"
        f"log = pathlib.Path({str(tmp_path / 'log')!r})\n"
        f"child = Child({SERVE!r}, None)\n"
        "print(child.ask({'do': 'echo'}, log)['pid'], flush=True)\n"
        f"child.ask({{'do': {do!r}, 'value': 0}}, log)\n"
        "child.ask({'do': 'hang', 'value': 0}, log)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert gone(pid)
