"""`cadenza profile`: the table that it writes, and when it writes none."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza import main
from calib_data.workload import workload_from_name
from engines.build import Cache
from engines.document import document_from_text
from engines.errors import InputError
from engines.ort import OrtBackend
from engines.sampler import Generation, Request
from engines.schedule import SamplerConfig, Schedule, passes_by_window
from engines.trace import Trace
from exporter.folder import Export
from tests.tuner.tuning import bench_of, snapshot
from tuner import profile as rooms
from tuner import timing
from tuner.config import ProfileConfig
from tuner.contest import Contest
from tuner.gain import PROXIES, TaskSensitivity, summarize
from tuner.profile import profile
from tuner.profile_report import closing_table
from tuner.profile_setting import prepare_profile
from tuner.sensitivity import PromptTables
from tuner.sensitivity_file import Sensitivity
from tuner.tables import Question, scored_positions
from tuner.workshop import Workshop

N = 4


@dataclass(frozen=True)
class Said:
    """Exit code and streams of a command."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Profiler:
    """`cadenza profile` of one export into one file."""

    export: Path
    file: Path
    cache: Path
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *argv: object) -> Said:
        self.capsys.readouterr()
        settings = ("--cache", self.cache, "--prompts-per-task", N, *argv)
        code = main(["profile", *map(str, (self.export, "-o", self.file, *settings))])
        said = self.capsys.readouterr()
        return Said(code, said.out, said.err)

    def table(self) -> Sensitivity:
        """Return the file as an allocation reads it."""
        return Sensitivity.from_json(document_from_text(self.file.read_text(), "s.json"))


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time each engine twice only: how long passes take decides nothing here."""

    def once(own: Any) -> Any:
        def timed(*args: Any, **how: Any) -> Any:
            return own(*args, **(how | {"repeats": 2}))

        return timed

    for name in ("measure", "measure_switch"):
        monkeypatch.setattr(timing, name, once(getattr(timing, name)))


@pytest.fixture
def profiler(
    exported: Export, shared_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Profiler:
    return Profiler(exported.folder, tmp_path / "out" / "s.json", shared_cache, capsys)


def test_the_table_has_every_precision_of_the_export_and_what_an_allocation_needs(
    profiler: Profiler, exported: Export
) -> None:
    said = profiler()
    assert said.code == 0, said.err
    table = profiler.table()
    names = [each.precision.name for each in table.precisions]
    assert set(names) == set(exported.precisions)
    assert table.base == "int8"
    for each in table.precisions:
        assert (each.latency_ms is None) == each.precision.simulated
    assert table.families == {family: size / 2**20 for family, size in exported.families.items()}
    assert list(table.tasks) == list(exported.tasks)
    for name, task in table.tasks.items():
        sampler = exported.tasks[name].sampler
        assert (task.passes == passes_by_window(sampler, exported.windows)).all()
        assert task.n_prompts == N
        full, base = names.index("fp32"), names.index("int8")
        assert (task.kl[:, full] == 0).all() and (task.gain[:, base] == 0).all()
        assert (task.kl[:, base] > 0).all() and (task.influence >= 1).all()
        assert task.latency_ms is not None
        simulated = [each.precision.simulated for each in table.precisions]
        assert (np.isnan(task.latency_ms) == simulated).all()
        assert (np.array(task.extra["gain_low"]) <= task.gain).all()
        assert np.shape(task.extra["raw_gain"]) == task.gain.shape
    assert table.candidates() == ("int8", "fp32")
    with pytest.raises(InputError, match="cannot compete"):
        table.candidates(("w4a4", "int8"))


def test_people_get_a_row_a_task_and_window_and_machines_the_same_numbers(
    profiler: Profiler, exported: Export
) -> None:
    said = profiler("--precision", "int8")
    header, *rows, _, last = said.out.splitlines()
    assert header.split()[:2] == ["task", "window"]
    assert len([row for row in rows if "[" in row]) == len(exported.tasks) * exported.windows
    assert str(profiler.file) in last
    told = json.loads(profiler("--precision", "int8", "--seed", 1, "--force", "--json").out)
    assert told["made"] is True
    for name, task in profiler.table().tasks.items():
        assert told["tasks"][name]["gain"] == task.gain.tolist()
        assert told["tasks"][name]["best"] == "fp32"


def test_the_same_command_changes_nothing_and_another_wants_force(profiler: Profiler) -> None:
    argv = ("--precision", "int8", "--task", "edit")
    assert profiler(*argv).code == 0
    before = snapshot(profiler.file.parent)
    again = profiler(*argv)
    assert again.code == 0
    assert "complete already; nothing was changed" in again.err
    other = profiler(*argv, "--proxy", "flips")
    assert (other.code, other.out) == (2, "")
    assert "give --force to replace it" in other.err
    assert snapshot(profiler.file.parent) == before
    assert profiler(*argv, "--proxy", "flips", "--force").code == 0
    assert profiler.table().tasks["edit"].extra["proxy"] == "flips"
    assert [path.name for path in profiler.file.parent.iterdir()] == ["s.json"]


def test_what_is_no_table_is_replaced_only_by_force_and_a_folder_never(
    profiler: Profiler,
) -> None:
    profiler.file.parent.mkdir()
    profiler.file.write_text("precious")
    assert profiler("--precision", "int8", "--task", "edit").code == 2
    assert profiler.file.read_text() == "precious"
    profiler.file.unlink()
    profiler.file.mkdir()
    said = profiler("--precision", "int8", "--task", "edit", "--force")
    assert said.code == 2
    assert "is not a file" in said.err


# Moves ask every masked position, and rollouts denoise other answers.
@pytest.mark.parametrize("proxy", [each for each in PROXIES if each not in ("moves", "rollout")])
def test_another_proxy_costs_no_pass(
    profiler: Profiler, monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    argv = ("--precision", "int8", "--task", "edit", "--force")
    assert profiler(*argv).code == 0
    for ran in ("serve", "logits"):
        monkeypatch.setattr(OrtBackend, ran, None)
    assert profiler(*argv, "--proxy", proxy, "--seed", 0).code == 0


def test_rollouts_are_answered_once(profiler: Profiler, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ("--precision", "int8", "--task", "edit", "--force")
    first = profiler(*argv, "--proxy", "rollout")
    assert first.code == 0, first.err
    assert "with one window changed" in first.err
    gain = profiler.table().tasks["edit"].gain
    for ran in ("serve", "logits"):
        monkeypatch.setattr(OrtBackend, ran, None)
    assert profiler(*argv, "--proxy", "kl").code == 0
    assert (profiler.table().tasks["edit"].gain != gain).any()
    assert profiler(*argv, "--proxy", "rollout").code == 0
    assert (profiler.table().tasks["edit"].gain == gain).all()


def test_an_interrupted_profile_goes_on_with_the_task_that_was_not_finished(
    profiler: Profiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = replace(profiler, cache=tmp_path / "cache")
    asked: list[str] = []

    def measured(*args: Any, **how: Any) -> PromptTables:
        asked.append(args[0][0].request.task)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return own(*args, **how)

    own = rooms.prompt_tables
    monkeypatch.setattr(rooms, "prompt_tables", measured)
    assert fresh("--precision", "int8").code == 130
    assert not fresh.file.exists()
    assert fresh("--precision", "int8").code == 0
    assert asked == ["edit", "close", "close"]


def test_what_a_tune_measured_a_profile_does_not_measure_again(
    profiler: Profiler, exported: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_of(exported, tmp_path, "edit", precisions=("fp32", "int8"))
    contest = Contest(Workshop(bench, tmp_path))
    job = bench.jobs["edit"]
    found = contest.sensitivity(contest.shop.default, job)
    monkeypatch.setattr(rooms, "prompt_tables", None)
    config = ProfileConfig(
        export=exported.folder,
        output=tmp_path / "s.json",
        precisions=("int8",),
        tasks=("edit",),
        prompts_per_task=len(job.calibration),
    )
    again = profile(config, Cache(tmp_path / "cache"), lambda text: None).tasks["edit"]
    assert again.to_json() == found.to_json()


def test_a_dry_run_says_the_passes_that_a_run_takes_and_writes_nothing(
    profiler: Profiler, tmp_path: Path
) -> None:
    for influence in ("remask", "counterfactual"):
        argv = ("--precision", "int8", "--task", "edit", "--influence", influence)
        dry = replace(profiler, cache=tmp_path / "none")
        said = dry(*argv, "--dry-run", "--json")
        assert said.code == 0, said.err
        assert not dry.cache.exists() and not dry.file.exists()
        foreseen = json.loads(said.out)
        told = json.loads(profiler(*argv, "--force", "--json").out)
        assert foreseen["rows"] == {"edit": told["tasks"]["edit"]["rows"]}
        assert foreseen["seconds"] > 0
        profiler.file.unlink()
    assert "edit" in profiler("--task", "edit", "--dry-run").out


def test_windows_positions_influence_and_proxy_are_followed(
    profiler: Profiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ("--precision", "int8", "--task", "close", "--force")
    profiler(*argv)
    plain = profiler.table().tasks["close"]
    profiler(*argv, "--windows", 2)
    assert profiler.table().tasks["close"].kl.sum() == pytest.approx(plain.kl.sum())
    assert profiler.table().windows == 2
    profiler(*argv, "--influence", "counterfactual")
    assert (profiler.table().tasks["close"].influence != plain.influence).any()
    profiler(*argv, "--proxy", "moves")
    assert profiler.table().tasks["close"].extra["moves"] is not None
    file = tmp_path / "mine.jsonl"
    lines = [
        {"id": str(n), "prompt": f"close:(({'[' * n}", "split": "calibration"} for n in range(6)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked: list[object] = []
    own = rooms.prompt_tables

    def measured(*given: Any, **how: Any) -> PromptTables:
        asked.append(how["scored"])
        return own(*given, **how)

    monkeypatch.setattr(rooms, "prompt_tables", measured)
    said = profiler(*argv, "--task", f"mine={file}", "--positions", "scored")
    assert said.code == 0, said.err
    assert len(asked) == 2 and all(asked)
    scored = profiler.table().tasks
    assert (scored["close"].kl <= plain.kl + 1e-12).all()
    assert scored["mine"].n_prompts == N


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--precision", "int9"), "unknown precision 'int9'"),
        (("--precision", "w4a6"), "export again with --precision w4a6"),
        (("--precision", "int8", "--precision", "int8"), "each precision is named once"),
        (("--target", "cuda"), "export again with --target cuda"),
        (("--task", "poem"), "unknown task 'poem'"),
        (("--task", "edit", "--task", "edit"), "name it once"),
        (("--task", "mine=none.jsonl"), "give a file of JSON lines"),
        (("--prompts-per-task", "0"), "prompts_per_task >= 1"),
        (("--windows", "99"), "fewer --windows"),
        (("--windows", "0"), "windows >= 1"),
        (("--seed", "-1"), "seed >= 0"),
        (("--proxy", "luck"), "invalid choice: 'luck'"),
        (("--influence", "luck"), "invalid choice: 'luck'"),
        (("--positions", "some"), "invalid choice: 'some'"),
    ],
)
def test_an_argument_at_fault_exits_2_with_the_mend_and_writes_nothing(
    argv: tuple[str, ...], says: str, profiler: Profiler
) -> None:
    said = profiler(*argv, "--json")
    assert (said.code, said.out) == (2, "")
    assert says in said.err
    assert "Traceback" not in said.err
    assert not profiler.file.parent.exists()


def test_a_file_without_calibration_prompts_is_refused(profiler: Profiler, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"id": "a", "prompt": "edit:ab,ab", "split": "test"}) + "\n")
    said = profiler("--task", f"mine={file}")
    assert said.code == 2
    assert 'set their "split" to "calibration"' in said.err


def test_the_base_is_the_cheapest_executed_precision_or_the_cheapest_of_all(
    exported: Export, tmp_path: Path
) -> None:
    def base(*names: str) -> str:
        config = ProfileConfig(export=exported.folder, output=tmp_path / "s", precisions=names)
        return prepare_profile(config).base

    assert base() == base("int8") == base("int8", "w4a4") == "int8"
    assert base("w8a8", "w4a4") == "w4a4"
    assert base("fp32") == "fp32"


def alike_task(kl: float) -> TaskSensitivity:
    rng = np.random.default_rng(0)
    table = rng.gamma(1.0, 1.0, (30, 2, 2)) * (1.0, 0.0) * np.array([1.0, kl])[:, None]
    return summarize(
        PromptTables(
            precisions=("int8", "fp32"),
            kl=table,
            flips=table,
            moves=None,
            influence=np.ones((30, 2)),
            passes=np.ones((30, 2)),
            rows=0,
        ),
        (8, 32),
    )


def test_windows_that_cannot_be_told_apart_are_marked_and_a_mixed_schedule_is_called_noise() -> (
    None
):
    said = closing_table({"same": alike_task(1.0), "other": alike_task(30.0)})
    rows = [line.split() for line in said.splitlines()]
    assert [row[-1] for row in rows[1:3]] == ["2", "1"]
    assert [row[-1] for row in rows[3:5]] == ["-", "-"]
    assert "same: no two windows can be told apart on 30 prompts" in said
    assert "other: no two" not in said


@pytest.mark.parametrize(
    ("scored", "answer", "read"),
    [
        ("all", (3, 4, 9, 9), [0, 1, 2]),
        ("all", (3, 4, 5, 6), [0, 1, 2, 3]),
        ("start", (3, 4, 9, 9), [0]),
        ("end", (3, 4, 9, 9), [1]),
        ("end", (3, 4, 5, 6), [3]),
        ("end", (9, 9, 9, 9), [0]),
    ],
)
def test_scored_are_the_tokens_that_a_grader_reads_up_to_the_end_of_the_text(
    scored: str, answer: tuple[int, ...], read: list[int]
) -> None:
    workload = replace(workload_from_name("edit"), scored=scored)
    request = Request(prompt=(1,), sampler=SamplerConfig(), schedule=Schedule(("fp32",)))
    done = Generation(
        ids=answer, passes=2, tokens=0, bits=32.0, engine_ms=(0.0,), commit_step=(1,) * 4
    )
    mask = scored_positions(workload, eos_id=9)(Trace(request, done, ()))
    assert np.flatnonzero(mask).tolist() == read


def test_a_question_s_key_follows_everything_that_decides_the_answer(exported: Export) -> None:
    sampler = exported.tasks["edit"].sampler
    first = Question(
        engines={"int8": "a", "fp32": "b"},
        full="b",
        sampler=sampler,
        windows=3,
        prompts=[(1, 2)],
    )
    others = [
        replace(first, engines={"fp32": "b", "int8": "a"}),
        replace(first, engines={"int8": "c", "fp32": "b"}),
        replace(first, full="c"),
        replace(first, sampler=replace(sampler, steps=6)),
        replace(first, windows=2),
        replace(first, prompts=[(1, 3)]),
        replace(first, influence="counterfactual"),
        replace(first, target="int8"),
        replace(first, scored="scored start"),
        replace(first, with_moves=True),
    ]
    assert replace(first).key == first.key
    assert len({first.key, *(other.key for other in others)}) == 11
