"""Laws of build routes: text and choices are inverses, and no list from elsewhere is trusted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from engines.errors import InputError
from engines.routes import (
    MOST_CHARACTERS,
    MOST_CHOICES,
    MOST_KNOBS,
    RouteKnob,
    knobs_from_json,
    route_from_text,
    route_text,
    space_of,
)


def entry(option: str, values: str, default: str, **more: Any) -> dict[str, Any]:
    allowed = f"{option}={values}"
    return {"option": option, "allowed_values": allowed, "default_value": default, **more}


ENTRIES = [
    entry("-conv_use_long_w", "[on|off]", "on", help="long  form\nof kernels"),
    entry("-kgen:codegen:cuda_tile", "[0|1|2|3]", "1", help="CUDA Tile"),
    entry("-copy_ppg", "[off]", "off"),
    entry("-peep:max", "int32_t", "1"),
    entry("-kgen:tiling", "[0|1|...]", "0"),
    entry("-slice_fusion", "[ on | off ]", "on"),
]


def listed(entries: Sequence[object], version: object = "2.19.45") -> str:
    return json.dumps({"tuner_version": version, "tuner_options": entries})


KNOBS = knobs_from_json(listed(ENTRIES))


def test_knobs_are_read_as_tensorrt_lists_them() -> None:
    assert KNOBS[:2] == (
        RouteKnob("-conv_use_long_w", ("on", "off"), "on", "long form of kernels", "", "2.19.45"),
        RouteKnob(
            "-kgen:codegen:cuda_tile", ("0", "1", "2", "3"), "1", "CUDA Tile", "", "2.19.45"
        ),
    )
    assert [knob.option for knob in KNOBS] == [each["option"] for each in ENTRIES]
    assert KNOBS[5].choices == ("on", "off")
    assert {knob.tuner_version for knob in KNOBS} == {"2.19.45"}


def test_open_ended_knobs_are_known_and_say_what_they_take() -> None:
    known = {knob.option: knob.takes for knob in KNOBS if knob.open_ended}
    assert known == {"-peep:max": "int32_t", "-kgen:tiling": "[0|1|...]"}


@pytest.mark.parametrize("text", ["", " \n", listed([])])
def test_a_module_without_knobs_gives_none_and_takes_the_default_route_alone(text: str) -> None:
    knobs = knobs_from_json(text)
    assert knobs == ()
    assert space_of(knobs) == {}
    assert route_text({}, knobs) == ""
    assert route_from_text("", knobs) == {}
    with pytest.raises(InputError, match="lists no knobs; leave the route out"):
        route_from_text("-copy_ppg=off", knobs)


def test_what_tensorrt_does_not_say_is_left_open() -> None:
    (knob,) = knobs_from_json('{"tuner_options": [{"option": "-a", "later": {"x": 1}}]}')
    assert knob == RouteKnob("-a", (), "")
    assert knob.tuner_version == "unknown"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense", "build routes: not valid JSON"),
        ("[" * 100_000, "build routes: not valid JSON"),
        ('{"tuner_options": [], "tuner_options": []}', "given twice"),
        ("[]", "build routes: must be an object"),
        ("{}", "build routes: the key 'tuner_options' is missing"),
        ('{"tuner_options": {}}', "build routes: tuner_options: must be a list"),
        (listed([1]), "tuner_options: 0: must be an object"),
        (listed([{}]), "tuner_options: 0: the key 'option' is missing"),
        (listed([{"option": 3}]), "tuner_options: 0: option: must be text"),
        (listed([*ENTRIES, entry("-x", "[a]", "a"), ENTRIES[0]]), "7: the knob -conv"),
        (listed([entry("x", "[a]", "a")]), "tuner_options: 0: option must be a dash"),
        (listed([entry("--x", "[a]", "a")]), "tuner_options: 0: option must be a dash"),
        (listed([entry("-", "[a]", "a")]), "tuner_options: 0: option must be a dash"),
        (listed([entry("-a b", "[a]", "a")]), "tuner_options: 0: option must be a dash"),
        (listed([entry("-a=b", "[a]", "a")]), "tuner_options: 0: option must be a dash"),
        (listed([entry("-\u00e9", "[a]", "a")]), "tuner_options: 0: option must be a dash"),
        (listed([entry("-x\n", "[a]", "a")]), "tuner_options: 0: option: must be 1 to 200 print"),
        (listed([entry("-" + "x" * 200, "[a]", "a")]), "0: option: must be 1 to 200"),
        (listed([entry("-x", "[a|b c]", "a")]), "tuner_options: 0: -x has the choice 'b c'"),
        (listed([entry("-x", "[a|[b]", "a")]), "tuner_options: 0: -x has the choice '[b'"),
        (listed([entry("-x", "[a|\u001b[2J]", "a")]), "tuner_options: 0: -x has the choice"),
        (listed([entry("-x", "[a|" + "b" * 201 + "]", "a")]), "0: -x has the choice"),
        (listed([entry("-x", "[a|b", "a")]), "allowed_values: the list '-x=[a|b' has no end"),
        (listed([entry("-x", "[" + "a|" * MOST_CHOICES + "b]", "a")]), "more than 256 choices"),
        (listed([entry("-x", "[a]", "\u001b[2J")]), "tuner_options: 0: -x needs a default"),
        (listed([entry("-x", "[a]", "a" * 201)]), "tuner_options: 0: -x needs a default"),
        (listed([entry("-x", "[a]", "a") | {"default_value": 1}]), "default_value: must be text"),
        (listed([entry("-x", "[a]", "a", help=["no"])]), "tuner_options: 0: help: must be text"),
        (listed([entry("-x", "[a]", "a", help="\ud800")]), "help: is not Unicode text"),
        (listed([], version=2), "build routes: tuner_version: must be text"),
        (listed([], version="2\n3"), "build routes: tuner_version: must be 1 to 200 printable"),
        (listed([1] * (MOST_KNOBS + 1)), "tuner_options: has 4097 knobs, more than 4096"),
        (" " * MOST_CHARACTERS + "[]", "characters, more than 4194304"),
    ],
    ids=lambda text: repr(text[:40]),
)  # fmt: skip
def test_another_list_is_refused_with_its_place_and_a_mend_in_one_line(
    text: str, says: str
) -> None:
    with pytest.raises(InputError) as caught:
        knobs_from_json(text)
    assert says in str(caught.value)
    assert "; " in str(caught.value)
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


def test_a_damaged_list_is_refused_or_still_right() -> None:
    whole = listed(ENTRIES)
    rng = np.random.default_rng(0)
    read = 0
    for _ in range(2000):
        at = int(rng.integers(len(whole)))
        kind = int(rng.integers(3))
        middle = chr(int(rng.integers(1, 300))) if kind == 0 else ""
        text = whole[:at] if kind == 1 else whole[:at] + middle + whole[at + 1 :]
        try:
            knobs = knobs_from_json(text)
        except InputError:
            continue
        read += 1
        for values in product(*space_of(knobs).values()):
            route = route_text(dict(zip(space_of(knobs), values, strict=True)), knobs)
            assert route_text(route_from_text(route, knobs), knobs) == route
    assert 100 < read < 1900


def test_help_is_one_printable_line_of_bounded_length() -> None:
    text = listed([entry("-x", "[a|b]", "a", help="\x1b[2J tab\there " + "long " * 10_000)])
    (knob,) = knobs_from_json(text)
    assert knob.help.startswith("[2J tab here long")
    assert knob.help.isprintable()
    assert len(knob.help) <= 2000


def test_a_choice_listed_twice_is_one_choice() -> None:
    (knob,) = knobs_from_json(listed([entry("-x", "[a|b|a||]", "a")]))
    assert knob.choices == ("a", "b")


@pytest.mark.parametrize(
    ("option", "choices", "default"),
    [
        ("x", ("a",), "a"), ("-x", ("a", "a"), "a"), ("-x", ("a b",), "a b"), ("-x", ("",), ""),
        ("-x", ("a|b",), "a"), ("-x", ("a",), "\n"), ("-x", tuple(map(str, range(257))), "0"),
    ],
)  # fmt: skip
def test_a_knob_that_no_route_can_spell_cannot_be_made(
    option: str, choices: tuple[str, ...], default: str
) -> None:
    with pytest.raises(ValueError, match=r"got|no route can spell"):
        RouteKnob(option, choices, default)


def test_text_and_choices_are_inverses_for_every_choice() -> None:
    space = space_of(KNOBS, given={"-peep:max": ["1", "4"], "-kgen:tiling": ["0", "8", "x=y"]})
    texts = set()
    every = list(product(*space.values()))
    for values in every:
        choices = dict(zip(space, values, strict=True))
        text = route_text(choices, KNOBS)
        changed = {option: value for option, value in choices.items() if value != space[option][0]}
        assert route_from_text(text, KNOBS) == changed
        assert list(route_from_text(text, KNOBS)) == sorted(changed)
        assert route_text(changed, KNOBS) == text
        texts.add(text)
    assert len(texts) == len(every) == 2 * 4 * 2 * 2 * 3
    assert "" in texts


def test_a_route_names_what_differs_from_the_default_in_alphabetical_order() -> None:
    choices = {"-slice_fusion": "off", "-kgen:codegen:cuda_tile": "2", "-conv_use_long_w": "on"}
    assert route_text(choices, KNOBS) == "-kgen:codegen:cuda_tile=2 -slice_fusion=off"


@pytest.mark.parametrize(
    "text",
    [
        "-slice_fusion=off -kgen:codegen:cuda_tile=2",
        "  -kgen:codegen:cuda_tile=2\t\n-slice_fusion=off ",
        "-conv_use_long_w=on -slice_fusion=off -kgen:codegen:cuda_tile=2 -peep:max=1",
    ],
)
def test_every_spelling_of_a_route_has_one_text(text: str) -> None:
    choices = route_from_text(text, KNOBS)
    assert list(choices.items()) == [("-kgen:codegen:cuda_tile", "2"), ("-slice_fusion", "off")]
    assert route_text(choices, KNOBS) == "-kgen:codegen:cuda_tile=2 -slice_fusion=off"


@pytest.mark.parametrize(
    ("text", "mend"),
    [
        ("-slice_fuson=off", "no knob '-slice_fuson'; did you mean '-slice_fusion'?"),
        ("slice_fusion=off", "did you mean '-slice_fusion'?"),
        ("--slice_fusion=off", "did you mean '-slice_fusion'?"),
        ("-zzz=1", "knobs are -conv_use_long_w, -kgen:codegen:cuda_tile"),
        ("=off", "knobs are -conv_use_long_w"),
        ("-slice_fusion=of", "-slice_fusion has no value 'of'; did you mean 'off'?"),
        ("-slice_fusion=", "-slice_fusion has no value ''; values are on, off"),
        ("-slice_fusion", "chooses nothing; write -name=value"),
        ("-kgen:codegen:cuda_tile=[0|1]", "has no value '[0|1]'"),
        ("-slice_fusion=off -slice_fusion=off", "chosen twice; leave one out"),
        ("-peep:max=int32_t", "give one of int32_t"),
        ("-peep:max=1.5", "give one of int32_t"),
        ("-peep:max=2147483648", "give one of int32_t"),
        ("-peep:max=" + "9" * 9999, "give one of int32_t"),
        ("-peep:max=\u0661\u0662", "give one of int32_t"),
        ("-kgen:tiling=[a]", "give one of [0|1|...]"),
        ("-x=" + "y" * 100_000, "knobs are"),
        ("-" + "x" * 100_000 + "=y", "knobs are"),
        ("x" * (MOST_CHARACTERS + 1), "give at most"),
    ],
    ids=lambda text: repr(text[:30]),
)
def test_another_route_is_refused_with_the_nearest_in_one_line(text: str, mend: str) -> None:
    with pytest.raises(InputError) as caught:
        route_from_text(text, KNOBS)
    assert mend in str(caught.value)
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "choices",
    [{"-nope": "1"}, {"-slice_fusion": "on -copy_ppg=off"}, {"-peep:max": "1\n2"}, {"": ""}],
)
def test_no_choice_can_smuggle_another_into_a_route(choices: dict[str, str]) -> None:
    with pytest.raises(InputError):
        route_text(choices, KNOBS)


@pytest.mark.parametrize(
    ("takes", "fits", "not_so"),
    [
        ("int32_t", ("-2147483648", "2147483647"), ("-2147483649", "2147483648", "a", "")),
        ("uint8_t", ("0", "255"), ("-1", "256")),
        ("int64_t", (str(2**63 - 1), str(-(2**63))), (str(2**63), "9" * 5000)),
        ("", ("a", "=", "-1,2"), ("", "a b", "a|b", "[a]", "\u00e9")),
    ],
)
def test_an_open_ended_knob_takes_what_its_type_holds(
    takes: str, fits: tuple[str, ...], not_so: tuple[str, ...]
) -> None:
    knob = RouteKnob("-x", (), "7", takes=takes)
    assert all(map(knob.takes_value, fits))
    assert not any(map(knob.takes_value, not_so))


def test_the_space_holds_each_knob_with_several_values_its_default_first() -> None:
    assert space_of(KNOBS) == {
        "-conv_use_long_w": ("on", "off"),
        "-kgen:codegen:cuda_tile": ("1", "0", "2", "3"),
        "-slice_fusion": ("on", "off"),
    }


def test_an_open_ended_knob_is_offered_where_values_are_given() -> None:
    space = space_of(KNOBS, given={"-peep:max": ("4", "1", "4")})
    assert space["-peep:max"] == ("1", "4")
    assert next(iter(space)) == "-peep:max"
    assert space_of(KNOBS, given={"-kgen:codegen:cuda_tile": ["3"]})[
        "-kgen:codegen:cuda_tile"
    ] == ("1", "3")


def test_a_given_knob_without_another_value_is_not_offered() -> None:
    assert "-peep:max" not in space_of(KNOBS, given={"-peep:max": ()})
    assert "-slice_fusion" not in space_of(KNOBS, given={"-slice_fusion": ["on"]})


@pytest.mark.parametrize("most", range(6))
def test_no_more_knobs_are_offered_than_asked_for_and_the_given_ones_first(most: int) -> None:
    given = {"-slice_fusion": ["off"], "-peep:max": ["4"]}
    every = list(space_of(KNOBS, given=given))
    assert every[:2] == list(given)
    assert list(space_of(KNOBS, most, given)) == every[:most]


@pytest.mark.parametrize("given", [{"-slice_fuson": ["off"]}, {"-slice_fuson": []}])
def test_a_given_knob_that_is_not_there_is_an_error(given: dict[str, list[str]]) -> None:
    with pytest.raises(InputError, match="did you mean '-slice_fusion'"):
        space_of(KNOBS, given=given)


def test_a_value_given_in_vain_is_an_error() -> None:
    with pytest.raises(InputError, match="did you mean 'off'"):
        space_of(KNOBS, given={"-slice_fusion": ["of"]})
    with pytest.raises(ValueError, match="most >= 0"):
        space_of(KNOBS, -1)


def test_a_default_outside_the_choices_is_offered_but_never_written() -> None:
    (knob,) = knobs = knobs_from_json(listed([entry("-x", "[a|b]", "by itself")]))
    assert space_of(knobs) == {"-x": ("by itself", "a", "b")}
    assert route_text({"-x": "by itself"}, knobs) == ""
    assert not knob.open_ended


def test_the_search_takes_options_as_names_of_its_knobs_unmapped() -> None:
    from optuna.distributions import CategoricalDistribution
    from optuna.trial import FixedTrial

    from tuner.space import Candidate, Knob, candidate_of, narrowed, offers
    from tuner.study import distributions

    space = space_of(KNOBS, given={"-peep:max": ["4"]})
    recipe = {"quantizer": "plain", "windows": 6, "clip": 1.0, "keep": 0, "scales": "shared"}
    default = candidate_of(recipe, {option: values[0] for option, values in space.items()})
    knobs = [Knob(name, (own,), "recipe", "") for name, own in default.items if name not in space]
    knobs += [Knob(option, values, "backend", "") for option, values in space.items()]
    changed = default.changed(**{"-kgen:codegen:cuda_tile": "3", "-peep:max": "4"})
    assert Candidate.of(json.loads(json.dumps(changed.values))) == changed
    assert offers(knobs, changed)
    assert narrowed(knobs, {"-slice_fusion": ["off"]})[-1].name == list(space)[-1]
    text = route_text({name: str(changed[name]) for name in space}, KNOBS)
    assert text == "-kgen:codegen:cuda_tile=3 -peep:max=4"
    for name, distribution in distributions(knobs).items():
        assert isinstance(distribution, CategoricalDistribution)
        trial = FixedTrial({name: changed[name]})
        assert trial.suggest_categorical(name, distribution.choices) == changed[name]
