"""What a tune is going to take, before anything is built: trials, engines, time, disk and memory.

Counts are exact where the command decides them, else upper bounds that say so; memory is an
estimate; time is a measured pass, multiplied.  Nothing is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines.build import Cache, engine_key
from engines.bundle import check_output, is_bundle
from engines.errors import InputError
from engines.machine import busy, state
from engines.plans import plan_key
from engines.precision import FULL_PRECISION
from engines.terminal import duration, table
from tuner.config import TuneConfig
from tuner.plan_engines import plan_request
from tuner.plan_knobs import plan_graph
from tuner.profile_setting import seconds_a_row
from tuner.space import Knob, first_candidates, size
from tuner.workbench import Workbench, prepare
from tuner.workshop import Workshop, engine_spec

MIB = float(1 << 20)

# Settings whose engines are loaded together: the default's, a candidate's, and the best one's.
_SETTINGS = 3
_SERVE, _TRACE = ".serve", ".trace"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a tune takes.

    Attributes:
        candidates: In the space.
        trials: That are to be finished.
        engines: To be built at most: each trial another setting.
        cached: Of those that the first trials run, how many the cache has, of how many.
        plans: Of TensorRT to be built at most; 0 for a target that has none.
        plans_cached: Of those of the default candidate, how many the cache has, of how many.
        rows: Forward passes of single rows, at most: traces, sensitivity, answers, judgement.
        seconds: What these take at the measured speed of full precision; None: not measured.
        disk_mib: For certain: the bundle, as far as it cannot be hard links.
        disk_most_mib: At most, with the graphs and weights of every trial's recipe.
        disk_free_mib: Where the bundle will be.
        memory_mib: An estimate: weights of the engines loaded together, and the largest logits.
        memory_free_mib: None where it cannot be read.
        notes: What is to be known before it starts.
    """

    candidates: int
    trials: int
    engines: int
    cached: tuple[int, int]
    plans: int
    plans_cached: tuple[int, int]
    rows: int
    seconds: float | None
    disk_mib: float
    disk_most_mib: float
    disk_free_mib: float
    memory_mib: float
    memory_free_mib: float | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def foreseen(shop: Workshop, a_row: float | None) -> Plan:
    """Return what a tune takes.

    Args:
        shop: Knows what it works on, and the space.
        a_row: Seconds of a forward pass of a row, where it was measured.

    Raises:
        InputError: The space that was asked for does not fit.
        MissingExtra: The module that builds the target's plans is not installed.
    """
    bench, space = shop.bench, shop.space
    config, effort, export = bench.config, bench.effort, bench.export
    trials = min(config.trials or effort.trials, size(space))
    names = {each.name for each in bench.precisions} | {FULL_PRECISION.name}
    rows = 0
    for job in bench.jobs.values():
        steps, windows = job.sampler.steps, export.windows
        measured = steps * (1 + len(names)) + 2 * (windows - 1)
        rows += len(job.calibration) * measured * trials
        rows += len(job.tuning) * steps * (trials + effort.refinements + 2)
        rows += len(job.test) * steps * (4 + len(names) + effort.permutations) * 2
    weights = {name: bytes_ / MIB for name, bytes_ in export.families.items()}
    used = {export.precisions[name].family for name in names}
    graphs = sum(
        export.files[each.file].bytes
        for each in export.graphs.values()
        if each.file in export.files
    )
    quantized = sum(size_ for name, size_ in weights.items() if name != FULL_PRECISION.family)
    most = graphs / MIB + (quantized if _offers(space, "keep") else 0.0)
    free = os.statvfs(_existing(config.output))
    now = state()
    memory = _SETTINGS * sum(weights[name] for name in used) + _activations_mib(bench)
    certain = graphs / MIB
    if not _same_device(export.folder, config.output):  # no hard links: weights are copied
        certain += sum(weights[name] for name in used)
    plan = Plan(
        candidates=size(space),
        trials=trials,
        engines=trials * len(names),
        cached=_cached(bench, shop, space, names, trials),
        plans=_plans(bench, trials, len(names)),
        plans_cached=_plans_cached(bench, shop),
        rows=rows,
        seconds=None if a_row is None else rows * a_row,
        disk_mib=certain,
        disk_most_mib=certain + (trials - 1) * most + sum(weights[name] for name in used),
        disk_free_mib=free.f_bavail * free.f_frsize / MIB,
        memory_mib=memory,
        memory_free_mib=now.get("available_mib"),
        notes=(),
    )
    pins = [f"pinned: {name} {shop.default[name]}" for name in config.pinned]
    notes = [
        *pins,
        *shop.plan_knobs.notes,
        busy(now),
        _short_of_disk(plan),
        _short_of_memory(plan),
    ]
    return Plan(**{**asdict(plan), "notes": tuple(note for note in notes if note)})


def planned(
    config: TuneConfig, cache: Cache, say: Callable[[str], None], force: bool = False
) -> Plan:
    """Return what a tune would take; every name is checked, and nothing is built or written.

    Args:
        config: What is asked for.
        cache: Engines, measurements and answers; only read.
        say: Where progress goes, a line at a time.
        force: Whether what another command left at the output would be replaced.

    Raises:
        InputError: An argument or a file given is at fault.
    """
    bench = prepare(config, cache, say)
    check_output(config.output, force=force or is_bundle(config.output))
    job = next(iter(bench.jobs.values()))
    a_row = seconds_a_row(bench.export, config.target, job.tuning, job.sampler)
    return foreseen(Workshop(bench, config.output, keeps=False), a_row)


def check(plan: Plan, output: Path) -> None:
    """Let a tune begin only where the disk that it surely needs is free.

    Raises:
        InputError: It is not.
    """
    if plan.disk_mib > plan.disk_free_mib:
        raise InputError(
            f"{plan.disk_mib:,.1f} MiB are needed where {str(output)!r} will be, and "
            f"{plan.disk_free_mib:,.1f} are free; free some space, or choose another --output"
        )


def said(plan: Plan) -> str:
    """Return the plan for people."""
    time = "not measured" if plan.seconds is None else f"about {duration(plan.seconds)}"
    free = "unknown" if plan.memory_free_mib is None else f"{plan.memory_free_mib:,.0f} MiB"
    rows: list[list[object]] = [
        ["candidates", f"{plan.candidates:,}"],
        ["trials", f"{plan.trials:,}"],
        ["engines", f"{plan.engines:,} at most"],
        ["of the first trials'", f"{plan.cached[0]} of {plan.cached[1]} are in the cache"],
        ["forward passes", f"{plan.rows:,} rows at most: {time} at full precision's speed"],
        [
            "disk",
            f"{plan.disk_mib:,.1f} MiB for certain, {plan.disk_most_mib:,.1f} at most; "
            f"{plan.disk_free_mib:,.0f} MiB free",
        ],
        ["memory", f"about {plan.memory_mib:,.0f} MiB (an estimate); {free} free"],
    ]
    if plan.plans:
        cached, of = plan.plans_cached
        told = f"{plan.plans:,} at most; of the default's {cached} of {of} are in the cache"
        rows.insert(4, ["plans of TensorRT", told])
    return "\n".join([table(["what", "how much"], rows), *plan.notes])


def _cached(
    bench: Workbench, shop: Workshop, space: Sequence[Knob], names: set[str], trials: int
) -> tuple[int, int]:
    """Return how many engines of the first trials the cache has, of how many.

    Of those whose recipe is the export's own: others' graphs are not made yet.
    """
    wanted: dict[str, None] = {}
    for candidate in first_candidates(space)[:trials]:
        recipe = {k.name: candidate[k.name] for k in space if k.kind == "recipe"}
        if shop.default.changed(**recipe) != shop.default:
            continue
        options = shop.session(candidate)
        for name in sorted(names):
            spec = engine_spec(bench.export, name, candidate.scales, options)[1]
            wanted[engine_key(spec)] = None
    there = sum(bench.cache.get("engine", key) is not None for key in wanted)
    return there, len(wanted)


def _plans(bench: Workbench, trials: int, names: int) -> int:
    """Return how many plans are built at most.

    Where they run here, of each engine one with each tail; elsewhere those of what ships alone.
    """
    if not bench.ahead:
        return 0
    return 2 * trials * names if bench.plans_here else len(bench.precisions)


def _plans_cached(bench: Workbench, shop: Workshop) -> tuple[int, int]:
    """Return how many of the default candidate's serve plans the cache has, of how many."""
    default, export, keys = shop.default, bench.export, list[str]()
    own = export.recipe.quantizer, export.recipe.windows, export.recipe.clip, 0
    as_exported = (default.quantizer, default.windows, default.clip, default.keep) == own
    if bench.ahead and as_exported:  # others' graphs are not made yet
        digests = {path: entry.sha256 for path, entry in export.files.items()}
        for each in bench.precisions:
            graph = plan_graph(export, each.name, default.scales, default.weights)
            request = plan_request(export, graph, bench.config.target, shop.plan_options(default))
            keys.append(plan_key(request, digests))
    return sum(bench.cache.get("plan", key) is not None for key in keys), len(keys)


def _activations_mib(bench: Workbench) -> float:
    """Return a rough size of the logits of the largest batch that is evaluated."""
    longest = max(job.sampler.gen_length for job in bench.jobs.values())
    rows = max(bench.export.shape.batch[1], 64)
    return rows * longest * bench.export.model.vocab * 4 / MIB


def _offers(space: Sequence[Knob], name: str) -> bool:
    return any(knob.name == name and len(knob.choices) > 1 for knob in space)


def _same_device(one: Path, other: Path) -> bool:
    return _existing(one).stat().st_dev == _existing(other).stat().st_dev


def _existing(path: Path) -> Path:
    """Return the nearest folder above a path that is there."""
    path = path.resolve()
    while not path.exists():
        path = path.parent
    return path


def _short_of_disk(plan: Plan) -> str | None:
    if plan.disk_most_mib <= plan.disk_free_mib:
        return None
    return (
        f"disk may run short: up to {plan.disk_most_mib:,.0f} MiB are used while it searches, "
        f"{plan.disk_free_mib:,.0f} are free"
    )


def _short_of_memory(plan: Plan) -> str | None:
    if plan.memory_free_mib is None or plan.memory_mib <= plan.memory_free_mib:
        return None
    return (
        f"memory may run short: about {plan.memory_mib:,.0f} MiB are needed, "
        f"{plan.memory_free_mib:,.0f} are free; a trial that is killed for want of memory is "
        f"left out, and the search goes on"
    )
