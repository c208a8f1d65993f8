"""Laws of graders: what each accepts, and that a user's own code is told where it fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from calib_data.errors import WorkloadError
from calib_data.grader import PATTERN_LIMIT, TEXT_LIMIT, grader_from_spec, is_grader_spec
from calib_data.prompts import Prompt

ASKED = Prompt("a1", "how many?", " 42 ")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the current directory, where modules of the user's may lie; forgets them after."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("spec", "text", "right"),
    [
        ("exact", "42", True),
        ("exact", "\n 42\t", True),
        ("exact", "4 2", False),
        ("exact", "", False),
        (r"regex:\d+", "first 7, then 42.", True),
        (r"regex:\d+", "first 42, then 7.", False),
        (r"regex:\d+", "none", False),
        (r"regex:answer is (.*)\.", "the answer is  42 .", True),
        (r"regex:(\d+)|none", "42 or none", False),
        (r"regex:(?:is|=)\s*(\d)(\d)", "is 42", False),
        (r"regex:a:b=(\d+)", "a:b=42", True),
    ],
)
def test_a_text_is_right_by_the_rule_of_its_grader(spec: str, text: str, right: bool) -> None:
    grader = grader_from_spec(spec)
    assert grader.needs_answers
    assert grader.text == spec
    assert grader.judge(ASKED, text) is right


def test_only_the_end_of_a_long_text_is_searched() -> None:
    grader = grader_from_spec(r"regex:\d+")
    assert grader.judge(ASKED, "x" * TEXT_LIMIT + " 42")
    assert not grader.judge(ASKED, "42 " + "x" * TEXT_LIMIT)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "a grader is exact, regex:PATTERN or python:module.fn"),
        ("Exact", "a grader is exact"),
        ("regex:", "a grader is exact"),
        ("regex:\udc80", "a grader is Unicode text"),
        ("regex:(", "does not compile"),
        ("regex:" + "(" * 900 + ")" * 900, "does not compile"),
        ("regex:" + "x" * (PATTERN_LIMIT + 1), f"at most {PATTERN_LIMIT} characters"),
        ("python:json", "names a function of a module"),
        ("python:a..b", "names a function of a module"),
        ("python:os.path;x.y", "names a function of a module"),
        ("python:no_such_module.fn", "there is no module 'no_such_module' in"),
        ("python:json.no_such", "has no function 'no_such'"),
        ("python:sys.exit", "has no file whose digest"),
    ],
)
def test_what_is_no_grader_is_refused_with_the_mend(spec: str, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        grader_from_spec(spec)


def test_a_function_of_the_current_directory_gets_prompt_text_and_answer(own: Path) -> None:
    (own / "mine_a.py").write_text(
        "def fn(prompt, text, answer):\n    print('noise')\n    return (prompt, text, answer) == "
        "('how many?', 't', ' 42 ')\n"
    )
    path = list(sys.path)
    grader = grader_from_spec("python:mine_a.fn")
    assert sys.path == path
    assert not grader.needs_answers
    assert grader.judge(ASKED, "t") is True
    assert grader.judge(ASKED, "other") is False


def test_what_a_grader_prints_is_kept_off_stdout(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own / "mine_b.py").write_text("print('in')\ndef fn(*of):\n    print('on')\n    return True\n")
    grader_from_spec("python:mine_b.fn").judge(ASKED, "t")
    assert capsys.readouterr() == ("", "in\non\n")


def test_its_text_tells_one_source_from_another(own: Path) -> None:
    texts = []
    for number, body in enumerate(("True", "True", "False")):
        folder = own / f"p{number}"
        folder.mkdir()
        (folder / "g.py").write_text(f"def fn(*of): return {body}\n")
        texts.append(grader_from_spec(f"python:p{number}.g.fn").text.partition(" ")[2])
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("sha256:")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return 1 / 0", r"mine_\w+\.py, line 2, in fn: ZeroDivisionError: division by zero"),
        ("raise SystemExit('bye')", "line 2, in fn: SystemExit: bye"),
        ("raise ValueError('one\\ntwo')", "ValueError: one;"),
        ("return 1", "returned 1, of type int; let it return True or False"),
        ("return None", "returned None, of type NoneType"),
        ("raise type('Own', (BaseException,), {})('gone')", r"line 2, in fn: .*Own: gone;"),
        (
            "raise type('Mute', (Exception,), {'__str__': lambda s: 1 / 0})()",
            "line 2, in fn: .*Mute",
        ),
        ("return type('Shy', (), {'__repr__': lambda s: 1 / 0})()", "of type Shy; let it return"),
        ("import sys; sys.path.clear(); return 3", "returned 3, of type int"),
    ],
)
def test_code_that_fails_is_told_with_its_place(
    own: Path,
    body: str,
    says: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # one of them empties it
    name = f"mine_{abs(hash(request.node.name))}"
    (own / f"{name}.py").write_text(f"def fn(prompt, text, answer):\n    {body}\n")
    grader = grader_from_spec(f"python:{name}.fn")
    with pytest.raises(WorkloadError, match=says):
        grader.judge(ASKED, "t")


def test_a_module_that_cannot_be_imported_is_told_with_its_place(own: Path) -> None:
    (own / "mine_c.py").write_text("import json\n1 / 0\n")
    with pytest.raises(WorkloadError, match=r"mine_c\.py, line 2, .*ZeroDivisionError"):
        grader_from_spec("python:mine_c.fn")
    (own / "mine_d.py").write_text("import not_there\n")
    with pytest.raises(WorkloadError, match="No module named 'not_there'"):
        grader_from_spec("python:mine_d.fn")


def test_a_grader_for_one_task_is_told_from_one_for_all() -> None:
    assert all(map(is_grader_spec, ("exact", "regex:a=b", "python:a.b")))
    assert not any(map(is_grader_spec, ("mine=exact", "mine=regex:a=b", "regex=exact", "exactly")))
