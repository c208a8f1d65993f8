"""A child process for what may crash, hang or eat memory: native code that is not ours.

The child is kept: what it loaded for one request is there for the next.  It is started again after
it died.  Requests and answers are JSON lines over pipes of their own; whatever the child and its
native libraries print goes to the log of the request.

    parent --request--> child         the write end doubles as a lifeline: at its end of file the
    parent <--notes, answer-- child   child leaves, even in the middle of a request

A child is a session of its own, so Ctrl-C reaches the parent alone, which then kills it.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engines import errors
from engines.errors import BackendError, BudgetError, CadenzaError

# Any JSON value.
Json = Any
Note = Callable[[str], None]

# Lines and characters of a log that an error shows.
_TAIL_LINES, _TAIL_WIDTH, _TAIL_BYTES = 20, 500, 64 << 10
_NOTE_WIDTH = 1000

# Errors that travel back under their own class.
_KNOWN: dict[str, type[CadenzaError]] = {
    each.__name__: each
    for each in (
        errors.CadenzaError,
        errors.InputError,
        errors.BundleError,
        errors.MissingExtra,
        errors.BudgetError,
        errors.BackendError,
        errors.DegradedError,
    )
}

# The parent's module search path is the child's, so that both run the same code wherever it lies.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from engines.child import child_main; child_main(*sys.argv[2:])"
)

# Starts the command behind it with fixed addresses (ADDR_NO_RANDOMIZE), one heap, one seed, and on
# one core, where threads take turns in the same order if nothing may interrupt them.
_STEADY = """
import ctypes, os, sys
ctypes.CDLL(None).personality(0x0040000)
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, [cores[os.getpid() % len(cores)]])
try:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
except OSError:  # for the privileged alone
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
os.environ.update(MALLOC_ARENA_MAX="1", PYTHONHASHSEED="0")
os.execv(sys.argv[1], sys.argv[1:])
"""


class ChildError(BackendError):
    """The child died, hung, or answered nonsense.

    Attributes:
        tail: The last lines of what it printed.
    """

    def __init__(self, message: str, tail: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.tail = tail


class Child:
    """A process that answers one request at a time, and may die of it.

    Args:
        serve: "package.module:function"; function(given) is called once in each new child and
            returns the handler of requests, handler(request, note) -> answer.
        given: Plain data for it.
        limit_s: Seconds without a note or an answer after which the child is killed; None: no
            limit.
        memory_mib: Most MiB of address space that it may have; None: no limit.
        steady: Let nothing differ between two runs that the system decides by chance: where memory
            lies, how hashes are seeded, which thread is first (it has one core).  A compiler that
            goes through a set of pointers makes the same of the same then.  Where the system
            refuses, it is as it was.
    """

    def __init__(
        self,
        serve: str,
        given: Json,
        limit_s: float | None = None,
        memory_mib: float | None = None,
        steady: bool = False,
    ) -> None:
        self._first = [sys.executable, "-c", _STEADY] if steady else []
        self._started = [serve, json.dumps(given, allow_nan=False), str(memory_mib or 0)]
        self._limit_s = limit_s
        self._process: _Process | None = None

    def ask(self, request: Json, log: Path, on_note: Note = lambda note: None) -> Json:
        """Return the child's answer; starts a child if there is none.

        Args:
            request: Plain data.
            log: File for all that the child prints meanwhile.
            on_note: Told of each note that the handler gives, a line.

        Raises:
            CadenzaError: Of the class and with the message that the handler raised.
            ChildError: The child died, hung, ran out of memory or answered nonsense, with the
                reason and the last lines of the log; the next request starts a new one.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")
        if self._process is None or not self._process.alive:
            self.close()
            self._process = _Process(self._first, self._started, log)
        try:
            self._process.send({"request": request, "log": str(log.resolve())})
            return self._answer(self._process, log, on_note)
        except BaseException as error:
            if not isinstance(error, CadenzaError) or isinstance(error, _Fatal):
                self.close()
            if isinstance(error, _Fatal):
                tail = _tail(log)
                last = f"; it last said: {tail[-1]}" if tail else ""
                raise ChildError(f"{error}{last}", tail) from error.__cause__
            raise

    def close(self) -> None:
        """End the child, if there is one."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _answer(self, process: _Process, log: Path, on_note: Note) -> Json:
        while True:
            line = process.line(self._limit_s)
            try:
                said = json.loads(line, parse_constant=_refuse_constant)
                kind, value = said["kind"], said["value"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise _Fatal(
                    f"the child answered nonsense, {line[:80]!r}; see its log, {log}"
                ) from error
            if kind == "note":
                on_note(value)
            elif kind == "answer":
                return value
            elif kind == "error" and value["class"] in _KNOWN:
                raise _error(value)
            else:
                raise ChildError(f"{value['message']}; see {log}", _tail(log))


class _Fatal(CadenzaError):
    """The child cannot be used any more."""


class _Process:
    """A running child with its pipes, killed with all that it started when it is let go."""

    def __init__(self, first: list[str], started: list[str], log: Path) -> None:
        command = [*first, sys.executable, "-c", _BOOT, json.dumps(sys.path)]
        to_child, ours = os.pipe()
        back, from_child = os.pipe()
        try:
            with log.open("ab") as out:
                self._popen = subprocess.Popen(
                    [*command, *started, str(to_child), str(from_child), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    pass_fds=(to_child, from_child),
                    start_new_session=True,
                )
        except BaseException:
            os.close(ours)
            os.close(back)
            raise
        finally:
            os.close(to_child)
            os.close(from_child)
        self._write, self._read, self._rest = ours, back, bytearray()
        self._end = weakref.finalize(self, _end, self._popen, ours, back)

    @property
    def alive(self) -> bool:
        """Whether it has not ended yet."""
        return self._end.alive and self._popen.poll() is None

    def send(self, message: Json) -> None:
        data = memoryview((json.dumps(message, allow_nan=False) + "\n").encode())
        try:
            while data:
                data = data[os.write(self._write, data) :]
        except BrokenPipeError:
            pass  # it died: `line` tells of what

    def line(self, limit_s: float | None) -> bytes:
        """Return the next line; a silence longer than the limit, or the end, is fatal."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        at = 0
        while (end := self._rest.find(b"\n", at)) < 0:
            at = len(self._rest)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._read], [], [], left)[0]:
                raise _Fatal(
                    f"hung: said nothing for {limit_s:g} s and was killed; allow more with "
                    f"--child-limit, or leave this candidate out"
                )
            data = os.read(self._read, 1 << 20)
            if not data:
                raise _Fatal(self._death())
            self._rest += data
        found = bytes(self._rest[:end])
        del self._rest[: end + 1]
        return found

    def close(self) -> None:
        self._end()

    def _death(self) -> str:
        """Return of what the child died."""
        try:
            code = self._popen.wait(5.0)
        except subprocess.TimeoutExpired:
            return "the child closed its pipe and went on; report this"
        if code == -signal.SIGKILL:
            return (
                "was killed by the system (SIGKILL), most likely for want of memory; close other "
                "programs, or use smaller batches or fewer precisions"
            )
        if code < 0:
            return (
                f"crashed ({signal.Signals(-code).name}); leave this candidate out, or report it"
            )
        return f"left with exit code {code}; see its log"


def _end(popen: subprocess.Popen[bytes], *pipes: int) -> None:
    """Kill a child's whole group, wait for it, and close our ends of its pipes."""
    try:
        os.killpg(popen.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        popen.kill()
    popen.wait()
    for pipe in pipes:
        os.close(pipe)


def _error(value: Json) -> CadenzaError:
    known = _KNOWN[value["class"]]
    if known is BudgetError:
        return BudgetError(value["message"], value["nearest"])
    return known(value["message"])


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _tail(log: Path) -> tuple[str, ...]:
    """Return the last lines of a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ()
    return tuple(line[:_TAIL_WIDTH] for line in text.splitlines()[-_TAIL_LINES:])


def child_main(
    serve: str, given: str, memory_mib: str, to_child: str, from_child: str, parent: str
) -> None:
    """Answer requests until the parent lets go; runs in the child alone."""
    import importlib
    import queue
    import threading

    _die_with(int(parent))
    _first_to_go()
    if float(memory_mib):
        import resource

        most = math.ceil(float(memory_mib) * (1 << 20))
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for pipe in (int(to_child), int(from_child)):
        os.set_inheritable(pipe, False)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        with os.fdopen(int(to_child), "rb") as stream:
            for line in stream:
                requests.put(line)
        os._exit(0)  # the parent is gone, whatever runs here

    threading.Thread(target=listen, daemon=True).start()
    out = os.fdopen(int(from_child), "wb")

    def say(kind: str, value: Json) -> None:
        out.write(json.dumps({"kind": kind, "value": value}, allow_nan=False).encode() + b"\n")
        out.flush()

    def note(text: str) -> None:
        say("note", " ".join(str(text).split())[:_NOTE_WIDTH])

    handler: Callable[[Json, Note], Json] | None = None
    while True:
        message = json.loads(requests.get())
        _print_to(message["log"])
        try:
            if handler is None:
                module, _, name = serve.partition(":")
                handler = getattr(importlib.import_module(module), name)(json.loads(given))
            say("answer", handler(message["request"], note))
        except CadenzaError as error:
            value = {"class": type(error).__name__, "message": str(error)}
            say("error", value | {"nearest": getattr(error, "nearest", None)})
        except MemoryError:
            say("other", {"message": "ran out of memory; use smaller batches or fewer precisions"})
        # Any other exception is a fault of ours: Python prints its traceback into the log and
        # the child ends, which the parent tells.


def _print_to(log: str) -> None:
    """Let everything that is printed from now on, by Python or not, go to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


def _first_to_go() -> None:
    """Let the kernel take this process before its parent where memory runs out."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        return  # the kernel chooses by size, and this is the large one


def _die_with(parent: int) -> None:
    """Let the kernel end this process when its parent dies, where it can do that."""
    import ctypes

    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    except (OSError, AttributeError):
        return  # the lifeline remains
    if os.getppid() != parent:
        os._exit(0)
