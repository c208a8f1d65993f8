"""Figures of profiling: forward passes a prompt, and wall time over the passes' own.

One task of the demo's export is profiled with all its precisions, executed and simulated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from engines.backend import Backend, Floats, Ids, Mask, Served
from engines.options import OrtOptions
from engines.ort import OrtBackend
from engines.precision import FULL_PRECISION, Precision
from tests.bench.figure import Figure, median_interval, seconds_of
from tests.bench.generate import EXPORT, ROOT
from tuner.config import ProfileConfig
from tuner.gain import summarize
from tuner.profile_setting import ProfiledTask, Setting, prepare_profile
from tuner.sensitivity import prompt_tables
from tuner.trajectories import trace_items
from tuner.workshop import engine_spec

TASK = "close"
PROMPTS, ROUNDS = 32, 9

Call = Callable[[], object]


@dataclass
class Recorded:
    """An engine that counts the rows of its passes and can do the same passes again."""

    engine: Backend
    calls: list[Call]
    rows: list[int] = field(default_factory=list)

    @property
    def precision(self) -> Precision:
        return self.engine.precision

    def serve(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Served:
        self._keep(self.engine.serve, ids, mask, positions, progress)
        return self.engine.serve(ids, mask, positions, progress)

    def logits(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Floats:
        self._keep(self.engine.logits, ids, mask, positions, progress)
        return self.engine.logits(ids, mask, positions, progress)

    def _keep(
        self, tail: Callable[..., object], ids: Ids, mask: Mask, positions: Ids, progress: Floats
    ) -> None:
        self.rows.append(len(ids))
        given = tuple(array.copy() for array in (ids, mask, positions, progress))
        self.calls.append(partial(tail, *given))


@dataclass(frozen=True)
class Bench:
    """A task, and the engines of every precision of the demo's export."""

    setting: Setting
    engines: Mapping[str, Backend]

    @property
    def task(self) -> ProfiledTask:
        """The one that is profiled."""
        return self.setting.tasks[TASK]

    def profile(self, engines: Mapping[str, Backend]) -> str:
        """Return what a profile finds of the task, as the cache would hold it."""
        task, model = self.task, self.setting.export.model
        full = engines[FULL_PRECISION.name]
        traces = trace_items(task.items, task.sampler, TASK, full, model)
        tables = prompt_tables(traces, engines, full, windows=self.setting.windows, model=model)
        bits = [engines[name].precision.bits for name in tables.precisions]
        found = summarize(tables, bits, self.setting.base)
        return json.dumps([tables.to_json(), found.to_json()])


def bench() -> Bench:
    """Return the demo's export with its engines, one thread each."""
    config = ProfileConfig(
        export=EXPORT,
        output=ROOT / "demo" / "sensitivity.json",
        tasks=(TASK,),
        prompts_per_task=PROMPTS,
    )
    setting = prepare_profile(config)
    engines: dict[str, Backend] = {}
    for each in setting.precisions:
        _, spec = engine_spec(setting.export, each.name, "shared", OrtOptions(threads=1))
        engines[each.name] = OrtBackend.load(None, spec.trace, each, spec.scales, spec.options)
    return Bench(setting, engines)


def profile_passes() -> Figure:
    """Return the forward passes of rows that profiling takes, in generations a prompt."""
    own = bench()
    watched = {name: Recorded(engine, []) for name, engine in own.engines.items()}
    own.profile(watched)
    rows = sum(sum(each.rows) for each in watched.values())
    value = rows / (PROMPTS * own.task.sampler.steps)
    return Figure(
        name="profile_passes",
        value=value,
        unit="generations a prompt",
        against=f"P + 2 with {len(watched)} precisions: a trace, a replay for each precision but "
        f"full, and influence",
        reference=float(len(watched) + 2),
        spread=(value, value),
        n=PROMPTS,
    )


def profile_wall() -> Figure:
    """Return the wall time of profiling a task over that of its forward passes alone."""
    own = bench()
    calls: list[Call] = []
    own.profile({name: Recorded(engine, calls) for name, engine in own.engines.items()})

    def alone(turn: int) -> None:
        for call in calls:
            call()

    seconds = seconds_of(
        {"profile": lambda turn: own.profile(own.engines), "passes": alone}, ROUNDS
    )
    ratios = seconds["profile"] / seconds["passes"]
    return Figure(
        name="profile_wall",
        value=float(np.median(ratios)),
        unit="wall time of the passes alone",
        against=f"at most 1.15: the same inputs to the same engines, interleaved, one thread, "
        f"{len(own.engines)} precisions, {PROMPTS} prompts",
        reference=1.15,
        spread=median_interval(ratios),
        n=len(ratios),
    )
