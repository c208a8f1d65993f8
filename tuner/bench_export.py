"""`cadenza bench EXPORT`: a pass of each precision, and the file that `tune --latencies` reads.

On `cpu` and `cuda` ONNX Runtime runs the graphs.  For a target of TensorRT each precision's plan
is built, with its weights as inputs and as constants where the export has both, and run on this
machine's GPU; where it cannot run, that is said before anything is built.

All precisions are measured in turns, in one run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.backend import Backend
from engines.buckets import buckets_of
from engines.build import BuildLog, Cache
from engines.errors import BackendError, InputError
from engines.machine import busy, state
from engines.measure import Latency, measure, measure_switch
from engines.noise import Interval
from engines.options import CONSTANT, INPUT, session_options
from engines.ort import environment
from engines.plans import built_plan, profile_of, read_back
from engines.schedule import SamplerConfig, fixed_steps_like
from engines.targets import Target, refusal
from engines.throughput import rounds_in
from engines.trt import BuildRequest, module_version
from engines.trt_run import Device, PlanBackend, cannot_run
from exporter.folder import Export
from tuner.bench_config import BenchConfig
from tuner.config import TuneConfig
from tuner.exports import export_for
from tuner.latencies import Latencies, Row, shape_of
from tuner.workshop import engine_spec

Json = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Lane:
    """An engine that is timed.

    Attributes:
        precision: Its name.
        weights: INPUT or CONSTANT where the export has both, else None.
        engine: Loaded.
    """

    precision: str
    weights: str | None
    engine: Backend


@dataclass(frozen=True)
class Fleet:
    """Engines to time, in their order, and what they depend on."""

    lanes: Mapping[str, Lane]
    device: str
    environment: Mapping[str, str]


def bench_export(config: BenchConfig, target: Target, cache: Cache, say: Say) -> Json:
    """Return the latency of a pass of each precision of an export, as `--latencies` reads it.

    Raises:
        InputError: The export is damaged or for another target, or what is asked does not fit it.
        BackendError: An engine cannot be built, loaded or run here.
    """
    given = {"--task": config.tasks, "--batch": config.batches, "--input": config.input}
    for name in [name for name, value in given.items() if value]:
        raise InputError(f"{name} is for bundles; an export is timed at one shape, leave it out")
    if target.ahead:
        _check_runs(config, target)
    export = export_for(config.path, target.name)
    _, _, answer = shape_of(export)
    shape = config.shape(export.shape)
    at = (shape.batch[1], shape.prompt[1])
    if at[1] + answer > export.model.max_length:
        raise InputError(
            f"prompts of {at[1]} and answers of {answer} tokens are more than the model's "
            f"{export.model.max_length}; give --shape prompt=MIN:OPT:MAX with a smaller OPT"
        )
    warning = busy(state())
    if warning is not None:
        say(f"warning: {warning}")
    if (*at, answer) != shape_of(export):
        say(
            f"note: tune reads latencies at the export's own shape alone, a batch of "
            f"{export.shape.batch[1]} and prompts of {export.shape.prompt[1]} tokens"
        )
    before = state()
    sampler = sampler_to_time(export)
    with ExitStack() as stack:
        if target.ahead:
            fleet = _plans(export, target, cache, say, stack)
        else:
            fleet = _sessions(export, config, target, cache, say)
        rows, switch_ms, rounds = _timed(fleet, export, sampler, at, config, say)
    return latencies_document(
        target=target.name,
        device=fleet.device,
        shape=(*at, answer),
        rows=[(fleet.lanes[row.precision], row) for row in rows],
        switch_ms=switch_ms,
        how={
            **fleet.environment,
            "steps": sampler.steps,
            "rounds": rounds,
            "seed": config.seed,
            "machine": before,
            "warnings": [] if warning is None else [warning],
        },
    )


def latencies_document(
    target: str,
    device: str,
    shape: tuple[int, int, int],
    rows: list[tuple[Lane, Latency]],
    switch_ms: float,
    how: Json,
) -> Json:
    """Return the content of a file of latencies.

    Args:
        target: For which the engines were built.
        device: On which they ran.
        shape: Rows of the batch, tokens of a prompt, tokens of an answer.
        rows: What was timed, and its milliseconds.
        switch_ms: Of a change of engine.
        how: Whatever else explains them.
    """
    return Latencies(
        source="measured",
        device=device,
        target=target,
        shape=shape,
        rows=tuple(
            Row(
                precision=lane.precision,
                ms=Interval(row.latency_ms, row.low, row.high),
                weights=lane.weights,
                n=row.n,
            )
            for lane, row in rows
        ),
        switch_ms=switch_ms,
        how=how,
    ).to_json()


def sampler_to_time(export: Export) -> SamplerConfig:
    """Return the fixed steps whose passes are timed: of the task with the longest answers."""
    longest = max(export.tasks.values(), key=lambda task: task.sampler.gen_length)
    return fixed_steps_like(longest.sampler, export.windows)


def _timed(
    fleet: Fleet,
    export: Export,
    sampler: SamplerConfig,
    at: tuple[int, int],
    config: BenchConfig,
    say: Say,
) -> tuple[tuple[Latency, ...], float, int]:
    """Return a row of each engine, milliseconds of a switch, and how many rounds both had."""
    engines = {name: lane.engine for name, lane in fleet.lanes.items()}
    where = (sampler, export.windows, *at, export.model)
    rounds = config.repeats
    if rounds is None:
        first = measure(engines, *where, repeats=1, seed=config.seed).rows
        a_round = sum(row.latency_ms for row in first) * sampler.steps / 1000.0
        rounds = rounds_in(config.seconds, a_round, len(engines))
    say(f"timing {', '.join(engines)}: {rounds} generations each")
    found = measure(engines, *where, repeats=rounds, seed=config.seed)
    usual: dict[str, Backend] = {}  # of each precision as it is exported by default
    for lane in fleet.lanes.values():
        usual.setdefault(lane.precision, lane.engine)
    say("timing a change of engine")
    switch_ms = measure_switch(usual, *where, repeats=rounds, seed=config.seed)
    return found.rows, switch_ms, rounds


def _sessions(
    export: Export, config: BenchConfig, target: Target, cache: Cache, say: Say
) -> Fleet:
    """Return ONNX Runtime's engines of every executed precision."""
    options = session_options(target.name, {"threads": config.threads})
    log, lanes = BuildLog(), {}
    for name in _names(export, target, say):
        _, spec = engine_spec(export, name, "shared", options)
        lanes[name] = Lane(name, None, cache.engine(spec, log))
    say(f"{log}")
    found = environment(options)
    return Fleet(lanes, found["device"], {**found, "threads": str(config.threads)})


def _names(export: Export, target: Target, say: Say) -> list[str]:
    """Return the precisions to time: executed ones that the target takes."""
    names = []
    for name, precision in export.precisions.items():
        why = None if precision.simulated else refusal(target, name)
        if why is not None:
            say(f"note: {why}; {name} is left out")
        elif not precision.simulated:
            names.append(name)
    return names


def _check_runs(config: BenchConfig, target: Target) -> None:
    """Check, before anything is built, that plans of the target can run here.

    Raises:
        BackendError: They cannot; says what to do.
    """
    why = cannot_run(target)
    if why is not None:
        raise BackendError(
            f"{why.rstrip('.')}; copy {str(config.path)!r} to a machine with that GPU and "
            f"run the same command there, or let tune predict: cadenza tune {config.path} "
            f"--target {target.name} --gpu NAME"
        )


def _plans(export: Export, target: Target, cache: Cache, say: Say, stack: ExitStack) -> Fleet:
    """Return TensorRT's engines of every precision, and of both ways to give them weights.

    The stack closes the device under them.
    """
    answers = [task.sampler.gen_length for task in export.tasks.values()]
    longest = export.model.max_length
    buckets = buckets_of(export.shape, answers, longest)
    digests = {path: entry.sha256 for path, entry in export.files.items()}
    log = BuildLog()
    built = []
    for name in _names(export, target, say):
        for weights, graph in _forms(export, name):
            say(f"building {name}{'' if weights is None else f', weights {weights}'}")
            entry = export.graphs[graph]
            request = BuildRequest(
                graph=export.path(graph),
                target=target.name,
                profile=profile_of(export.shape, answers, longest, entry.scales),
            )
            plan = built_plan(request, cache, log, digests, TuneConfig.child_limit_s)
            read_back(plan, name, 0, True, say)
            built.append((name, weights, entry, plan))
    say(f"{log}")
    device = stack.enter_context(Device.open(target))
    lanes = {
        name if weights is None else f"{name}, weights {weights}": Lane(
            name,
            weights,
            PlanBackend.load(
                serve=plan.file,
                trace=None,
                precision=export.precisions[name],
                scales=None if entry.scales is None else np.array(entry.scales, np.float32),
                weights=[export.folder / path for path in entry.weights]
                if weights == INPUT
                else [],
                device=device,
                buckets=buckets,
                pad_id=export.model.eos_id,
            ),
        )
        for name, weights, entry, plan in built
    }
    versions = {target.module: module_version(target), "memory": str(device.memory_bytes())}
    return Fleet(lanes, device.name, versions)


def _forms(export: Export, name: str) -> list[tuple[str | None, str]]:
    """Return how weights may be given, and the graph for it; what is usual first."""
    stem = f"{name}.all" if export.precisions[name].has_static_scales else name
    inside, outside = f"{stem}.serve", f"{stem}.bare.serve"
    if outside not in export.graphs:
        return [(None, inside)]
    return [(INPUT, outside), (CONSTANT, inside)]
