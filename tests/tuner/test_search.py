"""The search: nothing twice, resumable, and the same walk with and without a break."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engines.errors import InputError
from tuner.search import open_study, search
from tuner.space import Candidate, Knob, default_candidate, size
from tuner.trials import TrialLog, TrialResult

SPACE = (
    Knob("windows", (6, 3, 4), "windows"),
    Knob("clip", (1.0, 0.9), "clip"),
    Knob("keep", (0, 1, 2), "blocks"),
    Knob("scales", ("shared",), "scales"),
    Knob("threads", (2, 1), "threads"),
    Knob("optimization", ("all",), "optimization"),
)


def worth(candidate: Candidate, number: int) -> TrialResult:
    cost = 10.0 + candidate.keep - candidate.threads + 0.1 * candidate.windows
    loss = 4.0 * candidate.clip - candidate.keep
    return TrialResult(number, candidate, cost, loss, {"edit": loss - 3.0})


class Evaluations:
    """Counts what is evaluated, and stops the process's way after some of it."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.seen: list[Candidate] = []
        self.stop_after = stop_after

    def __call__(self, candidate: Candidate, number: int) -> TrialResult:
        if len(self.seen) == self.stop_after:
            raise KeyboardInterrupt
        self.seen.append(candidate)
        return worth(candidate, number)


def walk(
    folder: Path, trials: int, evaluate: Evaluations, strategy: str = "tpe"
) -> list[Candidate]:
    study = open_study(folder, None)
    log = TrialLog(folder / "trials.jsonl")
    found = search(SPACE, evaluate, log, study, trials, seed=5, strategy=strategy)
    return [result.candidate for result in found]


def test_the_defaults_come_first_and_nothing_is_evaluated_twice(tmp_path: Path) -> None:
    evaluate = Evaluations()
    walked = walk(tmp_path, 12, evaluate)
    assert walked[0] == default_candidate(SPACE)
    assert len(set(walked)) == len(walked) == 12
    assert evaluate.seen == walked


@pytest.mark.parametrize("strategy", ["tpe", "random"])
def test_a_broken_walk_goes_on_as_if_unbroken(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "broken").mkdir()
    whole = walk(tmp_path / "whole", 10, Evaluations(), strategy)
    with pytest.raises(KeyboardInterrupt):
        walk(tmp_path / "broken", 10, Evaluations(stop_after=6), strategy)
    rest = Evaluations()
    assert walk(tmp_path / "broken", 10, rest, strategy) == whole
    assert rest.seen == whole[6:]


def test_a_finished_search_evaluates_nothing(tmp_path: Path) -> None:
    walk(tmp_path, 4, Evaluations())
    again = Evaluations()
    walk(tmp_path, 4, again)
    assert again.seen == []


def test_the_search_stops_when_the_space_is_spent(tmp_path: Path) -> None:
    assert len(walk(tmp_path, 1000, Evaluations(), "random")) == size(SPACE) == 36


def test_no_trial_starts_after_the_deadline_but_the_first(tmp_path: Path) -> None:
    log = TrialLog(tmp_path / "trials.jsonl")
    study = open_study(tmp_path, None)
    found = search(SPACE, worth, log, study, 9, seed=0, deadline=1.0, clock=lambda: 2.0)
    assert len(found) == 1


def test_the_study_is_rebuilt_from_the_log(tmp_path: Path) -> None:
    walked = walk(tmp_path, 7, Evaluations())
    study = open_study(tmp_path, None)
    log = TrialLog(tmp_path / "trials.jsonl")
    assert [each.candidate for each in search(SPACE, worth, log, study, 8, seed=5)][:7] == walked
    assert {t.user_attrs.get("number") for t in study.trials if t.values} == set(range(8))


def test_a_torn_last_line_is_dropped_and_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    walked = walk(tmp_path, 5, Evaluations())
    log = tmp_path / "trials.jsonl"
    log.write_bytes(log.read_bytes()[:-9])
    again = Evaluations()
    assert walk(tmp_path, 5, again) == walked
    assert again.seen == walked[4:]
    assert "torn last line" in capsys.readouterr().err


def test_infeasible_and_failed_results_are_told_apart() -> None:
    candidate = default_candidate(SPACE)
    assert TrialResult(0, candidate, 1.0, 1.0, {"edit": 0.0}).feasible
    assert not TrialResult(0, candidate, 1.0, 1.0, {"edit": 0.1}).feasible
    assert not TrialResult(0, candidate, 1.0, 1.0, failed="crashed").feasible


def test_an_unknown_strategy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="strategy"):
        walk(tmp_path, 2, Evaluations(), "full")


def test_trials_of_a_machine_with_more_cores_count_but_are_not_told_to_the_study(
    tmp_path: Path,
) -> None:
    log = TrialLog(tmp_path / "trials.jsonl")
    log.append(worth(default_candidate(SPACE), 0))
    log.append(worth(replace(default_candidate(SPACE), threads=16), 1))
    study = open_study(tmp_path, None)
    found = search(SPACE, worth, log, study, 4, seed=5)
    assert [result.number for result in found] == [0, 1, 2, 3]
    assert {t.user_attrs.get("number") for t in study.trials if t.values} == {0, 2, 3}


def test_a_database_holds_the_studies_of_many_commands_apart(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    for name in ("one", "other"):
        folder = tmp_path / name
        folder.mkdir()
        log = TrialLog(folder / "trials.jsonl")
        search(SPACE, worth, log, open_study(folder, url, name), 3, seed=5, strategy="random")
        again = open_study(folder, url, name)
        assert {t.user_attrs["number"] for t in again.trials if t.values} == {0, 1, 2}


@pytest.mark.parametrize(
    "url", ["nonsense", "sqlite:////nowhere/at/all.db", "redis://here", "unheard://of"]
)
def test_a_storage_that_cannot_be_used_is_told_with_the_mend(tmp_path: Path, url: str) -> None:
    with pytest.raises(InputError, match="give the URL of a database") as caught:
        open_study(tmp_path, url)
    assert "\n" not in str(caught.value)
