"""Influence: how far what a window commits travels, by prompt.

    remask     1 + sum over the positions i still masked after w of
               KL(p_full(. | S)_i || p_full(. | S')_i) / commits of w,
               where S is the state after w, and S' the same with w's commits masked again

    counterfactual   1 + tokens committed after w that differ from the trace's answer /
               commits of w that differ from the trace's,
               where another precision makes w's commits from the state before w, and full
               precision goes on to the end.  Where the other precision makes the very commits of
               the trace, the one of lowest margin, p_full of its token less that of the runner-up,
               is put as its runner-up instead.

The 1 is the direct damage: without it the last window would count for nothing.  The re-mask form
takes two forward passes of a row for each window but the last.  The counterfactual takes the
window's own passes and all that follow, for each window but the last: with W equal windows about
(W + 1) / 2 generations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.backend import Backend
from engines.model import ModelInfo
from engines.sampler import Request, generate
from engines.schedule import Schedule
from engines.trace import Trace, TraceStep
from tuner.costs import Reals
from tuner.replay import Prompts, State, batches, kl_divergence, window_at


@dataclass(frozen=True, slots=True)
class Measured:
    """Values by prompt and window [N, W], and the forward passes of single rows they took."""

    values: Reals
    rows: int


def remask_influence(
    prompts: Prompts,
    full: Backend,
    windows: int,
    model: ModelInfo,
    batch: int,
    advance: Callable[[int], None],
) -> Measured:
    """Return I of each prompt and window [N, W], at least 1, in the re-mask form.

    A window in which a trace commits nothing, or after which nothing is masked, has I = 1.

    Args:
        prompts: Traces of full precision [N].
        full: Made them.
        windows: W.
        model: Its mask token stands for what is not decided.
        batch: Rows put before the engine at once.
        advance: Told of the rows of each batch done.
    """
    twins: list[State] = []  # the state after a window, then the same masked again
    commits: dict[tuple[int, int], int] = {}
    for index, trace in enumerate(prompts.traces):
        total = trace.request.sampler.gen_length
        of_step = np.array([window_at(step.committed, trace, windows) for step in trace.steps])
        for window in np.unique(of_step).tolist():
            mine = np.flatnonzero(of_step == window)
            last = int(mine[-1])
            if last + 1 == len(trace.steps):
                continue
            then = trace.steps[last + 1]
            changed = np.concatenate([trace.steps[step].positions for step in mine])
            masked = np.flatnonzero(then.ids == model.mask_id)
            erased = then.ids.copy()
            erased[changed] = model.mask_id
            before = then.committed - len(changed)
            twins.append(State(index, last, window, then.ids, masked, then.committed, total))
            twins.append(State(index, last, window, erased, masked, before, total))
            commits[index, window] = len(changed)
    values = np.ones((len(prompts.traces), windows))
    for rows in batches(twins, batch, model.vocab, together=2):
        logits = rows.logits(full, prompts)
        counts = np.array([len(state.asked) for state in rows.states[::2]])
        where = np.arange(logits.shape[1]) < counts[:, None]
        travelled = kl_divergence(logits[::2][where], logits[1::2][where])
        sums = np.bincount(np.repeat(np.arange(len(counts)), counts), travelled, len(counts))
        for state, value in zip(rows.states[::2], sums.tolist(), strict=True):
            values[state.trace, state.window] += value / commits[state.trace, state.window]
        advance(len(rows.states))
    return Measured(values, len(twins))


@dataclass(frozen=True, slots=True)
class _Turn:
    """A window of a trace that is answered again.

    Attributes:
        trace: Index of the trace.
        window: The window.
        steps: Of the trace, in the window; at least one.
        stop: Answer tokens decided where the window ends.
    """

    trace: int
    window: int
    steps: tuple[TraceStep, ...]
    stop: int


def counterfactual_influence(
    prompts: Prompts,
    target: Backend,
    full: Backend,
    windows: int,
    model: ModelInfo,
    batch: int,
    advance: Callable[[int], None],
) -> Measured:
    """Return I of each prompt and window [N, W], at least 1, in the counterfactual form.

    A window in which a trace commits nothing, or after which it takes no step, has I = 1.

    Args:
        prompts: Traces of full precision [N].
        target: Makes a window's commits in place of full precision.
        full: Made the traces.
        windows: W.
        model: Its mask token stands for what is not decided.
        batch: Answers denoised at once.
        advance: Told of the rows of each batch done.
    """
    turns = [turn for at in range(len(prompts.traces)) for turn in _turns(prompts, at, windows)]
    turns.sort(key=lambda turn: (turn.window, len(turn.steps[0].ids)))
    values, rows = np.ones((len(prompts.traces), windows)), 0
    start = 0
    while start < len(turns):
        part = turns[start : start + batch]
        part = [turn for turn in part if turn.window == part[0].window]
        start += len(part)
        before = [_answer(prompts.traces[turn.trace], turn.steps[0]) for turn in part]
        stops = [turn.stop for turn in part]
        made, passes = _go_on(part, prompts, target, model, before, stops)
        changed = []
        for index, (turn, own) in enumerate(zip(part, before, strict=True)):
            answer = np.array(prompts.traces[turn.trace].generation.ids)
            fresh = np.flatnonzero((own == model.mask_id) & (made[index] != model.mask_id))
            at = _committed(turn, prompts.traces[turn.trace])
            same = np.isin(fresh, at) & (made[index][fresh] == answer[fresh])
            changed.append(int(np.count_nonzero(~same)))
            if not changed[-1]:
                place, token = _runner_up(turn, prompts.traces[turn.trace], model.mask_id)
                made[index][place] = token
                changed[-1] = 1
        ends, more = _go_on(part, prompts, full, model, made, [None] * len(part))
        for turn, own, end, count in zip(part, made, ends, changed, strict=True):
            later = own == model.mask_id
            answer = np.array(prompts.traces[turn.trace].generation.ids)
            differs = np.count_nonzero(end[later] != answer[later])
            values[turn.trace, turn.window] += differs / count
        rows += passes + more
        advance(passes + more)
    return Measured(values, rows)


def _turns(prompts: Prompts, index: int, windows: int) -> list[_Turn]:
    """Return the windows of a trace that something follows."""
    trace = prompts.traces[index]
    total = trace.request.sampler.gen_length
    found: dict[int, list[TraceStep]] = {}
    for step in trace.steps:
        found.setdefault(window_at(step.committed, trace, windows), []).append(step)
    last = max(found)
    return [
        _Turn(index, window, tuple(steps), -(-(window + 1) * total // windows))
        for window, steps in found.items()
        if window != last
    ]


def _answer(trace: Trace, step: TraceStep) -> NDArray[np.int64]:
    """Return the answer part of a state [G]."""
    return step.ids[len(trace.request.prompt) :].copy()


def _committed(turn: _Turn, trace: Trace) -> NDArray[np.int64]:
    """Return the answer positions that the trace commits in the window."""
    found = np.concatenate([step.positions for step in turn.steps])
    return found - len(trace.request.prompt)


def _runner_up(turn: _Turn, trace: Trace, mask_id: int) -> tuple[int, int]:
    """Return the commit of lowest margin: its answer position, and the second best token."""
    log_p = np.concatenate([step.log_p for step in turn.steps]).copy()
    tokens = np.concatenate([step.tokens for step in turn.steps])
    each = np.arange(len(tokens))
    own = np.exp(log_p[each, tokens])
    log_p[each, tokens] = log_p[:, mask_id] = -np.inf
    second = log_p.argmax(axis=1)
    lowest = int(np.argmin(own - np.exp(log_p[each, second])))
    return int(_committed(turn, trace)[lowest]), int(second[lowest])


def _go_on(
    part: Sequence[_Turn],
    prompts: Prompts,
    engine: Backend,
    model: ModelInfo,
    begun: Sequence[NDArray[np.int64]],
    stops: Sequence[int | None],
) -> tuple[list[NDArray[np.int64]], int]:
    """Return answers begun elsewhere as an engine goes on with them [G] each, and the rows."""
    name = engine.precision.name
    requests = []
    for turn, own, stop in zip(part, begun, stops, strict=True):
        asked = prompts.traces[turn.trace].request
        requests.append(
            Request(
                prompt=asked.prompt,
                sampler=asked.sampler,
                schedule=Schedule.uniform(name, 1),
                task=f"{asked.task}, prompt {prompts.called(turn.trace)}",
                begun=tuple(own.tolist()),
                stop=stop,
            )
        )
    done = generate(requests, {name: engine}, model)
    return [np.array(each.ids, np.int64) for each in done], sum(each.passes for each in done)
