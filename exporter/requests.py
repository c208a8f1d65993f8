"""The tasks of an export, and their calibration prompts as requests: tokenized and checked.

Every name and number is checked here, before anything slow begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from calib_data.tasks import TASKS
from calib_data.workload import (
    Workload,
    WorkloadError,
    expand_specs,
    name_of_spec,
    workload_from_spec,
)
from engines.errors import InputError
from engines.model import ModelInfo
from engines.precision import FULL_PRECISION
from engines.sampler import Request
from engines.schedule import SamplerConfig, Schedule, passes_by_window
from engines.text import Tokenizer

# Prompts of each task whose denoising states the graphs are compared on.
_PARITY_PROMPTS = 3

Tasks = Mapping[str, tuple[Workload, SamplerConfig]]


def tasks_from_specs(
    specs: Sequence[str],
    settings: Mapping[str, int],
    task_settings: Mapping[str, Mapping[str, int]],
    windows: int,
) -> dict[str, tuple[Workload, SamplerConfig]]:
    """Return the workload and the sampler settings of each task by name.

    Args:
        specs: As given to `--task`; none for all built-in tasks.
        settings: steps, gen_length and block_length for every task.
        task_settings: The same for one task, over `settings`.
        windows: That each task's steps must fill.

    Raises:
        InputError: A task is unknown or its file at fault, or the numbers do not fit.
    """
    found: dict[str, tuple[Workload, SamplerConfig]] = {}
    for spec in expand_specs(specs) or tuple(TASKS):
        name = name_of_spec(spec)
        chosen = {**settings, **task_settings.get(name, {})}
        try:
            task = workload_from_spec(
                spec,
                steps=chosen.get("steps"),
                gen_length=chosen.get("gen_length"),
                block_length=chosen.get("block_length"),
            )
            sampler = SamplerConfig(
                steps=task.steps, gen_length=task.gen_length, block_length=task.block_length
            )
        except WorkloadError as error:
            raise InputError(f"--task {spec}: {error}") from error
        except ValueError as error:
            raise InputError(
                f"task {name!r}: {error}; give --steps, --gen-length, --block-length or "
                f"--task-set {name}.steps=.. that fit"
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


def check_windows(task: str, sampler: SamplerConfig, windows: int) -> None:
    """Check that every window of a task has a pass, so that it can be calibrated.

    Raises:
        InputError: One has none.
    """
    try:
        passes = passes_by_window(sampler, windows)
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
        try:
            prompts = task.prompts("calibration", count, seed)
        except WorkloadError as error:
            raise InputError(f"task {name!r}: {error}") from error
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
