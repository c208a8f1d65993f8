"""The space that the search walks: recipes x schedules x options of the backend, declared as data.

A *candidate* is one value for each knob.  The first is always the defaults: the recipe of the
export itself, the allocation's schedule, the backend's own options.  A knob with one choice is not
offered to the search, and what a backend lacks is no knob at all.

Three kinds of knob: of the *recipe* (another graph), of the *schedule* (the same engines in other
windows), of the *backend* (the same graph, loaded otherwise).  A *setting* is a candidate less its
schedule: all candidates of a setting run the same engines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

from engines.options import INPUT
from engines.precision import FULL_PRECISION, Precision

Value = int | float | str | bool
Kind = Literal["recipe", "schedule", "backend"]

# The rules of the knob `schedule`: what a candidate's windows run.
UNIFORM, SPEND, BASELINE = "uniform-", "spend-", "baseline-"
SCHEDULE = "schedule"

# Shares, in percent, of what lies between the cheapest schedule and the budget (or the dearest
# schedule): the exact program's optimum within each is a schedule of its front.
SHARES = (100, 90, 80, 70, 60, 50, 40, 30, 20, 10)

# Knobs of the recipe in the order in which they are declared, with what each changes.
_SAYS: dict[str, str] = {
    "quantizer": "how weights were rounded: which of the exports given",
    "windows": "parts of progress that are scheduled apart",
    "clip": "share of the largest activation that still fits",
    "keep": "blocks kept in full precision, the most sensitive first",
    "scales": "sets of int8 activation scales: one, or one a window",
    "precisions": "what the schedules may use",
    SCHEDULE: "what the windows run: one precision, a share of the budget spent best, or by hand",
}
ALL = "all"

# Knobs whose value does not decide what ships: it is chosen among all schedules of a setting.
NEVER_PINNED = ("precisions", SCHEDULE)


@dataclass(frozen=True, slots=True)
class Knob:
    """One choice of the search.

    Attributes:
        name: What a candidate calls it.
        choices: Its values; the first is the default.
        kind: What it changes.
        says: The same in a line.
    """

    name: str
    choices: tuple[Value, ...]
    kind: Kind
    says: str

    def __post_init__(self) -> None:
        if not self.choices or len(set(map(repr, self.choices))) != len(self.choices):
            raise ValueError(f"knob {self.name!r} needs different choices, got {self.choices}")


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """One value for each knob.

    Attributes:
        items: (knob, value): knobs of recipe and schedule, then the backend's by name.
    """

    items: tuple[tuple[str, Value], ...]

    def __post_init__(self) -> None:
        order = list(_SAYS)
        ordered = sorted(
            self.items,
            key=lambda item: (order.index(item[0]) if item[0] in _SAYS else 99, item[0]),
        )
        object.__setattr__(self, "items", tuple(ordered))

    @classmethod
    def of(cls, values: Mapping[str, Value]) -> Candidate:
        """Return the candidate of a mapping from knob names to values.

        Raises:
            ValueError: A knob is missing, or a value is no plain one.
        """
        missing = [name for name in _SAYS if name not in values]
        if missing:
            raise ValueError(f"a candidate needs the knob {missing[0]!r}, got {sorted(values)}")
        for name, value in values.items():
            if not isinstance(value, int | float | str):
                raise ValueError(f"knob {name!r} has the value {value!r}, which is no plain one")
        return cls(tuple(values.items()))

    def __getitem__(self, name: str) -> Value:
        """Return the value of a knob; KeyError where there is none."""
        return dict(self.items)[name]

    @property
    def values(self) -> dict[str, Value]:
        """The knobs by name."""
        return dict(self.items)

    def changed(self, **values: Value) -> Candidate:
        """Return the candidate with other values of some of its knobs.

        Raises:
            ValueError: It has no such knob.
        """
        unknown = sorted(set(values) - set(self.values))
        if unknown:
            raise ValueError(f"no knob {unknown[0]!r}, only {', '.join(self.values)}")
        return Candidate(tuple((name, values.get(name, own)) for name, own in self.items))

    @property
    def setting(self) -> Candidate:
        """The candidate with the default schedule: equal settings run the same engines."""
        return self.changed(precisions=ALL, schedule=f"{SPEND}{SHARES[0]}")

    @property
    def quantizer(self) -> str:
        """Which export's weights."""
        return str(self["quantizer"])

    @property
    def windows(self) -> int:
        """Parts of progress that are scheduled apart."""
        return int(self["windows"])

    @property
    def clip(self) -> float:
        """Share of the largest activation that still fits; above it activations saturate."""
        return float(self["clip"])

    @property
    def keep(self) -> int:
        """Blocks kept in full precision, the most sensitive first."""
        return int(self["keep"])

    @property
    def scales(self) -> str:
        """`shared`: one set of static activation scales; `window`: one a window."""
        return str(self["scales"])

    @property
    def precisions(self) -> tuple[str, ...] | None:
        """Names that schedules may use; None for every one."""
        chosen = str(self["precisions"])
        return None if chosen == ALL else tuple(chosen.split("+"))

    @property
    def schedule(self) -> str:
        """The rule that gives each task its schedule."""
        return str(self[SCHEDULE])

    @property
    def weights(self) -> str:
        """How plans are given their weights, where they are plans."""
        return str(dict(self.items).get("weights", INPUT))

    @property
    def options(self) -> dict[str, Value]:
        """Knobs of the backend, by name."""
        return {name: value for name, value in self.items if name not in _SAYS}


def candidate_of(recipe: Mapping[str, Value], options: Mapping[str, Value]) -> Candidate:
    """Return the candidate of an export's own recipe: every precision, the whole budget.

    Args:
        recipe: Its `quantizer`, `windows`, `clip`, `keep` and `scales`.
        options: The backend's own.
    """
    schedule = {"precisions": ALL, SCHEDULE: f"{SPEND}{SHARES[0]}"}
    own = {**recipe, **schedule}
    return Candidate.of({**{name: own[name] for name in _SAYS}, **options})


def knobs(
    default: Candidate,
    *,
    quantizers: Sequence[str],
    steps: int,
    blocks: int,
    precisions: Sequence[Precision],
    options: Mapping[str, Sequence[Value]],
    says: Mapping[str, str],
    baselines: Sequence[str] = (),
) -> tuple[Knob, ...]:
    """Return the knobs of an export; what its precisions cannot use has one choice.

    Args:
        default: The export's own recipe with the default options.
        quantizers: Of the exports given.
        steps: Fewest denoising steps of any task: no more windows than that.
        blocks: Of the denoiser.
        precisions: The candidates.  Only quantized ones have a clip and kept blocks, only int8
            has static scales, and only executed ones are timed, so only they have options.
        options: What the backend can be told, by name.
        says: What each of these changes.
        baselines: Names of schedules written by hand.
    """
    quantized = any(precision.family != FULL_PRECISION.family for precision in precisions)
    static = any(precision.has_static_scales for precision in precisions)
    timed = not any(precision.simulated for precision in precisions)
    names = [precision.name for precision in precisions]
    subsets = [
        "+".join(chosen) for size in range(2, len(names)) for chosen in combinations(names, size)
    ]
    schedules = [
        *(f"{UNIFORM}{name}" for name in names),
        *(f"{SPEND}{share}" for share in SHARES if len(names) > 1),
        *(f"{BASELINE}{name}" for name in baselines),
    ]
    choices: dict[str, Sequence[Value]] = {
        "quantizer": quantizers if quantized else (),
        "windows": [count for count in (3, 4, 6, 8, 12) if count <= steps],
        "clip": (1.0, 0.9, 0.8) if quantized else (),
        "keep": [count for count in (0, 1, 2) if count < blocks] if quantized else (),
        "scales": ("shared", "window") if static else (),
        "precisions": subsets,
        SCHEDULE: schedules,
        **({name: tuple(values) for name, values in options.items()} if timed else {}),
    }
    return tuple(
        Knob(
            name,
            (own, *(each for each in choices.get(name, ()) if each != own)),
            _kind(name),
            _SAYS.get(name) or says[name],
        )
        for name, own in default.items
    )


def narrowed(
    space: Sequence[Knob],
    wanted: Mapping[str, Sequence[Value]],
    pinned: Mapping[str, Value] | None = None,
) -> tuple[Knob, ...]:
    """Return knobs with the choices that a user wants in place of the built-in ones.

    The default stays, and stays first: everything is compared with it.  Of a pinned knob the value
    is the default, and the only choice.

    Args:
        space: The knobs.
        wanted: Choices by name.
        pinned: One value by name.

    Raises:
        ValueError: There is no such knob, or a value is of another kind than the knob's.
    """
    known = {knob.name: knob for knob in space}
    alone = {name: (value,) for name, value in (pinned or {}).items()}
    for name, choices in {**wanted, **alone}.items():
        if name not in known:
            raise ValueError(f"no knob {name!r}, only {', '.join(known)}")
        own = known[name].choices[0]
        for choice in choices:
            numbers = isinstance(own, float) and type(choice) is int
            if type(choice) is not type(own) and not numbers:
                raise ValueError(f"knob {name!r} takes values like {own!r}, got {choice!r}")
            rules = known[name].choices
            if name in ("quantizer", "scales", "precisions") and choice not in rules:
                raise ValueError(f"knob {name!r} has {', '.join(map(str, rules))}, not {choice!r}")

    def chosen(knob: Knob) -> tuple[Value, ...]:
        own = knob.choices[0]
        if knob.name in alone:
            return (type(own)(alone[knob.name][0]),)
        others = wanted.get(knob.name, knob.choices[1:])
        return tuple(dict.fromkeys((own, *(type(own)(each) for each in others))))

    return tuple(replace(knob, choices=chosen(knob)) for knob in space)


def _kind(name: str) -> Kind:
    if name not in _SAYS:
        return "backend"
    return "schedule" if name in ("precisions", SCHEDULE) else "recipe"


def default_candidate(space: Sequence[Knob]) -> Candidate:
    """Return the candidate of every knob's default."""
    return Candidate.of({knob.name: knob.choices[0] for knob in space})


def rule_parts(rule: str) -> tuple[str, str]:
    """Return the kind of a rule of the knob `schedule`, and what it names: a precision, K, a file.

    The kind is UNIFORM, SPEND or BASELINE.

    Raises:
        ValueError: It is none of these, or names nothing; or a share is no whole number up to 100.
    """
    kind = next((each for each in (UNIFORM, SPEND, BASELINE) if rule.startswith(each)), "")
    named = rule.removeprefix(kind)
    share = named.isascii() and named.isdecimal() and int(named) <= 100
    if not kind or not named or (kind == SPEND and not share):
        raise ValueError(
            f"a schedule's rule is {UNIFORM}P, {SPEND}K with K up to 100, or {BASELINE}NAME, got "
            f"{rule!r}"
        )
    return kind, named


def first_candidates(space: Sequence[Knob]) -> list[Candidate]:
    """Return the candidates that every search of ours begins with, in their order.

    The whole budget spent best (the exact program's optimum), each uniform schedule, the optimum's
    neighbours on the front, schedules written by hand; then each backend option alone.
    """
    default = default_candidate(space)
    rules = next(knob.choices for knob in space if knob.name == SCHEDULE)
    by_kind: dict[str, list[Value]] = {UNIFORM: [], SPEND: [], BASELINE: []}
    for rule in rules:
        by_kind[rule_parts(str(rule))[0]].append(rule)
    spends = by_kind[SPEND]
    order = [*spends[:1], *by_kind[UNIFORM], *spends[1:3], *by_kind[BASELINE]]
    first = [default.changed(schedule=rule) for rule in order]
    for knob in space:
        if knob.kind == "backend":
            first += [default.changed(**{knob.name: choice}) for choice in knob.choices[1:]]
    return list(dict.fromkeys((default, *first)))


def offers(space: Sequence[Knob], candidate: Candidate) -> bool:
    """Return whether the knobs offer a candidate; those of another machine may not."""
    values = candidate.values
    return values.keys() == {knob.name for knob in space} and all(
        any(
            values[knob.name] == choice and type(values[knob.name]) is type(choice)
            for choice in knob.choices
        )
        for knob in space
    )


def size(space: Sequence[Knob]) -> int:
    """Return the number of candidates."""
    return math.prod(len(knob.choices) for knob in space)
