"""The worker of `tuner.worker`; its engines misbehave where a candidate asks for some threads."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from engines.backend import Backend, Floats, Ids, Mask
from engines.build import BuildLog, Cache, EngineSpec
from engines.precision import FULL_PRECISION
from tuner.worker import serve as serve_whole

CRASHES, HANGS, EATS, DIES, NAN, OTHER = range(2, 8)
# MiB that the one that eats memory asks for in one piece.
EATEN = 1 << 18


class NotANumber:
    """An engine that fails quietly."""

    def __init__(self, engine: Backend) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def logits(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Floats:
        """Return no numbers."""
        return np.full_like(self._engine.logits(ids, mask, positions, progress), np.nan)


def serve(given: Mapping[str, Any]) -> Callable[[Any, Callable[[str], None]], Any]:
    """Return the worker's handler, with a cache that hands out such engines."""
    whole = Cache.engine

    def engine(cache: Cache, spec: EngineSpec, log: BuildLog) -> Backend:
        if spec.precision == FULL_PRECISION:
            return whole(cache, spec, log)
        asked = spec.options.threads
        print(f"about to build {spec.precision.name} for {asked} threads", flush=True)
        if asked == CRASHES:
            os.kill(os.getpid(), signal.SIGSEGV)
        if asked == HANGS:
            time.sleep(3600)
        if asked == EATS:
            np.ones(EATEN << 20, np.uint8)
        if asked == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        if asked == NAN:
            return NotANumber(whole(cache, spec, log))  # type: ignore[return-value]
        if asked == OTHER:
            stem = FULL_PRECISION.name
            spec = replace(
                spec,
                serve=spec.serve.with_name(f"{stem}.serve.onnx"),
                trace=spec.trace.with_name(f"{stem}.trace.onnx"),
            )
        return whole(cache, spec, log)

    Cache.engine = engine  # type: ignore[method-assign]
    return serve_whole(given)
