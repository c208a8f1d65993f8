"""Knobs of plans: how they are given their weights, and the build routes of their module.

A knob is offered only where something tells its choices apart: a GPU here, which times plans, or,
for weights, a file of latencies that has rows for both.  Where it is not, a note says why.  Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from engines.errors import InputError
from engines.module_routes import ModuleRoutes
from engines.options import CONSTANT, INPUT, WEIGHTS
from engines.routes import MOST_SEARCHED, space_of
from exporter.folder import Export
from tuner.config import TuneConfig
from tuner.latencies import Latencies
from tuner.space import Value

_SAYS = "a plan's weights: inputs that a family shares, or constants of its own"


@dataclass(frozen=True)
class PlanKnobs:
    """What can be searched of plans, besides their graphs.

    Attributes:
        choices: By the knob's name, the default first.
        says: What each changes.
        notes: Why others are not offered, a sentence each.
        possible: Values that may be asked for, offered or not, by the knob's name.
    """

    choices: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    says: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    possible: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)

    def joined(self, other: PlanKnobs) -> PlanKnobs:
        """Return these and others, which have other names."""
        return PlanKnobs(
            choices={**self.choices, **other.choices},
            says={**self.says, **other.says},
            notes=(*self.notes, *other.notes),
            possible={**self.possible, **other.possible},
        )


def is_route(name: str) -> bool:
    """Return whether a knob is a build route: no other's name begins with a dash."""
    return name.startswith("-")


def route_knobs(module: ModuleRoutes, config: TuneConfig) -> PlanKnobs:
    """Return the build routes that are searched, each at its default first.

    Args:
        module: What it lists, and why its plans are not timed here, if they are not.
        config: May name routes and their choices; these come first.

    Raises:
        InputError: A route that is asked for is none, or has no such value, names the nearest; or
            it cannot be searched here.
    """
    asked: dict[str, tuple[str, ...]] = {}
    for name, values in {**config.choices, **{k: (v,) for k, v in config.pinned.items()}}.items():
        if is_route(name):
            asked[name] = tuple(map(str, values))
    if not module.knobs:
        space_of((), given=asked)  # refuses every one
        return PlanKnobs(notes=(f"build routes: {module.says}",))
    if module.why_not_timed is not None:
        if asked:
            raise InputError(
                f"the build route {next(iter(asked))} is tried only where plans are timed, and "
                f"{module.why_not_timed.rstrip('.')}; leave it out"
            )
        note = f"build routes: {module.says} not searched, for {module.why_not_timed}"
        return PlanKnobs(notes=(note,))
    by_option = {knob.option: knob for knob in module.knobs}
    offered = space_of(module.knobs, max(MOST_SEARCHED, len(asked)), asked)
    choices: dict[str, tuple[Value, ...]] = {
        name: offered.get(name, (by_option[name].default,)) for name in {**asked, **offered}
    }
    says = {name: by_option[name].help or "a build route of TensorRT" for name in choices}
    return PlanKnobs(choices=choices, says=says, possible=choices)


def weights_knob(
    export: Export, names: Collection[str], latencies: Latencies | None, runs: bool
) -> PlanKnobs:
    """Return the knob `weights`, as far as its choices can be told apart.

    Args:
        export: Has the graphs.
        names: Of the precisions that compete, and full precision.
        latencies: That were given or predicted, or None.
        runs: Whether plans are timed here.

    Raises:
        InputError: What was measured is all precisions' with neither choice.
    """
    both = sorted(name for name in names if has_both(export, name))
    if not both:
        return PlanKnobs()
    says, default = {"weights": _SAYS}, {"weights": (INPUT,)}
    every = {"weights": WEIGHTS}
    if runs:
        return PlanKnobs(every, says, possible=every)
    if latencies is None or not any(row.weights for row in latencies.rows):
        why = "are not told apart by the file of latencies"
        if latencies is None or latencies.source == "predicted":
            why = "take equally long by a prediction"
        note = (
            f"weights: inputs and constants {why}, so the search is not offered the choice; "
            f"cadenza bench on the GPU times both"
        )
        predicted = latencies is None or latencies.source == "predicted"
        return PlanKnobs(default, says, (note,), every if predicted else default)
    found = tuple(each for each in WEIGHTS if all(latencies.tells(name, each) for name in both))
    if not found:
        raise InputError(
            f"the latencies are neither with weights as inputs nor as constants those of all of "
            f"{', '.join(both)}; measure the missing ones with cadenza bench"
        )
    if found == WEIGHTS:
        return PlanKnobs(every, says, possible=every)
    other = CONSTANT if found == (INPUT,) else INPUT
    missing = [name for name in both if not latencies.tells(name, other)]
    note = (
        f"weights: only {found[0]}s are tried, as {other}s the latencies lack "
        f"{', '.join(missing)}; cadenza bench on the GPU times both"
    )
    return PlanKnobs({"weights": found}, says, (note,), {"weights": found})


def plan_graph(folder: Export, name: str, scales: str, weights: str = INPUT) -> str:
    """Return the id of the graph that TensorRT builds.

    Args:
        folder: Has the graphs.
        name: Of the precision.
        scales: "shared" or "window", of the recipe.
        weights: "input": its weights are inputs, where they fuse so; or "constant".
    """
    static = folder.precisions[name].has_static_scales and scales == "shared"
    stem = f"{name}.all" if static else name
    bare = f"{stem}.bare.serve"
    return bare if weights == INPUT and bare in folder.graphs else f"{stem}.serve"


def has_both(export: Export, name: str) -> bool:
    """Return whether a precision's plan can be built with its weights as inputs."""
    return any(f"{stem}.bare.serve" in export.graphs for stem in (name, f"{name}.all"))


def shares(export: Export, name: str, weights: str) -> bool:
    """Return whether a precision's plan reads the weights that its family shares.

    Args:
        export: Has the graphs.
        name: Of the precision.
        weights: The candidate's choice.
    """
    return weights == INPUT and has_both(export, name)
