"""Which denoising states a calibration looks at: by the share of the answer still masked.

A model sees few canvases that are nearly all masks and many that are nearly done; a weight should
be rounded well for both ends, where the first commitments are made and the last ones corrected.
So the states of full-precision trajectories fall into four buckets by the share still masked, and
more are taken from the two outer ones.  Temporal mask adaptive sampling, of DLLMQuant (2025).

Pure: no torch, no files; numbers are drawn from a seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engines.sampler import Pass

# Share of the states from each bucket, from the most masked to the least.
SHARES = (0.3, 0.2, 0.2, 0.3)


@dataclass(frozen=True, slots=True)
class State:
    """What a denoiser is given for one row, without padding.

    Attributes:
        ids: The canvas [L].
        asked: Positions that are asked for [M].
        masked: Share of the answer that is not yet decided, in (0, 1].
    """

    ids: NDArray[np.int32]
    asked: NDArray[np.int32]
    masked: float


@dataclass(frozen=True)
class StateLog:
    """Collects the states of a run; call it before each pass.  8 bytes a token and less."""

    states: list[State] = field(default_factory=list)

    def __call__(self, state: Pass) -> None:
        """Note the rows of a pass."""
        for row in range(len(state.ids)):
            self.states.append(
                State(
                    ids=state.ids[row, : state.lengths[row]].astype(np.int32),
                    asked=state.positions[row, : state.asked[row]].astype(np.int32),
                    masked=1.0 - float(state.progress[row]),
                )
            )


def sample_states(
    states: Sequence[State], count: int, seed: int, shares: Sequence[float] = SHARES
) -> list[State]:
    """Return up to `count` different states by their buckets, in the order in which they came.

    A bucket that is short gives all it has; the others give the rest, by their shares.

    Args:
        states: Of full-precision trajectories.
        count: How many; all where there are no more.
        seed: Of the choice.
        shares: Of each bucket; they sum to 1.  The first bucket is the most masked.

    Raises:
        ValueError: count is below 1, or the shares are none.
    """
    if count < 1 or not shares or min(shares) < 0 or abs(sum(shares) - 1) > 1e-9:
        raise ValueError(f"need count >= 1 and shares that sum to 1, got {count=}, {shares=}")
    bucket = buckets([state.masked for state in states], len(shares))
    there = np.bincount(bucket, minlength=len(shares))
    rng = np.random.default_rng(seed)
    chosen: list[int] = []
    for number, quota in enumerate(quotas(there, min(count, len(states)), shares)):
        members = np.flatnonzero(bucket == number)
        chosen += rng.permutation(members)[:quota].tolist()
    return [states[index] for index in sorted(chosen)]


def buckets(masked: Sequence[float], count: int) -> NDArray[np.int64]:
    """Return the bucket of each share still masked: 0 the most masked, count - 1 the least."""
    decided = 1.0 - np.asarray(masked, np.float64)
    return np.clip(np.floor(decided * count + 1e-6).astype(np.int64), 0, count - 1)


def quotas(there: NDArray[np.int64], count: int, shares: Sequence[float]) -> NDArray[np.int64]:
    """Return how many each bucket gives [buckets]: by its share, never more than it has.

    Args:
        there: How many each bucket has.
        count: How many all give together; at most the sum of `there`.
        shares: Of each bucket.
    """
    if count > there.sum():
        raise ValueError(f"{count} wanted of {there.sum()}")
    given = np.zeros(len(there), np.int64)
    weight = np.asarray(shares, np.float64)
    while (rest := count - int(given.sum())) > 0:
        room = there - given
        part = np.where(room > 0, weight, 0.0)
        if not part.any():  # only buckets without a share are left
            part = (room > 0).astype(np.float64)
        exact = rest * part / part.sum()
        whole = np.floor(exact).astype(np.int64)
        # The largest remainders first; ties to the more masked.
        for index in np.argsort(whole - exact, kind="stable")[: rest - int(whole.sum())]:
            whole[index] += 1
        given += np.minimum(whole, room)
    return given
