"""The commit rule: which of the asked positions a pass decides.

A pure function of what the engine gave and of the row's state, the same for every rule: a row
commits as many of its most probable positions as are due, or all that reach its threshold if these
are more.  Fixed steps have an infinite threshold, the threshold rule has one token due.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engines.backend import Floats


class Chosen(NamedTuple):
    """What is committed: N positions of all B rows, row by row, most probable first.

    Attributes:
        counts: How many of each row [B].
        rows: Row of each [N].
        columns: Column of the asked positions of each [N].
    """

    counts: NDArray[np.int64]
    rows: NDArray[np.intp]
    columns: NDArray[np.intp]


def choose(
    probability: Floats,
    asked: NDArray[np.int64],
    due: NDArray[np.int64],
    threshold: NDArray[np.float64] | None,
) -> Chosen:
    """Return what a pass commits; ties go to the lowest index.

    Args:
        probability: Of the token at each asked position [B, M], finite.
        asked: How many of a row's positions count [B], from 1 to M; the others stand in.
        due: The fewest that each row commits [B], at least 1, at most `asked`.
        threshold: Least probability of what is committed beyond these [B], compared in float64;
            infinite for rows of fixed steps; None where all are.
    """
    width = probability.shape[1]
    if np.count_nonzero(asked != width):
        probability = np.where(np.arange(width) < asked[:, None], probability, -1.0)
    counts = due
    if threshold is not None:
        counts = np.maximum(due, np.count_nonzero(probability >= threshold[:, None], axis=1))
    most = int(counts.max())
    chosen = (-probability).argsort(axis=1, kind="stable")[:, :most]
    if not np.count_nonzero(counts != most):
        return Chosen(counts, np.repeat(np.arange(len(chosen)), most), chosen.reshape(-1))
    wanted = np.arange(most) < counts[:, None]
    return Chosen(counts, np.nonzero(wanted)[0], chosen[wanted])
