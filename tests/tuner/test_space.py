"""The space of candidates: the export's own recipe first, and no knob that nothing can turn."""

from __future__ import annotations

import math

import pytest

from engines import options as told
from engines.options import SAYS, option_choices, own_options
from engines.precision import Precision, precision_from_name
from tuner.space import (
    SHARES,
    Candidate,
    Knob,
    candidate_of,
    default_candidate,
    first_candidates,
    knobs,
    narrowed,
    offers,
    rule_parts,
    size,
)

RECIPE = {"quantizer": "rtn", "windows": 6, "clip": 1.0, "keep": 0, "scales": "shared"}
DEFAULT = candidate_of(RECIPE, own_options("cpu"))

FP32, INT8, W4A4, W8A8 = (precision_from_name(n) for n in ("fp32", "int8", "w4a4", "w8a8"))
STATIC = (FP32, INT8)


def offered(
    precisions: tuple[Precision, ...] = STATIC,
    default: Candidate = DEFAULT,
    steps: int = 12,
    blocks: int = 4,
    quantizers: tuple[str, ...] = ("rtn",),
    baselines: tuple[str, ...] = (),
) -> tuple[Knob, ...]:
    return knobs(
        default,
        quantizers=quantizers,
        steps=steps,
        blocks=blocks,
        precisions=precisions,
        options=option_choices("cpu"),
        says=SAYS,
        baselines=baselines,
    )


def choices(space: tuple[Knob, ...]) -> dict[str, tuple[object, ...]]:
    return {knob.name: knob.choices for knob in space}


def test_every_knob_begins_with_the_default_and_has_no_choice_twice() -> None:
    odd = DEFAULT.changed(windows=5, clip=0.95)
    for default in (DEFAULT, odd):
        space = offered(default=default)
        assert default_candidate(space) == default
        for knob in space:
            assert knob.says
            assert len(set(knob.choices)) == len(knob.choices)


def test_there_are_no_more_windows_than_steps_nor_kept_blocks_than_blocks() -> None:
    assert choices(offered(steps=6, blocks=2))["windows"] == (6, 3, 4)
    assert choices(offered(steps=6, blocks=2))["keep"] == (0, 1)
    assert choices(offered(steps=6, blocks=1))["keep"] == (0,)


_OPTIONS = {"threads", "graph_optimization", "spinning", "arena"}


@pytest.mark.parametrize(
    ("precisions", "idle"),
    [
        ((FP32,), {"quantizer", "clip", "keep", "scales", "precisions"}),
        ((FP32, INT8), {"quantizer", "precisions"}),
        ((W4A4, W8A8), {"quantizer", "scales", "precisions"} | _OPTIONS),
        ((W4A4, W8A8, FP32), {"quantizer", "scales"} | _OPTIONS),
    ],
)
def test_what_the_precisions_cannot_use_is_not_offered(
    precisions: tuple[Precision, ...], idle: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(told, "usable_cores", lambda: 2)
    found = choices(offered(precisions))
    assert {name for name, of in found.items() if len(of) == 1} == idle


def test_each_export_given_is_a_choice_of_the_quantizer() -> None:
    assert choices(offered(quantizers=("rtn", "gptq")))["quantizer"] == ("rtn", "gptq")
    assert choices(offered((FP32,), quantizers=("rtn", "gptq")))["quantizer"] == ("rtn",)


def test_schedules_are_uniform_ones_steps_along_the_front_and_those_written_by_hand() -> None:
    rules = choices(offered(baselines=("mine",)))["schedule"]
    assert rules[:3] == ("spend-100", "uniform-fp32", "uniform-int8")
    assert set(rules) == {
        "uniform-fp32",
        "uniform-int8",
        "baseline-mine",
        *(f"spend-{share}" for share in SHARES),
    }
    assert choices(offered((INT8,)))["schedule"] == ("spend-100", "uniform-int8")


def test_subsets_of_three_precisions_are_offered_and_the_rule_is_read_back() -> None:
    found = choices(offered((FP32, W8A8, W4A4)))["precisions"]
    assert found == ("all", "fp32+w8a8", "fp32+w4a4", "w8a8+w4a4")
    assert DEFAULT.precisions is None
    assert DEFAULT.changed(precisions="fp32+w8a8").precisions == ("fp32", "w8a8")


@pytest.mark.parametrize(
    ("cores", "threads"), [(1, (0,)), (2, (0, 1)), (4, (0, 1, 2)), (16, (0, 1, 8))]
)
def test_threads_are_all_half_or_one_each_once(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: tuple[int, ...]
) -> None:
    monkeypatch.setattr(told, "usable_cores", lambda: cores)
    assert option_choices("cpu")["threads"] == threads


def test_what_a_backend_lacks_is_no_option() -> None:
    assert set(option_choices("cpu")) == set(own_options("cpu")) == _OPTIONS == set(SAYS)
    assert set(option_choices("cuda")) == set(own_options("cuda")) == {"graph_optimization"}
    for provider in ("cpu", "cuda"):
        for name, values in option_choices(provider).items():
            assert values[0] == own_options(provider)[name]


def test_the_size_is_the_number_of_candidates() -> None:
    space = offered(steps=3, blocks=1)
    assert size(space) == math.prod(len(knob.choices) for knob in space) > 1


def test_a_search_begins_with_the_exact_optimum_uniform_ones_neighbours_and_options() -> None:
    first = first_candidates(offered(baselines=("mine",)))
    assert first[0] == DEFAULT
    assert [each.schedule for each in first[:6]] == [
        "spend-100",
        "uniform-fp32",
        "uniform-int8",
        "spend-90",
        "spend-80",
        "baseline-mine",
    ]
    assert len(set(first)) == len(first)
    for each in first:
        changed = [k for k, value in each.items if value != DEFAULT[k]]
        assert len(changed) <= 1
    assert {k for each in first for k, v in each.items if v != DEFAULT[k]} <= {
        "schedule",
        *_OPTIONS,
    }


@pytest.mark.parametrize("precisions", [(FP32,), (INT8,), (W4A4,), (W4A4, W8A8)])
def test_every_first_candidate_is_offered(precisions: tuple[Precision, ...]) -> None:
    space = offered(precisions)
    assert all(offers(space, each) for each in first_candidates(space))


def test_a_pinned_knob_has_its_value_as_default_and_as_only_choice() -> None:
    space = narrowed(offered(), {"windows": (3,)}, {"clip": 1, "scales": "window", "keep": 2})
    found = choices(space)
    assert found["windows"] == (6, 3)  # a list of one: the default stays beside it
    assert (found["clip"], found["scales"], found["keep"]) == ((1.0,), ("window",), (2,))
    assert type(found["clip"][0]) is float
    default = default_candidate(space)
    assert (default.scales, default.keep) == ("window", 2)
    assert all(each.scales == "window" for each in first_candidates(space))


@pytest.mark.parametrize(
    ("pinned", "says"),
    [
        ({"colour": "red"}, "no knob 'colour'"),
        ({"scales": "each"}, "knob 'scales' has shared, window, not 'each'"),
        ({"windows": "three"}, "takes values like 6, got 'three'"),
        ({"spinning": 1}, "takes values like False, got 1"),
    ],
)
def test_a_knob_is_not_pinned_to_what_it_cannot_be(
    pinned: dict[str, str | int], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        narrowed(offered(), {}, pinned)


def test_a_value_of_another_kind_is_not_offered() -> None:
    space = offered()
    assert offers(space, DEFAULT)
    assert not offers(space, DEFAULT.changed(spinning=0))
    assert not offers(space, DEFAULT.changed(windows=7))
    assert not offers(space[:-1], DEFAULT)


def test_a_candidate_survives_its_values() -> None:
    assert Candidate.of(DEFAULT.values) == DEFAULT
    assert DEFAULT.options == own_options("cpu")
    with pytest.raises(ValueError, match="a candidate needs the knob 'quantizer'"):
        Candidate.of({"windows": 3})
    with pytest.raises(ValueError, match="no plain one"):
        Candidate.of(DEFAULT.values | {"arena": None})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="no knob 'colour'"):
        DEFAULT.changed(colour="red")


def test_a_setting_forgets_the_schedule_and_nothing_else() -> None:
    one = DEFAULT.changed(schedule="uniform-int8", clip=0.9, precisions="fp32+int8")
    assert one.setting == DEFAULT.changed(clip=0.9)
    assert one.setting != DEFAULT.setting


def test_a_knob_needs_different_choices() -> None:
    with pytest.raises(ValueError, match="different choices"):
        Knob("clip", (1.0, 1.0), "recipe", "clip")
    with pytest.raises(ValueError, match="different choices"):
        Knob("clip", (), "recipe", "clip")


@pytest.mark.parametrize(
    ("rule", "parts"),
    [
        ("uniform-int8-w", ("uniform-", "int8-w")),
        ("spend-0", ("spend-", "0")),
        ("spend-100", ("spend-", "100")),
        ("baseline-uniform-mine", ("baseline-", "uniform-mine")),
    ],
)
def test_a_rule_is_its_kind_and_what_it_names(rule: str, parts: tuple[str, str]) -> None:
    assert rule_parts(rule) == parts
    assert "".join(rule_parts(rule)) == rule


@pytest.mark.parametrize(
    "rule",
    ["", "spend", "spend-", "spend-101", "spend-1.5", "spend-²", "uniform-", "Best-int8"],
)
def test_what_is_no_rule_has_no_parts(rule: str) -> None:
    with pytest.raises(ValueError, match="a schedule's rule is"):
        rule_parts(rule)
