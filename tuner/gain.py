"""From divergences by prompt to gains: KL, means, a monotone fit, and bootstrap intervals.

`sensitivity` says what K, I and gain are and measures the first two.  Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.costs import Reals


def log_softmax(logits: NDArray[np.floating]) -> Reals:
    """Return log probabilities of logits, or of log probabilities, over the last axis."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def kl_divergence(log_p: NDArray[np.floating], logits: NDArray[np.floating]) -> Reals:
    """Return KL(p || q) of each row [n], nats, at least 0; logits are q's, both [n, V]."""
    ours, theirs = log_softmax(log_p), log_softmax(logits)
    out: Reals = np.maximum((np.exp(ours) * (ours - theirs)).sum(axis=-1), 0.0)
    return out


def gain_from(kl: Reals, influence: Reals, bits: Sequence[float], base: int) -> Reals:
    """Return the gain over the base, monotone in bits [..., W, P], nats; 0 for the base.

    Args:
        kl: E[K] of each window and precision [..., W, P].
        influence: E[I] of each window [..., W].
        bits: Of each precision [P].
        base: Index of the precision that gains are counted from.

    Raises:
        ValueError: Shapes do not fit, or base is no index.
    """
    if kl.shape[:-1] != influence.shape or kl.shape[-1:] != (len(bits),):
        raise ValueError(
            f"need kl [..., W, P], influence [..., W], bits [P], got shapes {kl.shape}, "
            f"{influence.shape}, {np.shape(bits)}"
        )
    if not 0 <= base < len(bits):
        raise ValueError(f"need 0 <= base < {len(bits)}, got {base}")
    raw = (kl[..., base : base + 1] - kl) * influence[..., None]
    fitted = isotonic(raw, bits)
    return fitted - fitted[..., base : base + 1]


def isotonic(values: Reals, bits: Sequence[float]) -> Reals:
    """Return the closest values, in least squares, that do not fall with bits [..., P].

    Among precisions of equal bits the values' own order stays.  By the min-max formula: each
    value is the largest, over where a pool may start, of the smallest mean, over where it may end.
    """
    order = np.lexsort((values, np.broadcast_to(np.asarray(bits, np.float64), values.shape)))
    ordered = np.take_along_axis(values, order, axis=-1)
    count = values.shape[-1]
    sums = np.concatenate((np.zeros((*values.shape[:-1], 1)), np.cumsum(ordered, axis=-1)), -1)
    fitted = np.empty_like(ordered)
    for index in range(count):
        pools = []
        for start in range(index + 1):
            ends = np.arange(index + 1, count + 1)
            means = (sums[..., ends] - sums[..., start : start + 1]) / (ends - start)
            pools.append(means.min(axis=-1))
        fitted[..., index] = np.max(pools, axis=0)
    out = np.empty_like(fitted)
    np.put_along_axis(out, order, fitted, axis=-1)
    return out


@dataclass(frozen=True, slots=True)
class Spread:
    """A table over prompts: its value and the ends of its bootstrap interval, of one shape."""

    value: Reals
    low: Reals
    high: Reals


def summarize(
    kl: Reals,
    influence: Reals,
    bits: Sequence[float],
    base: int,
    seed: int,
    confidence: float = 0.95,
    resamples: int = 1_000,
) -> tuple[Spread, Spread, Spread]:
    """Return E[K] [W, P], E[I] [W] and the gain [W, P], with intervals over prompts.

    Prompts are drawn again with their K and I together, and the gain is made from each draw.

    Args:
        kl: K by prompt [N, W, P].
        influence: I by prompt [N, W].
        bits: Of each precision [P].
        base: Index of the precision that gains are counted from.
        seed: Of the bootstrap.
        confidence: Of the intervals.
        resamples: Of the bootstrap.

    Raises:
        ValueError: Shapes do not fit, there are no prompts, or a value is not finite.
    """
    if kl.ndim != 3 or not len(kl) or influence.shape != kl.shape[:2]:
        raise ValueError(
            f"need kl [N, W, P] and influence [N, W], got shapes {kl.shape}, {influence.shape}"
        )
    if not (np.isfinite(kl).all() and np.isfinite(influence).all()):
        raise ValueError("kl and influence must be finite")
    count = len(kl)
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(count, np.full(count, 1.0 / count), resamples) / count
    drawn_kl = np.tensordot(weights, kl, 1)
    drawn_influence = weights @ influence
    mean_kl, mean_influence = kl.mean(axis=0), influence.mean(axis=0)
    tail = (1.0 - confidence) / 2.0

    def spread(value: Reals, drawn: Reals) -> Spread:
        low, high = np.quantile(drawn, (tail, 1.0 - tail), axis=0)
        return Spread(value, np.minimum(low, value), np.maximum(high, value))

    return (
        spread(mean_kl, drawn_kl),
        spread(mean_influence, drawn_influence),
        spread(
            gain_from(mean_kl, mean_influence, bits, base),
            gain_from(drawn_kl, drawn_influence, bits, base),
        ),
    )
