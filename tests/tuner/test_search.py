"""The search: nothing twice, resumable, and the same walk with and without a break."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engines.errors import InputError
from tests.tuner.hypervolume import Progress, volume_of
from tests.tuner.spaces import SMALL, Landscape, large
from tuner.search import importance, search
from tuner.space import Candidate, Knob, default_candidate, first_candidates, size
from tuner.strategies import STRATEGIES, drawn
from tuner.study import open_study, redacted
from tuner.trials import TrialLog, TrialResult


class Evaluations(Landscape):
    """Counts what is evaluated, and stops the process's way after some of it."""

    stop_after: int | None = None

    def __call__(
        self, candidate: Candidate, number: int = 0, before: Sequence[TrialResult] = ()
    ) -> TrialResult:
        if len(self.seen) == self.stop_after:
            raise KeyboardInterrupt
        assert number == len(before)
        return super().__call__(candidate, number, before)


def walk(
    folder: Path,
    trials: int,
    evaluate: Landscape | None = None,
    strategy: str = "tpe",
    space: tuple[Knob, ...] = SMALL,
    seed: int = 5,
) -> list[Candidate]:
    study = open_study(folder, None)
    log = TrialLog(folder / "trials.jsonl")
    evaluate = evaluate or Evaluations(space, 0)
    found = search(space, evaluate, log, study, trials, seed, strategy)
    assert log.read() == found
    return [result.candidate for result in found]


def test_ours_begins_with_the_first_candidates_and_nothing_is_evaluated_twice(
    tmp_path: Path,
) -> None:
    evaluate = Evaluations(SMALL, 0)
    walked = walk(tmp_path, 30, evaluate)
    first = first_candidates(SMALL)
    assert walked[: len(first)] == first
    assert walked[0] == default_candidate(SMALL)
    assert len(set(walked)) == len(walked) == 30
    assert evaluate.seen == walked


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_broken_walk_goes_on_as_if_unbroken(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "broken").mkdir()
    whole = walk(tmp_path / "whole", 14, None, strategy)
    for stop in (2, 1, 3):
        broken = Evaluations(SMALL, 0)
        broken.stop_after = stop
        with pytest.raises(KeyboardInterrupt):
            walk(tmp_path / "broken", 99, broken, strategy)
    rest = Evaluations(SMALL, 0)
    assert walk(tmp_path / "broken", 14, rest, strategy) == whole
    assert rest.seen == whole[6:]


def test_another_seed_walks_another_way(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    count = len(first_candidates(large())) + 12
    one = walk(tmp_path / "one", count, space=large(), seed=1)
    assert one != walk(tmp_path / "other", count, space=large(), seed=2)


def test_a_finished_search_evaluates_nothing(tmp_path: Path) -> None:
    walk(tmp_path, 4)
    again = Evaluations(SMALL, 0)
    walk(tmp_path, 4, again)
    assert again.seen == []


@pytest.mark.parametrize("strategy", ["tpe", "random", "full"])
def test_the_search_stops_when_the_space_is_spent(tmp_path: Path, strategy: str) -> None:
    walked = walk(tmp_path, 1000, None, strategy)
    assert len(walked) == len(set(walked)) == size(SMALL) == 72


def test_no_trial_starts_after_the_deadline_but_the_first(tmp_path: Path) -> None:
    log = TrialLog(tmp_path / "trials.jsonl")
    study = open_study(tmp_path, None)
    land = Landscape(SMALL, 0)
    found = search(SMALL, land, log, study, 9, seed=0, deadline=1.0, clock=lambda: 2.0)
    assert len(found) == 1


def test_the_study_is_made_anew_from_the_log(tmp_path: Path) -> None:
    walked = walk(tmp_path, 7)
    (tmp_path / "study.journal").write_bytes(b"half written")
    study = open_study(tmp_path, None)
    log = TrialLog(tmp_path / "trials.jsonl")
    found = search(SMALL, Landscape(SMALL, 0), log, study, 8, seed=5)
    assert [each.candidate for each in found][:7] == walked
    assert {t.user_attrs.get("number") for t in study.own.trials if t.values} == set(range(8))


def test_a_torn_last_line_is_dropped_and_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    walked = walk(tmp_path, 5)
    log = tmp_path / "trials.jsonl"
    log.write_bytes(log.read_bytes()[:-9])
    again = Evaluations(SMALL, 0)
    assert walk(tmp_path, 5, again) == walked
    assert again.seen == walked[4:]
    assert "torn last line" in capsys.readouterr().err


def test_failed_and_infeasible_trials_are_told_and_the_search_goes_on(tmp_path: Path) -> None:
    land = Landscape(SMALL, 0)

    def failing(candidate: Candidate, number: int, before: Sequence[TrialResult]) -> TrialResult:
        if candidate.clip == 0.9:
            return TrialResult(
                number=number, candidate=candidate, cost=0.0, loss=100.0, failed="crashed"
            )
        return land(candidate, number)

    study = open_study(tmp_path, None)
    found = search(SMALL, failing, TrialLog(tmp_path / "log"), study, 60, seed=0)
    assert len(found) == 60
    told = [t for t in study.own.trials if t.values]
    assert [t.values[0] == 1e12 for t in told] == [each.failed is not None for each in found]
    assert all((t.constraints["failed"] > 0) == (t.values[0] == 1e12) for t in told)


def test_an_unknown_strategy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="strategy"):
        walk(tmp_path, 2, None, "best")


def test_trials_of_a_machine_with_more_cores_count_but_are_not_told_to_the_study(
    tmp_path: Path,
) -> None:
    log, land = TrialLog(tmp_path / "trials.jsonl"), Landscape(SMALL, 0)
    default = default_candidate(SMALL)
    log.append(land.result(default, 0))
    log.append(land.result(default.changed(threads=16), 1))
    study = open_study(tmp_path, None)
    found = search(SMALL, land, log, study, 4, seed=5)
    assert [result.number for result in found] == [0, 1, 2, 3]
    assert {t.user_attrs.get("number") for t in study.own.trials if t.values} == {0, 2, 3}


def test_trials_of_another_device_are_kept_and_neither_compete_nor_guide(tmp_path: Path) -> None:
    log, land = TrialLog(tmp_path / "trials.jsonl"), Landscape(SMALL, 0)
    default = default_candidate(SMALL)
    for number in range(3):
        foreign = replace(land.result(default, number), device="elsewhere", cost=0.1)
        log.append(foreign)
    study = open_study(tmp_path, None, device="here")
    found = search(
        SMALL, lambda c, n, b: replace(land.result(c, n), device="here"), log, study, 3, seed=5
    )
    assert [result.number for result in found] == [3, 4, 5]
    assert found[0].candidate == default
    assert {result.device for result in found} == {"here"}
    assert len(log.read()) == 6


@pytest.mark.parametrize(
    "url", ["nonsense", "sqlite:////nowhere/at/all.db", "redis://here", "unheard://of"]
)
def test_a_storage_that_cannot_be_used_is_told_with_the_mend(tmp_path: Path, url: str) -> None:
    with pytest.raises(InputError, match="give the URL of a database") as caught:
        open_study(tmp_path, url)
    assert "\n" not in str(caught.value)


def test_a_password_is_never_shown(tmp_path: Path) -> None:
    url = "postgresql://me:geheim@127.0.0.1:1/none"
    assert redacted(url) == "postgresql://me:***@127.0.0.1:1/none"
    with pytest.raises(InputError) as caught:
        open_study(tmp_path, url)
    assert "geheim" not in str(caught.value)


def test_importance_finds_the_knob_that_matters_and_says_nothing_where_nothing_can_be_told() -> (
    None
):
    land = Landscape(large(), 2)
    taken: set[Candidate] = set()
    for number in range(120):
        found = drawn(large(), taken, number)
        assert found is not None
        taken.add(found)
    results = [land.result(each, number) for number, each in enumerate(sorted(taken, key=repr))]
    found_ = importance(large(), results)
    assert max(found_["cost"], key=lambda name: found_["cost"][name]) == "schedule"
    assert max(found_["loss"], key=lambda name: found_["loss"][name]) == "schedule"
    assert sum(found_["cost"].values()) == pytest.approx(1.0)
    assert importance(large(), results[:2]) == {}
    same = [land.result(default_candidate(large()), number) for number in range(5)]
    assert importance(large(), same) == {}


@pytest.mark.slow
@pytest.mark.parametrize("landscape", range(2))
def test_ours_reaches_the_front_in_a_fraction_of_what_random_needs(
    tmp_path: Path, landscape: int
) -> None:
    space = large()
    land = Landscape(space, landscape)
    everything = land.everything()
    feasible = [each for each in everything if each.feasible]
    reference = (
        max(each.cost for each in feasible),
        12.0,
        1.1 * max(each.memory_mib for each in feasible),
    )
    mark = 0.98 * volume_of(everything, reference)

    def evaluations(strategy: str, seed: int, most: int) -> int:
        folder = tmp_path / f"{strategy}{seed}"
        folder.mkdir()
        progress, count = Progress(reference), 0

        def counted(
            candidate: Candidate, number: int, before: Sequence[TrialResult]
        ) -> TrialResult:
            nonlocal count
            result = land.result(candidate, number)
            count += 1
            if progress.add(result) >= mark:
                raise StopIteration
            return result

        study, log = open_study(folder, None), TrialLog(folder / "log")
        try:
            search(space, counted, log, study, most, seed, strategy)
        except StopIteration:
            return count
        return most

    ours = statistics.median(evaluations("tpe", seed, 400) for seed in range(3))
    random = statistics.median(evaluations("random", seed, 3000) for seed in range(3))
    assert ours <= random / 4
