"""Baselines keep the bits that they are compared at, and files are read strictly."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from engines.errors import InputError
from engines.schedule import Schedule
from tuner.baselines import (
    back_loaded,
    backward,
    from_file,
    front_loaded,
    permuted,
    widened,
)

BITS = {"a3": 3.0, "a4": 4.0, "a8": 8.0}


def random_schedule(rng: np.random.Generator) -> Schedule:
    return Schedule(tuple(rng.choice(list(BITS), rng.integers(1, 9)).tolist()))


@pytest.mark.parametrize("seed", range(20))
def test_every_other_order_has_the_same_bits(seed: int) -> None:
    own = random_schedule(np.random.default_rng(seed))
    first, last = front_loaded(own, BITS), back_loaded(own, BITS)
    for each in (first, last, backward(own), *permuted(own, 5, seed)):
        assert Counter(each.precisions) == Counter(own.precisions)
    falling = [BITS[name] for name in first.precisions]
    assert falling == sorted(falling, reverse=True)
    assert last == backward(first)
    assert backward(backward(own)) == own


@pytest.mark.parametrize("seed", range(10))
def test_permutations_differ_and_are_as_many_as_there_are(seed: int) -> None:
    own = Schedule(("a3", "a3", "a8", "a4"))  # 12 orders
    found = permuted(own, 30, seed)
    assert len(found) == len(set(found)) == 11
    assert own not in found
    assert permuted(Schedule.uniform("a4", 4), 3, seed) == []
    assert found == permuted(own, 30, seed)


@pytest.mark.parametrize("seed", range(20))
def test_where_passes_differ_every_order_still_has_the_same_mean_bits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    own = Schedule(tuple(rng.choice(list(BITS), 8).tolist()))
    passes = rng.choice([1.0, 2.0], 8)

    def mean_bits(schedule: Schedule) -> float:
        return float(np.dot([BITS[name] for name in schedule.precisions], passes) / passes.sum())

    orders = [front_loaded(own, BITS, passes), back_loaded(own, BITS, passes)]
    orders += [backward(own, passes), *permuted(own, 6, seed, passes)]
    for each in orders:
        assert mean_bits(each) == pytest.approx(mean_bits(own))
    assert permuted(own, 6, seed, passes=np.arange(8.0)) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_widened_schedule_has_each_precision_over_the_same_progress(seed: int) -> None:
    own = random_schedule(np.random.default_rng(seed))
    for times in (1, 2, 3):
        wide = widened(own, times * own.windows)
        assert wide is not None
        assert wide.precisions[::times] == own.precisions
        assert len(set(wide.precisions[:times])) == 1
    if own.windows > 1:
        assert widened(own, own.windows + 1) is None
        assert widened(own, own.windows - 1) is None


def test_a_file_holds_one_schedule_or_one_for_each_task(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('["a3", "a8"]')
    assert from_file(file, list(BITS)) == {None: Schedule(("a3", "a8"))}
    file.write_text('{"edit": ["a3"], "default": ["a4", "a8"]}')
    found = from_file(file, list(BITS))
    assert found == {"edit": Schedule(("a3",)), "default": Schedule(("a4", "a8"))}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "JSON"),
        ("7", "must be"),
        ("{}", "no schedule"),
        ("[]", "at least one window"),
        ('["a3", 4]', "text"),
        ('["a3", "a5"]', "'a5' is none of a3, a4, a8"),
        ('{"edit": "a3"}', "list"),
        ('{"edit": ["a3"], "edit": ["a4"]}', "twice"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_a_file_at_fault_gets_a_sentence(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "mine.json"
    file.write_text(content)
    with pytest.raises(InputError, match=says):
        from_file(file, list(BITS))


def test_a_file_that_cannot_be_read_or_is_huge_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be read|is a folder|is not UTF-8"):
        from_file(tmp_path / "none.json", list(BITS))
    with pytest.raises(InputError, match=r"cannot be read|is a folder|is not UTF-8"):
        from_file(tmp_path, list(BITS))
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"cannot be read|is a folder|is not UTF-8"):
        from_file(tmp_path / "binary.json", list(BITS))
    (tmp_path / "huge.json").write_text(json.dumps(["a3"] * 400_000))
    with pytest.raises(InputError, match="more than 1 MiB"):
        from_file(tmp_path / "huge.json", list(BITS))
