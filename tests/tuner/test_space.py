"""The space of candidates: the export's own recipe first, and no knob that nothing can turn."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest

from engines.precision import Precision, precision_from_name
from tuner import space
from tuner.space import Candidate, default_candidate, first_candidates, knobs, size

DEFAULT = Candidate(windows=6, clip=1.0, keep=0, scales="shared", threads=0, optimization="all")


FP32, INT8, W4A4 = (precision_from_name(name) for name in ("fp32", "int8", "w4a4"))
STATIC = (FP32, INT8)


def choices(*of: object, default: Candidate = DEFAULT) -> dict[str, tuple[object, ...]]:
    return {knob.name: knob.choices for knob in knobs(default, *of)}  # type: ignore[arg-type]


def test_every_knob_begins_with_the_default_and_has_no_choice_twice() -> None:
    odd = Candidate(windows=5, clip=0.95, keep=0, scales="shared", threads=0, optimization="all")
    for default in (DEFAULT, odd):
        offered = knobs(default, 12, 4, STATIC)
        assert default_candidate(offered) == default
        assert [knob.name for knob in offered] == [field.name for field in fields(Candidate)]
        for knob in offered:
            assert knob.says
            assert len(set(knob.choices)) == len(knob.choices)


def test_there_are_no_more_windows_than_steps_nor_kept_blocks_than_blocks() -> None:
    assert choices(6, 2, STATIC)["windows"] == (6, 3, 4)
    assert choices(6, 2, STATIC)["keep"] == (0, 1)
    assert choices(6, 1, STATIC)["keep"] == (0,)


@pytest.mark.parametrize(
    ("precisions", "idle"),
    [
        ((FP32,), {"clip", "keep", "scales"}),
        ((FP32, INT8), set()),
        ((W4A4,), {"scales", "threads", "optimization"}),
    ],
)
def test_what_the_precisions_cannot_use_is_not_offered(
    precisions: tuple[Precision, ...], idle: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "usable_cores", lambda: 2)
    offered = choices(12, 8, precisions)
    assert {name for name, of in offered.items() if len(of) == 1} == idle


@pytest.mark.parametrize(
    ("cores", "threads"), [(1, (0,)), (2, (0, 1)), (4, (0, 1, 2)), (16, (0, 1, 8))]
)
def test_threads_are_all_half_or_one_each_once(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: tuple[int, ...]
) -> None:
    monkeypatch.setattr(space, "usable_cores", lambda: cores)
    assert choices(12, 4, STATIC)["threads"] == threads


def test_the_size_is_the_number_of_candidates() -> None:
    offered = choices(3, 1, STATIC)
    assert size(knobs(DEFAULT, 3, 1, STATIC)) == math.prod(map(len, offered.values())) > 1


def test_a_search_begins_with_the_defaults_and_single_changes_that_are_offered() -> None:
    for precisions in ((FP32,), STATIC, (W4A4,)):
        offered = knobs(DEFAULT, 12, 4, precisions)
        first = first_candidates(offered)
        assert first[0] == DEFAULT
        assert len(set(first)) == len(first)
        for each in first:
            assert all(each.values()[knob.name] in knob.choices for knob in offered)
            changed = [k for k, value in each.values().items() if value != DEFAULT.values()[k]]
            assert len(changed) <= 1


def test_a_candidate_survives_its_values() -> None:
    assert Candidate.from_values(DEFAULT.values()) == DEFAULT
    for values in (DEFAULT.values() | {"colour": 1}, {"windows": 3}):
        with pytest.raises(ValueError, match="a candidate has the knobs"):
            Candidate.from_values(values)
