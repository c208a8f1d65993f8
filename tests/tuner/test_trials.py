"""The log of trials: what was written is read, and what is no trial is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engines.errors import InputError
from tuner.space import Candidate
from tuner.trials import TrialLog, TrialResult

CANDIDATE = Candidate(windows=3, clip=0.9, keep=1, scales="window", threads=0, optimization="all")
RESULTS = [
    TrialResult(0, CANDIDATE, 3.5, 0.25, {"edit": -0.75}, {"edit": {"schedule": ["int8"] * 3}}),
    TrialResult(1, CANDIDATE, 0.0, 100.0, failed="no kernel"),
    TrialResult(2, CANDIDATE, 0.0, 100.0, failed="too slow", nearest={"latency_ms": 3.0}),
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
    {"number": 0, "candidate": CANDIDATE.values(), "cost": 1.0, "loss": 0.0, "failed": None}
)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("5", "expected an object, got int"),
        ('["number"]', "expected an object, got list"),
        ("{}", "candidate"),
        (damaged(number=1), "its number is 1, expected 0"),
        (damaged(cost=float("nan")), "must be finite"),
        (damaged(loss=None), "real number"),
        (damaged(cost=10**400), "too large"),
        (damaged(violations=[]), "violations must be an object"),
        (damaged(tasks=3), "tasks must be an object"),
        (damaged(candidate={"windows": 3}), "a candidate has the knobs"),
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
