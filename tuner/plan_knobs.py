"""Knobs of plans: how they are given their weights.

A knob is offered only where something tells its choices apart: a GPU here, which times plans, or a
file of latencies that has rows for both.  Where it is not, a note says why.  Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from engines.errors import InputError
from engines.options import CONSTANT, INPUT, WEIGHTS
from exporter.folder import Export
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
