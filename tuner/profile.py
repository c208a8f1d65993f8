"""`cadenza profile`, from an export to `sensitivity.json`: what was measured, and nothing decided.

    prompts -> traces of full precision -> K, flips, moves, I by prompt -> gains with intervals
    engines -> milliseconds of a pass, interleaved; MiB of each family of weights

Tables by prompt and latencies are kept in the cache by content, so an interrupted profile goes on
where a task was finished; another seed or base costs no pass, and another proxy none but for
`rollout`, whose answers are kept too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from engines.backend import Backend
from engines.build import BuildLog, Cache, EngineSpec, engine_key
from engines.document import document_from_text
from engines.errors import CadenzaError, InputError
from engines.options import session_options
from engines.precision import FULL_PRECISION
from engines.schedule import SamplerConfig, Schedule, fixed_steps_like
from engines.terminal import Progress
from tuner.config import ProfileConfig
from tuner.costs import Reals
from tuner.evaluate import Fleet, answer, read_positions
from tuner.folder import write_json
from tuner.gain import TaskSensitivity, summarize
from tuner.profile_setting import ProfiledTask, Setting, prepare_profile
from tuner.rollout import with_rollout
from tuner.sensitivity import PromptTables, prompt_tables
from tuner.sensitivity_file import Profiled, Sensitivity, TaskTable
from tuner.tables import Question, answered, scored_positions
from tuner.timing import timed_passes
from tuner.trajectories import trace_items
from tuner.workshop import engine_spec

MIB = float(1 << 20)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a profile ended with.

    Attributes:
        made: Whether the file was written now, and not found complete.
        tasks: What was measured of each task; empty where nothing was made now.
    """

    made: bool
    tasks: Mapping[str, TaskSensitivity]


@dataclass
class _Bench:
    """The engines of a profile, loaded when first wanted, and the cache."""

    setting: Setting
    cache: Cache
    built: BuildLog = field(default_factory=BuildLog)

    @cached_property
    def specs(self) -> dict[str, EngineSpec]:
        options = session_options(self.setting.config.target)
        return {
            each.name: engine_spec(self.setting.export, each.name, "shared", options)[1]
            for each in self.setting.precisions
        }

    @cached_property
    def keys(self) -> dict[str, str]:
        return {name: engine_key(spec) for name, spec in self.specs.items()}

    @cached_property
    def engines(self) -> dict[str, Backend]:
        return {name: self.cache.engine(spec, self.built) for name, spec in self.specs.items()}

    def tables(self, name: str) -> PromptTables:
        """Return a task's tables, measured where the cache has none."""
        setting, task = self.setting, self.setting.tasks[name]
        config, with_moves = setting.config, setting.config.proxy == "moves"
        counterfactual = config.influence == "counterfactual"
        target = setting.base if counterfactual else None

        def measured() -> PromptTables:
            full, model = self.engines[FULL_PRECISION.name], setting.export.model
            with Progress(setting.rows(name, alone=True), f"{name}, forward passes") as progress:
                traces = trace_items(task.items, task.sampler, name, full, model, progress.advance)
                return prompt_tables(
                    traces,
                    self.engines,
                    full,
                    windows=setting.windows,
                    model=model,
                    influence=config.influence,
                    target=target,
                    scored=(
                        None
                        if config.positions == "all"
                        else scored_positions(task.workload, model.eos_id)
                    ),
                    with_moves=with_moves,
                    advance=progress.advance,
                    prompt_ids=[item.prompt.id for item in task.items],
                )

        question = Question(
            engines=self.keys,
            full=self.keys[FULL_PRECISION.name],
            sampler=task.sampler,
            windows=setting.windows,
            prompts=[item.ids for item in task.items],
            influence=config.influence,
            target=target,
            scored="all" if config.positions == "all" else f"scored {task.workload.scored}",
            with_moves=with_moves,
        )
        tables = answered(question, self.cache, measured)
        return self._with_rollout(tables, task) if config.proxy == "rollout" else tables

    def _with_rollout(self, tables: PromptTables, task: ProfiledTask) -> PromptTables:
        """Return tables with what single changes of the base do."""
        setting, fleet = self.setting, Fleet(self.engines, self.keys, self.setting.export.model)
        uniform = Schedule.uniform(FULL_PRECISION.name, setting.windows)
        full = answer(task.items, task.sampler, uniform, fleet, self.cache).ids
        count = len(task.items) * (1 + setting.windows * (len(tables.precisions) - 1))
        with Progress(count, f"{task.workload.name}, answers with one window changed") as progress:
            return with_rollout(
                tables,
                task.items,
                task.sampler,
                setting.base,
                fleet,
                self.cache,
                full,
                read_positions(task.workload.scored, full, fleet.model.eos_id),
                progress.advance,
            )

    def timing(self, sampler: SamplerConfig) -> dict[str, Any]:
        """Return milliseconds of a pass of each executed precision, measured in turns.

        As `timed_passes`; by threshold they are of fixed steps of the same lengths: a pass costs
        the same.
        """
        setting, shape = self.setting, self.setting.export.shape
        config, fixed = setting.config, fixed_steps_like(sampler, setting.windows)
        names = [each.name for each in setting.precisions if not each.simulated]
        return timed_passes(
            {name: self.engines[name] for name in names},
            self.keys,
            names,
            FULL_PRECISION.name,
            fixed,
            setting.windows,
            (shape.batch[1], shape.prompt[1]),
            setting.export.model,
            config.repeats,
            config.seed,
            self.cache,
        )


def profile(
    config: ProfileConfig, cache: Cache, say: Callable[[str], None], force: bool = False
) -> Outcome:
    """Profile an export and write the table.

    Args:
        config: What is asked for.
        cache: Engines and measurements.
        say: Where progress goes, a line at a time.
        force: Replace another file at the output.

    Raises:
        InputError: An argument or a file given is at fault.
        BackendError: An engine failed.
    """
    setting = prepare_profile(config)
    _check_writable(config.output)
    identity = setting.identity
    if _is_complete(config, identity, force):
        say(f"{config.output} is complete already; nothing was changed")
        return Outcome(made=False, tasks={})
    bench = _Bench(setting, cache)
    found: dict[str, TaskSensitivity] = {}
    for number, name in enumerate(setting.tasks, start=1):
        say(
            f"task {number}/{len(setting.tasks)}: {name}, {len(setting.tasks[name].items)} prompts"
        )
        tables = bench.tables(name)
        found[name] = summarize(
            tables,
            [each.bits for each in setting.precisions],
            setting.base,
            config.proxy,
            config.seed,
            groups=[each.simulated for each in setting.precisions],
        )
    say("latency of a pass")
    written = _sensitivity(bench, found, identity)
    try:
        config.output.parent.mkdir(parents=True, exist_ok=True)
        write_json(config.output, written.to_json())
    except OSError as error:
        raise InputError(
            f"cannot write {str(config.output)!r}: {error.strerror}; choose another --output"
        ) from error
    say(f"{bench.built}")
    return Outcome(made=True, tasks=found)


def _check_writable(file: Path) -> None:
    """Check that a file can be written before anything is measured for it.

    Raises:
        InputError: It cannot be.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=f".{file.name[:100]}.", dir=file.parent):
            file.exists()  # a name that is too long fails here
    except (OSError, ValueError) as error:
        says = getattr(error, "strerror", None) or error
        raise InputError(f"cannot write {str(file)!r}: {says}; choose another --output") from error


def _is_complete(config: ProfileConfig, identity: str, force: bool) -> bool:
    """Return whether the output is what this very command wrote.

    Raises:
        InputError: Something else is there and may not be replaced.
    """
    file = config.output
    if not file.exists() and not file.is_symlink():
        return False
    if not file.is_file():
        raise InputError(f"{str(file)!r} is not a file; choose another --output")
    try:
        document = document_from_text(file.read_text(encoding="utf-8"), str(file))
        made = Sensitivity.from_json(document).extra.get("profile")
    except (CadenzaError, OSError, UnicodeDecodeError):
        made = None
    if isinstance(made, dict) and made.get("identity") == identity:
        return True
    if not force:
        raise InputError(
            f"{str(file)!r} is there already and not of this command; give --force to replace "
            f"it, or choose another --output"
        )
    return False


def _sensitivity(
    bench: _Bench, found: Mapping[str, TaskSensitivity], identity: str
) -> Sensitivity:
    setting, config = bench.setting, bench.setting.config
    timings = {name: bench.timing(task.sampler) for name, task in setting.tasks.items()}
    first = next(iter(timings.values()))
    none = [float("nan")] * setting.windows

    def by_window(timing: Mapping[str, Any]) -> Reals:
        rows = [timing["by_window"].get(each.name, none) for each in setting.precisions]
        return np.array(rows, np.float64).T

    sizes = setting.export.families
    return Sensitivity(
        precisions=tuple(
            Profiled(precision=each, latency_ms=first["pass"].get(each.name), memory_mib=0.0)
            for each in setting.precisions
        ),
        families={
            name: sizes[name] / MIB
            for name in dict.fromkeys(each.family for each in setting.precisions)
        },
        activation_mib=0.0,
        base=setting.base,
        shape=asdict(setting.export.shape),
        switch_ms=first["switch"],
        windows=setting.windows,
        tasks={
            name: TaskTable.of(
                each,
                setting.tasks[name].sampler,
                bench.tables(name).passes.mean(axis=0),
                by_window(timings[name]),
                setting.tasks[name].workload.grader,
            )
            for name, each in found.items()
        },
        extra={
            "profile": {
                "identity": identity,
                "target": config.target,
                "prompts_per_task": config.prompts_per_task,
                "proxy": config.proxy,
                "influence": config.influence,
                "positions": config.positions,
                "seed": config.seed,
            }
        },
    )
