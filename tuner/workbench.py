"""What a tune works on, read and checked before anything is built: export, tasks, prompts, cache.

Every name in the arguments is resolved here, so a misspelt task or precision costs no build.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from calib_data.prompts import Split
from calib_data.workload import (
    Workload,
    expand_specs,
    graders_by_task,
    name_of_spec,
    workload_from_spec,
)
from engines.build import Cache, digest_json
from engines.errors import InputError
from engines.machine import machine
from engines.manifest import DEFAULT_TASK
from engines.options import session_options
from engines.ort import environment
from engines.precision import FULL_PRECISION, Precision
from engines.schedule import SamplerConfig, Schedule, fixed_steps_like, passes_by_window
from engines.targets import target_from_name
from engines.text import Tokenizer, tokenizer_from_file
from engines.trt import module_version
from exporter.folder import Export
from tuner.baselines import from_file, widened
from tuner.config import Effort, TuneConfig
from tuner.evaluate import Item, sampler_of
from tuner.exports import candidates_of, export_for, exports_of, own_tasks
from tuner.latencies import Latencies, elsewhere, given_latencies


@dataclass(frozen=True)
class Job:
    """One task with its prompts, tokenized; calibration, tuning and test are disjoint."""

    workload: Workload
    sampler: SamplerConfig
    calibration: tuple[Item, ...]
    tuning: tuple[Item, ...]
    test: tuple[Item, ...]


@dataclass(frozen=True)
class Workbench:
    """Everything a tune needs besides engines.

    Attributes:
        config: What was asked for.
        export: The base recipe's graphs.
        exports: Of the same checkpoint, by how weights were rounded; `export` is the first.
        precisions: The candidates, most bits first; full precision is among them or only measured
            against.
        jobs: By the name of the task.
        tokenizer: The checkpoint's.
        cache: Engines, measurements and answers.
        say: Where a line of progress goes.
        effort: What the mode spends.
        baselines: Schedules written by hand, by the name of their file and by task; None stands
            for every other task.
        latencies: Of engines for a GPU that is not asked here, or None.
        plans_here: Whether the engines are TensorRT's plans, run on this machine's GPU.
    """

    config: TuneConfig
    export: Export
    exports: dict[str, Export]
    precisions: tuple[Precision, ...]
    jobs: dict[str, Job]
    tokenizer: Tokenizer
    cache: Cache
    say: Callable[[str], None]
    effort: Effort
    baselines: Mapping[str, Mapping[str | None, Schedule]] = field(default_factory=dict)
    latencies: Latencies | None = None
    plans_here: bool = False

    def baselines_of(self, task: str) -> dict[str, Schedule]:
        """Return the schedules written by hand for a task, or for `default`, by their file."""
        return {
            label: schedule
            for label, each in self.baselines.items()
            for schedule in (each.get(task, each.get(None)),)
            if schedule is not None
        }

    @property
    def device(self) -> str:
        """What results are measured on, with a digest of it: only those of equals compete."""
        found = {
            **environment(session_options(self.config.target)),
            "target": self.config.target,
        }
        if self.plans_here:
            target = target_from_name(self.config.target)
            found |= {**machine(gpu=True), target.module: module_version(target)}
            return f"{found['device']}, {self.config.target} ({digest_json(found)[:8]})"
        if self.ahead:
            found["latencies"] = digest_json(self.latencies and self.latencies.to_json())
            elsewhere = "no latencies" if self.latencies is None else self.latencies.says
            return f"{self.config.target}, {elsewhere} ({digest_json(found)[:8]})"
        return f"{found['device']}, {found['cores']} cores ({digest_json(found)[:8]})"

    @property
    def simulated(self) -> bool:
        """Whether the candidates are simulated: bits, but no latency."""
        return self.precisions[0].simulated

    @property
    def ahead(self) -> bool:
        """Whether what ships are plans of TensorRT."""
        return target_from_name(self.config.target).ahead

    @property
    def stands_in(self) -> bool:
        """Whether what runs here stands in for plans of a GPU that is not asked."""
        return self.ahead and not self.plans_here

    @property
    def timed(self) -> bool:
        """Whether the candidates have latencies, measured here or given."""
        return not self.simulated and (not self.stands_in or self.latencies is not None)

    @property
    def unit(self) -> str:
        """The unit of costs, and where milliseconds are from if they were not measured here."""
        if not self.timed:
            return "mean bits"
        return "ms a sequence" + (f", {self.latency_from}" if self.latency_from else "")

    @property
    def latency_from(self) -> str:
        """Where milliseconds are from, if they were not measured here, else ""."""
        return "" if self.latencies is None else self.latencies.says

    def sampler(self, name: str) -> SamplerConfig:
        """Return the sampler of a task; of `default` it is the first task's."""
        job = self.jobs.get(name) or next(iter(self.jobs.values()))
        return job.sampler

    @property
    def prompts_digest(self) -> str:
        """Digest of what files gave: tasks, prompts, judges, schedules by hand, latencies."""
        return digest_json(
            [
                [
                    [label, str(task), each.precisions]
                    for label, of in self.baselines.items()
                    for task, each in of.items()
                ],
                self.latencies and self.latencies.to_json(),
                *[
                    [
                        name,
                        job.sampler.to_json(),
                        job.workload.grader,
                        [asdict(item.prompt) for item in items],
                    ]
                    for name, job in self.jobs.items()
                    for items in (job.calibration, job.tuning, job.test)
                ],
            ]
        )

    @property
    def shown_precisions(self) -> tuple[Precision, ...]:
        """The candidates and full precision: what the closing table may show."""
        full = self.export.precisions[FULL_PRECISION.name]
        return tuple(dict.fromkeys((*self.precisions, full)))


def prepare(
    config: TuneConfig,
    cache: Cache,
    say: Callable[[str], None],
    effort: Effort | None = None,
) -> Workbench:
    """Return the workbench of a tune.

    Args:
        config: What is asked for.
        cache: Engines, measurements and answers.
        say: Where a line of progress goes.
        effort: In place of what the mode spends.

    Raises:
        InputError: An export is damaged, or a name or a prompt in the arguments is at fault.
    """
    spent = effort or config.effort
    export = export_for(config.export, config.target)
    exports = exports_of(export, config.others, config.target)
    precisions = candidates_of(config, export)
    tokenizer = tokenizer_from_file(export.tokenizer, export.model)
    asked = asked_tasks(config.tasks, config.graders, export, export.windows)
    jobs = {
        name: _job(workload, sampler, spent, config.seed, export, tokenizer)
        for name, (workload, sampler) in asked.items()
    }
    strange = [name for name, _ in config.max_losses if name not in jobs]
    if strange:
        raise InputError(
            f"a loss is allowed to the task {strange[0]!r}, tasks are {', '.join(jobs)}; mend "
            f"the name, or add --task {strange[0]}"
        )
    target = target_from_name(config.target)
    plans_here = target.ahead and elsewhere(target) is None
    return Workbench(
        config,
        export,
        exports,
        precisions,
        jobs,
        tokenizer,
        cache,
        say,
        spent,
        _baselines(config, precisions, jobs, export.windows, say),
        given_latencies(config, export, precisions, plans_here or not target.ahead),
        plans_here,
    )


def _baselines(
    config: TuneConfig,
    precisions: Sequence[Precision],
    jobs: Mapping[str, Job],
    windows: int,
    say: Callable[[str], None],
) -> dict[str, dict[str | None, Schedule]]:
    """Return the schedules of every `--baseline`, by the name of the file."""
    names = [precision.name for precision in precisions]
    found: dict[str, dict[str | None, Schedule]] = {}
    for file in config.baselines:
        if file.stem in found:
            raise InputError(f"two baselines are called {file.stem!r}; rename one")
        found[file.stem] = from_file(file, names)
        for schedule in found[file.stem].values():
            if widened(schedule, windows) is None:
                say(
                    f"baseline {file.stem}: {schedule.windows} windows are no equal parts of "
                    f"{windows}; it is judged, but does not compete"
                )
        unknown = [
            str(task) for task in found[file.stem] if task not in (None, DEFAULT_TASK, *jobs)
        ]
        if unknown:
            raise InputError(
                f"{str(file)!r} has a schedule for {unknown[0]!r}, tasks are {', '.join(jobs)}; "
                f"mend the name, or add --task {unknown[0]}"
            )
    return found


def task_of(
    spec: str, export: Export, windows: int, grader: str | None = None
) -> tuple[Workload, SamplerConfig]:
    """Return a task and how it is denoised: as the export was calibrated, if it was on it.

    Args:
        spec: As given to `--task`.
        export: Says which tasks it knows.
        windows: That must each have a pass.
        grader: As given to `--grader`, or None.

    Raises:
        InputError: The task or its file is at fault, the export was not calibrated on a built-in
            one, or there are more windows than passes.
    """
    name = name_of_spec(spec)
    known = export.tasks.get(name)
    try:
        if known is None:
            workload = workload_from_spec(spec, grader=grader)
        else:
            workload = workload_from_spec(
                spec,
                grader=grader,
                steps=known.sampler.steps,
                gen_length=known.sampler.gen_length,
                block_length=known.sampler.block_length,
            )
        sampler = sampler_of(workload) if known is None else known.sampler
    except ValueError as error:
        raise InputError(f"task {spec!r}: {error}") from error
    if known is None and workload.source == "builtin" and name not in export.tasks:
        raise InputError(
            f"the export was not calibrated on {name!r}, only on {', '.join(export.tasks)}; "
            f"export again with --task {name}"
        )
    try:
        passes_by_window(fixed_steps_like(sampler, windows), windows)
    except ValueError as error:
        raise InputError(f"task {name!r}: {error}; export again with fewer --windows") from error
    return workload, sampler


def asked_tasks(
    specs: Sequence[str], given: Sequence[str], export: Export, windows: int
) -> dict[str, tuple[Workload, SamplerConfig]]:
    """Return the tasks of a command and how they are denoised, by name.

    Args:
        specs: As given to `--task`; none for the export's own.
        given: As given to `--grader`.
        export: Says which tasks it knows.
        windows: That must each have a pass.

    Raises:
        InputError: As `task_of`; or a task is given twice, or a grader does not fit.
    """
    expanded = expand_specs(specs) or own_tasks(export)
    try:
        graders = graders_by_task(given, expanded)
    except ValueError as error:
        raise InputError(f"{error}") from error
    found: dict[str, tuple[Workload, SamplerConfig]] = {}
    for spec in expanded:
        workload, sampler = task_of(spec, export, windows, graders.get(name_of_spec(spec)))
        if workload.name in found:
            raise InputError(f"the task {workload.name!r} is given twice; name it once")
        found[workload.name] = (workload, sampler)
    return found


def _job(
    workload: Workload,
    sampler: SamplerConfig,
    effort: Effort,
    seed: int,
    export: Export,
    tokenizer: Tokenizer,
) -> Job:
    splits: dict[str, tuple[Item, ...]] = {}
    counts: dict[Split, int] = {
        "calibration": effort.calibration,
        "tuning": effort.tuning,
        "test": effort.test,
    }
    for split, count in counts.items():
        splits[split] = items_of(workload, sampler, split, count, seed, export, tokenizer)
    return Job(workload, sampler, splits["calibration"], splits["tuning"], splits["test"])


def items_of(
    workload: Workload,
    sampler: SamplerConfig,
    split: Split,
    count: int,
    seed: int,
    export: Export,
    tokenizer: Tokenizer,
) -> tuple[Item, ...]:
    """Return prompts of a split with their tokens, `count` or all there are.

    Raises:
        InputError: There are none, or one cannot be tokenized or is too long for the export.
    """
    name = workload.name
    try:
        prompts = workload.prompts(split, count, seed)
    except ValueError as error:
        raise InputError(f"task {name!r}: {error}") from error
    if not prompts:
        raise InputError(
            f"task {name!r} has no {split} prompts; add lines to its file, or set their "
            f'"split" to "{split}"'
        )
    longest = min(export.shape.prompt[2], export.model.max_length - sampler.gen_length)
    items = []
    for prompt in prompts:
        try:
            ids = tokenizer.encode(prompt.prompt)
        except InputError as error:
            raise InputError(f"task {name!r}, prompt {prompt.id!r}: {error}") from error
        if len(ids) > longest:
            raise InputError(
                f"task {name!r}, prompt {prompt.id!r} has {len(ids)} tokens, the export takes "
                f"{longest}; export again with a larger --shape, or shorten it"
            )
        items.append(Item(prompt, ids))
    return tuple(items)
