"""Figures of answering: the demo's bundle against PyTorch, against uniform bundles, its overhead.

A round answers a fresh batch of test prompts of every task, one batch a task, with one thread.
Tokens are the committed positions of the answers, end-of-sequence padding included, so that both
sides of a comparison are charged for the same work whatever they answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from calib_data.workload import workload_from_name
from engines.manifest import DEFAULT_TASK, TOKENIZER
from engines.ort import OrtBackend
from engines.precision import FULL_PRECISION
from engines.runtime import Runtime
from engines.sampler import Request, generate
from engines.schedule import SamplerConfig, Schedule
from engines.text import Tokenizer, tokenizer_from_file
from exporter.checkpoint import load_denoiser, model_info, read_checkpoint
from exporter.folder import read_export
from tests.bench import torch_loop
from tests.bench.figure import Figure, median_interval, seconds_of, speed_figure
from tuner.config import TuneConfig

ROOT = Path(__file__).resolve().parent.parent.parent
BUNDLE = ROOT / "demo" / "bundle"
EXPORT = ROOT / "demo" / "export"
CHECKPOINT = ROOT / "calib_data" / "reference"
ROUNDS = {1: 15, 8: 15}

# Prompts a task, and points, that decide whether a uniform precision is good enough.
JUDGED = 256
MAX_LOSS = TuneConfig.max_loss

Prompts = dict[str, list[str]]


def tasks_of(runtime: Runtime) -> dict[str, SamplerConfig]:
    """Return the sampler settings of each task of a bundle, without `default`."""
    tasks = runtime.bundle.manifest.tasks
    return {name: task.sampler for name, task in tasks.items() if name != DEFAULT_TASK}


def prompts_by_round(names: Sequence[str], batch: int, rounds: int) -> list[Prompts]:
    """Return test prompts for each round and task, none twice."""
    drawn = {
        name: [one.prompt for one in workload_from_name(name).prompts("test", batch * rounds)]
        for name in names
    }
    return [
        {name: texts[batch * turn : batch * (turn + 1)] for name, texts in drawn.items()}
        for turn in range(rounds)
    ]


def answer_all(runtime: Runtime, prompts: Prompts) -> None:
    """Answer one batch a task."""
    for name, texts in prompts.items():
        runtime.generate(texts, task=name)


def speedup(name: str, batch: int) -> Figure:
    """Return the tokens a second of the demo's bundle against the PyTorch loop's."""
    runtime = Runtime.load(BUNDLE, threads=1)
    model = runtime.bundle.manifest.model
    checkpoint = read_checkpoint(CHECKPOINT)
    if model_info(checkpoint).digest != model.digest:
        raise ValueError(f"{BUNDLE} is not of {CHECKPOINT}; make demo again")
    torch.set_num_threads(1)
    denoiser = load_denoiser(checkpoint)
    tokenizer = tokenizer_of(runtime)
    tasks = tasks_of(runtime)
    rounds = prompts_by_round(list(tasks), batch, ROUNDS[batch])
    ids = [
        {task: [tokenizer.encode(text) for text in texts] for task, texts in prompts.items()}
        for prompts in rounds
    ]

    def theirs(turn: int) -> None:
        for task, rows in ids[turn].items():
            torch_loop.generate(denoiser, rows, tasks[task], model.eos_id)

    seconds = seconds_of(
        {"cadenza": lambda turn: answer_all(runtime, rounds[turn]), "torch": theirs}, len(rounds)
    )
    return speed_figure(
        name,
        "PyTorch fp32 loop, same model and sampler rule, inference_mode, "
        f"scaled_dot_product_attention, batch {batch}, one thread",
        "tokens/s",
        float(batch * sum(sampler.gen_length for sampler in tasks.values())),
        seconds["cadenza"],
        seconds["torch"],
    )


def with_uniform(runtime: Runtime, precision: str) -> Runtime:
    """Return a runtime on the same engines that runs one precision in every window."""
    manifest = runtime.bundle.manifest
    tasks = {
        name: replace(
            task,
            targets={
                target: replace(tuned, schedule=Schedule.uniform(precision, task.windows))
                for target, tuned in task.targets.items()
            },
        )
        for name, task in manifest.tasks.items()
    }
    bundle = replace(runtime.bundle, manifest=replace(manifest, tasks=tasks))
    return Runtime(bundle, runtime.target, runtime.engines, tokenizer_of(runtime))


def tokenizer_of(runtime: Runtime) -> Tokenizer:
    """Return the tokenizer of a bundle."""
    bundle = runtime.bundle
    return tokenizer_from_file(bundle.path(TOKENIZER), bundle.manifest.model)


def accuracy(runtime: Runtime, task: str) -> float:
    """Return the percentage of tuning prompts that a bundle answers rightly."""
    workload = workload_from_name(task)
    assert workload.grade is not None
    prompts = [one.prompt for one in workload.prompts("tuning", JUDGED)]
    answers = runtime.generate(prompts, task=task)
    right = [workload.grade(p, answer.text) for p, answer in zip(prompts, answers, strict=True)]
    return 100.0 * sum(right) / len(right)


def mixed_over_best_uniform() -> Figure:
    """Return the tokens a second of the demo's bundle against the best uniform choice's.

    That is, for each task, the fastest precision whose accuracy on tuning prompts is no more
    than MAX_LOSS points below full precision's, or below the bundle's own where that is lower.
    """
    shipped = Runtime.load(BUNDLE, threads=1)
    uniform = {name: with_uniform(shipped, name) for name in shipped.engines}
    tasks = tasks_of(shipped)
    best_of_all = max(shipped.engines.values(), key=lambda one: one.precision.bits).precision.name
    rounds = prompts_by_round(list(tasks), 8, ROUNDS[8])

    def run(runtime: Runtime, task: str) -> Callable[[int], None]:
        return lambda turn: answer_all(runtime, {task: rounds[turn][task]})

    every = {"": shipped, **uniform}
    seconds = seconds_of(
        {f"{name}/{task}": run(one, task) for name, one in every.items() for task in tasks},
        len(rounds),
    )
    best = np.zeros(len(rounds))
    for task in tasks:
        scores = {name: accuracy(one, task) for name, one in every.items()}
        floor = min(scores[best_of_all] - MAX_LOSS, scores[""])
        within = [name for name in uniform if scores[name] >= floor]
        best += min((seconds[f"{name}/{task}"] for name in within), key=np.median)
    return speed_figure(
        "mixed_over_best_uniform",
        "for each task the fastest uniform precision within the same quality floor, batch 8, "
        "one thread",
        "tokens/s",
        float(8 * sum(sampler.gen_length for sampler in tasks.values())),
        sum((seconds[f"/{task}"] for task in tasks), np.zeros(len(rounds))),
        best,
    )


def runtime_overhead() -> Figure:
    """Return the share of wall time outside ONNX Runtime's own call, at batch 8."""
    runtime = Runtime.load(BUNDLE, threads=1)
    rounds = prompts_by_round(list(tasks_of(runtime)), 8, ROUNDS[8])
    inside = 0.0

    def timed(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal inside
            start = time.perf_counter()
            result = run(*args)
            inside += time.perf_counter() - start
            return result

        return call

    for engine in runtime.engines.values():
        # The innermost call there is: what it leaves out is ours, the backend's Python too.
        engine._run = timed(engine._run)  # type: ignore[attr-defined]
    answer_all(runtime, rounds[0])
    shares = []
    for prompts in rounds:
        inside = 0.0
        start = time.perf_counter()
        answer_all(runtime, prompts)
        shares.append(1.0 - inside / (time.perf_counter() - start))
    return Figure(
        name="runtime_overhead",
        value=float(np.median(shares)),
        unit="share of wall time",
        against="at most 0.05 outside the engine's own call, batch 8, one thread",
        reference=0.05,
        spread=median_interval(shares),
        n=len(shares),
    )


def full_precision_generations() -> Figure:
    """Return the reference checkpoint's answers a second at fp32, batch 64, on every core."""
    export = read_export(EXPORT)
    precision = export.precisions[FULL_PRECISION.name]
    engine = OrtBackend.load(export.path("fp32.serve"), None, precision)
    tokenizer = tokenizer_from_file(export.tokenizer, export.model)
    batch, rounds = 64, 15
    name, task = next(iter(export.tasks.items()))
    schedule = Schedule.uniform(precision.name, export.windows)
    requests = [
        Request(prompt=tokenizer.encode(one.prompt), sampler=task.sampler, schedule=schedule)
        for one in workload_from_name(name).prompts("test", batch)
    ]
    engines = {precision.name: engine}
    seconds = seconds_of({"fp32": lambda turn: generate(requests, engines, export.model)}, rounds)
    speeds = batch / seconds["fp32"]
    return Figure(
        name="full_precision_generations",
        value=float(np.median(speeds)),
        unit="answers/s",
        against="at least 100 on two cores, batch 64, 12 steps",
        reference=100.0,
        spread=median_interval(speeds.tolist()),
        n=rounds,
    )
