"""Build routes: TensorRT's own knobs of how a network is compiled, read as data.

TensorRT lists its knobs as JSON (`IBuilderConfig.all_build_routes`) and takes a choice of them as
one line (`build_route`): `-name=value` tokens with spaces between them; what is not named stays at
its default.  TensorRT-RTX, and TensorRT on Windows, list none.

A knob is called by its `option` everywhere, as TensorRT spells it, leading dash and colons
included: `-kgen:codegen:cuda_tile`.  That is also its name as a knob of the search, unmapped: a
candidate, its log and the sampler take any text as a name, and since no option of a backend starts
with a dash, the two never meet.

Pure: nothing here imports TensorRT.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NoReturn

from engines.document import Document, document_from_text, shorten
from engines.errors import InputError

# TensorRT 11.1 lists 209 knobs in about 50 KB; what is far beyond that is not its list.
MOST_CHARACTERS = 1 << 22
MOST_KNOBS = 4096
MOST_CHOICES = 256
LONGEST = 200
LONGEST_HELP = 2000

# A search over more knobs than this sees few of them change even once.
MOST_SEARCHED = 64

_OPTION = re.compile(r"-[A-Za-z0-9_][A-Za-z0-9_.:\-]*")
_VALUE = re.compile(r"[!-Z\\^-{}~]+")  # printable ASCII, but for the space and [ ] |
_INTEGER = re.compile(r"(u?)int(8|16|32|64)_t")


@dataclass(frozen=True, slots=True)
class RouteKnob:
    """One knob of TensorRT's compiler.

    Attributes:
        option: Its name with the leading dash, as a route spells it.
        choices: Its values in TensorRT's order; empty for an open-ended knob.
        default: What stands where a route does not name it.  Never written into a route, so it
            need not be among the choices; "" where TensorRT does not say.
        help: What it changes, in a line.
        takes: What TensorRT says of an open-ended knob's values, for instance `int32_t`.
        tuner_version: Of the compiler that listed it; part of what a route means.
    """

    option: str
    choices: tuple[str, ...]
    default: str
    help: str = ""
    takes: str = ""
    tuner_version: str = "unknown"

    def __post_init__(self) -> None:
        if len(self.option) > LONGEST or not _OPTION.fullmatch(self.option):
            raise ValueError(
                f"option must be a dash and up to {LONGEST - 1} letters, digits, or any of _.:-, "
                f"got {shorten(self.option)}"
            )
        if len(self.choices) > MOST_CHOICES or len(set(self.choices)) != len(self.choices):
            raise ValueError(
                f"{self.option} needs up to {MOST_CHOICES} different choices, "
                f"got {len(self.choices)}, {len(set(self.choices))} of them different"
            )
        for choice in self.choices:
            if not _writable(choice):
                raise ValueError(
                    f"{self.option} has the choice {shorten(choice)}, which no route can spell"
                )
        if len(self.default) > LONGEST or not self.default.isprintable():
            raise ValueError(
                f"{self.option} needs a default of up to {LONGEST} printable characters, "
                f"got {shorten(self.default)}"
            )

    @property
    def open_ended(self) -> bool:
        """Whether its values are not listed."""
        return not self.choices

    def takes_value(self, value: str) -> bool:
        """Return whether a value is one of its own, or one that an open-ended knob may have."""
        if value == self.default or value in self.choices:
            return True
        if not self.open_ended or not _writable(value):
            return False
        integer = _INTEGER.search(self.takes)
        if not integer:
            return True
        bits = int(integer[2])
        low, high = (0, 2**bits) if integer[1] else (-(2 ** (bits - 1)), 2 ** (bits - 1))
        return bool(re.fullmatch(r"-?[0-9]{1,20}", value)) and low <= int(value) < high


def knobs_from_json(text: str, where: str = "build routes") -> tuple[RouteKnob, ...]:
    """Return the knobs that TensorRT lists, in its order.

    Args:
        text: `IBuilderConfig.all_build_routes`.  Empty where the module has none (TensorRT-RTX,
            Windows): then no knob comes back, and the caller says so.
        where: What messages call it.

    Raises:
        InputError: It is not such a list, too long, or names a knob twice; says where.
    """
    if not text.strip():
        return ()
    if len(text) > MOST_CHARACTERS:
        raise InputError(
            f"{where}: has {len(text)} characters, more than {MOST_CHARACTERS}; "
            f"give what TensorRT lists, or leave it out"
        )
    document = document_from_text(text, where)
    entries = document["tuner_options"].entries()
    if len(entries) > MOST_KNOBS:
        document["tuner_options"].fail(
            f"has {len(entries)} knobs, more than {MOST_KNOBS}; give what TensorRT lists"
        )
    said = document.get("tuner_version")
    version = "unknown" if said is None else said.name()
    found: dict[str, RouteKnob] = {}
    for entry in entries:
        knob = _knob_from_entry(entry, version)
        if knob.option in found:
            entry.fail(f"the knob {knob.option} is listed twice; leave one out")
        found[knob.option] = knob
    return tuple(found.values())


def route_text(choices: Mapping[str, str], knobs: Sequence[RouteKnob]) -> str:
    """Return the route of some choices, to be given to `IBuilderConfig.build_route`.

    Equal routes have equal texts: options stand in alphabetical order, and those at their default
    are left out; "" is the default route.

    Args:
        choices: Values by option.
        knobs: What TensorRT lists.

    Raises:
        InputError: There is no such knob, or it has no such value; names the nearest.
    """
    by_option = {knob.option: knob for knob in knobs}
    kept = {option: choices[option] for option in sorted(choices)}
    for option, value in kept.items():
        _check(option, value, by_option)
    return " ".join(
        f"{option}={value}" for option, value in kept.items() if value != by_option[option].default
    )


def route_from_text(text: str, knobs: Sequence[RouteKnob]) -> dict[str, str]:
    """Return what a route chooses by option, in alphabetical order, less what is at its default.

    The inverse of `route_text`, and of any other spelling of the same route.

    Args:
        text: `-name=value` tokens with white space between them.
        knobs: What TensorRT lists.

    Raises:
        InputError: A token is no choice, names a knob twice, or one that is not there, or a value
            that the knob does not have; names the nearest.
    """
    if len(text) > MOST_CHARACTERS:
        raise InputError(f"a route of {len(text)} characters; give at most {MOST_CHARACTERS}")
    by_option = {knob.option: knob for knob in knobs}
    found: dict[str, str] = {}
    for token in text.split():
        option, equals, value = token.partition("=")
        if not equals:
            raise InputError(f"route: {shorten(token)} chooses nothing; write -name=value")
        _check(option, value, by_option)
        if option in found:
            raise InputError(f"route: {option} is chosen twice; leave one out")
        found[option] = value
    return {
        option: found[option]
        for option in sorted(found)
        if found[option] != by_option[option].default
    }


def space_of(
    knobs: Sequence[RouteKnob],
    most: int = MOST_SEARCHED,
    given: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, tuple[str, ...]]:
    """Return what a search may try: the values of each knob by option, the default first.

    A knob is offered when it has at least one value besides its default: an open-ended one only
    where values are given.

    Args:
        knobs: What TensorRT lists.
        most: Knobs to offer at most, at least 0: the given ones in their order, then the others in
            TensorRT's.  So `most=len(given)` offers the given ones alone.
        given: Values to try in place of a knob's own, by option.

    Raises:
        InputError: A given knob or value is not there; names the nearest.
        ValueError: most is negative.
    """
    if most < 0:
        raise ValueError(f"most >= 0 must hold, got {most}")
    by_option = {knob.option: knob for knob in knobs}
    wanted = given or {}
    for option, values in wanted.items():
        for value in values:
            _check(option, value, by_option)
        if option not in by_option:  # given, but with no value
            _refuse_option(option, by_option)
    order = [*wanted, *(option for option in by_option if option not in wanted)]
    offered = {
        option: tuple(
            dict.fromkeys(
                (by_option[option].default, *wanted.get(option, by_option[option].choices))
            )
        )
        for option in order
    }
    several = [option for option, values in offered.items() if len(values) > 1]
    return {option: offered[option] for option in several[:most]}


def _knob_from_entry(entry: Document, version: str) -> RouteKnob:
    option = entry["option"].name()
    allowed, default, says = (
        entry.get(key) for key in ("allowed_values", "default_value", "help")
    )
    choices, takes = ((), "") if allowed is None else _allowed(allowed)
    try:
        return RouteKnob(
            option=option,
            choices=choices,
            default="" if default is None else default.text().strip(),
            help="" if says is None else _one_line(says.text())[:LONGEST_HELP],
            takes=takes,
            tuner_version=version,
        )
    except ValueError as error:
        entry.fail(f"{error}; leave this knob out")


def _allowed(allowed: Document) -> tuple[tuple[str, ...], str]:
    """Return the choices of `-name=[a|b|c]`, or () and what an open-ended knob is said to take."""
    text = allowed.text()
    takes = _one_line(text.partition("=")[2] or text)[:LONGEST]
    _, opened, rest = text.partition("[")
    inside, closed, _ = rest.partition("]")
    if opened and not closed:
        allowed.fail(f"the list {shorten(text)} has no end; close it with ]")
    if not opened or "..." in inside:
        return (), takes
    if inside.count("|") >= MOST_CHOICES:
        allowed.fail(f"has more than {MOST_CHOICES} choices; leave this knob out")
    return tuple(dict.fromkeys(each.strip() for each in inside.split("|") if each.strip())), ""


def _check(option: str, value: str, by_option: Mapping[str, RouteKnob]) -> None:
    if option not in by_option:
        _refuse_option(option, by_option)
    knob = by_option[option]
    if knob.takes_value(value):
        return
    if knob.open_ended:
        takes = f"of {knob.takes}" if knob.takes else "without spaces, brackets or |"
        raise InputError(f"route: {option} has no value {shorten(value)}; give one {takes}")
    near = get_close_matches(value[:LONGEST], knob.choices, 1)
    mend = f"did you mean {near[0]!r}?" if near else f"values are {_listed(knob.choices)}"
    raise InputError(f"route: {option} has no value {shorten(value)}; {mend}")


def _refuse_option(option: str, by_option: Mapping[str, RouteKnob]) -> NoReturn:
    if not by_option:
        raise InputError(
            f"route: {shorten(option)} cannot be chosen, this TensorRT lists no knobs; "
            f"leave the route out"
        )
    short = option[:LONGEST]
    near = [f"-{short.lstrip('-')}"] if f"-{short.lstrip('-')}" in by_option else []
    near = near or get_close_matches(short, by_option, 1)
    mend = f"did you mean {near[0]!r}?" if near else f"knobs are {_listed(by_option)}"
    raise InputError(f"route: no knob {shorten(option)}; {mend}")


def _listed(names: Iterable[str], most: int = 12) -> str:
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def _writable(value: str) -> bool:
    return len(value) <= LONGEST and _VALUE.fullmatch(value) is not None


def _one_line(text: str) -> str:
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())
