"""What the tests' children serve: one handler for each way to work or to die."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from engines.errors import BackendError, BudgetError, InputError

_ERRORS = {
    "input": InputError("a name is wrong; mend it"),
    "backend": BackendError("no engine; use another"),
    "budget": BudgetError("too little; raise it", {"mean_bits": 4.0, "latency_ms": None}),
}


def serve(given: Any) -> Callable[[Any, Callable[[str], None]], Any]:
    if given == "refuse":
        raise InputError("not with this; give another")
    seen: list[Any] = []

    def handle(request: Any, note: Callable[[str], None]) -> Any:
        seen.append(request)
        do, value = request["do"], request.get("value")
        if do == "echo":
            return {"given": given, "value": value, "seen": len(seen), "pid": os.getpid()}
        if do == "notes":
            for text in value:
                note(text)
        elif do == "print":
            print(f"python says {value}")
            os.write(1, f"native says {value}\n".encode())
            os.write(2, f"native warns {value}\n".encode())
        elif do == "segfault":
            os.write(2, b"about to fall\n")
            ctypes.string_at(0)
        elif do == "abort":
            os.abort()
        elif do == "exit":
            os._exit(value)
        elif do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif do == "hang":
            for _ in range(value):
                time.sleep(0.2)
                note("still there")
            time.sleep(60)
        elif do == "where":
            return ctypes.cast(ctypes.CDLL(None).malloc, ctypes.c_void_p).value
        elif do == "memory":
            bytearray(1 << 40)
        elif do == "raise":
            raise _ERRORS[value]
        elif do == "fault":
            raise ZeroDivisionError("our own fault")
        elif do == "nan":
            return float("nan")
        elif do == "large":
            return "x" * value
        elif do == "orphan" and os.fork() == 0:
            # A child of the child that outlives it, with every descriptor that it may inherit.
            time.sleep(60)
            os._exit(0)
        return None

    return handle
