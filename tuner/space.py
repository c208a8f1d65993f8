"""The space that the search walks: what the allocation cannot see, declared as data.

A *candidate* is one value for each knob.  The first is always the defaults, the recipe of the
export itself; a knob with one choice is not offered to the search.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from engines.machine import usable_cores
from engines.precision import FULL_PRECISION, Precision


@dataclass(frozen=True, slots=True)
class Knob:
    """One choice of the search.

    Attributes:
        name: A field of `Candidate`.
        choices: Its values; the first is the default.
        says: What it changes, in a line.
    """

    name: str
    choices: tuple[int | float | str, ...]
    says: str


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """One value for each knob: all choices but the schedule.

    Attributes:
        windows: Parts of progress that are scheduled apart.
        clip: Share of the largest activation that still fits; above it activations saturate.
        keep: Blocks kept in full precision, the most sensitive first.
        scales: Whether int8's activation scales differ by window or are one set.
        threads: Threads of an engine; 0 for every core.
        optimization: How far a session rewrites its graph.
    """

    windows: int
    clip: float
    keep: int
    scales: str
    threads: int
    optimization: str

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Candidate:
        """Return the candidate of a mapping from knob names to values.

        Raises:
            ValueError: A knob is missing or unknown.
        """
        names = {field.name for field in fields(cls)}
        if set(values) != names:
            raise ValueError(f"a candidate has the knobs {sorted(names)}, got {sorted(values)}")
        return cls(**values)

    def values(self) -> dict[str, int | float | str]:
        """Return the knobs by name."""
        return asdict(self)


_SAYS = {
    "windows": "parts of progress that are scheduled apart",
    "clip": "share of the largest activation that still fits",
    "keep": "blocks kept in full precision",
    "scales": "sets of int8 activation scales",
    "threads": "threads of an engine; 0 for every core",
    "optimization": "how far a session rewrites its graph",
}


def knobs(
    default: Candidate, steps: int, blocks: int, precisions: Sequence[Precision]
) -> tuple[Knob, ...]:
    """Return the knobs of an export; what its precisions cannot use has one choice.

    Args:
        default: The export's own recipe with the default options.
        steps: Fewest denoising steps of any task: no more windows than that.
        blocks: Of the denoiser.
        precisions: The candidates.  Only quantized ones have a clip and kept blocks, only int8
            has static scales, and only executed ones are timed.
    """
    cores = usable_cores()
    quantized = any(precision.family != FULL_PRECISION.family for precision in precisions)
    static = any(precision.has_static_scales for precision in precisions)
    timed = not any(precision.simulated for precision in precisions)
    choices: dict[str, tuple[int | float | str, ...]] = {
        "windows": tuple(count for count in (3, 4, 6, 8, 12) if count <= steps),
        "clip": (1.0, 0.9, 0.8) if quantized else (),
        "keep": tuple(n for n in (0, 1, 2) if n < blocks) if quantized else (),
        "scales": ("shared", "window") if static else (),
        "threads": (0, *sorted({1, max(1, cores // 2)} - {cores})) if timed else (),
        "optimization": ("all", "extended") if timed else (),
    }
    return tuple(
        Knob(name, (own, *(choice for choice in choices[name] if choice != own)), _SAYS[name])
        for name, own in default.values().items()
    )


def default_candidate(space: Sequence[Knob]) -> Candidate:
    """Return the candidate of every knob's default."""
    return Candidate.from_values({knob.name: knob.choices[0] for knob in space})


def first_candidates(space: Sequence[Knob]) -> list[Candidate]:
    """Return the candidates that every search begins with: the defaults, then single changes.

    Of the changes those that experience says may pay: the other set of int8 scales, one thread.
    """
    default = default_candidate(space)
    choices = {knob.name: knob.choices for knob in space}
    changes = (replace(default, scales="window"), replace(default, threads=1))
    offered = [
        each
        for each in changes
        if each.scales in choices["scales"] and each.threads in choices["threads"]
    ]
    return list(dict.fromkeys((default, *offered)))


def size(space: Sequence[Knob]) -> int:
    """Return the number of candidates."""
    return math.prod(len(knob.choices) for knob in space)
