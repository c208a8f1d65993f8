"""The page of a report as a browser shows it: whole, literal, offline, and on any width."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tuner.browser import Browser, browser
from tests.tuner.tune_folders import ODD, result, results, search, sensitivity, tune_folder
from tuner.report_data import read_tune_folder
from tuner.report_page import page
from tuner.report_values import shown

pytestmark = pytest.mark.slow

SECTIONS = (
    *("overview", "front", "tasks", "latencies", "search", "built", "trials", "failures"),
    "environment",
)

# Elements that stick out of the page, other than inside what scrolls by itself.
OVERFLOW = """
const wide = document.documentElement.clientWidth;
return [...document.body.querySelectorAll('*')].filter(
    each => !each.closest('.scroll, pre') && each.getBoundingClientRect().right > wide + 1
).map(each => each.tagName + ' ' + each.className);
"""
SIZES = """
return [...document.querySelectorAll(arguments[0])].map(each => {
    const box = each.getBoundingClientRect(); return [box.width, box.height];
});
"""


def _nan() -> dict[str, Any]:
    broken = json.loads(json.dumps(result(0, 9)).replace("48.2", "NaN").replace("0.97", "1e999"))
    asked = search(full={"cost": math.nan}, floors={"edit": math.inf, "rename": 1.0})
    return {"trials": results(9), "result": broken, "search": asked}


def _zero() -> dict[str, Any]:
    flat = {"cost": 9.0, "low": 9.0, "high": 9.0, "loss": 0.0, "memory_mib": 0.0}
    trials = [replace(each, failed=None, violations={}, **flat) for each in results(12)]
    table = sensitivity()
    for task in table["tasks"].values():
        for key in [key for key in task if key.startswith(("kl", "gain"))]:
            task[key] = [[0.0, 0.0]] * 6
    return {"trials": trials, "sensitivity": table}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "normal": dict,
    "one point": lambda: {"trials": results(1)},
    "not finite": _nan,
    "zero": _zero,
    "odd names": lambda: {"tasks": ODD, "sensitivity": sensitivity(ODD[:6])},
    "running": lambda: {"result": None, "sensitivity": None, "manifest": None},
}


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Yield a browser."""
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        opened.requests()
        yield opened


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """Return the name of a case, and the file of its page."""
    root = tmp_path_factory.mktemp("case")
    file = root / "report.html"
    made = page(read_tune_folder(tune_folder(root, **CASES[request.param]())))
    file.write_text(made, "utf-8")
    return request.param, file


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_a_page_is_whole_quiet_and_within_its_width(
    window: Browser, case: tuple[str, Path], width: int, scheme: str
) -> None:
    name, file = case
    window.resize(width)
    window.paint(scheme)
    window.console(), window.requests()  # what earlier pages left
    window.open(file)
    assert window.console() == []
    assert set(window.requests()) <= {file.resolve().as_uri(), "data:,"}
    for section in SECTIONS:
        (size,) = window.run(SIZES.replace("arguments[0]", f"'#{section}'"))
        assert min(size) > 30, section
    assert window.run(OVERFLOW) == []
    assert window.run("return document.documentElement.scrollWidth") <= width
    figures = window.run(SIZES.replace("arguments[0]", "'figure svg'"))
    assert figures != []
    assert all(min(size) > 50 for size in figures)
    texts = window.run(SIZES.replace("arguments[0]", "'figure svg text'"))
    assert len(texts) > 5 * len(figures)
    assert all(size[0] > 0 for size in texts)
    window.run("for (const each of document.querySelectorAll('details')) each.open = true")
    assert window.run(OVERFLOW) == []
    said = window.run("return document.body.innerText")
    if name == "not finite":
        assert "not finite" in said
    if name == "odd names":
        for odd in ODD:
            assert " ".join(shown(odd).split()) in " ".join(said.split())
        assert window.run("return document.querySelectorAll('b, script').length") == 0


def test_figures_and_page_follow_the_scheme(window: Browser, case: tuple[str, Path]) -> None:
    seen = []
    for scheme in ("light", "dark"):
        window.paint(scheme)
        window.open(case[1])
        seen.append(
            window.run(
                "const of = (at, key) => getComputedStyle(document.querySelector(at))[key];"
                "return [of('body', 'backgroundColor'), of('figure svg text', 'fill')]"
            )
        )
    assert seen[0][0] != seen[1][0]
    assert seen[0][1] != seen[1][1]
