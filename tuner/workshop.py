"""The engines of a candidate: its recipe's graphs, made where they are not there, and loaded.

    candidate -> recipe -> graphs (the export's own, or another folder) -> engines by precision

Whatever was built before comes from the cache.  Engines belong to a setting: candidates that
differ in their schedule share them.  Of all settings only the default's engines, the yardstick,
stay loaded beside the two asked for last, so a long search needs no more memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from engines.backend import Backend
from engines.build import BuildLog, EngineSpec, digest_json, engine_key
from engines.errors import BackendError, InputError
from engines.module_routes import ModuleRoutes, routes_of
from engines.options import SAYS, OrtOptions, option_choices, own_options, session_options
from engines.precision import FULL_PRECISION
from engines.routes import route_text
from engines.sampler import Pass, Request
from engines.schedule import Schedule
from engines.targets import target_from_name
from engines.trace import Trace
from engines.trt import TrtOptions
from engines.trt_run import Device
from exporter.calibrate import read_calibration
from exporter.folder import CALIBRATION, Export, Recipe, read_export
from exporter.parity import states_from_requests
from exporter.requantize import requantize
from tuner.evaluate import Fleet
from tuner.latencies import elsewhere
from tuner.plan_engines import plan_fleet
from tuner.plan_knobs import PlanKnobs, is_route, route_knobs, weights_knob
from tuner.ranking import rank_blocks
from tuner.rule import check_rule
from tuner.space import SCHEDULE, Candidate, Knob, Value, candidate_of, knobs, narrowed
from tuner.stopwatch import BUILD, EVALUATE, Stopwatch
from tuner.trajectories import trace_items
from tuner.workbench import Workbench

# Prompts of each task on whose traces the blocks are ranked.
_RANKING_PROMPTS = 8


@dataclass(frozen=True)
class Engines:
    """The loaded engines of a candidate.

    Attributes:
        folder: The export of its recipe.
        fleet: By the name of the precision; full precision is always there.
        graphs: Id of each precision's serve graph in the folder.
        built: Kernels of each precision's products, as read back.
        options: How the sessions were made.
        device: The GPU on which they are plans; "" where they are sessions.
        close: Lets go of what is not Python's.
    """

    folder: Export
    fleet: Fleet
    graphs: Mapping[str, str]
    built: Mapping[str, Mapping[str, int]]
    options: OrtOptions
    device: str = ""
    close: Callable[[], None] = lambda: None


@dataclass
class Workshop:
    """Makes and loads engines.

    Attributes:
        bench: Export, prompts and cache.
        work: Folder for the graphs of other recipes.
        built: Counts engines built and reused.
        watch: Counts the seconds spent.
        keeps: Whether what a module says of itself is kept in the cache.
    """

    bench: Workbench
    work: Path
    built: BuildLog = field(default_factory=BuildLog)
    watch: Stopwatch = field(default_factory=Stopwatch)
    keeps: bool = True
    _loaded: dict[Candidate, Engines] = field(default_factory=dict)

    @property
    def default(self) -> Candidate:
        """The export's own recipe with the default options, and what is pinned: the yardstick."""
        own = self._own
        pinned = {
            name: type(own[name])(value)
            for name, value in self.bench.config.pinned.items()
            if name in own.values  # what is unknown or of another kind `space` refuses
        }
        return own.changed(**pinned)

    @property
    def _own(self) -> Candidate:
        """The export's own recipe with the default options."""
        recipe = self.bench.export.recipe
        return candidate_of(
            {
                "quantizer": recipe.quantizer,
                "windows": recipe.windows,
                "clip": recipe.clip,
                "keep": 0,
                "scales": "shared",
            },
            {
                **own_options(self.bench.config.target),
                **{name: values[0] for name, values in self.plan_knobs.choices.items()},
            },
        )

    @cached_property
    def plan_knobs(self) -> PlanKnobs:
        """What can be searched of plans, besides their graphs; nothing where there are none.

        Raises:
            InputError: The latencies given are of no choice whole.
        """
        bench = self.bench
        if not bench.ahead:
            return PlanKnobs()
        names = {each.name for each in bench.precisions} | {FULL_PRECISION.name}
        weights = weights_knob(bench.export, names, bench.latencies, runs=bench.plans_here)
        return weights.joined(route_knobs(self._routes, bench.config))

    @cached_property
    def _routes(self) -> ModuleRoutes:
        """The build routes of the module that builds plans, as far as it can be asked."""
        target, limit_s = (
            target_from_name(self.bench.config.target),
            self.bench.config.child_limit_s,
        )
        why = None if self.bench.plans_here else elsewhere(target)
        return routes_of(target, self.bench.cache, limit_s, self.keeps, why)

    def plan_options(self, candidate: Candidate) -> TrtOptions:
        """Return how a candidate's plans are built."""
        chosen = {name: str(value) for name, value in candidate.options.items() if is_route(name)}
        return TrtOptions(route=route_text(chosen, self._routes.knobs))

    def session(self, candidate: Candidate) -> OrtOptions:
        """Return how a candidate's sessions are made; what is of plans alone is not in it."""
        given = candidate.options
        own = {name: given[name] for name in given if name not in self.plan_knobs.choices}
        return session_options(self.bench.config.target, own)

    @property
    def blocks(self) -> int:
        """Blocks of the denoiser."""
        return read_calibration(self.bench.export.folder / CALIBRATION).blocks

    @property
    def space(self) -> tuple[Knob, ...]:
        """What is searched: the export's recipe first, and what its backend offers.

        Raises:
            InputError: The choices that were asked for do not fit.
        """
        bench = self.bench
        names = {label for job in bench.jobs for label in bench.baselines_of(job)}
        offered = knobs(
            self._own,
            quantizers=tuple(bench.exports),
            steps=min(job.sampler.steps for job in bench.jobs.values()),
            blocks=self.blocks,
            precisions=bench.precisions,
            options={**option_choices(bench.config.target), **self.plan_knobs.choices},
            says={**SAYS, **self.plan_knobs.says},
            baselines=sorted(names),
        )
        try:
            chosen = narrowed(offered, bench.config.choices, bench.config.pinned)
            for knob in chosen:
                for choice in knob.choices:
                    self._check_choice(knob, choice, names)
        except ValueError as error:
            raise InputError(f"{error}; mend space in the config") from error
        return chosen

    def _check_choice(self, knob: Knob, choice: Value, baselines: Collection[str]) -> None:
        """Check that a choice is possible: everything about it that needs no engine.

        Raises:
            ValueError: It is not.
        """
        if knob.name in self.plan_knobs.choices:
            possible = self.plan_knobs.possible[knob.name]
            if choice not in possible:
                raise ValueError(
                    f"knob {knob.name!r} has {', '.join(map(str, possible))}, not {choice!r}"
                )
        elif knob.kind == "backend":
            session_options(self.bench.config.target, {knob.name: choice})
        elif knob.name in ("windows", "clip"):
            Recipe(**{knob.name: choice})  # type: ignore[arg-type]
            steps = min(job.sampler.steps for job in self.bench.jobs.values())
            if knob.name == "windows" and int(choice) > steps:
                raise ValueError(f"windows <= {steps} must hold, the steps, got {choice}")
        elif knob.name == "keep" and not 0 <= int(choice) < self.blocks:
            raise ValueError(f"0 <= keep < {self.blocks} must hold, got {choice}")
        elif knob.name == SCHEDULE:
            check_rule(
                str(choice), [each.name for each in self.bench.precisions], sorted(baselines)
            )

    def engines(self, candidate: Candidate) -> Engines:
        """Return a candidate's engines, built where the cache has none like them.

        Raises:
            BackendError: One cannot be built or loaded.
        """
        setting = self._loadable(candidate)
        if setting in self._loaded:
            self._loaded[setting] = self._loaded.pop(setting)  # asked for last
            return self._loaded[setting]
        with self.watch(BUILD):
            folder = self._folder(setting)
            default = self._loadable(self.default)
            for other in [each for each in self._loaded if each != default][:-1]:
                self._loaded.pop(other).close()
            load = self._plans if self.bench.plans_here else self._sessions
            self._loaded[setting] = load(folder, setting)
        return self._loaded[setting]

    def stand_ins(self, candidate: Candidate) -> Engines:
        """Return what stands in for a candidate's plans on a processor, for TensorRT's targets.

        Raises:
            BackendError: One cannot be built or loaded.
        """
        setting = self._standing_in(candidate.setting)
        if self.bench.stands_in:
            return self.engines(candidate)
        with self.watch(BUILD):
            return self._sessions(self._folder(setting), setting)

    def _standing_in(self, setting: Candidate) -> Candidate:
        """Return a setting as stand-ins see it: the same however plans are built."""
        usual = {name: values[0] for name, values in self.plan_knobs.choices.items()}
        return setting.changed(**usual)

    def _loadable(self, candidate: Candidate) -> Candidate:
        """Return the setting by which a candidate's engines are loaded."""
        setting = candidate.setting
        return self._standing_in(setting) if self.bench.stands_in else setting

    @cached_property
    def _device(self) -> Device:
        """The GPU, held as long as this process lives."""
        return Device.open(target_from_name(self.bench.config.target))

    def _plans(self, folder: Export, setting: Candidate) -> Engines:
        """Return a setting's engines as plans on this machine's GPU; not executed."""
        made = plan_fleet(
            self.bench, folder, setting, self.plan_options(setting), self._device, self.built
        )
        options = self.session(setting)
        return Engines(
            folder, made.fleet, made.graphs, made.built, options, self._device.name, made.close
        )

    def _sessions(self, folder: Export, setting: Candidate) -> Engines:
        """Return a setting's engines as sessions of ONNX Runtime."""
        names = {each.name for each in self.bench.precisions} | {FULL_PRECISION.name}
        options = self.session(setting)
        loaded: dict[str, Backend] = {}
        built: dict[str, Mapping[str, int]] = {}
        keys: dict[str, str] = {}
        graphs: dict[str, str] = {}
        for name in sorted(names):
            graphs[name], spec = engine_spec(folder, name, setting.scales, options)
            keys[name] = engine_key(spec)
            engine = self.bench.cache.engine(spec, self.built)
            loaded[name], built[name] = engine, engine.built
        return Engines(folder, Fleet(loaded, keys, folder.model), graphs, built, options)

    @cached_property
    def traces(self) -> dict[str, list[Trace]]:
        """Full-precision trajectories of every task's calibration prompts."""
        # Which blocks are kept changes nothing of full precision, and is found by these traces.
        fleet = self.engines(self.default.changed(keep=0)).fleet
        full = fleet.engines[FULL_PRECISION.name]
        with self.watch(EVALUATE):
            return {
                name: trace_items(job.calibration, job.sampler, name, full, fleet.model)
                for name, job in self.bench.jobs.items()
            }

    def few_states(self, prompts: int) -> list[Pass]:
        """Return every pass of full precision's denoising of each task's first prompts."""
        fleet = self.engines(self.default).fleet
        full = fleet.engines[FULL_PRECISION.name]
        uniform = Schedule.uniform(FULL_PRECISION.name, 1)
        states: list[Pass] = []
        for job in self.bench.jobs.values():
            requests = [
                Request(prompt=item.ids, sampler=job.sampler, schedule=uniform)
                for item in job.calibration[:prompts]
            ]
            states += states_from_requests(requests, full, fleet.model)
        return states

    def tidy(self, candidate: Candidate) -> None:
        """Remove the graphs of every recipe but a candidate's; they can be made again."""
        kept = self._folder(candidate).folder
        for folder in (self.work / "recipes").glob("*"):
            if folder != kept:
                shutil.rmtree(folder)

    @cached_property
    def _block_ranks(self) -> tuple[int, ...]:
        """Blocks of the denoiser, the one whose quantization diverges most first.

        They are ranked once, on the first export: rounding differs less than blocks do.
        """
        options = session_options(self.bench.config.target)
        name = self.bench.precisions[-1].name  # of fewest bits

        def engine_of(recipe: Recipe) -> Backend:
            _, spec = engine_spec(self._folder_of(recipe), name, "shared", options)
            return self.bench.cache.engine(spec, self.built)

        few = [trace for traces in self.traces.values() for trace in traces[:_RANKING_PROMPTS]]
        return rank_blocks(self.blocks, self.bench.export.recipe, engine_of, few)

    def _folder(self, candidate: Candidate) -> Export:
        base = self.bench.exports[candidate.quantizer].recipe
        ranks = self._block_ranks if candidate.keep else ()
        more = [block for block in ranks if block not in base.keep][: candidate.keep]
        keep = tuple(sorted((*base.keep, *more)))
        return self._folder_of(
            replace(base, windows=candidate.windows, clip=candidate.clip, keep=keep)
        )

    def _folder_of(self, recipe: Recipe) -> Export:
        """Return the export of a recipe, made beside the others where it is not there.

        Raises:
            BackendError: It cannot be made of what the export holds; other recipes may.
        """
        base = self.bench.exports[recipe.quantizer]
        if recipe == base.recipe:
            return base
        name = digest_json({"recipe": asdict(recipe), "source": base.request})[:16]
        try:
            return read_export(requantize(base.folder, self.work / "recipes" / name, recipe))
        except InputError as error:
            raise BackendError(str(error)) from error


def engine_spec(
    folder: Export, name: str, scales: str, options: OrtOptions
) -> tuple[str, EngineSpec]:
    """Return the id of a precision's serve graph, and what its engine is built from.

    Args:
        folder: Has the graphs.
        name: Of the precision.
        scales: "shared": one set of static scales, constants of the graph; "window": one set a
            window, an input of the graph.
        options: How the sessions are made; exact ones are of the graphs that stand in.
    """
    precision = folder.precisions[name]
    stem = f"{name}.all" if precision.has_static_scales and scales == "shared" else name
    if options.exact and precision != FULL_PRECISION:
        stem = f"{stem}.sim"
    graph = folder.graphs[f"{stem}.serve"]
    return f"{stem}.serve", EngineSpec(
        serve=folder.path(f"{stem}.serve"),
        trace=folder.path(f"{stem}.trace"),
        precision=precision,
        scales=None if graph.scales is None else np.array(graph.scales, np.float32),
        options=options,
        target=options.provider,
        digests={path: entry.sha256 for path, entry in folder.files.items()},
    )
