"""What a bundle holds: the engines in use and no others, and answers that can be made again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from engines.bundle import Bundle
from engines.errors import InputError
from engines.manifest import schedule_digest
from engines.runtime import Runtime
from engines.schedule import SamplerConfig, Schedule
from exporter.folder import Export
from tests.tuner.test_judge import choice_of
from tests.tuner.tuning import EFFORT, bench_of
from tuner import ship as room
from tuner.choice import Choice
from tuner.contest import Contest
from tuner.ship import ship
from tuner.workshop import Workshop

SCHEDULES = {
    "edit": Schedule(("int8", "fp32", "int8")),
    "close": Schedule.uniform("int8", 3),
    "default": Schedule.uniform("int8", 3),
}


@pytest.fixture
def contest(small_effort: None, exported: Export, tmp_path: Path) -> Contest:
    (tmp_path / "work").mkdir()
    return Contest(Workshop(bench_of(exported, tmp_path), tmp_path / "work"))


def shipped(contest: Contest, choices: dict[str, Choice], force: bool = False) -> Bundle:
    return ship(contest, contest.shop.default, choices, {}, {"seed": 7}, True, force)


def choices(schedules: dict[str, Schedule] = SCHEDULES) -> dict[str, Choice]:
    return {name: choice_of(schedule) for name, schedule in schedules.items()}


def test_a_bundle_holds_the_engines_in_use_and_no_others(contest: Contest) -> None:
    both = shipped(contest, choices()).manifest
    assert set(both.precisions) == {"fp32", "int8"}
    assert both.degraded
    uniform = {name: Schedule.uniform("int8", 3) for name in SCHEDULES}
    bundle = shipped(contest, choices(uniform), force=True)
    assert set(bundle.manifest.precisions) == {"int8"}
    assert not [path for path in bundle.manifest.files if "fp32" in path or "w4" in path]


def test_each_task_ships_its_own_schedule_and_sampler(contest: Contest) -> None:
    manifest = shipped(contest, choices()).manifest
    for name, schedule in SCHEDULES.items():
        assert manifest.tasks[name].targets["cpu"].schedule == schedule
    assert manifest.tasks["edit"].sampler == contest.bench.jobs["edit"].sampler


def test_the_runtime_gives_every_golden_answer_again(contest: Contest) -> None:
    bundle = shipped(contest, choices())
    runtime = Runtime.load(bundle.folder)
    assert Counter(golden.task for golden in bundle.golden) == {
        "edit": EFFORT.test,
        "close": EFFORT.test,
        "default": 2 * EFFORT.test,
    }
    for golden in bundle.golden:
        (answer,) = runtime.generate(golden.prompt, golden.task, batch=1)
        assert answer.ids == golden.ids
        task = bundle.manifest.tasks[golden.task]
        assert golden.schedule_digest == schedule_digest(
            SCHEDULES[golden.task], task.sampler, "cpu"
        )


def test_golden_answers_of_default_follow_its_sampler_alone(contest: Contest) -> None:
    jobs = dict(contest.bench.jobs)
    other = SamplerConfig(steps=6, gen_length=24, block_length=24)
    jobs["close"] = replace(jobs["close"], sampler=other)
    odd = replace(contest, shop=Workshop(replace(contest.bench, jobs=jobs), contest.shop.work))
    bundle = shipped(odd, choices())
    assert bundle.manifest.tasks["default"].sampler == jobs["edit"].sampler
    of_default = [golden for golden in bundle.golden if golden.task == "default"]
    assert {golden.id.split("/")[1] for golden in of_default} == {"edit"}


def test_no_more_answers_are_kept_than_are_wanted(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "GOLDEN_PROMPTS", 2)
    found = Counter(golden.task for golden in shipped(contest, choices()).golden)
    assert found == {"edit": 2, "close": 2, "default": 2}


def test_another_bundle_is_replaced_with_force_only(contest: Contest) -> None:
    before = shipped(contest, choices()).digest
    uniform = choices({name: Schedule.uniform("int8", 3) for name in SCHEDULES})
    with pytest.raises(InputError, match="force"):
        shipped(contest, uniform)
    assert shipped(contest, uniform, force=True).digest != before
