"""Buckets: the few shapes that plans run at, so that a captured graph can be run again.

A pass of B rows, L tokens and M asked positions is padded to the smallest bucket that holds it.
What is padded changes no answer: added tokens are masked, added rows repeat the first row, added
positions repeat a row's first, and all three are cut from what comes back.  Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engines.backend import Ids, Mask
from engines.errors import BackendError

if TYPE_CHECKING:
    from engines.manifest import Shape

# Declared values of an axis, and buckets in all: each of each engine holds a captured graph.
MOST_VALUES, MOST_BUCKETS = 64, 1024

# Lengths between a quarter of the longest and the longest, by halves, whole multiples of this.
_STEP = 8
_HALVES = 2

# Positions are asked for block by block or answer by answer.
_PARTS = 4


@dataclass(frozen=True, slots=True)
class Bucket:
    """One shape of a pass: rows, tokens of the canvas, and asked positions."""

    rows: int
    length: int
    asked: int


@dataclass(frozen=True, slots=True)
class Buckets:
    """The shapes that a pass is padded to: every combination of the three.

    Attributes:
        lengths: Of the canvas, ascending.
        batches: Rows, ascending.
        asked: Asked positions of a row, ascending.
    """

    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    asked: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("lengths", "batches", "asked"):
            values = getattr(self, name)
            ordered = tuple(sorted(set(values)))
            if not 1 <= len(values) <= MOST_VALUES or ordered != tuple(values) or values[0] < 1:
                raise ValueError(
                    f"{name} must be 1 to {MOST_VALUES} ascending numbers from 1 on, got {values}"
                )
        count = len(self.lengths) * len(self.batches) * len(self.asked)
        if count > MOST_BUCKETS:
            raise ValueError(f"buckets must be {MOST_BUCKETS} at most, got {count}")

    def fit(self, rows: int, length: int, asked: int) -> Bucket:
        """Return the smallest bucket that holds a pass.

        Raises:
            BackendError: There is none; says the largest.
        """
        return Bucket(
            rows=_least(self.batches, rows, "rows"),
            length=_least(self.lengths, length, "tokens"),
            asked=_least(self.asked, asked, "asked positions"),
        )

    def every(self) -> tuple[Bucket, ...]:
        """Return all of them, the largest first: memory that it needs serves the others."""
        return tuple(
            Bucket(rows, length, asked)
            for rows in reversed(self.batches)
            for length in reversed(self.lengths)
            for asked in reversed(self.asked)
        )

    def to_json(self) -> dict[str, list[int]]:
        """Return what the manifest says."""
        return {
            "lengths": list(self.lengths),
            "batches": list(self.batches),
            "asked": list(self.asked),
        }


def buckets_of(shape: Shape, answers: Collection[int], longest: int) -> Buckets:
    """Return the buckets of a declared shape; all lie in the profile that plans are built with.

    Lengths are the best one, the longest, its half and its quarter; batches the three declared
    ones; asked positions the longest answer's, and a quarter of it.

    Args:
        shape: Ranges of rows and of prompt tokens.
        answers: Tokens of an answer, of every task.
        longest: Tokens of prompt and answer that the model takes.
    """
    least, best, top, most = _canvas(shape, answers, longest)
    halves = {-(-top // (_STEP << part)) * _STEP for part in range(1, _HALVES + 1)}
    lengths = {best, top} | {length for length in halves if least <= length <= top}
    return Buckets(
        lengths=tuple(sorted(lengths)),
        batches=tuple(sorted(set(shape.batch))),
        asked=tuple(sorted({most, -(-most // _PARTS)})),
    )


def unfit(buckets: Buckets, shape: Shape, answers: Collection[int], longest: int) -> str | None:
    """Return why buckets do not go with a declared shape, or None.

    Each must lie within the extents that plans are built for, and the largest must hold every
    request that the shape allows.

    Args:
        buckets: As declared.
        shape: Ranges of rows and of prompt tokens.
        answers: Tokens of an answer, of every task.
        longest: Tokens of prompt and answer that the model takes.
    """
    least, _, top, most = _canvas(shape, answers, longest)
    for name, values, low, high in (
        ("lengths", buckets.lengths, least, top),
        ("batches", buckets.batches, shape.batch[0], shape.batch[2]),
        ("asked", buckets.asked, 1, most),
    ):
        if values[0] < low or values[-1] != high:
            return f"{name} must lie from {low} to {high} and end there, got {list(values)}"
    return None


def padded(
    bucket: Bucket, ids: Ids, mask: Mask, positions: Ids, eos_id: int
) -> tuple[Ids, Mask, Ids]:
    """Return a pass of exactly a bucket's shape: ids, mask, positions.

    Args:
        bucket: It holds the pass.
        ids: The canvas [B, L].
        mask: True where a token is attended to [B, L].
        positions: Asked positions [B, M], at least one.
        eos_id: What stands on the added part of the canvas, masked.
    """
    rows, length = ids.shape
    extra = bucket.length - length
    ids = np.pad(ids, ((0, 0), (0, extra)), constant_values=eos_id)
    mask = np.pad(mask, ((0, 0), (0, extra)), constant_values=False)
    again = np.repeat(positions[:, :1], bucket.asked - positions.shape[1], axis=1)
    positions = np.concatenate((positions, again), axis=1)
    place = rows_of(bucket, rows)
    return ids[place], mask[place], positions[place]


def rows_of(bucket: Bucket, rows: int) -> NDArray[np.intp]:
    """Return which row of a pass stands in each row of a bucket: the added ones are the first."""
    place = np.arange(bucket.rows)
    return np.where(place < rows, place, 0)


def _canvas(shape: Shape, answers: Collection[int], longest: int) -> tuple[int, int, int, int]:
    """Return the least, best and longest canvas, and the longest answer."""
    few, most = min(answers), max(answers)
    least, best, top = (
        min(prompt + answer, longest)
        for prompt, answer in zip(shape.prompt, (few, most, most), strict=True)
    )
    return least, best, top, most


def _least(values: tuple[int, ...], wanted: int, what: str) -> int:
    for value in values:
        if wanted <= value:
            return value
    raise BackendError(
        f"a pass of {wanted} {what} is above the largest bucket, {values[-1]}; lower the batch, "
        f"shorten the prompt, or export again with a larger --shape"
    )
