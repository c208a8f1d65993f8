"""Influence: how far what a window commits travels, by prompt.

    remask     1 + sum over the positions i still masked after w of
               KL(p_full(. | S)_i || p_full(. | S')_i) / commits of w,
               where S is the state after w, and S' the same with w's commits masked again

The 1 is the direct damage: without it the last window would count for nothing.  The re-mask form
takes two forward passes of a row for each window but the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engines.backend import Backend
from engines.model import ModelInfo
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
