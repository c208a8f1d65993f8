"""What this machine is, as far as builds and latencies depend on it.  Reads /proc alone."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def machine(gpu: bool = False) -> dict[str, str]:
    """Return system, device (the processor's name, or the first GPU's) and usable cores."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "device": _gpu_name() if gpu else _cpu_name(),
        "cores": str(usable_cores()),
    }


def usable_cores() -> int:
    """Return the cores that this process may run on; more threads would wait for each other."""
    return len(os.sched_getaffinity(0))


def has_vnni() -> bool:
    """Return whether the processor sums products of bytes without saturating on the way.

    x86 without VNNI does saturate; where /proc says nothing, it is taken to.
    """
    try:
        words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        words = set()
    return bool(words & {"avx512_vnni", "avx_vnni", "avx_vnni_int8", "asimddp"})


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return _after_colon(lines, "model name") or platform.processor() or "unknown processor"


def _gpu_name() -> str:
    try:
        first = min(Path("/proc/driver/nvidia/gpus").iterdir())
        lines = (first / "information").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        lines = []
    return _after_colon(lines, "Model") or "unknown GPU"


def _after_colon(lines: list[str], key: str) -> str:
    """Return the value of the first `key: value` line, or nothing."""
    found = (line.split(":", 1)[1].strip() for line in lines if line.startswith(key))
    return next(found, "")
