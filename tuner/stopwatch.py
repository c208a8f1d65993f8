"""Seconds by kind of work: what a tune spends on builds, measurements and evaluations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

BUILD, MEASURE, EVALUATE = "build", "measure", "evaluate"


@dataclass
class Stopwatch:
    """Counts seconds by kind; work inside other work counts once, as the inner one's kind.

    Attributes:
        spent: Seconds by kind.
        clock: Seconds.
    """

    spent: dict[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.perf_counter
    _inner: list[float] = field(default_factory=list)

    @contextmanager
    def __call__(self, kind: str) -> Iterator[None]:
        """Count the seconds of a block."""
        began = self.clock()
        self._inner.append(0.0)
        try:
            yield
        finally:
            took = self.clock() - began
            inside = self._inner.pop()
            self.spent[kind] = self.spent.get(kind, 0.0) + took - inside
            if self._inner:
                self._inner[-1] += took

    def since(self, before: dict[str, float]) -> dict[str, float]:
        """Return the seconds by kind that were added to an earlier copy of `spent`."""
        return {kind: value - before.get(kind, 0.0) for kind, value in self.spent.items()}
