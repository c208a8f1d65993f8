"""Windows of denoising progress, sampler settings, schedules: the precision of each window.

A window is one of W equal parts of the fraction of tokens committed, the same for every task.
With a fixed number of tokens a step that is a range of steps, uneven ones allowed; by threshold
the passes in a window depend on the data (`engines.trace.expected_passes`).  Never an attention
window.  Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

LOW_CONFIDENCE, THRESHOLD = "low_confidence", "threshold"
RULES = (LOW_CONFIDENCE, THRESHOLD)

# Denoising passes of an answer where nobody says how many.
_STEPS = 12

# Passes of each window that stand in for a threshold rule's when a pass is timed.
_TIMED_PASSES = 2


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """How an answer is denoised, greedily: what each pass commits of the row's active block.

    The rule `low_confidence` is LLaDA's remasking: as many of the most probable tokens as the
    step is due.  `threshold` is Fast-dLLM's: every token that is probable enough, and always the
    most probable one.

    Attributes:
        steps: Denoising passes for a whole answer; a multiple of the number of blocks.  By
            threshold the most that an answer can take, gen_length.  Not given: 12, or gen_length.
        gen_length: Tokens of an answer; a multiple of block_length.
        block_length: Tokens that are denoised together, block after block from the left.
        rule: Which masked tokens are committed first, one of RULES.
        threshold: Least probability of a token that is committed beside the most probable one,
            in (0, 1]; None for `low_confidence`.
    """

    steps: int = cast(int, None)  # never None once made
    gen_length: int = 24
    block_length: int = 24
    rule: str = LOW_CONFIDENCE
    threshold: float | None = None

    def __post_init__(self) -> None:
        by_threshold = self.rule == THRESHOLD
        if cast(int | None, self.steps) is None:
            object.__setattr__(self, "steps", self.gen_length if by_threshold else _STEPS)
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
        if self.rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}, got {self.rule!r}")
        if not by_threshold and self.threshold is not None:
            raise ValueError(
                f"threshold must be None with the rule {self.rule!r}, got {self.threshold}"
            )
        known = isinstance(self.threshold, float | int) and not isinstance(self.threshold, bool)
        if by_threshold and (not known or not 0.0 < (self.threshold or 0.0) <= 1.0):
            raise ValueError(f"0 < threshold <= 1 must hold, got threshold={self.threshold}")
        if by_threshold and self.steps != self.gen_length:
            raise ValueError(
                f"steps must be gen_length with the rule {THRESHOLD!r} (a pass may commit one "
                f"token only), got steps={self.steps}, gen_length={self.gen_length}"
            )

    @property
    def blocks(self) -> int:
        """Blocks of an answer."""
        return self.gen_length // self.block_length

    @property
    def commits(self) -> tuple[int, ...]:
        """Tokens committed by each step; LLaDA's even split, remainders first, in each block.

        By threshold the fewest of each: one.
        """
        per_block = self.steps // self.blocks
        base, extra = divmod(self.block_length, per_block)
        return tuple(base + (i < extra) for i in range(per_block)) * self.blocks

    def to_json(self) -> dict[str, object]:
        """Return plain data, as files and digests hold it; what the rule has not is left out."""
        return {key: value for key, value in asdict(self).items() if value is not None}


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
        ValueError: More windows than steps, or the passes depend on the data.
    """
    if sampler.rule == THRESHOLD:
        raise ValueError("passes by threshold depend on the data; take expected_passes of traces")
    if not 1 <= windows <= sampler.steps:
        raise ValueError(
            f"1 <= windows <= steps must hold, got windows={windows}, steps={sampler.steps}"
        )
    before = np.cumsum((0, *sampler.commits[:-1]))
    counts = np.bincount(window_of(before, sampler.gen_length, windows), minlength=windows)
    return tuple(int(count) for count in counts)


def fixed_steps_like(sampler: SamplerConfig, windows: int) -> SamplerConfig:
    """Return fixed steps of the same lengths, whose passes may be timed in place of a sampler's.

    A pass costs the same whatever rule looks at what it gives; only how many there are differs.
    A sampler of fixed steps is its own.  By threshold: the fewest steps that put two passes into
    each window, or one token a step where there are not enough tokens.

    Raises:
        ValueError: More windows than tokens.
    """
    if sampler.rule != THRESHOLD:
        return sampler
    fixed = replace(sampler, rule=LOW_CONFIDENCE, threshold=None)
    for steps in range(sampler.blocks, sampler.gen_length, sampler.blocks):
        fewer = replace(fixed, steps=steps)
        if windows <= steps and min(passes_by_window(fewer, windows)) >= _TIMED_PASSES:
            return fewer
    passes_by_window(fixed, windows)
    return fixed


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
