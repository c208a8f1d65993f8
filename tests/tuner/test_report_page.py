"""The page of a report: what it says at its top, that it is whole, and that nothing gets out."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.tuner.tune_folders import (
    ODD,
    failed,
    result,
    results,
    search,
    sensitivity,
    tune_folder,
)
from tuner.report_data import read_tune_folder
from tuner.report_page import MARKER, colours, page
from tuner.report_values import shown
from tuner.trials import TrialResult


class Parsed(HTMLParser):
    """Elements, ids, attributes and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


def made(root: Path, trials: Sequence[TrialResult] | None = None, **files: Any) -> str:
    """Return the page of a made-up folder."""
    return page(read_tune_folder(tune_folder(root, trials, **files)))


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the page of a finished tune."""
    return made(tmp_path_factory.mktemp("usual"))


def test_equal_folders_give_equal_bytes(usual: str, tmp_path: Path) -> None:
    assert made(tmp_path) == usual


def test_a_page_loads_nothing_and_runs_nothing(usual: str) -> None:
    assert usual.startswith(MARKER)
    parsed = Parsed(usual)
    for tag in ("script", "img", "iframe", "object", "embed", "form", "base", "image"):
        assert parsed.tags[tag] == 0
    assert "default-src 'none'" in usual
    for name, value in parsed.attributes:
        assert not name.startswith("on")
        if name in ("href", "src", "xlink:href"):
            assert value.startswith("#") or value == "data:,"
    assert re.findall(r"url\((?!#)", usual) == []
    assert re.findall(r"@import|https?:", usual) == []


def test_ids_are_given_once_and_what_refers_to_one_finds_it(usual: str) -> None:
    parsed = Parsed(usual)
    assert [name for name, count in Counter(parsed.ids).items() if count > 1] == []
    wanted = {value[1:] for name, value in parsed.attributes if name == "href" and value[0] == "#"}
    wanted |= set(re.findall(r"url\(#([^)]+)\)", usual))
    assert wanted - set(parsed.ids) == set()


def test_every_figure_says_what_it_shows_and_its_text_is_text(usual: str) -> None:
    figures = re.findall(r"<svg.*?</svg>", usual, re.DOTALL)
    assert len(figures) == 2 + 3 + 4 + 1 + 2  # front, maps, latencies, costs, search
    for svg in figures:
        assert re.search(r'^<svg [^>]*aria-label="[^"]+', svg)
        assert 'role="img"' in svg
        assert "<text" in svg
        assert "DejaVu" not in svg
        assert "#01" not in svg


def test_every_colour_of_a_figure_is_one_of_the_style(usual: str) -> None:
    figures = "".join(re.findall(r"<svg.*?</svg>", usual, re.DOTALL))
    assert re.findall(r"#[0-9a-f]{6}\b", figures) == []
    style = usual[usual.index("<style>") : usual.index("</style>")]
    for name in set(re.findall(r"var\((--\w+)\)", usual)):
        assert style.count(f"{name}:") == 2  # light and dark


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "Complete"),
        ({"result": None}, "Not finished"),
        ({"result": result(0, 27, complete=False, tasks={})}, "Interrupted"),
        ({"result": result(0, 27, over_budget=1.034)}, "takes 1.034 times its latency"),
        ({"result": result(0, 27, degraded=True)}, "Degraded"),
        (
            {"result": result(0, 27, short={"edit": [0.5, -0.4, 9.4]})},
            "not shown on test prompts for edit (0.50 [-0.40, 9.40] points)",
        ),
        ({"search": search(unit="mean bits")}, "no latency claim"),
        (
            {"search": search(latencies={"source": "predicted", "device": "NVIDIA L4"})},
            "milliseconds are predicted for NVIDIA L4",
        ),
        ({"search": search(floors={"edit": math.nan})}, "Not finite"),
    ],
)
def test_what_a_reader_must_know_stands_at_the_top(
    tmp_path: Path, files: dict[str, Any], says: str
) -> None:
    text = Parsed(made(tmp_path, results(6), sensitivity=None, **files)).text
    top = text[: text.index("What ships")]
    assert says in top
    notes = ("no latency claim", "milliseconds are predicted for NVIDIA L4")  # no faults
    assert ("Complete" in top) == (says in ("Complete", *notes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"budget_ms": 40.0}, "edit: latency missed by 20.5 %"),
        ({"loss": [0.5, -0.4, 9.0]}, "edit: quality not shown"),
    ],
)
def test_a_page_never_says_complete_over_a_task_that_misses(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    found = result(0, 6)
    found["tasks"]["edit"] |= changes
    text = Parsed(made(tmp_path, results(6), sensitivity=None, result=found)).text
    top = text[: text.index("What ships")]
    assert says in top
    assert "Complete" not in top


def test_trials_timed_beside_the_best_one_say_whether_they_tie(tmp_path: Path) -> None:
    found = results(3)
    found[1] = replace(found[1], against={"trial": 0, "ratio": 1.02, "low": 0.98, "high": 1.07})
    found[2] = replace(found[2], against={"trial": 0, "ratio": 0.9, "low": 0.88, "high": 0.93})
    text = " ".join(Parsed(made(tmp_path, found, sensitivity=None)).text.split())
    assert "1.020 [0.980, 1.070] of trial 0, a tie" in text
    assert re.search(r"0\.900 \[0\.880, 0\.930\] of trial 0(?!, a tie)", text)


def test_what_ships_is_a_sentence_a_task(usual: str) -> None:
    text = " ".join(Parsed(usual).text.split())
    said = (
        "ships int8 in 4 and fp32 in 2 of 6 windows: 48.2 [46.8, 49.6] ms a sequence, 0.80 of "
        "full precision's; 0.50 [-0.40, 1.40] points lost on 400 test prompts (allowed: 8)."
    )
    for task in ("edit", "rename", "chain", "default"):
        assert f"{task} {said}" in text


def test_names_stand_as_they_are_and_make_no_element(tmp_path: Path) -> None:
    one = failed(results(1)[0], f"reason {ODD[1]} {ODD[3]}")
    trials = [one, *(replace(each, number=each.number + 1) for each in results(8))]
    text = made(
        tmp_path,
        [replace(each, log=ODD) if each.failed else each for each in trials],
        tasks=ODD,
        sensitivity=sensitivity(ODD[:6]),
        search=search(ODD, device=ODD[3], environment={ODD[1]: ODD[3]}, seed=ODD[2]),
        config={name: {"value": name, "source": name} for name in ODD},
    )
    text.encode()
    parsed = Parsed(text)
    assert parsed.tags["b"] == parsed.tags["script"] == 0
    assert parsed.tags["svg"] == text.count("</svg>")
    for name in ODD:
        assert parsed.text.count(shown(name)) >= 4
    for control in "\x00\x1b\u202e\u200f":
        assert control not in text


def test_numbers_that_are_not_finite_are_told_and_not_drawn(tmp_path: Path) -> None:
    broken = json.loads(json.dumps(result(0, 9)).replace("48.2", "NaN").replace("0.97", "1e999"))
    trials = [
        replace(each, distances={"int8": {"l0": None, "l1": 0.5}}, nearest=None)
        for each in results(9)
    ]
    folder = tune_folder(
        tmp_path,
        trials,
        result=broken,
        search=search(full={"cost": math.nan, "memory_mib": math.inf}, floors={"edit": -math.inf}),
    )
    log = folder / "trials.jsonl"
    log.write_text(log.read_text().replace('"l1": 0.5', '"l1": -Infinity'))
    text = page(read_tune_folder(folder))
    parsed = Parsed(text)
    assert "not finite" in parsed.text
    assert "infinite" in parsed.text
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        assert not re.search(r"[\s\"(>-](nan|inf)[\s\",)<]", svg, re.IGNORECASE)


def plain(trials: Sequence[TrialResult], **changes: Any) -> list[TrialResult]:
    return [replace(each, failed=None, log=(), violations={}, **changes) for each in trials]


ZERO = {"cost": 0.0, "low": 0.0, "high": 0.0, "loss": 0.0, "memory_mib": 0.0}


@pytest.mark.parametrize(
    ("trials", "figures"),
    [
        ([], 0),
        (results(1), 4),
        (plain(results(4), **ZERO), 4),
        (plain(results(5), cost=1e-300, low=1e-300, high=1e300, loss=1e300), 0),
        ([replace(each, violations={"edit: loss": 1.0}) for each in results(3)], 4),
        ([failed(each, "no") for each in results(3)], 1),
        (plain(results(30), loss=-5.0), 5),
    ],
    ids=["none", "one", "zero", "huge", "infeasible", "failed", "negative"],
)
@pytest.mark.parametrize("goal", ["latency", "quality", "memory", "beauty"])
def test_any_trials_make_a_page(
    tmp_path: Path, trials: Sequence[TrialResult], figures: int, goal: str
) -> None:
    none = dict.fromkeys(("result", "sensitivity", "manifest"))
    text = made(tmp_path, trials, search=search(goal=goal), **none)
    assert text.count("<svg") in (figures, figures + 1)  # importance, where it can be told
    for section in ("front", "tasks", "latencies", "search", "built", "trials", "failures"):
        assert f'<section id="{section}">' in text


def test_zero_sensitivity_everywhere_is_a_map(tmp_path: Path) -> None:
    table = sensitivity()
    for task in table["tasks"].values():
        for key in [key for key in task if key.startswith(("kl", "gain"))]:
            task[key] = [[0.0, 0.0]] * 6
    text = made(tmp_path, results(3), sensitivity=table)
    assert "what each window feels" in text


def test_a_table_with_nothing_finite_is_refused_by_name(tmp_path: Path) -> None:
    table = sensitivity()
    table["tasks"]["edit"]["kl"][0][0] = math.nan
    text = Parsed(made(tmp_path, results(3), sensitivity=table)).text
    assert "sensitivity.json: not valid JSON (NaN is not a finite number)" in text


def test_intervals_of_another_shape_are_left_out(tmp_path: Path) -> None:
    table = sensitivity()
    for task in table["tasks"].values():
        task["gain_low"], task["influence_high"], task["kl_low"] = [[1.0]], "none", None
    assert "with 95 % bands" not in made(tmp_path, results(3), sensitivity=table)


def test_failures_are_told_once_a_reason_with_the_last_lines(tmp_path: Path) -> None:
    trials = [failed(each, f"reason {each.number % 2}") for each in results(6)]
    text = Parsed(made(tmp_path, trials, result=None, sensitivity=None)).text
    assert "reason 0 trials 0, 2, 4" in " ".join(text.split())
    assert text.count("Killed") == 2


def test_an_endless_reason_is_cut(tmp_path: Path) -> None:
    trials = [failed(results(1)[0], "x" * 1_000_000)]
    text = made(tmp_path, trials, result=None, sensitivity=None)
    assert len(text) < 200_000
    assert "1,000,000 characters" in text


def test_unknown_keys_are_kept_out(tmp_path: Path) -> None:
    text = made(
        tmp_path,
        results(3),
        result=result(0, 3, colour="mauve-1"),
        search=search(colour="mauve-2"),
        sensitivity=sensitivity() | {"colour": "mauve-3"},
    )
    assert "mauve" not in text


def test_a_precision_has_one_colour(tmp_path: Path) -> None:
    palette = colours(read_tune_folder(tune_folder(tmp_path)))
    assert palette == {"fp32": 0, "int8": 1}


def test_without_optuna_the_page_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "optuna"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "tuner.search", raising=False)
    monkeypatch.setitem(sys.modules, "optuna", None)
    text = Parsed(made(tmp_path, results(12), sensitivity=None, result=None)).text
    assert "It needs optuna; install it with: pip install 'cadenza[tune]'" in text


@pytest.mark.slow
def test_five_thousand_trials_make_a_page_in_time(tmp_path: Path) -> None:
    folder = tune_folder(tmp_path, results(5_000))
    began = time.process_time()
    text = page(read_tune_folder(folder))
    assert time.process_time() - began < 30
    assert len(text.encode()) < 10 * 2**20
    assert "trials are drawn" in text
    assert "of 5,000 trials are listed; trials.jsonl has all" in text
