"""Prompt tables of a task, from the cache where they were measured before.

`tune` and `profile` ask the same question in the same words, so what one has measured the other
has, too.  No proxy, seed or base is part of it: these are of what is made of the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from calib_data.workload import Workload
from engines.build import Cache, digest_json
from engines.schedule import SamplerConfig
from engines.trace import Trace
from tuner.evaluate import read_positions
from tuner.sensitivity import Influence, PromptTables, Scored

Positions = Literal["all", "scored"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """Everything that decides prompt tables.

    Attributes:
        engines: Key of each engine by the name of its precision, in the tables' order.
        full: Key of the engine that makes the traces.
        sampler: How answers are denoised.
        windows: W.
        prompts: Token ids [N].
        influence: Its form.
        target: Whose commits a counterfactual takes; None where it takes none.
        scored: Which positions count: "all", or what a grader reads as `Workload.scored` says.
        with_moves: Whether moves are measured.
    """

    engines: Mapping[str, str]
    full: str
    sampler: SamplerConfig
    windows: int
    prompts: Sequence[tuple[int, ...]]
    influence: Influence = "remask"
    target: str | None = None
    scored: str = "all"
    with_moves: bool = False

    @property
    def key(self) -> str:
        """Digest of all of it."""
        parts = asdict(self) | {
            "engines": list(self.engines.items()),
            "sampler": self.sampler.to_json(),
        }
        return digest_json(parts)


def answered(
    question: Question, cache: Cache, measure: Callable[[], PromptTables]
) -> PromptTables:
    """Return the tables that answer a question, measured only if the cache has none."""
    kept = cache.get("tables", question.key)
    if kept is not None:
        return PromptTables.from_json(kept)
    tables = measure()
    cache.put("tables", question.key, tables.to_json())
    return tables


def scored_positions(workload: Workload, eos_id: int) -> Scored:
    """Return, for a trace, which answer positions [G] the grader of a workload reads.

    As `evaluate.read_positions`; a prompt file says nothing of what its grader reads, so it is as
    "all".
    """

    def mask(trace: Trace) -> NDArray[np.bool_]:
        ids = np.array(trace.generation.ids)
        return np.asarray(read_positions(workload.scored, ids[None], eos_id)[0])

    return mask
