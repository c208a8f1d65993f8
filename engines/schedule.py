"""Windows of denoising progress, sampler settings, schedules: the precision of each window.

A window is one of W equal parts of the fraction of tokens committed, the same for every task.
With a fixed number of tokens a step that is a range of steps, uneven ones allowed.  Never an
attention window.  Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """How an answer is denoised: LLaDA's low-confidence remasking, greedy.

    Attributes:
        steps: Denoising passes for a whole answer; a multiple of the number of blocks.
        gen_length: Tokens of an answer; a multiple of block_length.
        block_length: Tokens that are denoised together, block after block from the left.
        rule: Which masked tokens are committed first.
    """

    steps: int = 12
    gen_length: int = 24
    block_length: int = 24
    rule: str = "low_confidence"

    def __post_init__(self) -> None:
        for name in ("steps", "gen_length", "block_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} >= 1 must hold, got {getattr(self, name)}")
        if self.gen_length % self.block_length:
            raise ValueError(
                f"gen_length must be a multiple of block_length, got "
                f"gen_length={self.gen_length}, block_length={self.block_length}"
            )
        if self.steps % self.blocks:
            raise ValueError(
                f"steps must be a multiple of the number of blocks, gen_length / block_length = "
                f"{self.blocks}, got steps={self.steps}"
            )
        if self.steps > self.gen_length:
            raise ValueError(
                f"steps <= gen_length must hold (a step commits at least one token), got "
                f"steps={self.steps}, gen_length={self.gen_length}"
            )
        if self.rule != "low_confidence":
            raise ValueError(f"rule must be 'low_confidence', got {self.rule!r}")

    @property
    def blocks(self) -> int:
        """Blocks of an answer."""
        return self.gen_length // self.block_length

    @property
    def commits(self) -> tuple[int, ...]:
        """Tokens committed by each step; LLaDA's even split, remainders first, in each block."""
        per_block = self.steps // self.blocks
        base, extra = divmod(self.block_length, per_block)
        return tuple(base + (i < extra) for i in range(per_block)) * self.blocks


def window_of(
    committed: NDArray[np.int64],
    total: int | NDArray[np.int64],
    windows: int | NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return the window [B] of rows with `committed` [B] of `total` tokens decided, before a pass.

    `total` and `windows` are one number, or one a row [B].  Integer arithmetic, so that Python and
    C++ agree at every edge.
    """
    window: NDArray[np.int64] = np.minimum(committed * windows // total, windows - 1)
    return window


def passes_by_window(sampler: SamplerConfig, windows: int) -> tuple[int, ...]:
    """Return the number of passes in each of the windows [W] for fixed tokens a step.

    Raises:
        ValueError: More windows than steps.
    """
    if not 1 <= windows <= sampler.steps:
        raise ValueError(
            f"1 <= windows <= steps must hold, got windows={windows}, steps={sampler.steps}"
        )
    before = np.cumsum((0, *sampler.commits[:-1]))
    counts = np.bincount(window_of(before, sampler.gen_length, windows), minlength=windows)
    return tuple(int(count) for count in counts)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The precision of each window, by name: one engine a window, for one task."""

    precisions: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.precisions:
            raise ValueError("a schedule has at least one window")

    @property
    def windows(self) -> int:
        """Number of windows."""
        return len(self.precisions)

    @property
    def is_uniform(self) -> bool:
        """Whether every window runs the same precision."""
        return len(set(self.precisions)) == 1

    @property
    def switches(self) -> int:
        """Windows whose precision differs from the one before."""
        return sum(a != b for a, b in zip(self.precisions, self.precisions[1:], strict=False))

    @classmethod
    def uniform(cls, precision: str, windows: int) -> Schedule:
        """Return the schedule that runs one precision in every window."""
        return cls((precision,) * windows)


def weighted_mean(values: Sequence[float], passes: Sequence[float]) -> float:
    """Return the mean of a value per window [W], weighted by the passes in each [W]."""
    return float(np.dot(values, passes) / np.sum(passes))
