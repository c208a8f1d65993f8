"""What a candidate comes to, piece by piece, from its graphs to the schedules that it would ship.

    recipe -> graphs -> engines -> latency by window -> sensitivity on calibration prompts
           -> allocation -> measured choice on tuning prompts, for each task and for `default`

Everything expensive is cached by content: two candidates that share an engine share its answers,
and the same tune again measures nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from engines.manifest import DEFAULT_TASK
from engines.precision import FULL_PRECISION
from engines.schedule import (
    THRESHOLD,
    SamplerConfig,
    Schedule,
    passes_by_window,
)
from engines.trace import expected_passes
from tuner.baselines import widened
from tuner.choice import Choice, Measures, Priced, choose_schedule, mixture, within_memory
from tuner.costs import Budget, Costs
from tuner.evaluate import (
    Answers,
    Item,
    answer,
    graded,
    read_positions,
    same_answers,
    token_agreement,
)
from tuner.gain import TaskSensitivity, summarize
from tuner.objective import Interval, loss_in_points
from tuner.plan_knobs import shares
from tuner.rollout import with_rollout
from tuner.sensitivity import PromptTables, prompt_tables
from tuner.sensitivity_file import Profiled, Sensitivity, TaskTable
from tuner.space import Candidate
from tuner.stopwatch import EVALUATE
from tuner.tables import Question, answered
from tuner.timing import Timing, time_candidate
from tuner.trials import TrialResult
from tuner.workbench import Job, Workbench
from tuner.workshop import Engines, Workshop

MIB = float(1 << 20)


@dataclass(frozen=True)
class Contest:
    """Evaluates candidates.

    Attributes:
        shop: Makes and loads the engines.
        tighten: Factor on the latency budget, below 1 where schedules took longer than predicted.
        step: Told of each piece of work on a candidate, when it is done.
    """

    shop: Workshop
    tighten: float = 1.0
    step: Callable[[str], None] = lambda note: None

    @property
    def bench(self) -> Workbench:
        """Export, prompts and cache."""
        return self.shop.bench

    def choices(
        self, candidate: Candidate, tried: Sequence[TrialResult] = ()
    ) -> dict[str, Choice]:
        """Return the schedule that each task, and `default`, would ship with these engines.

        Args:
            candidate: Whose setting; its own schedule has no precedence.
            tried: Trials of the search; schedules of those with this setting compete too.
        """
        bench, engines = self.bench, self.shop.engines(candidate)
        tables = {name: self.priced(candidate, name) for name in bench.jobs}
        tables[DEFAULT_TASK] = self._mixture(candidate, tables)
        groups = {name: {name: job} for name, job in bench.jobs.items()}
        groups[DEFAULT_TASK] = dict(bench.jobs)
        alike = [trial for trial in tried if trial.candidate.setting == candidate.setting]

        def chosen(names: tuple[str, ...]) -> dict[str, Choice]:
            choices: dict[str, Choice] = {}
            for name, table in tables.items():
                choices[name] = choose_schedule(
                    table.only(names),
                    self._measures(engines, groups[name]),
                    bench.config.goal,
                    {task: bench.config.floor_of(task) for task in groups[name]},
                    bench.effort.refinements,
                    bench.config.seed,
                    [
                        each
                        for each in (
                            *self.baselines(name, candidate.windows).values(),
                            *_schedules_of(alike, name),
                        )
                        if set(each.precisions) <= set(names)
                    ],
                )
                self.step(f"{name}: schedule")
            return choices

        return within_memory(tables[DEFAULT_TASK], chosen)

    def priced(self, candidate: Candidate, name: str) -> Priced:
        """Return gains, costs and budgets of a task with a candidate's engines."""
        engines, job = self.shop.engines(candidate), self.bench.jobs[name]
        found = self.sensitivity(candidate, job)
        timing = self.timing(candidate, job.sampler)
        self.step(f"{name}: sensitivity and latency")
        costs = self._costs(engines, candidate, name, timing)
        return Priced(gain=found.gain, costs=costs, budget=self.budget(name))

    def _mixture(self, candidate: Candidate, tables: Mapping[str, Priced]) -> Priced:
        engines, sampler = self.shop.engines(candidate), self.bench.sampler(DEFAULT_TASK)
        timing = self.timing(candidate, sampler)
        costs = self._costs(engines, candidate, DEFAULT_TASK, timing)
        gains = mixture({name: table.gain for name, table in tables.items()})
        return Priced(gains, costs, self.budget(DEFAULT_TASK))

    def baselines(self, task: str, windows: int) -> dict[str, Schedule]:
        """Return the schedules written by hand that can be written with a number of windows."""
        wide = {
            name: widened(each, windows) for name, each in self.bench.baselines_of(task).items()
        }
        return {name: each for name, each in wide.items() if each is not None}

    def timing(self, candidate: Candidate, sampler: SamplerConfig) -> Timing | None:
        """Return a candidate's latencies, corrected for the machine's drift; None if simulated."""
        return time_candidate(self.shop, candidate, sampler)

    def passes(self, name: str, windows: int) -> NDArray[np.float64]:
        """Return the expected passes of a task in each window [W].

        By threshold the mean over full precision's traces of the calibration prompts; of
        `default`, over the tasks that share its sampler.
        """
        sampler = self.bench.sampler(name)
        if sampler.rule != THRESHOLD:
            return np.array(passes_by_window(sampler, windows), np.float64)
        jobs = [name] if name in self.bench.jobs else self._jobs_like(sampler)
        found = [expected_passes(self.shop.traces[job], windows) for job in jobs]
        return np.asarray(np.mean(found, axis=0))

    def _jobs_like(self, sampler: SamplerConfig) -> list[str]:
        return [name for name, job in self.bench.jobs.items() if job.sampler == sampler]

    def passes_as_run(
        self, engines: Engines, name: str, split: str, schedule: Schedule
    ) -> NDArray[np.float64]:
        """Return the passes that a schedule took in each window [W] on prompts of a task.

        How many there are by threshold depends on the engines too: one that is less sure commits
        less a pass.  With fixed steps they are the expected ones.

        Args:
            engines: Of the candidate.
            name: The task's, or `default`.
            split: "tuning" or "test".
            schedule: The precision of each window.
        """
        sampler = self.bench.sampler(name)
        if sampler.rule != THRESHOLD:
            return self.passes(name, schedule.windows)
        jobs = [name] if name in self.bench.jobs else self._jobs_like(sampler)
        found = [
            self.answers(engines, job, getattr(job, split), schedule).passes(schedule.windows)
            for job in map(self.bench.jobs.__getitem__, jobs)
        ]
        return np.asarray(np.mean(found, axis=0))

    def budget(self, name: str) -> Budget:
        """Return the budgets of a task or `default`; a share is of full precision's latency."""
        config, latency = self.bench.config, None
        if config.has_latency:
            timing = self.timing(self.shop.default, self.bench.sampler(name))
            assert timing is not None, "simulated precisions have no latency budget"
            passes = self.passes(name, self.shop.default.windows)
            full = float(np.dot(passes, timing.by_window[FULL_PRECISION.name]))
            latency = config.latency_bound(full)
        if latency is not None:
            latency *= self.tighten
        return Budget(config.mean_bits, latency, config.memory_mib)

    def sensitivity(self, candidate: Candidate, job: Job) -> TaskSensitivity:
        """Return K, I and gains of a task with a candidate's engines."""
        engines = self.shop.engines(candidate)
        names = [precision.name for precision in reversed(self.bench.precisions)]
        full = self.shop.engines(self.shop.default).fleet
        with_moves = self.bench.config.proxy == "moves"

        def measured() -> PromptTables:
            return prompt_tables(
                self.shop.traces[job.workload.name],
                {name: engines.fleet.engines[name] for name in names},
                full.engines[FULL_PRECISION.name],
                windows=candidate.windows,
                model=engines.folder.model,
                with_moves=with_moves,
                prompt_ids=[item.prompt.id for item in job.calibration],
            )

        question = Question(
            engines={name: engines.fleet.keys[name] for name in names},
            full=full.keys[FULL_PRECISION.name],
            sampler=job.sampler,
            windows=candidate.windows,
            prompts=[item.ids for item in job.calibration],
            with_moves=with_moves,
        )
        with self.shop.watch(EVALUATE):
            tables = answered(question, self.bench.cache, measured)
        if self.bench.config.proxy == "rollout":
            ids = self.full_answers(job, job.calibration).ids
            with self.shop.watch(EVALUATE):
                tables = with_rollout(
                    tables,
                    job.calibration,
                    job.sampler,
                    names[0],
                    engines.fleet,
                    self.bench.cache,
                    ids,
                    self._read(job, ids),
                )
        return summarize(
            tables,
            [precision.bits for precision in reversed(self.bench.precisions)],
            proxy=self.bench.config.proxy,
            seed=self.bench.config.seed,
        )

    def profile(self, candidate: Candidate) -> Sensitivity:
        """Return everything that an allocation with a candidate's engines was based on."""
        bench, engines = self.bench, self.shop.engines(candidate)
        timing = self.timing(candidate, bench.sampler(DEFAULT_TASK))
        tasks, base = {}, ""
        for name, job in bench.jobs.items():
            found = self.sensitivity(candidate, job)
            own = self.timing(candidate, job.sampler)
            costs = self._costs(engines, candidate, name, own)
            latency = None if own is None else costs.latency_ms
            tasks[name], base = TaskTable.of(found, job.sampler, costs.passes, latency), found.base
        pass_ms = {} if timing is None else {k: np.mean(v) for k, v in timing.by_window.items()}
        return Sensitivity(
            precisions=tuple(
                Profiled(
                    precision=each,
                    latency_ms=float(pass_ms[each.name]) if pass_ms else None,
                    memory_mib=self._alone_mib(engines, candidate).get(each.name, 0.0),
                )
                for each in reversed(bench.precisions)
            ),
            families=self._family_mib(engines, candidate),
            activation_mib=0.0,
            base=base,
            shape=asdict(bench.export.shape),
            switch_ms=0.0 if timing is None else timing.switch_ms,
            windows=candidate.windows,
            tasks=tasks,
        )

    def answers(
        self, engines: Engines, job: Job, items: tuple[Item, ...], schedule: Schedule
    ) -> Answers:
        """Return the answers of a schedule to items of a task."""
        with self.shop.watch(EVALUATE):
            return answer(items, job.sampler, schedule, engines.fleet, self.bench.cache)

    def full_answers(self, job: Job, items: tuple[Item, ...]) -> Answers:
        """Return full precision's answers, by the default engines."""
        uniform = Schedule.uniform(FULL_PRECISION.name, self.shop.default.windows)
        return self.answers(self.shop.engines(self.shop.default), job, items, uniform)

    def _read(self, job: Job, full: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which tokens of full precision's answers the task's grader reads [N, G]."""
        return read_positions(job.workload.scored, full, self.bench.export.model.eos_id)

    def measures(self, candidate: Candidate, name: str) -> Measures:
        """Return how schedules of a task are measured with a candidate's engines."""
        return self._measures(self.shop.engines(candidate), {name: self.bench.jobs[name]})

    def _measures(self, engines: Engines, jobs: Mapping[str, Job]) -> Measures:
        def agreement(schedule: Schedule) -> dict[str, NDArray[np.float64]]:
            return {
                name: token_agreement(
                    self.answers(engines, job, job.tuning, schedule).ids,
                    full,
                    self._read(job, full),
                )
                for name, job in jobs.items()
                for full in (self.full_answers(job, job.tuning).ids,)
            }

        def loss(schedule: Schedule) -> dict[str, float]:
            return {
                name: self.loss(engines, job, job.tuning, schedule).mean
                for name, job in jobs.items()
            }

        return Measures(agreement, loss)

    def loss(
        self, engines: Engines, job: Job, items: tuple[Item, ...], schedule: Schedule
    ) -> Interval:
        """Return the points that a schedule loses against full precision on items of a task."""
        full = self.full_answers(job, items)
        own = self.answers(engines, job, items, schedule)
        graded_full = self._graded(job, items, full)
        graded_own = self._graded(job, items, own)
        if graded_full is None or graded_own is None:
            return loss_in_points(same_answers(own.ids, full.ids), None)
        return loss_in_points(graded_own, graded_full)

    def _graded(
        self, job: Job, items: tuple[Item, ...], answers: Answers
    ) -> NDArray[np.bool_] | None:
        return graded(job.workload, items, answers.ids, self.bench.tokenizer.decode)

    def _costs(
        self, engines: Engines, candidate: Candidate, name: str, timing: Timing | None
    ) -> Costs:
        precisions = tuple(reversed(self.bench.precisions))
        latency = None
        if timing is not None:
            latency = np.array([timing.by_window[each.name] for each in precisions]).T
        alone = self._alone_mib(engines, candidate)
        return Costs(
            names=tuple(each.name for each in precisions),
            bits=np.array([each.bits for each in precisions]),
            passes=self.passes(name, candidate.windows),
            latency_ms=latency,
            families=tuple(each.family for each in precisions),
            family_mib=self._family_mib(engines, candidate),
            alone_mib=np.array([alone.get(each.name, 0.0) for each in precisions]),
            switch_ms=0.0 if timing is None else timing.switch_ms,
            simulated=tuple(each.simulated for each in precisions),
        )

    def _alone_mib(self, engines: Engines, candidate: Candidate) -> dict[str, float]:
        """Return the MiB of weights that a precision's plan holds for itself, by precision.

        ONNX Runtime's sessions hold none, and neither do plans whose weights are inputs.
        """
        folder = engines.folder
        if not self.bench.ahead:
            return {}
        return {
            each.name: folder.families[each.family] / MIB
            for each in self.bench.precisions
            if not shares(folder, each.name, candidate.weights)
        }

    def _family_mib(self, engines: Engines, candidate: Candidate) -> dict[str, float]:
        """Return the MiB of weights that are there once for all precisions of a family."""
        alone = self._alone_mib(engines, candidate)
        own = {each.family for each in self.bench.precisions if each.name in alone}
        return {
            name: 0.0 if name in own else size / MIB
            for name, size in engines.folder.families.items()
        }


def _schedules_of(trials: Sequence[TrialResult], task: str) -> list[Schedule]:
    """Return the schedules that trials ran for a task, each once."""
    found = [tuple(trial.tasks[task]["schedule"]) for trial in trials if task in trial.tasks]
    return [Schedule(each) for each in dict.fromkeys(found)]
