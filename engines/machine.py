"""What this machine is, as far as builds and latencies depend on it, and its memory."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping
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


# Load of a usable core above which a machine is not idle.
_IDLE = 0.5


def give_back_memory() -> None:
    """Return freed memory to the system, where the C library keeps it for later (glibc does)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def state() -> dict[str, float]:
    """Return what latencies depend on at this moment, as far as it can be read.

    Keys are `load`, the last minute's runnable tasks for each usable core; `mhz_mean`, `mhz_min`
    and `mhz_max` of the cores; `available_mib` of memory; `throttled`, how often the cores were
    slowed for heat since the system started.
    """
    found = {"load": os.getloadavg()[0] / usable_cores()}
    clocks = [
        float(line.split(":", 1)[1])
        for line in _lines(Path("/proc/cpuinfo"))
        if line.startswith("cpu MHz")
    ]
    if clocks:
        found |= {"mhz_mean": sum(clocks) / len(clocks)}
        found |= {"mhz_min": min(clocks), "mhz_max": max(clocks)}
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable"):
            found["available_mib"] = float(line.split()[1]) / 1024.0
    cores = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/core_throttle_count")
    counts = [float(line) for file in cores for line in _lines(file)]
    if counts:
        found["throttled"] = sum(counts)
    return found


def busy(found: Mapping[str, float]) -> str | None:
    """Return a warning where a machine in a `state` is not idle, else None."""
    if found["load"] <= _IDLE:
        return None
    return (
        f"the machine is not idle: {found['load']:.1f} tasks for each core in the last minute; "
        f"latencies will be noisy"
    )


def _lines(file: Path) -> list[str]:
    """Return the lines of a file; none where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError):
        return []


def _cpu_name() -> str:
    lines = _lines(Path("/proc/cpuinfo"))
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
