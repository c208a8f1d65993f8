"""Record full-precision trajectories: a sampler run on the trace tail that keeps what it saw.

A `Trace` holds the states before each step, what was committed there, and the full log
probabilities at those positions.  Everything the sensitivity needs can be computed from it by
putting the same states in front of another engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engines.backend import Backend, Floats, Ids, Mask, Served, served_from_logits
from engines.errors import BackendError
from engines.model import ModelInfo
from engines.precision import Precision
from engines.sampler import Committed, Generation, Pass, Request, generate
from engines.schedule import Schedule, window_of


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One step of one row; L is its prompt plus answer, n what the step commits.

    Attributes:
        committed: Answer tokens decided before the step.
        ids: The canvas before the step [L], no padding.
        positions: Canvas positions committed by the step, most probable first [n].
        tokens: The tokens put there [n].
        log_p: Log probabilities over the vocabulary at those positions [n, V], nats; the mask
            token's is very low, not -inf.
    """

    committed: int
    ids: Ids
    positions: Ids
    tokens: Ids
    log_p: Floats


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded trajectory.

    Attributes:
        request: What was asked for.
        generation: The answer and what it took.
        steps: States and log probabilities, a step each.
    """

    request: Request
    generation: Generation
    steps: tuple[TraceStep, ...]

    def progress(self, step: int) -> float:
        """Return the fraction of the answer decided before `steps[step]`."""
        return self.steps[step].committed / self.request.sampler.gen_length


def record(
    requests: Sequence[Request],
    full: Backend,
    model: ModelInfo,
    batch: int = 32,
    on_pass: Callable[[Pass], None] | None = None,
) -> list[Trace]:
    """Return the trace of each request, in their order.

    Args:
        requests: What to answer.  Their schedules do not matter: `full` runs every window.
        full: The full-precision engine; its trace tail is used.
        model: Special ids, vocabulary and the longest canvas.
        batch: Rows answered at once; bounds memory, changes no trace.
        on_pass: Called before each pass; requests are counted within the batch.

    Raises:
        InputError: A prompt is not of the model, as in `generate`.
        BackendError: The engine failed, or gave logits that are not finite.
        ValueError: batch is below 1.
    """
    if batch < 1:
        raise ValueError(f"batch >= 1 must hold, got {batch}")
    return [
        trace
        for start in range(0, len(requests), batch)
        for trace in _record_batch(requests[start : start + batch], full, model, on_pass)
    ]


def expected_passes(traces: Sequence[Trace], windows: int) -> NDArray[np.float64]:
    """Return the passes in each window [W], mean over traces; for fixed steps `passes_by_window`.

    Raises:
        ValueError: No traces, or fewer than 1 window.
    """
    if not traces or windows < 1:
        raise ValueError(f"need traces and windows >= 1, got {len(traces)}, {windows}")
    passes = np.zeros(windows)
    for trace in traces:
        before = np.array([step.committed for step in trace.steps])
        of_step = window_of(before, trace.request.sampler.gen_length, windows)
        passes += np.bincount(of_step, minlength=windows)
    return passes / len(traces)


def _record_batch(
    requests: Sequence[Request],
    full: Backend,
    model: ModelInfo,
    on_pass: Callable[[Pass], None] | None,
) -> list[Trace]:
    """Return the traces of one batch."""
    tail = _LogitsKept(full)
    steps: list[list[TraceStep]] = [[] for _ in requests]

    def keep(state: Pass, committed: Committed) -> None:
        log_p = _log_softmax(tail.kept[committed.rows, committed.columns])
        if np.isnan(log_p).any():
            raise BackendError(
                f"engine {full.precision.name!r} gave logits that are not finite in step "
                f"{state.step}; check the checkpoint's weights"
            )
        edges = np.searchsorted(committed.rows, np.arange(len(state.requests) + 1))
        for row, index in enumerate(state.requests.tolist()):
            mine = slice(int(edges[row]), int(edges[row + 1]))
            steps[index].append(
                TraceStep(
                    committed=int(state.committed[row]),
                    ids=state.ids[row, : state.lengths[row]].copy(),
                    positions=committed.positions[mine].copy(),
                    tokens=committed.tokens[mine].copy(),
                    log_p=log_p[mine].copy(),
                )
            )

    name = full.precision.name
    uniform = [
        replace(request, schedule=Schedule.uniform(name, request.schedule.windows))
        for request in requests
    ]
    answers = generate(uniform, {name: tail}, model, on_pass=on_pass, record=keep)
    return [
        Trace(request, answer, tuple(taken))
        for request, answer, taken in zip(requests, answers, steps, strict=True)
    ]


class _LogitsKept:
    """A backend that serves from the trace tail and keeps the logits of its last pass."""

    def __init__(self, full: Backend) -> None:
        self.full = full
        self.kept: Floats = np.zeros((0, 0, 0), np.float32)

    @property
    def precision(self) -> Precision:
        return self.full.precision

    def serve(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Served:
        self.kept = self.full.logits(ids, mask, positions, progress)
        return served_from_logits(self.kept)

    def logits(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Floats:
        return self.full.logits(ids, mask, positions, progress)


def _log_softmax(logits: Floats) -> Floats:
    """Return log probabilities of logits [..., V]."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    out: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return out
