"""From end to end by confidence threshold: what is predicted, charged and shipped."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza import main
from engines.bundle import read_bundle
from engines.manifest import DEFAULT_TASK
from engines.noise import Interval
from engines.sampler import Request, generate
from engines.schedule import Schedule, window_of
from engines.trace import expected_passes
from exporter.calibrate import read_calibration
from exporter.folder import CALIBRATION, Export, read_export
from tests.tuner.tuning import Tuner, bench_of
from tuner import settle
from tuner.contest import Contest
from tuner.settle import time_schedules
from tuner.workshop import Workshop

UNIFORM = Schedule.uniform("fp32", 3)


@pytest.fixture(scope="module")
def by_threshold(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Return an export whose tasks have a threshold each; made by the command."""
    out = tmp_path_factory.mktemp("threshold") / "EXPORT"
    argv = (
        "export", checkpoint, "-o", out, "--precision", "int8", "--windows", 3,
        "--task", "edit", "--task", "close", "--prompts-per-task", 3,
        "--threshold", 0.5, "--task-set", "close.threshold=0.3",
    )  # fmt: skip
    assert main([str(each) for each in argv]) == 0
    return read_export(out)


@pytest.fixture(scope="module")
def contest(
    small_effort: None, by_threshold: Export, tmp_path_factory: pytest.TempPathFactory
) -> Contest:
    folder = tmp_path_factory.mktemp("contest")
    (folder / "work").mkdir()
    return Contest(Workshop(bench_of(by_threshold, folder), folder / "work"))


def test_the_settings_are_the_export_s_and_no_threshold_is_in_another_task(
    by_threshold: Export,
) -> None:
    samplers = {name: task.sampler for name, task in by_threshold.tasks.items()}
    assert {name: each.threshold for name, each in samplers.items()} == {"edit": 0.5, "close": 0.3}
    assert {each.rule for each in samplers.values()} == {"threshold"}
    assert {each.steps for each in samplers.values()} == {24}


def test_calibration_sees_every_point_of_progress_whatever_the_answers_jump_over(
    by_threshold: Export,
) -> None:
    calibration = read_calibration(by_threshold.folder / CALIBRATION)
    assert np.allclose(calibration.progress, np.arange(24) / 24, atol=1e-6)


def test_costs_count_the_expected_passes_of_full_precision_s_traces(contest: Contest) -> None:
    traces = contest.shop.traces
    assert len({trace.generation.passes for of in traces.values() for trace in of}) > 1
    for name in ("edit", "close"):
        assert np.array_equal(contest.passes(name, 3), expected_passes(traces[name], 3))
    table = contest.profile(contest.shop.default)
    for name in ("edit", "close"):
        assert np.array_equal(table.tasks[name].passes, contest.passes(name, 3))
        assert table.tasks[name].sampler == "threshold"
    assert table.tasks["close"].extra["threshold"] == 0.3
    # `default` is answered by the first task's sampler, and only that task has it here.
    assert np.array_equal(contest.passes(DEFAULT_TASK, 3), contest.passes("edit", 3))


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_passes_as_run_are_those_of_the_schedule_s_own_answers(
    precision: str, contest: Contest
) -> None:
    engines, job = contest.shop.engines(contest.shop.default), contest.bench.jobs["close"]
    schedule = Schedule.uniform(precision, 3)
    by_hand = np.zeros(3)
    for item in job.test:
        request = Request(prompt=item.ids, sampler=job.sampler, schedule=schedule)

        def count(state: Any) -> None:
            by_hand[window_of(state.committed, 24, 3)] += 1 / len(job.test)

        generate([request], engines.fleet.engines, engines.fleet.model, on_pass=count)
    found = contest.passes_as_run(engines, "close", "test", schedule)
    assert np.allclose(found, by_hand)


def test_each_schedule_is_charged_for_its_own_passes(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def measured(lanes: dict[str, Any], *_: object, passes: Any, **__: object) -> object:
        asked.append(passes)
        assert {sampler.rule for _, sampler in lanes.values()} == {"low_confidence"}
        return {name: Interval(float(passes[name].sum()), 0.0, 0.0) for name in lanes}

    monkeypatch.setattr(settle, "measure_schedules", measured)
    sampler = contest.bench.sampler("edit")
    counts = {"a": np.array([1.0, 2.0, 0.5]), "b": np.array([1.0, 2.0, 3.0])}
    wanted = dict.fromkeys(counts, (UNIFORM, sampler))
    timed = time_schedules(contest, contest.shop.default, wanted, counts)
    assert timed is not None
    assert {label: each.median for label, each in timed.items()} == {"a": 3.5, "b": 6.0}
    assert time_schedules(contest, contest.shop.default, wanted, counts) == timed
    assert len(asked) == 1


def test_a_share_of_the_latency_is_of_the_task_s_own_expected_passes(contest: Contest) -> None:
    bench = contest.bench
    half = replace(
        contest,
        shop=replace(
            contest.shop,
            bench=replace(bench, config=replace(bench.config, latency_share=0.5)),
        ),
    )
    timing = half.timing(half.shop.default, bench.sampler("edit"))
    assert timing is not None
    for name in ("edit", "close"):
        own = float(np.dot(contest.passes(name, 3), timing.by_window["fp32"]))
        assert half.budget(name).latency_ms == pytest.approx(0.5 * own)


def test_export_tune_verify_run_and_eval_by_threshold(
    contest: Contest, by_threshold: Export, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = contest.bench.cache.folder
    tuner = Tuner(by_threshold.folder, tmp_path / "BUNDLE", cache, capsys)
    said = tuner("--latency-ms", "100%", "--max-loss", "100", "--json")
    assert said.code == 0, said.err
    for task in ("edit", "close"):
        shipped = said.json["tasks"][task]["shipped"]
        assert shipped["latency_ms"][0] > 0
        assert 8 <= shipped["mean_bits"] <= 32

    bundle = read_bundle(tuner.bundle)
    samplers = {name: task.sampler for name, task in bundle.manifest.tasks.items()}
    assert {name: each.threshold for name, each in samplers.items()} == {
        "edit": 0.5,
        "close": 0.3,
        "default": 0.5,
    }
    assert main(["verify", str(tuner.bundle)]) == 0

    prompt = "edit:ab,abcabc"
    capsys.readouterr()
    assert main(["run", str(tuner.bundle), "--task", "edit", "--json", prompt]) == 0
    line = json.loads(capsys.readouterr().out)
    assert 1 <= line["passes"] <= 24
    assert main(["run", str(tuner.bundle), "--task", "edit", prompt]) == 0
    assert f" in {line['passes']} passes, mean bits " in capsys.readouterr().err

    assert main(["eval", str(tuner.bundle), "--limit", "20", "--json"]) == 0
    held_out = json.loads(capsys.readouterr().out)["tasks"]
    assert held_out["close"]["passes"] < 24
    for name in ("edit", "close"):
        assert 8 <= held_out[name]["mean_bits"] <= 32

    assert main(["inspect", str(tuner.bundle)]) == 0
    shown = capsys.readouterr().out
    assert "threshold: steps up to 24 (p >= 0.5), 24 tokens in blocks of 24" in shown
    assert "up to 24 (p >= 0.3)" in shown
