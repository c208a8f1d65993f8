"""Trajectories of full precision on prompts of a task: what its windows decide, pass by pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from engines.backend import Backend
from engines.model import ModelInfo
from engines.precision import FULL_PRECISION
from engines.sampler import Request
from engines.schedule import SamplerConfig, Schedule
from engines.trace import Trace, record
from tuner.evaluate import EVALUATION_BATCH, Item


def trace_items(
    items: Sequence[Item],
    sampler: SamplerConfig,
    task: str,
    full: Backend,
    model: ModelInfo,
    advance: Callable[[int], None] = lambda rows: None,
) -> list[Trace]:
    """Return the trace of each item.

    Args:
        items: Prompts of a task.
        sampler: How they are denoised.
        task: Its name.
        full: The full-precision engine.
        model: Special ids, vocabulary and the longest canvas.
        advance: Told of the rows of each pass.

    Raises:
        BackendError: The engine failed; names window, step and prompt.
    """
    uniform = Schedule.uniform(FULL_PRECISION.name, 1)
    asked = [
        Request(prompt=item.ids, sampler=sampler, schedule=uniform, task=task) for item in items
    ]
    # Messages name the task of a request; these name the prompt with it.
    named = [
        replace(request, task=f"{task}, prompt {item.prompt.id!r}")
        for request, item in zip(asked, items, strict=True)
    ]
    made = record(
        named,
        full,
        model,
        batch=EVALUATION_BATCH,
        on_pass=lambda state: advance(len(state.requests)),
    )
    return [replace(trace, request=request) for trace, request in zip(made, asked, strict=True)]
