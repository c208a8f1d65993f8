"""The one interface behind which engines run, and a fake with given latencies for tests.

A `Backend` is one loaded engine.  ONNX Runtime's is in `ort`; the torch model is one too
(`exporter.framework`), so parity, tracing and serving all use the same sampler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engines.precision import Precision

Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Served:
    """The serve tail at the asked positions, each [B, M].

    Attributes:
        tokens: The most probable token, lowest id on ties; never the mask token.
        probability: Its probability.
        entropy: Of the distribution, nats.
    """

    tokens: Ids
    probability: Floats
    entropy: Floats


class Backend(Protocol):
    """One loaded engine: a denoiser at one precision."""

    @property
    def precision(self) -> Precision:
        """The precision that the engine runs."""

    def serve(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Served:
        """Run a pass and return the serve tail.

        Args:
            ids: The canvas [B, L].
            mask: True where a token is attended to [B, L].
            positions: Where answers are wanted [B, M].
            progress: Fraction of tokens committed by each row [B], in [0, 1); chooses the row's
                static scales, where the engine has them.

        Raises:
            BackendError: The engine failed.
        """

    def logits(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Floats:
        """Run a pass and return the trace tail, logits [B, M, V]; arguments as `serve`."""


def served_from_logits(logits: Floats) -> Served:
    """Return the serve tail that a graph would compute from logits [B, M, V]."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return Served(
        tokens=logits.argmax(axis=-1).astype(np.int64),
        probability=np.exp(log_p.max(axis=-1)),
        entropy=-(np.exp(log_p) * log_p).sum(axis=-1),
    )


@dataclass
class FakeBackend:
    """A backend whose logits a function gives, and whose every pass takes a given time.

    Attributes:
        precision: What it claims to run.
        logits_of: (ids [B, L], mask [B, L], positions [B, M]) to logits [B, M, V].
        latency_ms: Milliseconds that `sleep` is told for each pass.
        sleep: What a pass does with its seconds; a test's own clock, so no test waits.
        passes: Passes run so far.
    """

    precision: Precision
    logits_of: Callable[[Ids, Mask, Ids], Floats]
    latency_ms: float = 0.0
    sleep: Callable[[float], None] = lambda seconds: None
    passes: int = field(default=0, init=False)

    def logits(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Floats:
        self.passes += 1
        self.sleep(self.latency_ms / 1000.0)
        return self.logits_of(ids, mask, positions)

    def serve(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Served:
        return served_from_logits(self.logits(ids, mask, positions, progress))
