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

What it costs in forward passes of rows: a generation's for each precision other than full, for K;
and two for each window but the last, for I.  `TaskSensitivity.rows` counts them.  What is pure of
this stands in `gain`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import cast

import numpy as np

from engines.backend import Backend, Floats, Ids, Mask
from engines.errors import BackendError
from engines.model import ModelInfo
from engines.schedule import window_of
from engines.trace import Trace
from tuner.costs import Reals
from tuner.gain import kl_divergence, log_softmax, summarize

# Rows put before an engine at once.
BATCH = 64


@dataclass(frozen=True, slots=True)
class Measured:
    """Values by prompt and window [N, W], and the forward passes of single rows they took."""

    values: Reals
    rows: int


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


def divergence(traces: Sequence[Trace], engine: Backend, batch: int = BATCH) -> float:
    """Return the K of a whole answer, mean over the prompts, nats; as `window_divergence`."""
    return float(window_divergence(traces, engine, 1, batch).values.sum(axis=1).mean())


def window_divergence(
    traces: Sequence[Trace],
    engine: Backend,
    windows: int,
    batch: int = BATCH,
    advance: Callable[[int], None] = lambda rows: None,
) -> Measured:
    """Return K of each prompt and window [N, W], nats.

    Args:
        traces: Of full precision [N].
        engine: Put in front of the traces' states, through its trace tail.
        windows: W.
        batch: Rows put before it at once; bounds memory.
        advance: Told of the rows of each batch done.

    Raises:
        BackendError: Logits are NaN or infinite; names engine, window, step and prompt.
        ValueError: No traces, or fewer than 1 window or row.
    """
    _check(traces, windows, batch)
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
    values = np.zeros((len(traces), windows))
    for state, logits in _run(states, engine, traces, batch, advance):
        log_p = traces[state.trace].steps[state.step].log_p
        values[state.trace, state.window] += kl_divergence(log_p, logits).sum()
    return Measured(values, len(states))


def influence(
    traces: Sequence[Trace],
    full: Backend,
    windows: int,
    mask_id: int,
    batch: int = BATCH,
    advance: Callable[[int], None] = lambda rows: None,
) -> Measured:
    """Return I of each prompt and window [N, W], at least 1; arguments as `window_divergence`.

    A window in which a trace commits nothing, or after which nothing is masked, has I = 1.
    """
    _check(traces, windows, batch)
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
            masked = np.flatnonzero(then.ids == mask_id)
            erased = then.ids.copy()
            erased[changed] = mask_id
            after = _State(index, last, window, then.ids, masked, then.committed, total)
            before = then.committed - len(changed)
            again = _State(index, last, window, erased, masked, before, total)
            twins.append((after, again, len(changed)))
    twins.sort(key=lambda twin: (twin[0].window, len(twin[0].ids), len(twin[0].asked)))
    states = [state for after, again, _ in twins for state in (after, again)]
    values = np.ones((len(traces), windows))
    answers = _run(states, full, traces, 2 * max(1, batch // 2), advance)
    for (state, logits), (_, moved), (*_, commits) in zip(answers, answers, twins, strict=True):
        travelled = kl_divergence(log_softmax(logits), moved).sum()
        values[state.trace, state.window] += travelled / commits
    return Measured(values, len(states))


def _check(traces: Sequence[Trace], windows: int, batch: int) -> None:
    if not traces or windows < 1 or batch < 1:
        raise ValueError(
            f"need traces, windows >= 1 and batch >= 1, got {len(traces)}, {windows}, {batch}"
        )


def _window(committed: int, trace: Trace, windows: int) -> int:
    return int(window_of(np.array(committed), trace.request.sampler.gen_length, windows))


def _run(
    states: Sequence[_State],
    engine: Backend,
    traces: Sequence[Trace],
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
        logits = engine.logits(*_batch(rows))
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


def _batch(rows: Sequence[_State]) -> tuple[Ids, Mask, Ids, Floats]:
    """Return (ids, mask, positions, progress) of rows; padding is on the right, and masked."""
    length = max(len(row.ids) for row in rows)
    asked = max(len(row.asked) for row in rows)
    ids = np.zeros((len(rows), length), np.int64)
    mask = np.zeros((len(rows), length), np.bool_)
    positions = np.zeros((len(rows), asked), np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = row.ids
        mask[index, : len(row.ids)] = True
        positions[index] = row.asked[0]
        positions[index, : len(row.asked)] = row.asked
    progress = np.array([row.committed / row.total for row in rows], np.float32)
    return ids, mask, positions, progress


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskSensitivity:
    """A task's sensitivity, means over N prompts with their intervals.

    Attributes:
        precisions: Names, in the order of the tables [P].
        base: Name of the precision that gains are counted from.
        kl: E[K] [W, P].
        influence: E[I] [W].
        gain: Over the base, monotone in bits [W, P].
        kl_low: Lower ends of the intervals; `kl_high` and so on likewise.
        n_prompts: N.
        rows: Forward passes of single rows that were spent.
    """

    precisions: tuple[str, ...]
    base: str
    kl: Reals
    kl_low: Reals
    kl_high: Reals
    influence: Reals
    influence_low: Reals
    influence_high: Reals
    gain: Reals
    gain_low: Reals
    gain_high: Reals
    n_prompts: int
    rows: int

    def to_json(self) -> dict[str, object]:
        """Return what `from_json` reads."""
        return {
            each.name: value.tolist() if isinstance(value, np.ndarray) else value
            for each in fields(self)
            for value in (getattr(self, each.name),)
        }

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> TaskSensitivity:
        """Return what `to_json` wrote."""
        known = {each.name: value[each.name] for each in fields(cls)}
        tables = {
            name: np.array(entry, np.float64)
            for name, entry in known.items()
            if name.startswith(("kl", "influence", "gain"))
        }
        names = tuple(cast("list[str]", known["precisions"]))
        return cls(**(known | tables | {"precisions": names}))  # type: ignore[arg-type]


def sensitivity_of(
    traces: Sequence[Trace],
    engines: Mapping[str, Backend],
    full: Backend,
    *,
    windows: int,
    model: ModelInfo,
    seed: int,
    base: str | None = None,
    batch: int = BATCH,
    advance: Callable[[int], None] = lambda rows: None,
) -> TaskSensitivity:
    """Return K, I and gains of a task with the engines that will run.

    Args:
        traces: Of full precision, a prompt each.
        engines: By name of the precision.  The one named as `full` is not run: its K is 0.
        full: Made the traces.
        windows: W.
        model: Its mask_id stands for what is not decided.
        seed: Of the bootstrap.
        base: That gains are counted from; None for the one of fewest bits.
        batch: Rows put before an engine at once; bounds memory.
        advance: Told of the rows of each batch done.

    Raises:
        BackendError: Logits are NaN or infinite; names engine, window, step and prompt.
        ValueError: No traces or engines, or the base is none of them.
    """
    names = tuple(engines)
    if not names or (base is not None and base not in names):
        raise ValueError(f"the base must be one of the engines, got {base!r} of {names}")
    bits = [engines[name].precision.bits for name in names]
    least = names[int(np.argmin(bits))] if base is None else base
    found = influence(traces, full, windows, model.mask_id, batch, advance)
    rows = found.rows
    kl = np.zeros((len(traces), windows, len(names)))
    for column, name in enumerate(names):
        if name != full.precision.name:
            one = window_divergence(traces, engines[name], windows, batch, advance)
            kl[..., column] = one.values
            rows += one.rows
    k, i, gain = summarize(kl, found.values, bits, names.index(least), seed)
    return TaskSensitivity(
        precisions=names,
        base=least,
        kl=k.value,
        kl_low=k.low,
        kl_high=k.high,
        influence=i.value,
        influence_low=i.low,
        influence_high=i.high,
        gain=gain.value,
        gain_low=gain.low,
        gain_high=gain.high,
        n_prompts=len(traces),
        rows=rows,
    )
