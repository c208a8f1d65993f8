"""Peak memory of serving one schedule, in a process of its own.

A process's peak never falls, and one that holds engines to compare them has loaded too much.  So
each figure is of a fresh child that loads what the schedule uses, answers a batch as often as
asked, and reads how much of it was resident at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.backend import Backend
from engines.bundle import Bundle, read_bundle
from engines.child import Child
from engines.runtime import Runtime, load_engine
from engines.sampler import Request, generate
from engines.schedule import SamplerConfig, Schedule
from engines.targets import target_from_name

SERVE = "engines.footprint:serve"

_GENERATIONS = 3


def footprint(
    bundle: Path,
    target: str,
    threads: int,
    schedule: Schedule,
    sampler: SamplerConfig,
    prompts: Sequence[tuple[int, ...]],
    log: Path,
) -> dict[str, Any]:
    """Return the most memory that answering a batch took.

    Keys are `peak_mib`, resident memory of the whole process at its highest, None where the system
    does not tell; `device_bytes`, what the GPU's memory was used for, None on a processor.

    Args:
        bundle: Its folder, every byte checked by the caller.
        target: One of its targets.
        threads: Of a pass; 0 for what the bundle says.
        schedule: The precision of each window.
        sampler: How the answers are denoised.
        prompts: The batch.
        log: File for what the child prints.

    Raises:
        BackendError: An engine cannot be loaded or failed, or the child died.
    """
    request = {
        "bundle": str(bundle.resolve()),
        "target": target,
        "threads": threads,
        "schedule": list(schedule.precisions),
        "sampler": sampler.to_json(),
        "prompts": [list(ids) for ids in prompts],
    }
    with Child(SERVE, None) as child:
        found: dict[str, Any] = child.ask(request, log)
    return found


def engines_of(
    bundle: Bundle, target: str, threads: int, names: Sequence[str]
) -> tuple[dict[str, Backend], Callable[[], Mapping[str, int]] | None]:
    """Return loaded engines by their precisions, and who tells what they take of a GPU's memory.

    Of TensorRT a runtime is loaded whole, for plans share what is on the GPU; then names that no
    schedule uses are left out.

    Raises:
        BackendError: One cannot be loaded.
    """
    if target_from_name(target).ahead:
        runtime = Runtime.load(bundle.folder, target)
        device = getattr(runtime, "device", None)
        taken = None if device is None else device.memory_bytes
        return {name: each for name, each in runtime.engines.items() if name in names}, taken
    serving = bundle.manifest.serving(target)
    return {name: load_engine(bundle, serving[name], threads) for name in names}, None


def serve(given: object) -> Callable[[Any, Callable[[str], None]], Any]:
    """Return the handler of the child; the request is as `footprint` writes it."""

    def handle(request: Any, note: Callable[[str], None]) -> Any:
        bundle = read_bundle(request["bundle"], verify=False)
        schedule = Schedule(tuple(request["schedule"]))
        sampler = SamplerConfig(**request["sampler"])
        names = sorted(set(schedule.precisions))
        engines, taken = engines_of(bundle, request["target"], request["threads"], names)
        asked = [
            Request(prompt=tuple(ids), sampler=sampler, schedule=schedule, task="bench")
            for ids in request["prompts"]
        ]
        for _ in range(_GENERATIONS):
            generate(asked, engines, bundle.manifest.model)
        peak = peak_resident_bytes()
        return {
            "peak_mib": None if peak is None else peak / 2**20,
            "device_bytes": None if taken is None else dict(taken()),
        }

    return handle


def peak_resident_bytes() -> int | None:
    """Return the most bytes of this process that were resident at once, or None.

    Not getrusage's, which a child takes over from who started it.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = (int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    return next(found, None)
