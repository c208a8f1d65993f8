"""What a tune would take is counted before anything is built; what cannot be is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cadenza import main
from engines.errors import InputError
from exporter.folder import Export
from tests.tuner.tuning import EFFORT, Tuner, bench_of, snapshot
from tuner.preflight import Plan, check, foreseen, said
from tuner.workshop import Workshop

pytestmark = pytest.mark.usefixtures("small_effort")


@pytest.fixture
def plan(exported: Export, tmp_path: Path) -> Plan:
    return foreseen(Workshop(bench_of(exported, tmp_path), tmp_path / "work"), 0.5)


def test_trials_engines_and_passes_are_counted(plan: Plan) -> None:
    assert plan.candidates == 2
    assert plan.trials == EFFORT.trials == 2
    assert plan.engines == 4
    assert plan.cached == (0, 4)
    assert plan.rows > 0
    assert plan.seconds == 0.5 * plan.rows
    assert 0 < plan.disk_mib <= plan.disk_most_mib
    assert plan.memory_mib > 0
    assert json.loads(json.dumps(plan.to_json()))["trials"] == 2


def test_the_first_trials_want_no_more_engines_than_all_of_them(
    exported: Export, tmp_path: Path
) -> None:
    plan = foreseen(Workshop(bench_of(exported, tmp_path, trials=1), tmp_path / "work"), None)
    assert plan.cached[1] <= plan.engines == 2


def test_what_the_cache_has_is_told(exported: Export, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    shop = Workshop(bench_of(exported, tmp_path), tmp_path / "work")
    shop.engines(shop.default)
    assert foreseen(shop, None).cached == (2, 4)
    assert foreseen(shop, None).seconds is None


def test_the_plan_is_said_for_people(plan: Plan) -> None:
    text = said(plan)
    for words in ("2 candidates"[2:], "4 at most", "0 of 4", "an estimate", "MiB free"):
        assert words in text
    assert "not measured" in said(replace(plan, seconds=None))


def test_a_disk_that_is_surely_too_small_is_refused_and_a_tight_one_told(plan: Plan) -> None:
    check(plan, Path("BUNDLE"))
    with pytest.raises(InputError, match="free some space, or choose another --output"):
        check(replace(plan, disk_free_mib=0.0), Path("BUNDLE"))


def test_a_dry_run_builds_and_writes_nothing(tuner: Tuner) -> None:
    before = snapshot(tuner.bundle.parent, tuner.export)
    found = tuner("--dry-run", "--json")
    assert found.code == 0, found.err
    assert found.json["trials"] == 2
    assert found.json["seconds"] > 0
    assert snapshot(tuner.bundle.parent, tuner.export) == before
    shown = tuner("--dry-run")
    assert "engines" in shown.out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--task", "poem"), "poem"),
        (("--precision", "int9"), "int9"),
        (("--max-loss", "poem=3"), "a loss is allowed to the task 'poem'"),
        (("--gate", "l7=3"), "a gate is one of"),
        (("--set", "space.colour=[1]"), "no knob 'colour'"),
        (("--set", "space.clip=[red]"), "knob 'clip' takes values like 1.0"),
        (("--set", "search.tirals=3"), "did you mean 'search.trials'"),
        (("--baseline", "nowhere.json"), "nowhere.json"),
        (("--max-loss", "much"), "--max-loss takes a number"),
    ],
)
def test_a_dry_run_checks_every_name(tuner: Tuner, argv: tuple[str, ...], says: str) -> None:
    found = tuner("--dry-run", *argv)
    assert found.code == 2
    assert says in found.err
    assert not tuner.bundle.exists()


def test_the_effective_config_is_printed_without_a_password_and_kept_in_the_folder(
    tuner: Tuner, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = tuner("--print-config", "--storage", "postgresql://me:geheim@host/db", "--seed", "3")
    assert found.code == 0
    assert "geheim" not in found.out
    assert "seed: 3  # --seed" in found.out
    file = tmp_path / "again.yaml"
    file.write_text(found.out)
    assert main(["tune", "--config", str(file), "--print-config", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["search.seed"] == {"value": 3, "source": f"{file}:{line_of(found.out, 'seed')}"}


def line_of(text: str, word: str) -> int:
    return next(n for n, line in enumerate(text.splitlines(), 1) if line.strip().startswith(word))
