"""The bundle of a finished tune: what it holds, from engines and verdicts to the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from engines import __version__
from engines.buckets import buckets_of
from engines.bundle import Bundle, Golden, write_bundle
from engines.manifest import DEFAULT_TASK, TOKENIZER, schedule_digest
from engines.ort import environment
from engines.plans import timing_file
from engines.precision import FULL_PRECISION
from engines.sampler import Request, generate
from engines.schedule import Schedule
from exporter.folder import Export
from tuner.choice import Choice
from tuner.closing_table import Verdict, verdict_json
from tuner.contest import Contest
from tuner.evaluate import Item
from tuner.plans import plans_of
from tuner.space import Candidate
from tuner.workbench import Job, Workbench
from tuner.workshop import Engines

# Answers of each task that any runtime must give again.
GOLDEN_PROMPTS = 16


def ship(
    contest: Contest,
    candidate: Candidate,
    choices: Mapping[str, Choice],
    verdicts: Mapping[str, Verdict],
    tune: Mapping[str, Any],
    degraded: bool,
    force: bool,
) -> Bundle:
    """Write the bundle and return it.

    Args:
        contest: Has the engines.  Of a target of TensorRT what stands in for plans ships with them
            and makes the golden answers, wherever it was tuned: it runs on any machine.
        candidate: The one that won.
        choices: Schedules of the tasks and of `default`.
        verdicts: As measured on test prompts; empty where an interrupted tune was not judged.
        tune: What was asked and found, for the manifest.
        degraded: Whether the quality asked for was not shown.
        force: Replace a bundle that is there.
    """
    bench = contest.bench
    engines = contest.shop.stand_ins(candidate) if bench.ahead else contest.shop.engines(candidate)
    used = sorted({name for choice in choices.values() for name in choice.schedule.precisions})
    plans = plans_of(contest, candidate, used) if bench.ahead else {}
    graphs = [engines.graphs[name] for name in used]
    graphs += [plan.graph for plan in plans.values() if plan.graph not in graphs]
    manifest = {
        "cadenza": __version__,
        "model": asdict(engines.folder.model),
        "sampler": engines.folder.sampler.to_json(),
        "targets": list(_targets(bench)),
        "shape": asdict(engines.folder.shape),
        "buckets": _buckets(contest, engines, choices) if plans else None,
        "precisions": [asdict(engines.folder.precisions[name]) for name in used],
        "families": {
            family: {"bytes": engines.folder.families[family]}
            for family in sorted({engines.folder.precisions[name].family for name in used})
        },
        "graphs": {name: _graph(engines.folder, name) for name in graphs},
        "engines": {
            **{
                f"{name}.{_here(bench)}": {
                    "file": engines.folder.graphs[engines.graphs[name]].file,
                    "graph": engines.graphs[name],
                    "precision": name,
                    "target": _here(bench),
                    "built": dict(engines.built[name]),
                    "options": _options(engines),
                }
                for name in used
            },
            **{f"{name}.{bench.config.target}": plan.entry for name, plan in plans.items()},
        },
        "tasks": {
            name: _task(contest, name, choice, verdicts.get(name))
            for name, choice in choices.items()
        },
        "environment": {**engines.folder.environment, **environment(engines.options)},
        "degraded": degraded,
        "tune": dict(tune),
    }
    files = _files(engines.folder, graphs)
    files |= {str(plan.entry["file"]): plan.file for plan in plans.values()}
    for plan in plans.values():  # the last build's holds the times of those before
        if plan.timing is not None:
            files[timing_file(bench.config.target)] = plan.timing
    return write_bundle(
        bench.config.output,
        manifest,
        files,
        golden_lines(contest, engines, choices),
        force=force,
    )


def golden_lines(
    contest: Contest, engines: Engines, choices: Mapping[str, Choice]
) -> list[Golden]:
    """Return answers to test prompts, each made alone, by its task and by full precision."""
    bench, lines = contest.bench, []
    for name, choice in choices.items():
        for job, item in _golden_items(bench, name):
            ids = [
                generate(
                    [Request(prompt=item.ids, sampler=job.sampler, schedule=schedule)],
                    engines.fleet.engines,
                    engines.fleet.model,
                )[0].ids
                for schedule in (
                    choice.schedule,
                    Schedule.uniform(FULL_PRECISION.name, choice.schedule.windows),
                )
            ]
            lines.append(
                Golden(
                    id=f"{name}/{item.prompt.id}",
                    task=name,
                    prompt=item.prompt.prompt,
                    ids=ids[0],
                    full_precision_ids=ids[1],
                    schedule_digest=schedule_digest(choice.schedule, job.sampler, _here(bench)),
                )
            )
    return lines


def _golden_items(bench: Workbench, name: str) -> list[tuple[Job, Item]]:
    """Return (job, item) pairs: a task's own prompts, or some of every task for `default`."""
    jobs = bench.jobs
    if name != DEFAULT_TASK:
        return [(jobs[name], item) for item in jobs[name].test[:GOLDEN_PROMPTS]]
    sampler = bench.sampler(DEFAULT_TASK)
    each = max(1, GOLDEN_PROMPTS // len(jobs))
    return [
        (job, item) for job in jobs.values() if job.sampler == sampler for item in job.test[:each]
    ]


def _here(bench: Workbench) -> str:
    """Return the target whose engines answer on this machine."""
    return "cpu" if bench.ahead else bench.config.target


def _targets(bench: Workbench) -> tuple[str, ...]:
    """Return the targets of the bundle: the one asked for, and what stands in for it here."""
    return tuple(dict.fromkeys((bench.config.target, _here(bench))))


def _buckets(
    contest: Contest, engines: Engines, choices: Mapping[str, Choice]
) -> dict[str, list[int]]:
    """Return the shapes that passes of plans are padded to."""
    answers = [contest.bench.sampler(name).gen_length for name in choices]
    model = engines.folder.model
    return buckets_of(engines.folder.shape, answers, model.max_length).to_json()


def _graph(folder: Export, name: str) -> dict[str, Any]:
    graph = folder.graphs[name]
    return {
        "file": graph.file,
        "tail": graph.tail,
        "precision": graph.precision,
        "windows": list(graph.windows),
        "weights": list(graph.weights),
        "scales": None if graph.scales is None else [list(row) for row in graph.scales],
    }


def _options(engines: Engines) -> dict[str, Any]:
    """Return how the engines are loaded; the provider is the engine's target."""
    return {key: value for key, value in asdict(engines.options).items() if key != "provider"}


def _task(contest: Contest, name: str, choice: Choice, verdict: Verdict | None) -> dict[str, Any]:
    bench = contest.bench
    job = bench.jobs.get(name)
    sampler = bench.sampler(name)
    says = job.workload.says if job is not None else "any request without a task"
    asked = replace(contest, tighten=1.0).budget(name)
    return {
        "windows": choice.schedule.windows,
        "sampler": sampler.to_json(),
        "says": says,
        # A record for people; nothing runs what it names.
        "grader": None if job is None else job.workload.grader,
        "targets": {
            target: {
                "schedule": list(choice.schedule.precisions),
                "budgets": asdict(asked),
                "measured": {} if verdict is None else _measured(verdict, bench),
                "predicted": {
                    "mean_bits": choice.mean_bits,
                    "latency_ms": choice.latency_ms,
                    "memory_mib": choice.memory_mib,
                    "gain": choice.gain,
                    "loss": choice.loss,
                },
            }
            if target == bench.config.target
            else _stands_in(choice, bench)
            for target in _targets(bench)
        },
    }


def _stands_in(choice: Choice, bench: Workbench) -> dict[str, Any]:
    """Return what is known of a schedule on the target that stands in: the schedule alone."""
    return {
        "schedule": list(choice.schedule.precisions),
        "budgets": {},
        "measured": {"stands_in_for": bench.config.target},
        "predicted": {},
    }


def _measured(verdict: Verdict, bench: Workbench) -> dict[str, Any]:
    """Return a verdict for the manifest: what ships, flat, then what it was compared with.

    Of a target of TensorRT it says where quality and latency come from: nothing ran there.
    """
    whole = verdict_json(verdict)
    shipped = {k: v for k, v in whole.pop("shipped").items() if k not in ("label", "schedule")}
    if not bench.stands_in:
        return {**shipped, **whole}
    latency = "none given" if bench.latencies is None else bench.latencies.says
    where = {"quality_from": "the graphs that stand in, on cpu", "latency_from": latency}
    return {**where, **shipped, **whole}


def _files(folder: Export, graphs: Sequence[str]) -> dict[str, Path]:
    """Return path in the bundle to file: graphs, the weights they read, and the tokenizer."""
    paths = {folder.graphs[name].file for name in graphs} | {TOKENIZER}
    for name in graphs:
        paths.update(folder.graphs[name].weights)
    paths.update(path for path in folder.files if path.startswith("tokenizer/"))
    return {path: folder.folder / path for path in sorted(paths)}
