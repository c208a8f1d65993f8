"""What a report reads of a tune folder, and that nothing in it changes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engines.errors import InputError
from tests.tuner.tune_folders import IDENTITY, manifest, result, results, search, tune_folder
from tuner.report_data import Record, read_tune_folder
from tuner.report_trials import best_by_trial, non_dominated, thinned
from tuner.report_values import figure_of, number, said, shown
from tuner.search_file import FORMAT
from tuner.trials import TrialResult


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return every file's content and time of change."""
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


def notes(record: Record) -> str:
    return "\n".join(record.notes)


def test_a_finished_tune_is_read_whole(tmp_path: Path) -> None:
    folder = tune_folder(tmp_path)
    before = contents(folder)
    record = read_tune_folder(folder)
    assert record.notes == ()
    assert record.finished
    assert len(record.trials) == 27
    assert [task.name for task in record.tasks] == ["edit", "rename", "chain", "default"]
    assert all(task.judged and len(task.rows) == 4 for task in record.tasks)
    assert record.search.floors == dict.fromkeys(("edit", "rename", "chain"), 8.0)
    assert record.search.budgets["edit"] == {"latency_ms": 52.0}
    assert set(record.engines) == {"fp32.cpu", "int8.cpu"}
    assert ("budget.latency_ms", "85%", "tune.yaml:4") in record.config
    assert record.chosen is not None
    assert record.chosen.feasible
    assert contents(folder) == before


def test_a_torn_last_line_is_left_out_and_left_there(tmp_path: Path) -> None:
    folder = tune_folder(tmp_path)
    log = folder / "trials.jsonl"
    log.write_bytes(log.read_bytes()[:-40])
    before = contents(folder)
    record = read_tune_folder(folder)
    assert len(record.trials) == 26
    assert "last line of trials.jsonl is torn" in notes(record)
    assert contents(folder) == before


def test_a_running_tune_shows_its_best_so_far(tmp_path: Path) -> None:
    record = read_tune_folder(
        tune_folder(tmp_path, result=None, sensitivity=None, manifest=None, config=None)
    )
    assert not record.finished
    assert record.chosen is not None
    assert record.chosen.feasible
    assert [task.rows[0].label for task in record.tasks] == ["best so far"] * 3
    for name in ("result.json", "sensitivity.json", "config.json"):
        assert f"{name} is missing" in notes(record)
    assert "No bundle lies beside" in notes(record)


def test_an_interrupted_tune_ships_what_was_not_judged(tmp_path: Path) -> None:
    made = result(1, 27, complete=False, tasks={})
    record = read_tune_folder(tune_folder(tmp_path, result=made))
    assert [task.judged for task in record.tasks] == [False] * 4
    assert {task.rows[0].label for task in record.tasks} == {"ships, not judged"}


def test_a_folder_that_is_none_is_refused_with_the_mend(tmp_path: Path) -> None:
    folder = tune_folder(tmp_path)
    with pytest.raises(InputError, match=r"not the folder of a tune; did you mean '.*BUNDLE.tune"):
        read_tune_folder(tmp_path / "BUNDLE")
    for wrong in (tmp_path, tmp_path / "nothing", folder / "search.json"):
        with pytest.raises(InputError, match=r"not the folder of a tune; give BUNDLE.tune"):
            read_tune_folder(wrong)


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b"{", b'{"a": NaN', b"\xff\xfe", b"[" * 100_000, b'{"a": 1' * 9]
)
@pytest.mark.parametrize("name", ["search", "result", "sensitivity", "config"])
def test_a_file_that_cannot_be_read_is_a_note(tmp_path: Path, name: str, content: bytes) -> None:
    folder = tune_folder(tmp_path, results(3))
    (folder / f"{name}.json").write_bytes(content)
    record = read_tune_folder(folder)
    assert f"{name}.json" in notes(record)
    assert len(record.trials) == 3


def test_a_damaged_line_before_the_last_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder = tune_folder(tmp_path, results(3))
    log = folder / "trials.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text(lines[0] + lines[1].replace('"cost": ', '"cost": NaN, "x": ') + lines[2])
    with pytest.raises(InputError, match=r"trials.jsonl, line 2: not a trial"):
        read_tune_folder(folder)


def test_the_bundle_of_another_tune_is_not_shown(tmp_path: Path) -> None:
    other = manifest() | {"tune": {"identity": "another"}}
    record = read_tune_folder(tune_folder(tmp_path, manifest=other))
    assert record.engines == {}
    assert "another tune's" in notes(record)


def test_the_bundle_that_a_running_tune_will_replace_is_known_by_its_command(
    tmp_path: Path,
) -> None:
    assert manifest()["tune"]["identity"] == IDENTITY
    assert read_tune_folder(tune_folder(tmp_path, result=None)).engines != {}


def test_a_search_of_another_format_is_a_note(tmp_path: Path) -> None:
    assert search()["format"] == FORMAT
    record = read_tune_folder(tune_folder(tmp_path, search=search(format="cadenza-search/9")))
    assert "cadenza-search/9" in notes(record)
    assert record.search.space == ()


def test_values_of_any_type_in_any_place_are_no_fault(tmp_path: Path) -> None:
    wrong = [None, 3, "text", [1, [2]], {"a": {"b": []}}, True, math.nan, 10**400]
    for index, value in enumerate(wrong):
        broken = dict.fromkeys(result(0, 3), value)
        asked = {"format": FORMAT} | {key: value for key in search() if key != "format"}
        folder = tune_folder(
            tmp_path / str(index),
            results(3),
            result=broken | {"tasks": {"edit": value}, "schedules": {"rename": value}},
            search=asked | {"budgets": {"edit": value}, "space": [value, {"name": value}]},
            config={"a": value, "b": {"value": value, "source": value}},
            manifest={"tune": value, "engines": {"x": value}},
        )
        assert len(read_tune_folder(folder).trials) == 3


def test_non_dominated_trials_are_those_that_brute_force_finds() -> None:
    found = results(120, seed=3)
    feasible = [each for each in found if each.feasible]

    def beaten(one: TrialResult) -> bool:
        return any(
            (other.cost, other.loss) != (one.cost, one.loss)
            and other.cost <= one.cost
            and other.loss <= one.loss
            for other in feasible
        )

    expected = {each.number for each in feasible if not beaten(each)}
    assert {each.number for each in non_dominated(found, lambda each: each.cost)} == expected


def test_of_equal_trials_the_first_stands_for_all() -> None:
    same = [replace(each, cost=1.0, loss=0.0, violations={}, failed=None) for each in results(5)]
    assert [each.number for each in non_dominated(same, lambda each: each.cost)] == [0]


def test_the_best_so_far_never_rises() -> None:
    best = best_by_trial(results(200), lambda each: each.cost)
    values = [value for _, value in best]
    assert values == sorted(values, reverse=True)
    assert values[-1] == min(each.cost for each in results(200) if each.feasible)


def test_thinning_keeps_what_it_must_and_the_order() -> None:
    found = results(500)
    keep = [found[7], found[333]]
    rows = thinned(found, keep, 50)
    assert [each.number for each in rows] == sorted(each.number for each in rows)
    assert {7, 333} <= {each.number for each in rows}
    assert 48 <= len(rows) <= 52
    assert thinned(found[:50], keep, 50) == found[:50]
    assert thinned(found, found, 50) == found


@pytest.mark.parametrize(
    ("value", "digits", "says"),
    [
        (None, 2, "—"),
        (math.nan, 2, "not finite"),
        (0.0, 2, "0.00"),
        (1.234, 1, "1.2"),
        (1e-9, 2, "1.00e-09"),
        (3e9, 0, "3.00e+09"),
        (-1234.5, 1, "-1234.5"),
    ],
)
def test_a_number_for_people(value: float | None, digits: int, says: str) -> None:
    assert figure_of(value, digits) == says


def test_numbers_that_are_not_finite_are_told_and_others_than_numbers_are_none() -> None:
    assert number(True) is None
    assert number("1") is None
    assert number(3) == 3.0
    for value in (math.inf, math.nan, 10**400):
        assert math.isnan(number(value) or 0.0)
        assert said(value) == "not finite"
    assert said([1, math.inf, {"a": None}]) == "1, not finite, a —"


def test_a_shown_text_is_one_line_without_controls_and_not_endless() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        text = "".join(map(chr, rng.integers(0, 0x11000, 200)))
        assert shown(text).encode()
        assert "\n" not in shown(text)
    assert shown("a\u202eb\ud800c\x00") == "a\ufffdb\ufffdc\ufffd"
    assert shown("日本 \u00a0é") == "日本 \u00a0é"
    assert shown("x" * 10**6).endswith("… (cut; 1,000,000 characters)")
    assert json.dumps(shown("x" * 10**6)).count("x") == 2_000
