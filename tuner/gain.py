"""From tables by prompt to gains: means, a monotone fit, bootstrap intervals.

`sensitivity` measures K, flips, moves and I of each prompt; what is made of them here needs no
engine.  Written for base precision b0, the gain of precision b in window w is, by proxy,

    kl*influence   (E[K_w^b0] - E[K_w^b]) * E[I_w], expectations apart, as T2Quant takes them
    sqrt           E[sqrt(K_w^b0 I_w)] - E[sqrt(K_w^b I_w)], products by prompt
    kl             E[K_w^b0] - E[K_w^b]
    influence      mean over windows of (E[K_v^b0] - E[K_v^b]) * E[I_w]: ranks windows by I alone
    flips, moves   as kl, of flips and of moves
    rollout        as kl, of the share of tokens read that differ at the end of the answer when
                   window w alone runs b and all others b0: measured end to end, without labels

made monotone in bits.  Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from tuner.costs import Indices, Reals
from tuner.sensitivity import PromptTables

PROXIES = ("kl*influence", "sqrt", "kl", "influence", "flips", "moves", "rollout")


def worth(tables: PromptTables, proxy: str = PROXIES[0], weights: Reals | None = None) -> Reals:
    """Return what the proxy says a precision costs in each window [..., W, P]; less is better.

    Args:
        tables: By prompt [N].
        proxy: One of PROXIES.
        weights: Of the prompts, each draw summing to 1 [..., N]; None: all alike.

    Raises:
        ValueError: The proxy is unknown, or the tables lack what it needs.
    """
    if proxy not in PROXIES:
        raise ValueError(f"proxy is one of {', '.join(PROXIES)}, got {proxy!r}")
    if proxy == "moves" and tables.moves is None:
        raise ValueError("proxy 'moves' needs tables with moves; measure them with_moves")
    if proxy == "rollout" and tables.rollout is None:
        raise ValueError("proxy 'rollout' needs tables with rollouts; see tuner.rollout")

    def mean(values: Reals) -> Reals:
        if weights is None:
            return np.asarray(values.mean(axis=0))
        out: Reals = np.tensordot(weights, values, 1)
        return out

    influence = tables.influence[..., None]
    if proxy == "kl*influence":
        return mean(tables.kl) * mean(influence)
    if proxy == "sqrt":
        return mean(np.sqrt(tables.kl * influence))
    if proxy == "influence":
        steepness: Reals = mean(tables.kl).mean(axis=-2, keepdims=True)
        return steepness * mean(influence)
    if proxy == "moves":
        assert tables.moves is not None, "checked above"
        return mean(tables.moves)
    if proxy == "rollout":
        assert tables.rollout is not None, "checked above"
        return mean(tables.rollout)
    return mean(tables.kl if proxy == "kl" else tables.flips)


def gain_from(
    tables: PromptTables,
    bits: Sequence[float],
    base: str,
    proxy: str = PROXIES[0],
    weights: Reals | None = None,
    monotone: bool = True,
    groups: Sequence[object] | None = None,
) -> Reals:
    """Return the gain over the base [..., W, P], in the proxy's unit; 0 for the base.

    Hundreds of draws of the prompts are one call: each is a row of weights.

    Args:
        tables: By prompt [N].
        bits: Of each precision [P].
        base: Name of the precision that gains are counted from.
        proxy: One of PROXIES.
        weights: Of the prompts, each draw summing to 1 [..., N]; None: all alike.
        monotone: Fit gains that do not fall with bits; False: as measured.
        groups: Of each precision [P]; those of different groups are fitted apart, for instance
            simulated and executed ones, which never compete.  None: all are of one.

    Raises:
        ValueError: Shapes do not fit, a value is not finite, or a name is unknown.
    """
    _check(tables, bits, base)
    column = tables.precisions.index(base)
    cost = worth(tables, proxy, weights)
    raw = cost[..., column : column + 1] - cost
    if not monotone:
        return raw
    fitted = raw.copy()
    kinds = [None] * len(bits) if groups is None else list(groups)
    for kind in dict.fromkeys(kinds):
        mine = [index for index, each in enumerate(kinds) if each == kind]
        fitted[..., mine] = isotonic(raw[..., mine], [bits[index] for index in mine])
    return fitted - fitted[..., column : column + 1]


def _check(tables: PromptTables, bits: Sequence[float], base: str) -> None:
    shape = tables.kl.shape
    moves = tables.flips if tables.moves is None else tables.moves
    rollout = tables.flips if tables.rollout is None else tables.rollout
    if (
        len(shape) != 3
        or not shape[0]
        or shape[2] != len(tables.precisions)
        or tables.influence.shape != shape[:2]
        or tables.flips.shape != shape
        or moves.shape != shape
        or rollout.shape != shape
        or len(bits) != shape[2]
    ):
        raise ValueError(
            f"need kl, flips, moves, rollout [N, W, P], influence [N, W], bits [P], N >= 1, got "
            f"shapes {shape}, {tables.flips.shape}, {moves.shape}, {rollout.shape}, "
            f"{tables.influence.shape}, {np.shape(bits)} for {len(tables.precisions)} precisions"
        )
    if base not in tables.precisions:
        raise ValueError(f"base is one of {', '.join(tables.precisions)}, got {base!r}")
    for values in (tables.kl, tables.flips, moves, rollout, tables.influence):
        if not np.isfinite(values).all():
            raise ValueError("kl, flips, moves, rollout and influence must be finite")


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


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskSensitivity:
    """A task's sensitivity, means over N prompts with their intervals.

    Attributes:
        precisions: Names, in the order of the tables [P].
        base: Name of the precision that gains are counted from.
        best: Name of the most precise candidate that competes with the base: of most bits, then
            of most gain.
        proxy: By which gains were made.
        kl: E[K] [W, P].
        influence: E[I] [W].
        gain: Over the base, monotone in bits [W, P].
        kl_low: Lower ends of the intervals; `kl_high` and so on likewise.
        raw_gain: As measured, before the monotone fit [W, P].
        flips: Expected flips [W, P].
        moves: Expected moves [W, P]; None: not measured.
        alike: Whether two windows' scores cannot be told apart [W, W]; see `alike_windows`.
        n_prompts: N.
        rows: Forward passes of single rows that were spent, those of the traces included.
    """

    precisions: tuple[str, ...]
    base: str
    best: str
    proxy: str
    kl: Reals
    kl_low: Reals
    kl_high: Reals
    influence: Reals
    influence_low: Reals
    influence_high: Reals
    gain: Reals
    gain_low: Reals
    gain_high: Reals
    raw_gain: Reals
    flips: Reals
    moves: Reals | None
    alike: tuple[tuple[bool, ...], ...]
    n_prompts: int
    rows: int

    @property
    def indistinct(self) -> bool:
        """Whether no two of several windows can be told apart: a mixed schedule is noise."""
        return len(self.alike) > 1 and all(all(row) for row in self.alike)

    def to_json(self) -> dict[str, object]:
        """Return the fields as plain data."""
        return {
            each.name: value.tolist() if isinstance(value, np.ndarray) else value
            for each in fields(self)
            for value in (getattr(self, each.name),)
        }


def summarize(
    tables: PromptTables,
    bits: Sequence[float],
    base: str | None = None,
    proxy: str = PROXIES[0],
    seed: int = 0,
    confidence: float = 0.95,
    resamples: int = 1_000,
    groups: Sequence[object] | None = None,
) -> TaskSensitivity:
    """Return means and gains of a task, with bootstrap intervals over prompts.

    Prompts are drawn again with all that was measured of them together, and the gain is made from
    each draw.

    Args:
        tables: By prompt [N].
        bits: Of each precision [P].
        base: That gains are counted from; None for the one of fewest bits.
        proxy: One of PROXIES.
        seed: Of the bootstrap.
        confidence: Of the intervals.
        resamples: Of the bootstrap.
        groups: As `gain_from`.

    Raises:
        ValueError: As `gain_from`.
    """
    least = tables.precisions[int(np.argmin(bits))] if base is None else base
    gain = gain_from(tables, bits, least, proxy, groups=groups)
    count = len(tables.kl)
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(count, np.full(count, 1.0 / count), resamples) / count
    drawn = gain_from(tables, bits, least, proxy, weights, groups=groups)
    kl, influence = tables.kl.mean(axis=0), tables.influence.mean(axis=0)
    tail = (1.0 - confidence) / 2.0

    def ends(value: Reals, draws: Reals) -> tuple[Reals, Reals]:
        low, high = np.quantile(draws, (tail, 1.0 - tail), axis=0)
        return np.minimum(low, value), np.maximum(high, value)

    kl_ends = ends(kl, np.tensordot(weights, tables.kl, 1))
    influence_ends = ends(influence, weights @ tables.influence)
    gain_ends = ends(gain, drawn)
    kinds = [None] * len(bits) if groups is None else list(groups)
    kind = kinds[tables.precisions.index(least)]
    rivals = [column for column in range(len(bits)) if kinds[column] == kind]
    best = max(rivals, key=lambda column: (bits[column], gain[:, column].sum()))
    return TaskSensitivity(
        precisions=tables.precisions,
        base=least,
        best=tables.precisions[best],
        proxy=proxy,
        kl=kl,
        kl_low=kl_ends[0],
        kl_high=kl_ends[1],
        influence=influence,
        influence_low=influence_ends[0],
        influence_high=influence_ends[1],
        gain=gain,
        gain_low=gain_ends[0],
        gain_high=gain_ends[1],
        raw_gain=gain_from(tables, bits, least, proxy, monotone=False),
        flips=tables.flips.mean(axis=0),
        moves=None if tables.moves is None else tables.moves.mean(axis=0),
        alike=alike_windows(gain[:, best], drawn[..., best], confidence),
        n_prompts=count,
        rows=tables.rows + int(tables.passes.sum()),
    )


def alike_windows(
    scores: Reals, drawn: Reals, confidence: float = 0.95
) -> tuple[tuple[bool, ...], ...]:
    """Return whether the scores of two windows cannot be told apart [W][W].

    From bootstrap draws of the paired differences S_w - S_v.  All pairs are judged together: a
    pair is apart when its difference exceeds, in its own standard errors, what the largest of all
    pairs' deviations stays within at the given confidence (the maximum t of Westfall and Young).
    So where all windows are equal, a pair is declared apart as rarely as 1 - confidence.

    Args:
        scores: S, the gain of the precision of most bits [W].
        drawn: The same of each draw of the prompts [R, W].
        confidence: With which all pairs that are apart are apart.
    """
    windows = len(scores)
    first, second = np.triu_indices(windows, 1)
    off: list[Reals] = []
    largest = np.zeros(len(drawn))
    for low in range(0, len(first), 256):  # pairs at once; bounds memory
        one, two = first[low : low + 256], second[low : low + 256]
        found = scores[one] - scores[two]
        draws = drawn[:, one] - drawn[:, two]
        error = np.maximum(draws.std(axis=0), 1e-12)
        largest = np.maximum(largest, (np.abs(draws - found) / error).max(axis=1))
        off.append(np.abs(found) / error)
    bound = float(np.quantile(largest, confidence))
    alike = np.ones((windows, windows), np.bool_)
    apart: Indices = np.flatnonzero(np.concatenate(off or [np.zeros(0)]) > bound)
    alike[first[apart], second[apart]] = alike[second[apart], first[apart]] = False
    return tuple(tuple(row) for row in alike.tolist())
