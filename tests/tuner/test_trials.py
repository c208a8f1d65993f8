"""The log of trials: what was written is read, and what is no trial is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engines.errors import InputError
from engines.options import own_options
from tuner.space import candidate_of
from tuner.trials import TrialLog, TrialResult

CANDIDATE = candidate_of(
    {"quantizer": "rtn", "windows": 3, "clip": 0.9, "keep": 1, "scales": "window"},
    own_options("cpu"),
)
RESULTS = [
    TrialResult(
        number=0,
        candidate=CANDIDATE,
        cost=3.5,
        low=3.4,
        high=3.75,
        loss=0.25,
        memory_mib=1.5,
        violations={"edit: loss": -0.75},
        tasks={"edit": {"schedule": ["int8"] * 3}},
        distances={"int8": {"l0": 0.5, "cos": None}},
        device="a processor, 2 cores (01234567)",
        machine={"load": 0.25},
        seconds={"all": 9.5},
        against={"trial": 0.0, "ratio": 0.9, "low": 0.8, "high": 0.95},
    ),
    TrialResult(
        number=1, candidate=CANDIDATE, cost=0.0, loss=100.0, failed="no kernel", log=("a", "b")
    ),
    TrialResult(
        number=4,
        candidate=CANDIDATE,
        cost=0.0,
        loss=100.0,
        failed="too slow",
        nearest={"latency_ms": 3.0},
    ),
]


def written(path: Path) -> TrialLog:
    log = TrialLog(path / "trials.jsonl")
    for result in RESULTS:
        log.append(result)
    return log


def test_what_was_appended_is_read(tmp_path: Path) -> None:
    assert TrialLog(tmp_path / "none.jsonl").read() == []
    log = written(tmp_path)
    assert log.read() == TrialLog(log.path).read() == RESULTS


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_log_cut_anywhere_gives_its_whole_lines_and_can_be_gone_on_with(
    tmp_path: Path, kept: int, capsys: pytest.CaptureFixture[str]
) -> None:
    log = written(tmp_path)
    lines = log.path.read_bytes().splitlines(keepends=True)
    for cut in (1, len(lines[kept]) // 2, len(lines[kept]) - 1):
        log.path.write_bytes(b"".join(lines[:kept]) + lines[kept][:cut])
        assert log.read() == RESULTS[:kept]
        assert "dropped a torn last line" in capsys.readouterr().err
        for result in RESULTS[kept:]:
            log.append(result)
        assert log.read() == RESULTS


def damaged(**changes: Any) -> str:
    return json.dumps(json.loads(LINE) | changes)


LINE = json.dumps(
    {"number": 0, "candidate": CANDIDATE.values, "cost": 1.0, "loss": 0.0, "failed": None}
)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("5", "expected an object, got int"),
        ('["number"]', "expected an object, got list"),
        ("{}", "candidate"),
        (damaged(number=None), "None"),
        (damaged(cost=float("nan")), "must be finite"),
        (damaged(loss=None), "real number"),
        (damaged(cost=10**400), "too large"),
        (damaged(violations=[]), "violations must be an object"),
        (damaged(tasks=3), "tasks must be an object"),
        (damaged(tasks={"edit": 5}), "not subscriptable"),
        (damaged(tasks={"edit": {"schedule": [3]}}), "a schedule must be a list of precisions"),
        (damaged(tasks={"edit": {"schedule": []}}), "a schedule must be a list of precisions"),
        (damaged(low=2.0, high=1.0), "low <= high must hold"),
        (damaged(seconds={"built": "y"}), "must be numbers"),
        (damaged(candidate={"windows": 3}), "a candidate needs the knob"),
        (damaged(colour="red"), "colour"),
        ("not json", "Expecting value"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_line_that_is_no_trial_is_told_with_its_number_and_the_mend(
    tmp_path: Path, line: str, says: str
) -> None:
    log = TrialLog(tmp_path / "trials.jsonl")
    log.path.write_text(line + "\n")
    with pytest.raises(InputError, match=f"line 1: not a trial .*{says}.*; remove the file"):
        log.read()


def test_numbers_ascend(tmp_path: Path) -> None:
    log = TrialLog(tmp_path / "trials.jsonl")
    log.path.write_text(f"{LINE}\n{LINE}\n")
    with pytest.raises(InputError, match=r"line 2: not a trial .*its number is 0, after 0"):
        log.read()


def test_an_interval_is_the_cost_itself_where_nothing_was_measured() -> None:
    assert RESULTS[0].interval == (3.4, 3.75)
    assert RESULTS[1].interval == (0.0, 0.0)
