"""What a profile works on, read and checked before anything runs, and what it would take."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from calib_data.workload import Workload
from engines.build import digest_json
from engines.files import digest_file
from engines.options import session_options
from engines.ort import OrtBackend
from engines.precision import FULL_PRECISION, Precision
from engines.schedule import LOW_CONFIDENCE, SamplerConfig, passes_by_window
from engines.text import tokenizer_from_file
from exporter.folder import EXPORT, Export
from tuner.config import ProfileConfig
from tuner.evaluate import Item
from tuner.exports import export_for, precisions_of
from tuner.replay import BATCH
from tuner.workbench import asked_tasks, items_of
from tuner.workshop import engine_spec


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
            [
                name,
                task.sampler.to_json(),
                task.workload.grader,
                [asdict(item.prompt) for item in task.items],
            ]
            for name, task in self.tasks.items()
        ]
        export = digest_file(self.export.folder / EXPORT).sha256
        return self.config.identity(export, digest_json(prompts))

    def rows(self, name: str, alone: bool = False) -> int:
        """Return the forward passes of single rows that a task takes, at most.

        Args:
            name: Of the task.
            alone: Without the rollouts of single changes.
        """
        task = self.tasks[name]
        most = replace(task.sampler, rule=LOW_CONFIDENCE, threshold=None)  # as many steps
        by_window = [n for n in passes_by_window(most, self.windows) if n]
        if self.config.influence == "remask":
            travelled = 2 * (len(by_window) - 1)
        else:
            travelled = sum(sum(by_window[w:]) for w in range(len(by_window) - 1))
        changed = 0
        if self.config.proxy == "rollout" and not alone:
            later = sum(sum(by_window[w:]) for w in range(len(by_window)))
            changed = most.steps + (len(self.precisions) - 1) * later
        return len(task.items) * (most.steps * len(self.precisions) + travelled + changed)


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
    asked = asked_tasks(config.tasks, config.graders, export, windows)
    for name, (workload, sampler) in asked.items():
        items = items_of(
            workload,
            sampler,
            "calibration",
            config.prompts_per_task,
            config.seed,
            export,
            tokenizer,
        )
        tasks[name] = ProfiledTask(workload, sampler, items)
    cheaper = [each for each in precisions if each.name != FULL_PRECISION.name]
    executed = [each for each in cheaper if not each.simulated]
    base = next(iter(executed or cheaper or precisions)).name
    return Setting(config, export, windows, precisions, base, tasks)


def seconds_a_row(
    export: Export, target: str, items: Sequence[Item], sampler: SamplerConfig
) -> float:
    """Return what a forward pass of a row takes full precision, from one batch; keeps nothing.

    Args:
        export: Has the graphs.
        target: Where the engine runs.
        items: Prompts of a task.
        sampler: How it is denoised.

    Raises:
        BackendError: The engine cannot be loaded or failed.
    """
    _, spec = engine_spec(
        export,
        FULL_PRECISION.name,
        "shared",
        session_options(target),
    )
    engine = OrtBackend.load(None, spec.trace, spec.precision, options=spec.options)
    some = (list(items) * BATCH)[:BATCH]
    length = max(len(item.ids) for item in some)
    ids = np.full((BATCH, length + sampler.gen_length), export.model.mask_id, np.int64)
    for row, item in enumerate(some):
        ids[row, : len(item.ids)] = item.ids
    commits = max(sampler.commits)
    positions = np.tile(np.arange(length, length + commits), (BATCH, 1))
    took = []
    for _ in range(2):  # the first warms up
        began = time.perf_counter()
        engine.logits(ids, np.ones(ids.shape, np.bool_), positions, np.zeros(BATCH, np.float32))
        took.append(time.perf_counter() - began)
    return took[-1] / BATCH
