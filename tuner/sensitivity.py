"""How much each precision damages each window, and what raising it buys: K, I and gain.

Along full-precision traces, for a prompt x, window w and precision b:

    K_w^b(x)   sum over the steps t of w and the positions i that t commits of
               KL(p_full(. | S_t)_i || p_b(. | S_t)_i), the engine b put in front of the trace's
               own states S_t (teacher forcing)
    I_w(x)     1 + sum over the positions i still masked after w of
               KL(p_full(. | S)_i || p_full(. | S')_i) / commits of w,
               where S is the state after w, and S' the same with w's commits masked again
    gain(w,b)  (E[K_w^b0] - E[K_w^b]) * E[I_w], made monotone in bits; b0 is the base

The 1 is the direct damage: without it the last window would count for nothing.  Expectations are
means over prompts, K's and I's taken apart, as T2Quant does; K adds up over steps by the chain
rule for a sampler that draws.

What it costs: a generation's passes for each precision other than full, for K; and two forward
passes for each window but the last, for I.  `Measured.passes` counts them.  The functions that
call an engine are `divergence` and `influence`; all others are pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.backend import Backend, Floats, Ids, Mask
from engines.errors import BackendError
from engines.model import ModelInfo
from engines.schedule import window_of
from engines.trace import Trace

Reals = NDArray[np.float64]

# Rows put before an engine at once.
BATCH = 64


@dataclass(frozen=True, slots=True)
class Measured:
    """Values by prompt, and the forward passes of single rows that they took."""

    values: Reals
    passes: int


@dataclass(frozen=True, slots=True)
class _State:
    """A canvas to be put before an engine; `asked` positions, and where it comes from."""

    trace: int
    step: int
    window: int
    ids: Ids
    asked: Ids
    committed: int
    total: int


def divergence(
    traces: Sequence[Trace],
    engines: Mapping[str, Backend],
    full: str,
    windows: int,
    model: ModelInfo,
    batch: int = BATCH,
    advance: Callable[[int], None] = lambda rows: None,
) -> Measured:
    """Return K of each prompt, window and precision [N, W, P], nats, in the order of `engines`.

    Args:
        traces: Of full precision [N].
        engines: By name of the precision; `full` among them or not.
        full: The name of the precision that made the traces: its K is 0, and it is not run.
        windows: W.
        model: Its eos_id pads.
        batch: Rows put before an engine at once; bounds memory.
        advance: Told of the rows of each batch done.

    Raises:
        BackendError: Logits are NaN or infinite; names engine, window, step and prompt.
        ValueError: No traces, no engines, or fewer than 1 window.
    """
    if not traces or not engines or windows < 1:
        raise ValueError(
            f"need traces, engines and windows >= 1, got {len(traces)}, {len(engines)}, {windows}"
        )
    states = [
        _State(
            index,
            number,
            _window(step.committed, trace, windows),
            step.ids,
            step.positions,
            step.committed,
            trace.request.sampler.gen_length,
        )
        for index, trace in enumerate(traces)
        for number, step in enumerate(trace.steps)
    ]
    # Of like length together: the less padding, the less is computed for nobody.
    states.sort(key=lambda state: (state.window, len(state.ids), len(state.asked)))
    values = np.zeros((len(traces), windows, len(engines)))
    passes = 0
    for column, (name, engine) in enumerate(engines.items()):
        if name == full:
            continue
        for state, logits in _run(states, engine, traces, model, batch, advance):
            log_p = traces[state.trace].steps[state.step].log_p
            values[state.trace, state.window, column] += kl_divergence(log_p, logits).sum()
        passes += len(states)
    return Measured(values, passes)


def influence(
    traces: Sequence[Trace],
    full: Backend,
    windows: int,
    model: ModelInfo,
    batch: int = BATCH,
    advance: Callable[[int], None] = lambda rows: None,
) -> Measured:
    """Return I of each prompt and window [N, W], at least 1; arguments as `divergence`.

    A window in which a trace commits nothing, or after which nothing is masked, has I = 1.
    """
    if not traces or windows < 1:
        raise ValueError(f"need traces and windows >= 1, got {len(traces)}, {windows}")
    twins: list[tuple[_State, _State, int]] = []  # after a window, the same masked again, commits
    for index, trace in enumerate(traces):
        total = trace.request.sampler.gen_length
        of_step = np.array([_window(step.committed, trace, windows) for step in trace.steps])
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
            after = _State(index, last, window, then.ids, masked, then.committed, total)
            before = then.committed - len(changed)
            again = _State(index, last, window, erased, masked, before, total)
            twins.append((after, again, len(changed)))
    twins.sort(key=lambda twin: (twin[0].window, len(twin[0].ids), len(twin[0].asked)))
    states = [state for after, again, _ in twins for state in (after, again)]
    values = np.ones((len(traces), windows))
    answers = _run(states, full, traces, model, 2 * max(1, batch // 2), advance)
    for (state, logits), (_, moved), (*_, commits) in zip(answers, answers, twins, strict=True):
        travelled = kl_divergence(log_softmax(logits), moved).sum()
        values[state.trace, state.window] += travelled / commits
    return Measured(values, len(states))


def _window(committed: int, trace: Trace, windows: int) -> int:
    return int(window_of(np.array(committed), trace.request.sampler.gen_length, windows))


def _run(
    states: Sequence[_State],
    engine: Backend,
    traces: Sequence[Trace],
    model: ModelInfo,
    batch: int,
    advance: Callable[[int], None],
) -> Iterator[tuple[_State, Floats]]:
    """Yield each state, in order, with the engine's logits at its asked positions [n, V].

    States come by window, and rows of a batch are of one.
    """
    start = 0
    while start < len(states):
        window = states[start].window
        rows = [state for state in states[start : start + batch] if state.window == window]
        start += len(rows)
        logits = engine.logits(*_batch(rows, model))
        for state, row in zip(rows, logits, strict=True):
            own = row[: len(state.asked)]
            bad = np.argwhere(~np.isfinite(own))
            if len(bad):
                trace = traces[state.trace]
                raise BackendError(
                    f"engine {engine.precision.name!r} gave the logit {own[tuple(bad[0])]} at "
                    f"position {state.asked[bad[0][0]]} in window {state.window}, step "
                    f"{state.step + 1} of {len(trace.steps)}, prompt {state.trace} (task "
                    f"{trace.request.task!r}); leave this precision out, or check the "
                    f"checkpoint's weights"
                )
            yield state, own
        advance(len(rows))


def _batch(rows: Sequence[_State], model: ModelInfo) -> tuple[Ids, Mask, Ids, Floats]:
    """Return (ids, mask, positions, progress) of rows, padded on the right."""
    length = max(len(row.ids) for row in rows)
    asked = max(len(row.asked) for row in rows)
    ids = np.full((len(rows), length), model.eos_id, np.int64)
    mask = np.zeros((len(rows), length), np.bool_)
    positions = np.zeros((len(rows), asked), np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = row.ids
        mask[index, : len(row.ids)] = True
        positions[index] = row.asked[0]
        positions[index, : len(row.asked)] = row.asked
    progress = np.array([row.committed / row.total for row in rows], np.float32)
    return ids, mask, positions, progress


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
