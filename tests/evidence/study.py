"""One quantizer's engines, prompts and measurements: what all experiments ask.

    checkpoint -> planted outliers -> export -> engines
    engines + calibration prompts -> traces -> sensitivity by prompt
    engines + schedules + prompts -> answers -> graded, and compared with full precision's

Everything slow is kept in a cache by content, so a killed study goes on where it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from calib_data.prompts import Split
from calib_data.workload import Workload, expand_specs, workload_from_spec
from engines.backend import Ids
from engines.build import BuildLog, Cache, digest_json, engine_key
from engines.options import OrtOptions
from engines.precision import FULL_PRECISION
from engines.sampler import Request
from engines.schedule import SamplerConfig, Schedule, passes_by_window
from engines.text import Tokenizer, tokenizer_from_file
from engines.trace import Trace, expected_passes, record
from exporter.export import ExportConfig, export
from exporter.folder import Export, Recipe, read_export
from exporter.plant import PlantConfig, plant_checkpoint
from tests.evidence.config import EvidenceConfig
from tuner.costs import Costs
from tuner.evaluate import (
    EVALUATION_BATCH,
    Answers,
    Fleet,
    Item,
    answer_all,
    graded,
    read_positions,
    sampler_of,
    token_agreement,
)
from tuner.rollout import with_rollout
from tuner.sensitivity import Influence, PromptTables, prompt_tables
from tuner.tables import Question, answered, scored_positions
from tuner.workshop import engine_spec

Say = Callable[[str], None]
Part = Split | Literal["fresh"]


@dataclass(frozen=True)
class Prompts:
    """A task's prompts, tokenized; its sampler is what the rows are denoised with."""

    workload: Workload
    sampler: SamplerConfig
    tokenizer: Tokenizer
    seed: int
    _drawn: dict[tuple[Part, int], tuple[Item, ...]] = field(default_factory=dict)

    def items(self, split: Part, count: int) -> tuple[Item, ...]:
        """Return the first `count` prompts of a split, drawn and tokenized once.

        `fresh` are test prompts that are not among the first `count` of `test`; a file may have
        none.
        """
        if (split, count) not in self._drawn:
            if split == "fresh":
                seen = {item.prompt.prompt for item in self.items("test", count)}
                drawn = self.workload.prompts("test", 2 * count, self.seed + 1)
                prompts = [each for each in drawn if each.prompt not in seen][:count]
            else:
                prompts = self.workload.prompts(split, count, self.seed)
            self._drawn[split, count] = tuple(
                Item(prompt, self.tokenizer.encode(prompt.prompt)) for prompt in prompts
            )
        return self._drawn[split, count]


@dataclass
class Study:
    """Everything measured with one quantizer's engines.

    Attributes:
        config: What is studied.
        quantizer: How weights are rounded.
        folder: Has the export.
        cache: Engines, sensitivities and answers.
        advance: Told of answers as they are there.
        traces: Shared between studies of one checkpoint: full precision does not depend on the
            quantizer.
    """

    config: EvidenceConfig
    quantizer: str
    folder: Export
    cache: Cache
    advance: Callable[[int], None] = lambda answers: None
    traces: dict[str, list[Trace]] = field(default_factory=dict)
    _known: dict[tuple[object, ...], NDArray[np.float64]] = field(default_factory=dict)

    @cached_property
    def fleet(self) -> Fleet:
        """The engines of all precisions, by name; `int8.window` has a set of scales a window."""
        options = OrtOptions(provider=self.config.target, threads=os.cpu_count() or 1)
        log, engines, keys = BuildLog(), {}, {}
        for name in self.folder.precisions:
            wanted = {name: "shared"}
            if self.folder.precisions[name].has_static_scales:
                wanted[f"{name}.window"] = "window"
            for label, scales in wanted.items():
                _, spec = engine_spec(self.folder, name, scales, options)
                engines[label] = self.cache.engine(spec, log)
                keys[label] = engine_key(spec)
        return Fleet(engines, keys, self.folder.model)

    @cached_property
    def prompts(self) -> dict[str, Prompts]:
        """Prompts by the name of the task."""
        tokenizer = tokenizer_from_file(self.folder.tokenizer, self.folder.model)
        found = {}
        for spec in expand_specs(self.config.tasks):
            workload = workload_from_spec(spec)
            found[workload.name] = Prompts(
                workload, sampler_of(workload), tokenizer, self.config.seed
            )
        return found

    def costs(
        self,
        task: str,
        names: Sequence[str],
        windows: int,
        sampler: SamplerConfig | None = None,
    ) -> Costs:
        """Return what windows cost in activation bits at the named precisions.

        Passes are those expected: known for fixed steps, else the mean over the traces.
        """
        own = sampler or self.prompts[task].sampler
        if own.rule == "threshold":
            passes = expected_passes(self.recorded(task, own), windows)
        else:
            passes = np.array(passes_by_window(own, windows), np.float64)
        rows = [self.folder.precisions[name] for name in names]
        return Costs(
            names=tuple(names),
            bits=np.array([row.bits for row in rows], np.float64),
            passes=passes,
            families=tuple(row.family for row in rows),
            simulated=tuple(row.simulated for row in rows),
        )

    def recorded(self, task: str, sampler: SamplerConfig | None = None) -> list[Trace]:
        """Return full precision's traces of a task's calibration prompts."""
        own = sampler or self.prompts[task].sampler
        key = digest_json([task, asdict(own)])
        if key not in self.traces:
            full = Schedule.uniform(FULL_PRECISION.name, 1)
            self.traces[key] = record(
                [
                    Request(prompt=item.ids, sampler=own, schedule=full, task=task)
                    for item in self.prompts[task].items("calibration", self.config.calibration)
                ],
                self.fleet.engines[FULL_PRECISION.name],
                self.folder.model,
                batch=EVALUATION_BATCH,
            )
        return self.traces[key]

    def tables(
        self,
        task: str,
        names: Sequence[str],
        windows: int,
        *,
        base: str,
        influence: Influence = "remask",
        sampler: SamplerConfig | None = None,
        scored: bool = False,
    ) -> PromptTables:
        """Return a task's sensitivity by prompt, with moves, on its calibration prompts."""
        fleet, prompts = self.fleet, self.prompts[task]
        read = scored_positions(prompts.workload, self.folder.model.eos_id) if scored else None

        def measured() -> PromptTables:
            return prompt_tables(
                self.recorded(task, sampler),
                {name: fleet.engines[name] for name in names},
                fleet.engines[FULL_PRECISION.name],
                windows=windows,
                model=self.folder.model,
                influence=influence,
                target=base if influence == "counterfactual" else None,
                scored=read,
                with_moves=True,
            )

        question = Question(
            engines={name: fleet.keys[name] for name in names},
            full=fleet.keys[FULL_PRECISION.name],
            sampler=sampler or prompts.sampler,
            windows=windows,
            prompts=[item.ids for item in prompts.items("calibration", self.config.calibration)],
            influence=influence,
            target=base if influence == "counterfactual" else None,
            scored=f"read {prompts.workload.scored}" if scored else "all",
            with_moves=True,
        )
        return answered(question, self.cache, measured)

    def answers(
        self,
        task: str,
        split: Part,
        count: int,
        schedules: Sequence[Schedule],
        sampler: SamplerConfig | None = None,
    ) -> dict[Schedule, Answers]:
        """Return the answers of schedules to the first prompts of a split, in chunks that resume.

        The first `rest` prompts are a chunk of their own, so that what was answered for them is
        not answered again for all.
        """
        prompts = self.prompts[task]
        own = sampler or prompts.sampler
        items = prompts.items(split, count)
        first = min(self.config.rest, count)
        parts = [items[:first], *([items[first:]] if first < len(items) else [])]
        made = [
            answer_all(part, own, schedules, self.fleet, self.cache, self.advance)
            for part in parts
        ]
        return {
            schedule: Answers(
                *(
                    np.concatenate([getattr(each[schedule], name) for each in made])
                    for name in ("ids", "commit_step", "bits")
                )
            )
            for schedule in dict.fromkeys(schedules)
        }

    def right(
        self,
        task: str,
        split: Part,
        count: int,
        schedules: Sequence[Schedule],
        sampler: SamplerConfig | None = None,
    ) -> dict[Schedule, NDArray[np.float64]]:
        """Return which answers of schedules are right, 0 or 1 [N] each."""
        return self._scores("right", task, split, count, schedules, sampler)

    def agreement(
        self,
        task: str,
        split: Part,
        count: int,
        schedules: Sequence[Schedule],
        sampler: SamplerConfig | None = None,
    ) -> dict[Schedule, NDArray[np.float64]]:
        """Return the share of full precision's tokens in each answer [N]: needs no labels.

        Of the tokens that the grader reads.
        """
        return self._scores("agreement", task, split, count, schedules, sampler)

    def _scores(
        self,
        kind: str,
        task: str,
        split: Part,
        count: int,
        schedules: Sequence[Schedule],
        sampler: SamplerConfig | None,
    ) -> dict[Schedule, NDArray[np.float64]]:
        """Return scores by schedule; what was scored before is not read again."""
        place = (kind, task, split, count, sampler)
        missing = [each for each in dict.fromkeys(schedules) if (*place, each) not in self._known]
        if missing:
            full = self.full(task, split, count, sampler).ids
            made = self.answers(task, split, count, missing, sampler)
            for schedule, answers in made.items():
                of = self._right if kind == "right" else self._agreement
                self._known[*place, schedule] = of(task, split, count, answers.ids, full)
        return {each: self._known[*place, each] for each in dict.fromkeys(schedules)}

    def _right(
        self, task: str, split: Part, count: int, ids: Ids, full: Ids
    ) -> NDArray[np.float64]:
        prompts = self.prompts[task]
        items = prompts.items(split, count)
        scores = graded(prompts.workload, items, ids, prompts.tokenizer.decode)
        same = (ids == full).all(axis=1)
        return (same if scores is None else scores).astype(np.float64)

    def _agreement(
        self, task: str, split: Part, count: int, ids: Ids, full: Ids
    ) -> NDArray[np.float64]:
        return token_agreement(ids, full, self.read(task, full))

    def full(
        self, task: str, split: Part, count: int, sampler: SamplerConfig | None = None
    ) -> Answers:
        """Return full precision's answers."""
        uniform = Schedule.uniform(FULL_PRECISION.name, 1)
        return self.answers(task, split, count, [uniform], sampler)[uniform]

    def read(self, task: str, full: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which tokens of full precision's answers a task's grader reads [N, G]."""
        scored = self.prompts[task].workload.scored
        return read_positions(scored, full, self.folder.model.eos_id)

    def rollouts(self, task: str, tables: PromptTables, base: str, read: bool) -> PromptTables:
        """Return tables of calibration prompts with what single changes of the base do.

        Args:
            task: Its name.
            tables: For the precisions wanted.
            base: Of the windows that are not changed.
            read: Whether only tokens that the grader reads count, or all.
        """
        prompts = self.prompts[task]
        items = prompts.items("calibration", self.config.calibration)
        full = self.full(task, "calibration", self.config.calibration).ids
        counted = self.read(task, full) if read else np.ones(full.shape, np.bool_)
        return with_rollout(
            tables,
            items,
            prompts.sampler,
            base,
            self.fleet,
            self.cache,
            full,
            counted,
            self.advance,
        )


def studies(config: EvidenceConfig, work: Path, cache: Cache, say: Say) -> dict[str, Study]:
    """Return a study for each quantizer, all on one planted checkpoint, exported where not there.

    Args:
        config: What is studied.
        work: Folder of checkpoints and exports.
        cache: Engines, sensitivities and answers.
        say: Told what is being done.
    """
    model = config.model
    if config.factor > 1:
        model = work / "planted"
        if not model.exists():
            say(f"planting outliers x {config.factor:g} in {config.channels} channels")
            plant_checkpoint(
                config.model,
                model,
                PlantConfig(factor=config.factor, channels=config.channels, seed=config.seed),
            )
    traces: dict[str, list[Trace]] = {}
    found = {}
    for quantizer in config.quantizers:
        say(f"exporting with {quantizer}")
        found[quantizer] = Study(
            config,
            quantizer,
            exported(config, model, work / quantizer, quantizer),
            cache,
            traces=traces,
        )
    return found


def exported(
    config: EvidenceConfig, model: Path, out: Path, quantizer: str, names: Sequence[str] = ()
) -> Export:
    """Return the export of a checkpoint with a quantizer; the same again is not made again."""
    export(
        ExportConfig(
            model=model,
            out=out,
            target=config.target,
            precisions=tuple(names) or config.precisions,
            recipe=Recipe(windows=config.windows, quantizer=quantizer),
            tasks=config.tasks,
            seed=config.seed,
            force=True,
        )
    )
    return read_export(out)
