"""`cadenza allocate`: what it prints, its exit codes, and tables that are at fault."""

from __future__ import annotations

import copy
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza import main
from tests.tuner.test_sensitivity_file import TASK, content, put
from tests.tuner.tuning import Said
from tuner.allocate import Budget, allocate

Run = Callable[..., Said]
ROOT = Path(__file__).resolve().parents[2]


def two_tasks() -> dict[str, Any]:
    value = content()
    other = copy.deepcopy(value["tasks"]["sort"])
    other |= {"passes": [3, 9], "gain": [[0.0, 0.1, -1.0], [0.0, 2.0, -1.0]], "latency_ms": None}
    value["tasks"]["edit"] = other
    return value


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return the command, of a table given as a value, as bytes, or as a path."""

    def call(table: object, *argv: object) -> Said:
        file = tmp_path / "s.json"
        if isinstance(table, dict):
            file.write_text(json.dumps(table))
        elif isinstance(table, bytes):
            file.write_bytes(table)
        else:
            file = Path(str(table))
        capsys.readouterr()
        code = main(["allocate", str(file), *map(str, argv)])
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return Said(code, said.out, said.err, file)

    return call


def test_json_holds_what_the_contract_says_and_equals_the_allocation(run: Run) -> None:
    said = run(two_tasks(), "--mean-bits", 20, "--latency-ms", 31, "--json")
    assert (said.code, said.err) == (0, "")
    assert list(said.json) == ["sort", "edit"]
    for task, gain in (("sort", 1.0), ("edit", 0.1)):
        answer = said.json[task]
        assert answer["gain"] == gain
        assert answer["front_complete"] is True
        assert answer["prices"].keys() == {"bit", "ms", "mib"}
        assert answer["prices"]["mib"] is None
        points = [*answer["front"], answer["runner_up"]]
        keys = {"mean_bits", "latency_ms", "memory_mib", "gain", "schedule"}
        assert all(point.keys() == keys for point in points)
        assert answer.keys() - keys == {
            *("uniform", "reason", "runner_up", "front", "front_complete", "prices")
        }
    assert said.json["sort"]["latency_ms"] == pytest.approx(6 * 3.0 + 6 * 1.1 + 0.1)
    assert said.json["edit"]["latency_ms"] == pytest.approx(3 * 3.0 + 9 * 1.0 + 0.1)


def test_a_percentage_is_of_the_most_precise_candidate_alone_for_each_task(run: Run) -> None:
    full = {"sort": 6 * 3.0 + 6 * 3.1, "edit": 12 * 3.0}
    said = run(two_tasks(), "--latency-ms", "80%", "--json")
    for task, answer in said.json.items():
        absolute = run(two_tasks(), "--latency-ms", 0.8 * full[task], "--task", task, "--json")
        assert absolute.json == {task: answer}
        assert answer["latency_ms"] <= 0.8 * full[task]
    only = run(two_tasks(), "--latency-ms", "100%", "--precision", "int8", "--json")
    assert only.json["sort"]["schedule"] == ["int8", "int8"]


def test_people_get_a_strip_the_runner_up_prices_and_the_reason(run: Run) -> None:
    said = run(two_tasks(), "--mean-bits", 20, "--front", 5)
    assert said.code == 0
    assert said.out.splitlines()[0].split()[:3] == ["task", "schedule", "bits"]
    for part in ("█▁", "runner-up", "█ fp32  ▁ int8", "sort: mixed: gains 1 over uniform"):
        assert part in said.out
    assert "one more mean bit gains 0" in said.out
    assert "front of edit, complete:" in said.out
    assert "front of" not in run(two_tasks(), "--mean-bits", 20).out


def test_without_a_budget_the_most_gain_is_the_answer_and_it_says_so(run: Run) -> None:
    said = run(content(), "--json")
    assert said.json["sort"]["schedule"] == ["fp32", "fp32"]
    assert "no budget is given: the answer is the schedule of most gain" in said.err
    assert "whatever it costs" in said.json["sort"]["reason"]
    assert said.json["sort"]["prices"] == {"bit": None, "ms": None, "mib": None}


def test_the_front_is_as_long_as_asked_for(run: Run) -> None:
    assert run(content(), "--front", 0, "--mean-bits", 32, "--json").json["sort"]["front"] == []
    thin = run(content(), "--front", 1, "--mean-bits", 32, "--json").json["sort"]
    assert len(thin["front"]) == 1
    assert thin["front_complete"] is False


def test_one_task_that_cannot_meet_a_budget_leaves_no_answer_and_says_what_all_can(
    run: Run,
) -> None:
    # sort needs 12.6 ms, edit 12: one fits, and there is no answer.
    said = run(two_tasks(), "--latency-ms", 12.3, "--json")
    assert said.code == 3
    assert said.json == {"infeasible": {"latency_ms": pytest.approx(12.6)}}
    assert "task 'sort'" in said.err
    assert said.err.count("\n") == 1
    assert run(two_tasks(), "--latency-ms", 12.6, "--json").code == 0
    both = run(two_tasks(), "--latency-ms", 11.0, "--mean-bits", 10, "--json")
    assert both.json == {"infeasible": {"mean_bits": None, "latency_ms": pytest.approx(12.6)}}
    assert "likewise 'edit'; give 12.6 ms a sequence" in both.err
    alone = run(two_tasks(), "--latency-ms", 12.3, "--task", "edit", "--json")
    assert alone.code == 0
    words = run(two_tasks(), "--mean-bits", 2)
    assert (words.code, words.out) == (3, "")
    assert "the smallest that fits is 8 mean bits" in words.err


def test_the_table_may_come_from_stdin_or_a_pipe(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    want = run(content(), "--mean-bits", 20, "--json").json
    raw = json.dumps(content()).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
    assert run("-", "--mean-bits", 20, "--json").json == want
    reader, writer = os.pipe()
    os.write(writer, raw)
    os.close(writer)
    try:
        assert run(f"/dev/fd/{reader}", "--mean-bits", 20, "--json").json == want
    finally:
        os.close(reader)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert "is empty" in run(fifo, "--mean-bits", 20).err  # and nobody waits


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(json.dumps(content()))
    code = (
        "import sys; from cadenza import main\n"
        f"code = main(['allocate', {str(tmp_path / 's.json')!r}, '--mean-bits', '20', '--json'])\n"
        "heavy = {'torch', 'onnx', 'onnxruntime', 'optuna', 'sqlalchemy', 'tokenizers', 'scipy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--mean-bits", "nan"), "mean_bits must be positive and finite"),
        (("--mean-bits", "-1"), "mean_bits must be positive and finite"),
        (("--memory-mib", "inf"), "memory_mib must be positive and finite"),
        (("--latency-ms", "0"), "latency_ms must be positive and finite"),
        (("--latency-ms", "0%"), "above 0 %"),
        (("--latency-ms", "inf%"), "above 0 %"),
        (("--latency-ms", "soon"), "for instance 12.5 or 80%"),
        (("--latency-ms", "1e310%"), "above 0 % and finite"),
        (("--precision", "fp8"), "no precision 'fp8', only int8, fp32, w4a4; name one"),
        (("--precision", "int8", "--precision", "int8"), "name it once"),
        (("--precision", "int8", "--precision", "w4a4"), "cannot compete"),
        (("--precision", "w4a4", "--latency-ms", "80%"), "budget them with --mean-bits"),
        (("--task", "poem"), "no task 'poem', only sort; name one"),
        (("--task", "sort", "--task", "sort"), "name it once"),
        (("--front", "-1"), "--front takes 0 to"),
        (("--front", "many"), "invalid int value"),
    ],
)
def test_an_argument_at_fault_exits_2_with_the_mend(
    argv: tuple[str, ...], says: str, run: Run
) -> None:
    said = run(content(), *argv, "--json")
    assert (said.code, said.out) == (2, "")
    assert says in said.err


def test_a_share_of_a_latency_that_nobody_measured_is_refused(run: Run) -> None:
    value = content()
    value["precisions"][1]["latency_ms"] = None
    value["tasks"]["sort"]["latency_ms"] = None
    said = run(value, "--latency-ms", "80%")
    assert said.code == 2
    assert "latency of fp32" in said.err
    assert "name the candidates that are timed" in said.err
    assert run(value, "--latency-ms", "80%", "--precision", "int8").code == 3  # but it is timed
    assert run(value, "--latency-ms", 20).code == 0


RAW: list[tuple[bytes, str]] = [
    (b"", "is empty"),
    (b"  \n", "is empty"),
    (b"[]", "must be an object"),
    (b"null", "must be an object"),
    (b'"x"', "must be an object"),
    (b"{", "not valid JSON"),
    (b"\xef\xbb\xbf{}", "byte order mark"),
    (b'{"format": "\xff"}', "is not UTF-8 at byte 12"),
    (json.dumps(content()).encode("utf-16"), "is not UTF-8"),
    (b'{"a": 1, "a": 2}', "the key 'a' is given twice"),
    (b'{"a": NaN}', "NaN is not a finite number"),
    (b'{"a": [1, -Infinity]}', "-Infinity is not a finite number"),
    (b'{"a": [1e999]}', "1e999 is not a finite number"),
    (b"[" * 100_000, "not valid JSON"),
    (b'{"a":' * 100_000, "not valid JSON"),
    (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),
    (b"{}", "the key 'format' is missing"),
]


@pytest.mark.parametrize(("raw", "says"), RAW, ids=[says for _, says in RAW])
def test_what_is_no_table_exits_2_with_a_sentence(raw: bytes, says: str, run: Run) -> None:
    said = run(raw, "--mean-bits", 20, "--json")
    assert (said.code, said.out) == (2, "")
    assert f"{said.bundle}: " in said.err
    assert says in said.err
    assert said.err.count("\n") == 1


HUGE = 10**400


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (put("windows", to=100_000), "must have an entry for each of 100000 windows, got 2"),
        (put("windows", to=HUGE), "windows: must be an integer from 1"),
        (put("windows", to=True), "windows: must be an integer from 1"),
        (put("windows", to=2.0), "windows: must be an integer from 1"),
        (put("windows", to="2"), "windows: must be an integer from 1"),
        (put("precisions", 0, "bits", to=True), "bits: must be a finite number, got True"),
        (put("precisions", 0, "bits", to=HUGE), "bits: must be a finite number"),
        (put("precisions", 0, "bits", to=1e308), "bits: must be a finite number"),
        (put("precisions", 0, "bits", to=1e300), "bits: must be at most 1e+60, got 1e+300"),
        (put("precisions", 0, "family", to="none"), "precisions: 0: family: 'none' is none of"),
        (put("precisions", 0, "name", to="\n"), "name: must be 1 to 200 printable"),
        (put("precisions", 0, to=[]), "precisions: 0: must be an object"),
        (put("precisions", to={}), "precisions: must be a list"),
        (put("families", to=[]), "families: must be an object"),
        (put("activation_mib", to=-1), "activation_mib: must be at least 0"),
        (put("tasks", "sort", to=None), "tasks: sort: must be an object"),
        (put("tasks", "", to={}), "tasks: key: must be 1 to 200"),
        (put(*TASK, "passes", to=[True, 1]), "passes: 0: must be a finite number, got True"),
        (put(*TASK, "passes", to=[1e299, 1]), "passes: 0: must be at most 1e+60"),
        (put(*TASK, "gain", 1, to=[0.0, 0.1, "x"]), "gain: 1: 2: must be a finite number"),
        (put(*TASK, "gain", to=[[0.0, 0.0, 0.0]] * 3), "a row for each of 2 windows, got 3"),
        (put(*TASK, "latency_ms", 0, 0, to=0), "latency_ms: 0: 0: must be positive"),
        (put(*TASK, "latency_ms", 0, 0, to=False), "must be a finite number, got False"),
        (put(*TASK, "influence", to=[1.0]), "influence: must have an entry for each of 2"),
        (put(*TASK, "n_prompts", to=-1), "n_prompts: must be an integer from 0"),
    ],
)
def test_a_table_at_fault_exits_2_and_the_place_is_named(
    change: Callable[[dict[str, Any]], None], says: str, run: Run
) -> None:
    value = content()
    change(value)
    said = run(value, "--mean-bits", 20, "--json")
    assert (said.code, said.out) == (2, "")
    assert f"{said.bundle}: " in said.err
    assert says in said.err


def test_a_folder_and_a_missing_file_exit_2(run: Run, tmp_path: Path) -> None:
    assert "is a folder; give a table" in run(tmp_path).err
    missing = run(tmp_path / "none.json")
    assert missing.code == 2
    assert "No such file" in missing.err
    assert run("x\0y").code == 2


def test_any_sound_number_is_calculated_with_or_refused_and_never_overflows(run: Run) -> None:
    # Warnings are errors in this suite: an overflow inside would end the test.
    rng = np.random.default_rng(0)
    sizes = [0.0, 5e-324, 1e-300, 1e-59, 1e-12, 1.0, 1e9, 1e59, 9e299]
    odds = [0.05, 0.005, 0.005, 0.17, 0.2, 0.2, 0.2, 0.16, 0.01]
    codes = set()
    for _ in range(300):
        value = content()

        def number(least: float = 0.0) -> float:
            return max(least, float(rng.choice(sizes, p=odds)) * float(rng.choice([1.0, 0.3])))

        for precision in value["precisions"][:2]:
            precision |= {"bits": number(5e-324), "latency_ms": number(5e-324)}
            precision["memory_mib"] = number()
        value |= {"switch_ms": number(), "activation_mib": number()}
        value["families"] = {"int8": number(), "fp32": number(), "w4": 1.0}
        task = value["tasks"]["sort"]
        task |= {"latency_ms": None, "passes": [number(), number()]}
        sign = rng.choice([-1.0, 1.0], (2, 3))
        task["gain"] = [[number() * s for s in row] for row in sign.tolist()]
        budgets = [
            part
            for name in ("--mean-bits", "--latency-ms", "--memory-mib")
            if rng.random() < 0.6
            for part in (name, number(5e-324))
        ]
        said = run(value, *budgets, "--json")
        codes.add(said.code)
        assert said.code in (0, 2, 3), said.err
        if said.code != 2:
            json.loads(said.out, parse_constant=lambda name: pytest.fail(name))
    assert codes == {0, 2, 3}


def test_the_command_answers_as_the_function_does(run: Run) -> None:
    from engines.document import document_from_text
    from tuner.sensitivity_file import Sensitivity

    table = Sensitivity.from_json(document_from_text(json.dumps(two_tasks()), "s"))
    names = table.candidates()
    for task in ("sort", "edit"):
        want = allocate(
            table.gain(task, names), table.costs(task, names), Budget(20.0, 30.0, 60.0)
        )
        argv = ("--mean-bits", 20, "--latency-ms", 30, "--memory-mib", 60, "--task", task)
        assert run(two_tasks(), *argv, "--json").json == {task: want.to_json()}
