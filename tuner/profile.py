"""`cadenza profile`, from an export to `sensitivity.json`: what was measured, and nothing decided.

    prompts -> traces of full precision -> K, flips, moves, I by prompt -> gains with intervals
    engines -> milliseconds of a pass, interleaved; MiB of each family of weights

Tables by prompt and latencies are kept in the cache by content, so an interrupted profile goes on
where a task was finished, and another proxy, seed or base costs no pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from calib_data.workload import Workload
from engines.backend import Backend
from engines.build import BuildLog, Cache, EngineSpec, digest_json, engine_key
from engines.document import document_from_text
from engines.errors import CadenzaError, InputError
from engines.files import digest_file
from engines.measure import measure, measure_switch
from engines.ort import OrtBackend, OrtOptions
from engines.precision import FULL_PRECISION, Precision
from engines.schedule import (
    LOW_CONFIDENCE,
    SamplerConfig,
    fixed_steps_like,
    passes_by_window,
)
from engines.terminal import Progress
from engines.text import tokenizer_from_file
from exporter.folder import EXPORT, Export
from tuner.config import ProfileConfig
from tuner.costs import Reals
from tuner.evaluate import Item
from tuner.folder import write_json
from tuner.gain import TaskSensitivity, summarize
from tuner.replay import BATCH
from tuner.sensitivity import PromptTables, prompt_tables
from tuner.sensitivity_file import Profiled, Sensitivity, TaskTable
from tuner.tables import Question, answered, scored_positions
from tuner.workbench import export_for, items_of, own_tasks, precisions_of, task_of
from tuner.workshop import engine_spec, trace_items

MIB = float(1 << 20)


@dataclass(frozen=True)
class ProfiledTask:
    """One task with its calibration prompts, tokenized."""

    workload: Workload
    sampler: SamplerConfig
    items: tuple[Item, ...]


@dataclass(frozen=True)
class Setting:
    """Everything that a profile works on, read and checked before anything runs.

    Attributes:
        config: What was asked for.
        export: The graphs.
        windows: W.
        precisions: Of the table, fewest bits first; full precision is among them.
        base: Name of the one that gains are counted from: of fewest bits among the executed ones
            beside full precision, or among all where there are none.
        tasks: By name.
    """

    config: ProfileConfig
    export: Export
    windows: int
    precisions: tuple[Precision, ...]
    base: str
    tasks: Mapping[str, ProfiledTask]

    @property
    def identity(self) -> str:
        """Digest of everything that decides the table."""
        prompts = [
            [name, task.sampler.to_json(), [asdict(item.prompt) for item in task.items]]
            for name, task in self.tasks.items()
        ]
        export = digest_file(self.export.folder / EXPORT).sha256
        return self.config.identity(export, digest_json(prompts))

    def rows(self, name: str) -> int:
        """Return the forward passes of single rows that a task takes, at most."""
        task = self.tasks[name]
        most = replace(task.sampler, rule=LOW_CONFIDENCE, threshold=None)  # as many steps
        by_window = [n for n in passes_by_window(most, self.windows) if n]
        if self.config.influence == "remask":
            travelled = 2 * (len(by_window) - 1)
        else:
            travelled = sum(sum(by_window[w:]) for w in range(len(by_window) - 1))
        return len(task.items) * (most.steps * len(self.precisions) + travelled)


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
        options = OrtOptions(provider=self.setting.config.target)
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
            with Progress(setting.rows(name), f"{name}, forward passes") as progress:
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
        return answered(question, self.cache, measured)

    def timing(self, sampler: SamplerConfig) -> dict[str, Any]:
        """Return milliseconds of a pass of each executed precision, measured in turns.

        By threshold they are of fixed steps of the same lengths: a pass costs the same.  Keys are
        `pass` {precision: ms}, `by_window` {precision: [ms] [W]} and `switch`.
        """
        setting, shape = self.setting, self.setting.export.shape
        config, fixed = setting.config, fixed_steps_like(sampler, setting.windows)
        names = [each.name for each in setting.precisions if not each.simulated]
        where = (setting.windows, shape.batch[1], shape.prompt[1])
        asked = {
            "engines": [[name, self.keys[name]] for name in names],
            "sampler": fixed.to_json(),
            "shape": where,
            "repeats": config.repeats,
            "seed": config.seed,
        }
        key = digest_json(asked)
        kept = self.cache.get("passes", key)
        if kept is None:
            lanes = {name: self.engines[name] for name in names}
            model, repeats, seed = setting.export.model, config.repeats, config.seed
            found = measure(lanes, fixed, *where, model, repeats=repeats, seed=seed)
            switch = measure_switch(lanes, fixed, *where, model, repeats=repeats, seed=seed)
            kept = {
                "pass": {row.precision: row.latency_ms for row in found.rows},
                "by_window": {row.precision: list(row.by_window) for row in found.rows},
                "switch": switch,
            }
            self.cache.put("passes", key, kept)
        return cast("dict[str, Any]", kept)


def prepare_profile(config: ProfileConfig) -> Setting:
    """Return what a profile works on.

    Raises:
        InputError: The export is damaged, or a name or a prompt in the arguments is at fault.
    """
    export = export_for(config.export, config.target)
    names = tuple(dict.fromkeys((*config.precisions, FULL_PRECISION.name)))
    chosen = precisions_of(names if config.precisions else tuple(export.precisions), export)
    precisions = tuple(sorted(chosen, key=lambda each: (each.bits, each.weight_bits, each.name)))
    windows = export.windows if config.windows is None else config.windows
    tokenizer = tokenizer_from_file(export.tokenizer, export.model)
    tasks: dict[str, ProfiledTask] = {}
    for spec in config.tasks or own_tasks(export):
        workload, sampler = task_of(spec, export, windows)
        if workload.name in tasks:
            raise InputError(f"the task {workload.name!r} is given twice; name it once")
        items = items_of(
            workload,
            sampler,
            "calibration",
            config.prompts_per_task,
            config.seed,
            export,
            tokenizer,
        )
        tasks[workload.name] = ProfiledTask(workload, sampler, items)
    cheaper = [each for each in precisions if each.name != FULL_PRECISION.name]
    executed = [each for each in cheaper if not each.simulated]
    base = next(iter(executed or cheaper or precisions)).name
    return Setting(config, export, windows, precisions, base, tasks)


def seconds_a_row(setting: Setting) -> float:
    """Return what a forward pass of a row takes full precision, from one batch; keeps nothing.

    Raises:
        BackendError: The engine cannot be loaded or failed.
    """
    _, spec = engine_spec(
        setting.export,
        FULL_PRECISION.name,
        "shared",
        OrtOptions(provider=setting.config.target),
    )
    engine = OrtBackend.load(None, spec.trace, spec.precision, options=spec.options)
    task = next(iter(setting.tasks.values()))
    items = (task.items * BATCH)[:BATCH]
    sampler = task.sampler
    length = max(len(item.ids) for item in items)
    ids = np.full((BATCH, length + sampler.gen_length), setting.export.model.mask_id, np.int64)
    for row, item in enumerate(items):
        ids[row, : len(item.ids)] = item.ids
    commits = max(sampler.commits)
    positions = np.tile(np.arange(length, length + commits), (BATCH, 1))
    took = []
    for _ in range(2):  # the first warms up
        began = time.perf_counter()
        engine.logits(ids, np.ones(ids.shape, np.bool_), positions, np.zeros(BATCH, np.float32))
        took.append(time.perf_counter() - began)
    return took[-1] / BATCH


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
