"""A shared study: claims that hold, hearts that stop, devices that do not mix."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import optuna
import pytest

from engines.errors import CadenzaError, InputError
from tests.tuner.postgres import server
from tests.tuner.spaces import SMALL, Landscape
from tuner.search import search
from tuner.space import Candidate
from tuner.study import open_study
from tuner.trials import TrialLog, TrialResult

LAND = Landscape(SMALL, 0)


def searched(
    folder: Path,
    url: str,
    trials: int,
    worker: str = "one",
    device: str = "here",
    evaluate: Callable[[Candidate, int, Sequence[TrialResult]], TrialResult] | None = None,
) -> list[TrialResult]:
    folder.mkdir(exist_ok=True)
    study = open_study(folder, url, "cadenza", worker, device, grace_s=3)
    log = TrialLog(folder / "trials.jsonl")
    return search(SMALL, evaluate or LAND, log, study, trials, seed=5)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/study.db"


def test_workers_one_after_the_other_share_what_is_finished(tmp_path: Path, url: str) -> None:
    first = searched(tmp_path / "one", url, 6)
    both = searched(tmp_path / "two", url, 10, worker="two")
    assert both[:6] == first
    assert len({each.candidate for each in both}) == len({each.number for each in both}) == 10
    assert [each.number for each in both] == sorted(each.number for each in both)
    assert searched(tmp_path / "one", url, 10) == both
    assert len(TrialLog(tmp_path / "one" / "trials.jsonl").read()) == 6
    assert len(TrialLog(tmp_path / "two" / "trials.jsonl").read()) == 4


def test_a_shared_search_of_one_worker_walks_as_a_search_of_its_own(
    tmp_path: Path, url: str
) -> None:
    shared = searched(tmp_path / "one", url, 14)
    own = search(SMALL, LAND, TrialLog(tmp_path / "log"), open_study(tmp_path, None), 14, seed=5)
    assert [each.candidate for each in shared] == [each.candidate for each in own]


def test_results_of_another_device_are_of_another_study(tmp_path: Path, url: str) -> None:
    searched(tmp_path / "one", url, 5)
    other = searched(tmp_path / "two", url, 3, worker="two", device="elsewhere")
    assert len(other) == 3
    assert len(searched(tmp_path / "one", url, 5)) == 5


def test_what_a_candidate_s_worker_left_is_run_first_by_whoever_comes(
    tmp_path: Path, url: str
) -> None:
    begun: list[Candidate] = []

    def interrupted(
        candidate: Candidate, number: int, before: Sequence[TrialResult]
    ) -> TrialResult:
        if len(before) == 4:
            begun.append(candidate)
            raise KeyboardInterrupt
        return LAND.result(candidate, number)

    with pytest.raises(KeyboardInterrupt):
        searched(tmp_path / "one", url, 9, evaluate=interrupted)
    found = searched(tmp_path / "two", url, 5, worker="two")
    assert found[-1].candidate == begun[0]


def test_what_others_run_is_not_taken(tmp_path: Path, url: str) -> None:
    seen: list[Candidate] = []

    def meanwhile(candidate: Candidate, number: int, before: Sequence[TrialResult]) -> TrialResult:
        seen.append(candidate)
        if len(before) == 2:
            inner = searched(tmp_path / "two", url, 5, worker="two")
            seen.extend(each.candidate for each in inner[2:])
        return LAND.result(candidate, number)

    searched(tmp_path / "one", url, 6, evaluate=meanwhile)
    assert len(seen) == len(set(seen))


def test_a_lost_database_is_filled_from_the_log(tmp_path: Path, url: str) -> None:
    before = searched(tmp_path / "one", url, 6)
    (tmp_path / "study.db").unlink()
    again = searched(tmp_path / "one", url, 6)
    assert [each.candidate for each in again] == [each.candidate for each in before]
    assert len(searched(tmp_path / "two", url, 6, worker="two")) == 6


def test_a_study_of_other_objectives_is_refused(tmp_path: Path, url: str) -> None:
    searched(tmp_path / "one", url, 2)
    (name,) = optuna.get_all_study_names(url)
    optuna.delete_study(study_name=name, storage=url)
    optuna.create_study(study_name=name, storage=url)
    with pytest.raises(InputError, match="1 objectives, not 3; name another database"):
        searched(tmp_path / "one", url, 4)


def test_a_database_that_goes_away_is_told_and_nothing_is_lost(tmp_path: Path, url: str) -> None:
    def breaking(candidate: Candidate, number: int, before: Sequence[TrialResult]) -> TrialResult:
        if len(before) == 3:
            (tmp_path / "study.db").write_bytes(b"no database " * 1000)
        return LAND.result(candidate, number)

    with pytest.raises(CadenzaError, match="the storage went away"):
        searched(tmp_path / "one", url, 9, evaluate=breaking)
    assert len(TrialLog(tmp_path / "one" / "trials.jsonl").read()) == 4
    (tmp_path / "study.db").unlink()
    assert len(searched(tmp_path / "one", url, 9)) == 9


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """Yield the URL of a real PostgreSQL."""
    with server() as found:
        yield found


def worker(folder: Path, url: str, *argv: object) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.tuner.study_worker", str(folder), url]
    return subprocess.Popen(
        [*command, *map(str, argv)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def lines(process: subprocess.Popen[str], until: str, count: int) -> list[str]:
    """Return a process's lines up to the n-th that begins with a word."""
    assert process.stdout is not None
    found: list[str] = []
    while sum(line.startswith(until) for line in found) < count:
        line = process.stdout.readline()
        assert line, process.stderr.read() if process.stderr else ""
        found.append(line.strip())
    return found


def rest(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.splitlines()


def said(found: list[str], word: str) -> list[str]:
    return [line.removeprefix(f"{word} ") for line in found if line.startswith(f"{word} ")]


@pytest.mark.slow
def test_two_workers_share_a_postgresql_and_one_of_them_is_killed(
    tmp_path: Path, postgres: str
) -> None:
    device = ("--device", "killing")
    one = worker(tmp_path / "one", postgres, *device)
    two = worker(tmp_path / "two", postgres, *device)
    before = lines(one, "begins", 4)
    one.send_signal(signal.SIGKILL)
    killed = said(before, "begins")[-1]
    assert one.stdout is not None
    before += one.stdout.read().splitlines()
    one.communicate()
    after = rest(two)
    ended = said(before, "ends") + said(after, "ends")
    if killed not in said(before, "ends"):  # it may have ended just before the signal
        assert killed in said(after, "ends")
    assert len(ended) == len(set(ended))
    has = said(after, "has")
    assert len(has) == len(set(has)) == 20
    again = rest(worker(tmp_path / "one", postgres, *device))
    assert said(again, "has") == has
    assert said(again, "begins") == []


@pytest.mark.slow
def test_workers_side_by_side_evaluate_nothing_twice(tmp_path: Path, postgres: str) -> None:
    argv = ("--device", "racing", "--trials", 40, "--delay", 0.02, "--strategy", "full")
    both = [worker(tmp_path / name, postgres, *argv) for name in ("one", "two")]
    found = [rest(each) for each in both]
    ended = [line for each in found for line in said(each, "ends")]
    assert len(ended) == len(set(ended))
    assert 40 <= len(ended) <= 41  # both may be at the last one
    assert all(len(said(each, "ends")) > 5 for each in found)


@pytest.mark.slow
def test_devices_do_not_mix_in_a_postgresql(tmp_path: Path, postgres: str) -> None:
    argv = ("--trials", 6, "--delay", 0.05)
    both = [
        worker(tmp_path / name, postgres, "--device", f"card {name}", *argv)
        for name in ("one", "two")
    ]
    for each, name in zip(both, ("one", "two"), strict=True):
        has = said(rest(each), "has")
        assert len(has) == 6
        assert all(f" card {name} " in line for line in has)


@pytest.mark.slow
def test_a_live_worker_keeps_its_claim_however_long_it_takes(
    tmp_path: Path, postgres: str
) -> None:
    slow = worker(tmp_path / "one", postgres, "--device", "slow", "--trials", 2, "--delay", 5)
    lines(slow, "begins", 1)
    began = time.monotonic()
    quick = rest(
        worker(tmp_path / "two", postgres, "--device", "slow", "--trials", 6, "--delay", 0.1)
    )
    assert time.monotonic() - began < 60
    assert said(rest(slow), "begins")[:1] != said(quick, "begins")[:1]
    assert len({*said(quick, "ends")}) == len(said(quick, "ends"))
