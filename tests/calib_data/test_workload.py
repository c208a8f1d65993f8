"""Laws of workloads: what a prompt file may hold, and what it gets when it does not."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest

from calib_data.prompts import Split, draw_prompts
from calib_data.tasks import TASKS
from calib_data.workload import (
    Workload,
    WorkloadError,
    expand_specs,
    graders_by_task,
    name_of_spec,
    workload_from_name,
    workload_from_spec,
)

USED: tuple[Split, ...] = ("calibration", "tuning", "test")


def write(folder: Path, *lines: object) -> str:
    file = folder / "prompts.jsonl"
    file.write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )
    return f"mine={file}"


def many(count: int) -> list[dict[str, str]]:
    return [{"id": f"p{n}", "prompt": f"say {n}", "answer": str(n)} for n in range(count)]


@pytest.mark.parametrize("name", TASKS)
def test_a_built_in_workload_is_its_task(name: str) -> None:
    workload, task = workload_from_name(name), TASKS[name]
    assert workload_from_spec(name) == workload
    assert workload.source == "builtin"
    assert (workload.steps, workload.gen_length) == (task.steps, task.gen_length)
    assert workload.prompts("test", 5, seed=3) == draw_prompts(task, "test", 5, 3)
    assert workload.grade is task.grade
    assert workload.scored == task.scored


def test_an_unknown_name_lists_the_known_and_the_way_to_a_file() -> None:
    with pytest.raises(WorkloadError, match=r"unknown task 'sort'.*edit.*NAME=FILE\.jsonl"):
        workload_from_spec("sort")


def test_settings_given_replace_the_tasks_own(tmp_path: Path) -> None:
    spec = write(tmp_path, *many(3))
    assert workload_from_spec("edit", steps=6).steps == 6
    own = workload_from_spec(spec, steps=8, gen_length=16)
    assert (own.steps, own.gen_length, own.block_length) == (8, 16, 16)
    assert workload_from_spec(spec, gen_length=16, block_length=8).block_length == 8


def test_the_splits_of_a_file_are_disjoint_and_together_everything(tmp_path: Path) -> None:
    workload = workload_from_spec(write(tmp_path, *many(90)))
    parts = {split: {p.id for p in workload.prompts(split, 99)} for split in USED}
    for one, other in combinations(USED, 2):
        assert parts[one]
        assert not parts[one] & parts[other]
    assert sum(map(len, parts.values())) == 90
    assert workload.prompts("train", 99) == []


def test_a_prompt_keeps_its_split_when_the_file_grows(tmp_path: Path) -> None:
    few = workload_from_spec(write(tmp_path, *many(30)))
    before = {split: {p.id for p in few.prompts(split, 99)} for split in USED}
    more = workload_from_spec(write(tmp_path, *reversed(many(60))))
    for split in USED:
        assert before[split] <= {p.id for p in more.prompts(split, 99)}


def test_a_split_given_is_obeyed(tmp_path: Path) -> None:
    lines = [{**line, "split": USED[n % 3]} for n, line in enumerate(many(9))]
    workload = workload_from_spec(write(tmp_path, *lines))
    assert {p.id for p in workload.prompts("tuning", 9)} == {"p1", "p4", "p7"}


def test_fewer_prompts_than_asked_are_all_there_are(tmp_path: Path) -> None:
    lines = [{**line, "split": "test"} for line in many(4)]
    workload = workload_from_spec(write(tmp_path, *lines))
    assert len(workload.prompts("test", 1000)) == 4
    assert workload.prompts("tuning", 1000) == []


def test_more_prompts_of_a_file_begin_with_the_fewer_and_a_seed_reorders(tmp_path: Path) -> None:
    lines = [{**line, "split": "test"} for line in many(40)]
    workload = workload_from_spec(write(tmp_path, *lines))
    assert workload.prompts("test", 30)[:10] == workload.prompts("test", 10)
    assert workload.prompts("test", 10, seed=1) != workload.prompts("test", 10, seed=0)


def test_an_answer_on_every_line_gives_an_exact_grader(tmp_path: Path) -> None:
    grade = workload_from_spec(write(tmp_path, *many(3))).grade
    assert grade is not None
    assert grade("say 2", "2")
    assert grade("say 2", " 2\n")
    assert not grade("say 2", "1")
    assert not grade("say 2", "22")
    assert not grade("say 2", "")
    with pytest.raises(ValueError, match="no answer for the prompt"):
        grade("say 9", "9")


def test_one_line_without_an_answer_gives_no_grader(tmp_path: Path) -> None:
    assert workload_from_spec(write(tmp_path, *many(3), {"id": "x", "prompt": "y"})).grade is None
    lines = [*many(2), {"id": "x", "prompt": "y", "answer": None, "split": None}]
    assert workload_from_spec(write(tmp_path, *lines)).grade is None


def test_a_prompt_given_twice_takes_either_answer(tmp_path: Path) -> None:
    lines = [{"id": n, "prompt": "pick", "answer": n} for n in ("a", "b")]
    grade = workload_from_spec(write(tmp_path, *lines)).grade
    assert grade is not None
    assert [grade("pick", given) for given in "abc"] == [True, True, False]


def test_blank_lines_a_byte_order_mark_and_unicode_are_read(tmp_path: Path) -> None:
    file = tmp_path / "模型 é $HOME.jsonl"
    line = json.dumps({"id": "1", "prompt": "é\u2028x", "split": "test"}, ensure_ascii=False)
    file.write_bytes(b"\xef\xbb\xbf" + f"{line}\r\n\r\n  \n".encode())
    (prompt,) = workload_from_spec(f"mine={file}").prompts("test", 9)
    assert prompt.prompt == "é\u2028x"


GOOD = {"id": "1", "prompt": "p"}


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "is empty"),
        (["", "   "], "is empty"),
        ([GOOD, "{"], "line 2: not JSON"),
        ([GOOD, "", "nonsense"], "line 3: not JSON"),
        (["[" * 100_000], "line 1: not JSON"),
        ([[1]], "line 1: not an object"),
        (["7"], "line 1: not an object"),
        ([{"id": "1"}], "line 1: the key 'prompt' is missing"),
        ([{"prompt": "p"}], "line 1: the key 'id' is missing"),
        ([{"id": "1", "prompt": 5}], "line 1: 'prompt' must be text, got 5"),
        ([{"id": "1", "prompt": None}], "line 1: 'prompt' must be text"),
        ([{"id": 1, "prompt": "p"}], "line 1: 'id' must be text, got 1"),
        ([{**GOOD, "answer": 5}], "line 1: 'answer' must be text"),
        (['{"id": "1", "prompt": "\\ud800"}'], "line 1: 'prompt' must be text"),
        ([{"id": "1", "prompt": ""}], "line 1: the prompt is empty"),
        ([{"id": "1", "prompt": "  "}], "line 1: the prompt is empty"),
        ([{"id": "", "prompt": "p"}], "line 1: the id is empty"),
        ([GOOD, {"id": "1", "prompt": "q"}], "line 2: the id '1' is that of line 1"),
        ([{**GOOD, "split": "dev"}], "line 1: 'split' is one of .*calibration.*, got 'dev'"),
        (
            [{**GOOD, "split": "test"}, {"id": "2", "prompt": "p", "split": "tuning"}],
            "line 2: the prompt of line 1 again, there for test, here for tuning",
        ),
    ],
)
def test_a_bad_file_is_refused_with_its_line(
    tmp_path: Path, lines: list[object], says: str
) -> None:
    with pytest.raises(WorkloadError, match=says):
        workload_from_spec(write(tmp_path, *lines))


def test_a_missing_file_a_folder_and_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for file in (tmp_path / "missing", tmp_path, tmp_path / "bytes", "", "a\0b"):
        with pytest.raises(WorkloadError, match="cannot read the prompt file"):
            workload_from_spec(f"mine={file}")


@pytest.mark.parametrize("name", ["default", "", "a b", "../up", "a.b", "é", "x" * 65])
def test_a_name_that_cannot_be_a_tasks_is_refused(tmp_path: Path, name: str) -> None:
    spec = write(tmp_path, *many(1)).replace("mine", name, 1)
    with pytest.raises(WorkloadError, match="a task's name is letters"):
        workload_from_spec(spec)


def test_a_file_under_a_built_in_name_keeps_nothing_of_the_task(tmp_path: Path) -> None:
    spec = write(tmp_path, {"id": "1", "prompt": "p"}).replace("mine", "edit", 1)
    workload = workload_from_spec(spec)
    assert isinstance(workload, Workload)
    assert (workload.source, workload.grade) == ("file", None)


def test_an_unknown_split_and_a_negative_count_are_refused() -> None:
    with pytest.raises(ValueError, match="split is one of"):
        workload_from_name("edit").prompts("dev", 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="count >= 0"):
        workload_from_name("edit").prompts("test", -1)


def test_a_grader_asked_for_replaces_the_comparison(tmp_path: Path) -> None:
    spec = write(tmp_path, *many(3))
    workload = workload_from_spec(spec, grader=r"regex:is (\d+)")
    assert workload.grade is not None
    assert workload.grade("say 2", "it is 1, no, it is 2!")
    assert not workload.grade("say 2", "2")
    assert workload.grader == r"regex:is (\d+)"
    assert workload_from_spec(spec).grader == "exact"
    assert workload_from_spec("edit").grader == "built in"


@pytest.mark.parametrize("grader", ["exact", "regex:.*"])
def test_a_grader_that_compares_needs_an_answer_on_every_line(tmp_path: Path, grader: str) -> None:
    spec = write(tmp_path, *many(2), {"id": "x", "prompt": "y"})
    with pytest.raises(WorkloadError, match=r'line 3: no answer.*add "answer" to every line'):
        workload_from_spec(spec, grader=grader)


def test_a_function_judges_prompts_without_answers_and_its_failure_names_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rule_of_a_file.py").write_text(
        "def fn(prompt, text, answer):\n    return len(text) // (len(text) - 3) > 1 if answer is "
        "None else False\n"
    )
    spec = write(tmp_path, {"id": "x7", "prompt": "y"})
    workload = workload_from_spec(spec, grader="python:rule_of_a_file.fn")
    assert workload.grade is not None
    assert workload.grade("y", "four")
    assert not workload.grade("y", "")
    with pytest.raises(WorkloadError, match=r"prompt 'x7': .*line 2, in fn: ZeroDivisionError"):
        workload.grade("y", "abc")


@pytest.mark.parametrize("spec", ["edit", "harness:gsm8k", "a=harness:gsm8k"])
def test_a_task_with_a_grader_of_its_own_takes_no_other(spec: str) -> None:
    with pytest.raises(WorkloadError, match="has a grader of its own"):
        workload_from_spec(spec, grader="exact")


FILES = ("a=x.jsonl", "edit", "b=y.jsonl", "harness:gsm8k?fewshot=4")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ((), {}),
        (("exact",), {"a": "exact", "b": "exact"}),
        (("regex:a=(.*)",), {"a": "regex:a=(.*)", "b": "regex:a=(.*)"}),
        (("b=regex:c=(.*)",), {"b": "regex:c=(.*)"}),
        (("b=python:m.f", "exact"), {"a": "exact", "b": "python:m.f"}),
    ],
)
def test_a_grader_goes_to_every_file_or_to_the_task_it_names(
    given: tuple[str, ...], found: dict[str, str]
) -> None:
    assert graders_by_task(given, FILES) == found


@pytest.mark.parametrize(
    ("given", "specs", "says"),
    [
        (("exact",), ("edit",), "no --task is one"),
        (("exact", "regex:x"), FILES, "are both for every file"),
        (("a=exact", "a=exact"), FILES, "'a' has two graders"),
        (("c=exact",), FILES, "given for a, b; add --task c=FILE"),
        (("edit=exact",), FILES, "prompt files are given for a, b"),
        (("a=exactly",), FILES, "--grader is exact, regex:PATTERN"),
        (("fuzzy",), FILES, "--grader is exact, regex:PATTERN"),
    ],
)
def test_a_grader_for_nobody_is_refused(
    given: tuple[str, ...], specs: tuple[str, ...], says: str
) -> None:
    with pytest.raises(WorkloadError, match=says):
        graders_by_task(given, specs)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("edit", "edit"),
        ("mine=a=b.jsonl", "mine"),
        ("harness:gsm8k?fewshot=4", "gsm8k"),
        ("own=harness:gsm8k?fewshot=4", "own"),
        ("harness:tasks/my task.yaml?fewshot=4", "my_task"),
    ],
)
def test_a_spec_has_a_name_before_anything_is_read(spec: str, name: str) -> None:
    assert name_of_spec(spec) == name


def test_the_paper_stands_for_six_tasks_with_different_names() -> None:
    specs = expand_specs(("edit", "harness:paper", "a=x.jsonl"))
    assert specs[0] == "edit"
    assert specs[-1] == "a=x.jsonl"
    assert [name_of_spec(spec) for spec in specs[1:-1]] == [
        *("gsm8k", "humaneval", "mmlu_pro", "bbh", "arc_challenge", "drop")
    ]
