"""The tasks of an export, and their calibration prompts as requests: tokenized and checked.

Every name and number is checked here, before anything slow begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from calib_data.tasks import TASKS
from calib_data.workload import Workload, WorkloadError, workload_from_spec
from engines.errors import InputError
from engines.model import ModelInfo
from engines.precision import FULL_PRECISION
from engines.sampler import Request
from engines.schedule import (
    LOW_CONFIDENCE,
    THRESHOLD,
    SamplerConfig,
    Schedule,
    fixed_steps_like,
    passes_by_window,
)
from engines.text import Tokenizer

# Prompts of each task whose denoising states the graphs are compared on.
_PARITY_PROMPTS = 3

# Sampler settings that a command may give, for every task or for one.
SETTINGS = ("steps", "gen_length", "block_length", "threshold")

Settings = Mapping[str, int | float]
Tasks = Mapping[str, tuple[Workload, SamplerConfig]]


def tasks_from_specs(
    specs: Sequence[str],
    settings: Settings,
    task_settings: Mapping[str, Settings],
    windows: int,
) -> dict[str, tuple[Workload, SamplerConfig]]:
    """Return the workload and the sampler settings of each task by name.

    Args:
        specs: NAME or NAME=FILE.jsonl; none for all built-in tasks.
        settings: Some of SETTINGS, for every task.
        task_settings: The same for one task, over `settings`; its steps go before a threshold
            for every task, and the other way round.
        windows: That each task's steps must fill.

    Raises:
        InputError: A task is unknown or its file at fault, or the numbers do not fit.
    """
    found: dict[str, tuple[Workload, SamplerConfig]] = {}
    for spec in specs or tuple(TASKS):
        name = spec.partition("=")[0]
        own = _chosen(name, settings, task_settings.get(name, {}))
        lengths = {key: int(value) for key, value in own.items() if key != "threshold"}
        try:
            task = workload_from_spec(spec, **lengths)
            sampler = SamplerConfig(
                steps=task.gen_length if "threshold" in own else task.steps,
                gen_length=task.gen_length,
                block_length=task.block_length,
                rule=THRESHOLD if "threshold" in own else LOW_CONFIDENCE,
                threshold=own.get("threshold"),
            )
        except WorkloadError as error:
            raise InputError(f"--task {spec}: {error}") from error
        except ValueError as error:
            raise InputError(
                f"task {name!r}: {error}; give --steps, --gen-length, --block-length, "
                f"--threshold or --task-set {name}.steps=.. that fit"
            ) from error
        if task.name in found:
            raise InputError(f"task {task.name!r} is given twice; rename one")
        check_windows(task.name, sampler, windows)
        found[task.name] = (task, sampler)
    unknown = sorted(set(task_settings) - set(found))
    if unknown:
        raise InputError(
            f"--task-set names the task {unknown[0]!r}, exported are {', '.join(found)}; add "
            f"--task {unknown[0]}"
        )
    return found


def _chosen(name: str, general: Settings, own: Settings) -> dict[str, int | float]:
    """Return the settings of a task: its own go before those for every task."""
    other = {"steps": "threshold", "threshold": "steps"}
    for given, where in ((general, "--"), (own, f"--task-set {name}.")):
        if "steps" in given and "threshold" in given:
            raise InputError(
                f"{where}steps and {where}threshold are both given, but by threshold an answer "
                f"takes as many passes as it needs; leave one out"
            )
    kept = {key: value for key, value in general.items() if other.get(key) not in own}
    return {**kept, **own}


def at_every_token(request: Request) -> Request:
    """Return a request by which calibration sees every point of progress, where its own may not.

    By threshold an answer may jump over windows; with one token a step it passes all of them.
    """
    if request.sampler.rule != THRESHOLD:
        return request
    return replace(request, sampler=replace(request.sampler, rule=LOW_CONFIDENCE, threshold=None))


def check_windows(task: str, sampler: SamplerConfig, windows: int) -> None:
    """Check that every window of a task has a pass, so that it can be calibrated.

    Raises:
        InputError: One has none.
    """
    try:
        passes = passes_by_window(fixed_steps_like(sampler, windows), windows)
    except ValueError as error:
        raise InputError(f"task {task!r}: {error}; use fewer --windows or more --steps") from error
    if 0 in passes:
        raise InputError(
            f"task {task!r}: window {passes.index(0)} of {windows} holds none of the "
            f"{sampler.steps} steps; use fewer --windows or more --steps"
        )


def requests_from_tasks(
    tasks: Tasks, tokenizer: Tokenizer, model: ModelInfo, count: int, seed: int
) -> list[Request]:
    """Return up to `count` calibration prompts of each task as requests.

    Raises:
        InputError: A task has no calibration prompt, or one is not of the model; names it.
    """
    requests = []
    for name, (task, sampler) in tasks.items():
        prompts = task.prompts("calibration", count, seed)
        if not prompts:
            raise InputError(
                f"task {name!r} has no calibration prompts; add lines to its file, or give some "
                f'"split": "calibration"'
            )
        for prompt in prompts:
            where = f"task {name!r}, prompt {prompt.id!r}"
            try:
                ids = tokenizer.encode(prompt.prompt)
            except InputError as error:
                raise InputError(f"{where}: {error}") from error
            if len(ids) + sampler.gen_length > model.max_length:
                raise InputError(
                    f"{where} has {len(ids)} tokens, with the answer's {sampler.gen_length} more "
                    f"than the model's {model.max_length}; shorten it or lower --gen-length"
                )
            schedule = Schedule.uniform(FULL_PRECISION.name, 1)
            requests.append(Request(prompt=ids, sampler=sampler, schedule=schedule, task=name))
    return requests


def few_of_each_task(requests: Sequence[Request]) -> list[Request]:
    """Return the first requests of each task: one ragged batch."""
    tasks = dict.fromkeys(request.task for request in requests)
    return [
        request
        for task in tasks
        for request in [r for r in requests if r.task == task][:_PARITY_PROMPTS]
    ]


def random_requests(model: ModelInfo, sampler: SamplerConfig, typical: int) -> list[Request]:
    """Return two requests of random tokens, a short and a typical one, the same every time."""
    rng = np.random.default_rng(0)
    plain = [i for i in range(model.vocab) if i not in (model.mask_id, model.eos_id)]
    room = model.max_length - sampler.gen_length
    return [
        Request(
            prompt=tuple(rng.choice(plain, size=min(length, room)).tolist()),
            sampler=sampler,
            schedule=Schedule.uniform(FULL_PRECISION.name, 1),
        )
        for length in (3, typical)
    ]
