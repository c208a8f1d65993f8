"""What changing a single window does to whole answers: measured end to end, without labels.

The base runs in all windows but one, which runs another precision, and answers are denoised to
their end.  What counts is the share of the tokens that a grader reads which differ from full
precision's.  Where teacher forcing sees only what a window itself would commit, this also sees
other positions being committed, and errors that later windows build on, or repair.

It costs more: with W equal windows and P precisions about (P - 1) (W + 1) / 2 + 1 generations a
prompt, for all windows before the changed one are run once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from engines.build import Cache
from engines.schedule import SamplerConfig, Schedule
from tuner.costs import Reals
from tuner.evaluate import Fleet, Item, answer_all, token_agreement
from tuner.sensitivity import PromptTables


def single_changes(
    base: str, names: Sequence[str], windows: int
) -> Mapping[tuple[int, int], Schedule]:
    """Return the schedule of each change, by window and index of the precision."""
    return {
        (window, column): Schedule(tuple(name if at == window else base for at in range(windows)))
        for window in range(windows)
        for column, name in enumerate(names)
    }


def with_rollout(
    tables: PromptTables,
    items: Sequence[Item],
    sampler: SamplerConfig,
    base: str,
    fleet: Fleet,
    cache: Cache,
    full: NDArray[np.int64],
    read: NDArray[np.bool_],
    advance: Callable[[int], None] = lambda answers: None,
) -> PromptTables:
    """Return tables with what single changes of the base do, from the cache as far as it goes.

    Args:
        tables: Of the items, for the precisions [P] and windows [W].
        items: Prompts [N].
        sampler: How they are denoised.
        base: Name of the precision of the windows that are not changed.
        fleet: Has an engine for each precision.
        cache: Of answers.
        full: Full precision's answers [N, G].
        read: Tokens that count [N, G].
        advance: Told of the answers that are there.
    """
    changes = single_changes(base, tables.precisions, tables.kl.shape[1])
    answers = answer_all(items, sampler, list(changes.values()), fleet, cache, advance)
    wrong: Reals = np.zeros(tables.kl.shape)
    for (window, column), schedule in changes.items():
        wrong[:, window, column] = 1.0 - token_agreement(answers[schedule].ids, full, read)
    return replace(tables, rollout=wrong, rows=tables.rows + _rows(tables, base))


def _rows(tables: PromptTables, base: str) -> int:
    """Return the forward passes of rows that single changes take beside the tables' own.

    Counted with the passes of the traces, which are those of every schedule for fixed steps.
    """
    passes = tables.passes.sum(axis=0)
    others = len(tables.precisions) - (base in tables.precisions)
    later = np.cumsum(passes[::-1])[::-1]  # from each window to the end
    return int(passes.sum() + others * later.sum())
