"""One candidate: timed against the machine's drift, held to budgets, and out where it fails."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.document import document_from_text
from engines.measure import Latencies, Latency
from engines.schedule import Schedule, passes_by_window
from exporter.folder import Export
from tests.tuner.tuning import EFFORT, bench_of
from tuner import contest as rooms
from tuner import timing as clocks
from tuner.contest import Contest
from tuner.gain import PROXIES
from tuner.sensitivity_file import Sensitivity
from tuner.workshop import Workshop

pytestmark = pytest.mark.usefixtures("small_effort")

PASS_MS = {"fp32": 4.0, "int8": 3.0, "anchor": 4.0}


def slowed(factors: list[float]) -> Any:
    """Return a `measure` for a machine that is slower each time by the next factor."""
    left = iter(factors)

    def measure(
        lanes: Mapping[str, object], sampler: object, windows: int, *_: object, **__: object
    ) -> Latencies:
        factor = next(left)
        rows = [
            Latency(name, ms, ms, ms, (ms,) * windows, 9, (ms,))
            for name in lanes
            for ms in (PASS_MS[name] * factor,)
        ]
        return Latencies(8, 16, tuple(rows))

    return measure


@pytest.fixture
def contest(
    exported: Export, tmp_path: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Contest:
    """Return a contest on a machine whose clock is ours."""
    (tmp_path / "work").mkdir()
    monkeypatch.setattr(clocks, "measure", slowed([1.0] * 99))
    monkeypatch.setattr(clocks, "measure_switch", lambda *_, **__: 0.5)
    bench = bench_of(exported, tmp_path, "edit", max_loss=100.0)
    return Contest(Workshop(bench, tmp_path / "work"))


def asking(contest: Contest, **changes: object) -> Contest:
    """Return the contest of another command on the same machine."""
    bench = contest.bench
    config = replace(bench.config, **changes)  # type: ignore[arg-type]
    return replace(contest, shop=Workshop(replace(bench, config=config), contest.shop.work))


def test_the_machine_s_drift_is_taken_out_of_a_candidate_s_latency(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = contest.bench.jobs["edit"].sampler
    monkeypatch.setattr(clocks, "measure", slowed([1.0, 2.0]))
    default = contest.timing(contest.shop.default, sampler)
    other = contest.timing(contest.shop.default.changed(threads=1), sampler)
    assert default is not None
    assert other is not None
    assert default.by_window == other.by_window == {"fp32": [4.0] * 3, "int8": [3.0] * 3}
    assert other.anchor_ms == 4.0
    assert (default.switch_ms, other.switch_ms) == (0.5, 0.25)


def test_a_resumed_contest_finds_its_timings_and_measures_nothing(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = contest.bench.jobs["edit"].sampler
    candidate = contest.shop.default.changed(threads=1)
    before = contest.timing(candidate, sampler)
    monkeypatch.setattr(clocks, "measure", slowed([]))
    assert asking(contest).timing(candidate, sampler) == before


def test_a_share_is_of_full_precision_s_whole_sequence_and_tightened_like_milliseconds(
    contest: Contest,
) -> None:
    sampler = contest.bench.jobs["edit"].sampler
    full = 4.0 * sum(passes_by_window(sampler, 3))
    half = asking(contest, latency_share=0.5)
    assert half.budget("edit").latency_ms == pytest.approx(0.5 * full)
    assert replace(half, tighten=0.9).budget("edit").latency_ms == pytest.approx(0.45 * full)
    named = asking(contest, latency_ms=30.0, mean_bits=9.0, memory_mib=5.0)
    assert replace(named, tighten=0.5).budget("edit").latency_ms == 15.0
    assert named.budget("edit").mean_bits == 9.0
    assert named.budget("edit").memory_mib == 5.0
    assert contest.budget("edit").latency_ms is None


def test_full_precision_loses_nothing_and_gains_most(contest: Contest) -> None:
    job = contest.bench.jobs["edit"]
    engines = contest.shop.engines(contest.shop.default)
    uniform = Schedule.uniform("fp32", 3)
    assert contest.loss(engines, job, job.tuning, uniform).mean == 0.0
    found = contest.sensitivity(contest.shop.default, job)
    assert found.precisions == ("int8", "fp32")
    assert found.n_prompts == EFFORT.calibration
    assert (found.gain[:, 1] >= found.gain[:, 0]).all()
    assert np.allclose(found.kl[:, 1], 0.0)


def test_a_sensitivity_is_measured_once(contest: Contest, monkeypatch: pytest.MonkeyPatch) -> None:
    job = contest.bench.jobs["edit"]
    before = contest.sensitivity(contest.shop.default, job)
    monkeypatch.setattr(rooms, "prompt_tables", None)
    again = asking(contest).sensitivity(contest.shop.default, job)
    assert again.to_json() == before.to_json()


def test_every_proxy_that_needs_no_moves_is_made_of_one_measurement(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = contest.bench.jobs["edit"]
    contest.sensitivity(contest.shop.default, job)
    monkeypatch.setattr(rooms, "prompt_tables", None)
    for proxy in PROXIES:
        other = asking(contest, proxy=proxy)
        if proxy == "moves":
            with pytest.raises(TypeError):
                other.sensitivity(other.shop.default, job)
        else:
            assert other.sensitivity(other.shop.default, job).proxy == proxy


def test_each_step_is_told(contest: Contest) -> None:
    steps: list[str] = []
    watched = replace(contest, step=steps.append)
    watched.choices(contest.shop.default)
    assert steps == ["edit: sensitivity and latency", "edit: schedule", "default: schedule"]


def test_the_profile_is_what_the_allocation_was_based_on(contest: Contest) -> None:
    default = contest.shop.default
    written = json.dumps(contest.profile(default).to_json())
    table = Sensitivity.from_json(document_from_text(written, "sensitivity.json"))
    job = contest.bench.jobs["edit"]
    names = table.candidates()
    assert np.array_equal(table.gain("edit", names), contest.sensitivity(default, job).gain)
    timing = contest.timing(default, job.sampler)
    assert timing is not None
    costs = table.costs("edit", names)
    for column, name in enumerate(names):
        uniform = np.full(default.windows, column)
        expected = np.dot(costs.passes, timing.by_window[name])
        assert costs.latency_of(uniform) == pytest.approx(expected)
