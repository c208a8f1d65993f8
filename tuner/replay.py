"""States of traces put before engines, in batches, and what the engines' logits say of them.

Batches hold states of one window and of like length, so that little is computed for nobody.  One
batch serves every engine: it is made once, and its logits are checked once each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.backend import Backend, Floats, Ids, Mask
from engines.errors import BackendError
from engines.schedule import window_of
from engines.trace import Trace
from tuner.costs import Reals

# Rows put before an engine at once, and the most logits that it may be asked for then (256 MiB).
BATCH = 64
_MOST_LOGITS = 1 << 26

# The most logits of which float64 copies are made at once.
_MOST_DOUBLES = 1 << 22


@dataclass(frozen=True, slots=True)
class State:
    """A canvas to be put before an engine.

    Attributes:
        trace: Index of the trace that it comes from.
        step: Index of the step that it is the state before; for messages, and to find the step.
        window: That it counts for.
        ids: The canvas [L], no padding.
        asked: Canvas positions where logits are wanted [M], ascending or as the caller reads them.
        committed: Answer tokens decided.
        total: Answer tokens.
    """

    trace: int
    step: int
    window: int
    ids: Ids
    asked: Ids
    committed: int
    total: int


@dataclass(frozen=True, slots=True)
class Prompts:
    """Traces, and what their prompts are called in messages.

    Attributes:
        traces: Of full precision [N].
        ids: A name each, or None: their numbers stand in.
    """

    traces: Sequence[Trace]
    ids: Sequence[str] | None = None

    def called(self, index: int) -> str:
        """Return what messages call a prompt."""
        return str(index) if self.ids is None else repr(self.ids[index])

    def name(self, index: int) -> str:
        """Return a prompt and its task for messages."""
        return f"{self.called(index)} (task {self.traces[index].request.task!r})"


@dataclass(frozen=True, slots=True)
class Batch:
    """What an engine is given: B states of one window, padded on the right.

    Attributes:
        states: Rows of the batch [B].
        ids: The canvas [B, L].
        mask: True where a token is attended to [B, L].
        positions: Asked positions [B, M]; the first one stands in where a row asks for fewer.
        progress: Fraction of the answer decided [B].
    """

    states: Sequence[State]
    ids: Ids
    mask: Mask
    positions: Ids
    progress: Floats

    def logits(self, engine: Backend, prompts: Prompts) -> Floats:
        """Return an engine's logits [B, M, V].

        Raises:
            BackendError: One is NaN or infinite; names engine, window, step and prompt.
        """
        out = engine.logits(self.ids, self.mask, self.positions, self.progress)
        if not np.isfinite(out).all():
            row, column, token = np.argwhere(~np.isfinite(out))[0]
            state = self.states[row]
            raise BackendError(
                f"engine {engine.precision.name!r} gave the logit {out[row, column, token]} at "
                f"position {self.positions[row, column]} in window {state.window}, step "
                f"{state.step + 1} of {len(prompts.traces[state.trace].steps)}, prompt "
                f"{prompts.name(state.trace)}; leave this precision out, or check the "
                f"checkpoint's weights"
            )
        return out


def check(traces: Sequence[Trace], windows: int, batch: int) -> None:
    """Refuse what cannot be measured with a ValueError."""
    if not traces or windows < 1 or batch < 1:
        raise ValueError(
            f"need traces, windows >= 1 and batch >= 1, got {len(traces)}, {windows}, {batch}"
        )


def window_at(committed: int, trace: Trace, windows: int) -> int:
    """Return the window of a trace's state with so many tokens decided."""
    return int(window_of(np.array(committed), trace.request.sampler.gen_length, windows))


def batches(states: Sequence[State], batch: int, vocab: int, together: int = 1) -> Iterator[Batch]:
    """Yield states in batches.

    Args:
        states: Groups of `together` that stay in one batch, each of one window, length and number
            of asked positions.
        batch: Rows at most, but at least one group; fewer where the logits would be too large.
        vocab: V.
        together: States of a group.
    """
    groups = sorted(
        range(0, len(states), together),
        key=lambda at: (states[at].window, len(states[at].ids), len(states[at].asked)),
    )
    rows: list[State] = []
    widest = 0
    for at in groups:
        group = states[at : at + together]
        wide = max(widest, len(group[0].asked))
        room = min(batch, _MOST_LOGITS // (wide * vocab))
        if rows and (len(rows) + together > room or rows[0].window != group[0].window):
            yield _padded(rows)
            rows, wide = [], len(group[0].asked)
        rows.extend(group)
        widest = wide
    if rows:
        yield _padded(rows)


def _padded(rows: Sequence[State]) -> Batch:
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
    return Batch(rows, ids, mask, positions, progress)


def log_softmax(logits: NDArray[np.floating]) -> Reals:
    """Return log probabilities of logits, or of log probabilities, over the last axis."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def kl_divergence(log_p: NDArray[np.floating], logits: NDArray[np.floating]) -> Reals:
    """Return KL(p || q) of each row [n], nats, at least 0; logits are q's, both [n, V].

    In float64, a few rows at a time: at near-certain commits K is of float32's own rounding.
    """
    if not len(log_p):
        return np.zeros(0)
    few = max(1, _MOST_DOUBLES // log_p.shape[-1])
    parts = []
    for start in range(0, len(log_p), few):
        ours = log_softmax(log_p[start : start + few])
        theirs = log_softmax(logits[start : start + few])
        np.subtract(ours, theirs, out=theirs)
        np.exp(ours, out=ours)
        parts.append(np.einsum("nv,nv->n", ours, theirs))
    out: Reals = np.maximum(np.concatenate(parts), 0.0)
    return out
