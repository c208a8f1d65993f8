"""`cadenza eval`: a bundle's answers to test prompts, graded and compared with full precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from calib_data.workload import (
    Workload,
    WorkloadError,
    expand_specs,
    graders_by_task,
    name_of_spec,
    workload_from_spec,
)
from engines.errors import InputError
from engines.manifest import DEFAULT_TASK
from engines.precision import FULL_PRECISION
from engines.runtime import Answer, Runtime, load_engine
from engines.sampler import Request, generate
from engines.schedule import Schedule, weighted_mean
from engines.terminal import Progress, table
from tuner.evaluate import grades
from tuner.objective import wilson_interval

Share = dict[str, float | int] | None


def evaluate_bundle(
    path: Path,
    specs: Sequence[str],
    target: str | None,
    limit: int,
    seed: int,
    graders: Sequence[str] = (),
) -> dict[str, dict[str, Any]]:
    """Return for each task its accuracy, its agreement with full precision, bits and passes.

    Args:
        path: The bundle.
        specs: As given to `--task`; none for every built-in task of the bundle.  A task that the
            bundle has no schedule for follows `default`.
        target: Where it runs; None where it runs best here.
        limit: Most prompts of a task.
        seed: Of the prompts.
        graders: How answers to prompt files are judged: GRADER, or NAME=GRADER for one task.

    Raises:
        InputError: A task, a file or a grader is at fault, or the bundle is damaged.
    """
    runtime = Runtime.load(path, target)
    names = [name for name in runtime.tasks if name != DEFAULT_TASK]
    specs = expand_specs(specs) or _builtin(names)
    workloads = _workloads(specs, graders, runtime)
    found: dict[str, dict[str, Any]] = {}
    for workload in workloads:
        try:
            prompts = workload.prompts("test", limit, seed)
        except WorkloadError as error:
            raise InputError(f"task {workload.name!r}: {error}") from error
        if not prompts:
            raise InputError(
                f"task {workload.name!r} has no test prompts; add lines to its file, or set their "
                f'"split" to "test"'
            )
        task = workload.name if workload.name in runtime.tasks else DEFAULT_TASK
        texts = [prompt.prompt for prompt in prompts]
        with Progress(len(texts), f"eval {workload.name}") as progress:
            answers = runtime.generate(texts, task, on_answers=progress.advance)
        hits = grades(workload, texts, [answer.text for answer in answers])
        found[workload.name] = {
            "schedule": task,
            "n": len(texts),
            "grader": workload.grader,
            "accuracy": _share(hits or ()),
            "agreement": _agreement(runtime, task, texts, answers),
            "mean_bits": weighted_mean(
                [answer.bits for answer in answers], [answer.passes for answer in answers]
            ),
            "passes": sum(answer.passes for answer in answers) / len(answers),
            "tokens": sum(answer.tokens for answer in answers) / len(answers),
            "scored_step": scored_step(workload.scored, answers),
        }
    return found


def held_out_table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the result as a table for people."""
    rows = [
        [
            name,
            each["n"],
            _percent(each["accuracy"]),
            _percent(each["agreement"]),
            None if each["agreement"] is None else each["agreement"]["n"],
            f"{each['mean_bits']:.2f}",
            f"{each['passes']:.1f}",
            each["scored_step"],
        ]
        for name, each in found.items()
    ]
    header = [
        "task",
        "prompts",
        "accuracy %",
        "agreement %",
        "of prompts",
        "bits",
        "passes",
        "step",
    ]
    return table(header, rows)


def scored_step(scored: str, answers: Sequence[Answer]) -> float:
    """Return the median step, from 1, in which the tokens that the grader reads were committed.

    Args:
        scored: "all" tokens before the end, the first ("start") or the last ("end").
        answers: At least one.
    """
    steps: list[int] = []
    for answer in answers:
        own = answer.commit_step[: max(answer.tokens, 1)]
        steps += {"start": own[:1], "end": own[-1:]}.get(scored, own)
    return float(median(steps))


def _builtin(names: Sequence[str]) -> list[str]:
    from calib_data.tasks import TASKS

    known = [name for name in names if name in TASKS]
    if not known:
        raise InputError(
            f"the bundle's tasks {', '.join(names)} are not built in; give their prompts, for "
            f"instance --task {names[0] if names else 'NAME'}=FILE.jsonl, or --task harness:TASK"
        )
    return known


def _workloads(specs: Sequence[str], graders: Sequence[str], runtime: Runtime) -> list[Workload]:
    try:
        asked = graders_by_task(graders, specs)
    except WorkloadError as error:
        raise InputError(f"{error}") from error
    return [_workload(spec, runtime, asked.get(name_of_spec(spec))) for spec in specs]


def _workload(spec: str, runtime: Runtime, grader: str | None) -> Workload:
    name = name_of_spec(spec)
    tasks = runtime.bundle.manifest.tasks
    settings = tasks[name if name in tasks else DEFAULT_TASK].sampler
    try:
        return workload_from_spec(
            spec,
            steps=settings.steps,
            gen_length=settings.gen_length,
            block_length=settings.block_length,
            grader=grader,
        )
    except WorkloadError as error:
        raise InputError(f"task {spec!r}: {error}") from error


def _agreement(
    runtime: Runtime, task: str, texts: Sequence[str], answers: Sequence[Answer]
) -> Share:
    """Return the share of answers equal to full precision's, or None where none is known."""
    manifest = runtime.bundle.manifest
    serving = manifest.serving(runtime.target)
    if FULL_PRECISION.name in serving:
        name = FULL_PRECISION.name
        full = runtime.engines.get(name) or load_engine(
            runtime.bundle, serving[name], device=runtime.device
        )
        settings = manifest.tasks[task]
        uniform = Schedule.uniform(name, settings.windows)
        same = []
        size = manifest.shape.batch[2]
        for start in range(0, len(texts), size):
            requests = [
                Request(prompt=runtime.encode(text), sampler=settings.sampler, schedule=uniform)
                for text in texts[start : start + size]
            ]
            made = generate(requests, {name: full}, manifest.model)
            same += [
                answer.ids == one.ids
                for answer, one in zip(answers[start : start + size], made, strict=True)
            ]
        return _share(same)
    known = {
        golden.prompt: golden.full_precision_ids
        for golden in runtime.bundle.golden
        if golden.task == task
    }
    return _share(
        [
            answer.ids == known[text]
            for text, answer in zip(texts, answers, strict=True)
            if text in known
        ]
    )


def _share(hits: Sequence[bool]) -> Share:
    if not hits:
        return None
    found = wilson_interval(sum(hits), len(hits))
    return {"mean": found.mean, "low": found.low, "high": found.high, "n": len(hits)}


def _percent(share: Share) -> str | None:
    if share is None:
        return None
    return f"{100 * share['mean']:.1f} [{100 * share['low']:.1f}, {100 * share['high']:.1f}]"
