"""`cadenza tune` from an export to a bundle: whole, resumable, and honest about what it lacks."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cadenza import main
from engines.bundle import read_bundle
from engines.child import Child, ChildError
from engines.runtime import Runtime
from tests.tuner.broken_worker import CRASHES, DIES, EATEN, EATS, HANGS, NAN, OTHER
from tests.tuner.tuning import Said, Tuner, snapshot
from tuner import pipeline, workshop
from tuner.best import best_trial
from tuner.space import Candidate, Knob
from tuner.trials import TrialLog, TrialResult

INT8 = ("--precision", "int8", "--max-loss", "100")
SIMULATED = ("--precision", "w4a4", "--precision", "w8a8")


def work_of(bundle: Path) -> Path:
    return bundle.parent / f"{bundle.name}.tune"


def interrupted_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let a Ctrl-C come in the middle of a trial."""
    ask = pipeline._ask

    def until(*of: Any) -> TrialResult:
        if of[4] == number:
            raise KeyboardInterrupt
        return ask(*of)

    monkeypatch.setattr(pipeline, "_ask", until)


def test_a_tune_ends_with_a_bundle_that_verify_accepts(
    tuned: Said, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tuned.code == 0, tuned.err
    assert main(["verify", str(tuned.bundle)]) == 0, capsys.readouterr()
    manifest = read_bundle(tuned.bundle).manifest
    assert set(manifest.tasks) == {"edit", "close", "default"}
    assert set(manifest.precisions) == {"int8"}
    assert not manifest.degraded
    assert (work_of(tuned.bundle) / "trials.jsonl").read_text().count("\n") == 2


def test_the_progress_of_a_trial_ends_at_its_total(tuned: Said) -> None:
    shown = re.findall(r"trial \d+/2: (\d+)/(\d+) in ", tuned.err)
    assert len(shown) == 2
    assert all(done == total for done, total in shown)


def test_json_is_alone_on_stdout_and_tells_what_ships(tuned: Said) -> None:
    said = tuned.json
    assert tuned.out.count("\n") == 1
    assert said["digest"] == read_bundle(tuned.bundle).digest
    assert said["schedules"] == {
        name: {"cpu": ["int8"] * 3} for name in ("edit", "close", "default")
    }
    for task in said["tasks"].values():
        assert len(task["shipped"]["latency_ms"]) == 3
        assert task["shipped"]["n"] == 5 if task is not said["tasks"]["default"] else 10
        assert {each["label"].split(",")[0] for each in task["compared"]} >= {"uniform fp32"}
    assert "judging on test prompts" in tuned.err


def test_the_same_command_again_changes_nothing_and_says_so(tuned: Said, tuner: Tuner) -> None:
    before = snapshot(tuned.bundle, work_of(tuned.bundle))
    again = tuner(*INT8, "--json", bundle=tuned.bundle)
    assert again.code == 0
    assert "complete already; nothing was changed" in again.err
    assert again.json["digest"] == tuned.json["digest"]
    assert again.json["made"] is False
    assert snapshot(tuned.bundle, work_of(tuned.bundle)) == before


def test_more_trials_go_on_where_fewer_ended(tuner: Tuner) -> None:
    first = tuner(*INT8, "--trials", "1", "--json")
    assert first.json["trials"] == 1
    more = tuner(*INT8, "--trials", "2", "--json")
    assert more.code == 0, more.err
    assert more.json["trials"] == 2
    assert more.err.count("trial 1/2:") == 0, "what was finished is not run again"
    fewer = tuner(*INT8, "--trials", "1")
    assert "complete already; nothing was changed" in fewer.err


def test_a_fresh_output_with_the_same_cache_builds_no_engine_and_gives_the_same_bundle(
    tuned: Said, tuner: Tuner
) -> None:
    fresh = tuner(*INT8, "--json")
    assert fresh.json["engines"]["built"] == 0
    assert fresh.json["engines"]["reused"] > 0
    assert fresh.json["digest"] == tuned.json["digest"]
    assert fresh.json["tasks"] == tuned.json["tasks"]


def test_interrupted_it_writes_the_best_so_far_and_the_same_command_finishes_it(
    tuned: Said, tuner: Tuner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        interrupted_at(patch, 1)
        broken = tuner(*INT8)
    assert broken.code == 130
    assert "interrupted: writing the best bundle so far" in broken.err
    assert main(["verify", str(tuner.bundle)]) == 0, capsys.readouterr()
    assert read_bundle(tuner.bundle).manifest.degraded
    finished = tuner(*INT8, "--json")
    assert finished.code == 0
    assert finished.json["trials"] == 2
    assert finished.json["digest"] == tuned.json["digest"]
    assert not read_bundle(tuner.bundle).manifest.degraded


def test_interrupted_while_judging_it_writes_the_bundle_too(
    tuned: Said, tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Child.ask

    def no_time(child: Child, request: Any, *more: Any) -> Any:
        if request["do"] == "finish" and not request["asked"]["interrupted"]:
            raise KeyboardInterrupt
        return ask(child, request, *more)

    with monkeypatch.context() as patch:
        patch.setattr(Child, "ask", no_time)
        broken = tuner(*INT8, "--json")
    assert broken.code == 130
    assert broken.json["digest"] == tuned.json["digest"]
    assert broken.json["degraded"]
    assert tuner(*INT8).code == 0


def test_interrupted_in_the_first_trial_it_leaves_no_bundle(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted_at(monkeypatch, 0)
    said = tuner(*INT8)
    assert said.code == 130
    assert "Traceback" not in said.err
    assert not tuner.bundle.exists()


def test_another_command_onto_an_output_is_refused_without_force(
    tuned: Said, tuner: Tuner, tmp_path: Path
) -> None:
    copy = tmp_path / "BUNDLE"
    shutil.copytree(tuned.bundle, copy)
    shutil.copytree(work_of(tuned.bundle), work_of(copy))
    before = snapshot(copy)
    other = (*INT8, "--seed", "3")
    refused = tuner(*other)
    assert refused.code == 2
    assert refused.err.rstrip().endswith("choose another place") or "--force" in refused.err
    assert snapshot(copy) == before
    shutil.rmtree(copy)
    without_the_bundle = tuner(*other)
    assert without_the_bundle.code == 2
    assert "holds the work of another command; give --force" in without_the_bundle.err
    forced = tuner(*other, "--force", "--json")
    assert forced.code == 0
    assert forced.json["seed"] == 3


def test_a_damaged_bundle_is_made_again_with_force_only(
    tuned: Said, tuner: Tuner, tmp_path: Path
) -> None:
    copy = tmp_path / "BUNDLE"
    shutil.copytree(tuned.bundle, copy)
    golden = copy / "golden.jsonl"
    golden.write_bytes(golden.read_bytes()[:-2] + b"?\n")
    refused = tuner(*INT8)
    assert refused.code == 2
    assert "golden.jsonl" in refused.err
    assert refused.err.rstrip().endswith("tune again, with --force")
    assert tuner(*INT8, "--force", "--json").json["digest"] == tuned.json["digest"]


@pytest.mark.parametrize(
    ("budget", "unit"),
    [
        (("--mean-bits", "7"), "mean_bits"),
        (("--latency-ms", "0.0001"), "latency_ms"),
        (("--latency-ms", "0.1%"), "latency_ms"),
        (("--memory-mib", "0.0001"), "memory_mib"),
    ],
)
def test_a_budget_below_the_cheapest_exits_3_and_names_the_smallest_that_fits(
    budget: tuple[str, str], unit: str, tuner: Tuner
) -> None:
    said = tuner(*INT8, *budget, "--json")
    assert said.code == 3
    assert "the smallest that fits is" in said.err
    nearest = said.json["infeasible"]
    assert set(nearest) == {unit}
    assert nearest[unit] > 0
    assert not tuner.bundle.exists()
    if unit != "latency_ms":
        assert tuner(*INT8, budget[0], nearest[unit] * 1.001).code == 0


def test_a_latency_may_be_a_share_of_full_precision_s(tuner: Tuner) -> None:
    said = tuner(*INT8, "--precision", "fp32", "--latency-ms", "5000%", "--json")
    assert said.code == 0, said.err
    assert said.json["goal"] == "quality"
    assert said.json["tightened"] == 1.0
    bundle = json.loads((tuner.bundle / "manifest.json").read_text())
    target = bundle["tasks"]["edit"]["targets"]["cpu"]
    assert target["budgets"]["latency_ms"] > target["predicted"]["latency_ms"] > 0


def test_a_schedule_that_takes_longer_as_a_whole_is_chosen_anew_or_told_to_be_degraded(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "SERVE", "tests.tuner.slow_worker:serve_all_late")
    said = tuner(*INT8, "--latency-ms", "5000%", "--json", "--strict")
    assert said.code == 4
    trials = said.json["trials"]
    assert said.err.count("1.500 times its budget; choosing again") == 2 * trials
    assert said.err.count("misses its latency; trying the next best") == trials
    assert "allow more --latency-ms" in said.err
    assert said.json["over_budget"] == 1.5
    assert said.json["tightened"] == pytest.approx(1.5**-2)
    assert said.json["degraded"] is True


def test_where_the_best_trial_misses_its_latency_the_next_best_ships(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "SERVE", "tests.tuner.slow_worker:serve_first_late")
    said = tuner(*INT8, "--latency-ms", "5000%", "--json", "--trials", "2")
    assert said.code == 0, said.err
    log = TrialLog(work_of(tuner.bundle) / "trials.jsonl")
    first, other = (trial.candidate.values for trial in log.read())
    best = best_trial(log.read(), "quality").candidate.values
    assert said.json["candidate"] in (first, other)
    assert said.json["candidate"] != best
    assert said.json["over_budget"] is None


def test_a_setting_that_takes_the_last_stage_down_does_not_ship(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "SERVE", "tests.tuner.slow_worker:serve_first_dead")
    said = tuner(*INT8, "--json", "--trials", "2")
    assert said.code == 0, said.err
    assert "crashed (SIGSEGV)" in said.err
    assert "trying the next best" in said.err
    best = best_trial(TrialLog(work_of(tuner.bundle) / "trials.jsonl").read(), "latency")
    assert said.json["candidate"] != best.candidate.values
    assert main(["verify", str(tuner.bundle)]) == 0


def test_simulated_precisions_are_tuned_by_bits_and_carry_no_latency(
    tuner: Tuner, capsys: pytest.CaptureFixture[str]
) -> None:
    said = tuner(*SIMULATED, "--mean-bits", "6", "--max-loss", "100")
    assert said.code == 0, said.err
    assert " bits, loss " in said.err
    rows = [line for line in said.out.splitlines() if "ships" in line]
    assert len(rows) == 3
    assert all("  -  " in row for row in rows)
    manifest = (tuner.bundle / "manifest.json").read_text()
    for task in json.loads(manifest)["tasks"].values():
        target = task["targets"]["cpu"]
        assert target["predicted"]["mean_bits"] <= 6
        assert target["predicted"]["latency_ms"] is None
        assert target["measured"]["latency_ms"] is None
        assert all(each["latency_ms"] is None for each in target["measured"]["compared"])
    assert all(each["simulated"] for each in json.loads(manifest)["precisions"])
    assert main(["verify", str(tuner.bundle)]) == 0, capsys.readouterr()


def prompt_file(file: Path, count: int = 24) -> Path:
    lines = [
        {"id": str(n), "prompt": f"edit:a{'bcd'[n % 3]},{'abcd' * (1 + n % 2)}{'efgh'[n % 4]}{n}"}
        for n in range(count)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_prompts_without_a_grader_are_judged_by_agreement(tuner: Tuner, tmp_path: Path) -> None:
    file = prompt_file(tmp_path / "mine.jsonl")
    said = tuner(*INT8, "--precision", "fp32", "--task", f"mine={file}", "--json")
    assert said.code == 0, said.err
    task = said.json["tasks"]["mine"]
    assert task["shipped"]["accuracy"] is None
    lost, _, _ = task["loss"]
    assert lost == pytest.approx(100 * (1 - task["shipped"]["agreement"][0]))


def test_a_schedule_written_by_hand_competes_and_is_judged(tuner: Tuner, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    asked = ("--precision", "int8", "--precision", "fp32", "--max-loss", "100", "--task", "edit")

    def judged(content: str) -> Said:
        file.write_text(content)
        return tuner(*asked, "--baseline", file, "--json", "--force")

    said = judged('["int8", "fp32", "fp32"]')
    assert said.code == 0, said.err
    rows = {row["label"]: row["schedule"] for row in said.json["tasks"]["edit"]["compared"]}
    shipped = said.json["tasks"]["edit"]["shipped"]["schedule"]
    assert ["int8", "fp32", "fp32"] in (rows.get("baseline mine"), shipped)
    plain = tuner(*asked)
    assert plain.code == 2  # without it, it is another command
    assert "does not compete" in judged('["int8", "fp32"]').err
    for content, says in (
        ('["w4a4"]', "'w4a4' is none of"),
        ('{"poem": ["int8"]}', "has a schedule for 'poem'"),
        ("[", "not valid JSON"),
    ):
        refused = judged(content)
        assert refused.code == 2
        assert says in refused.err


def test_a_changed_prompt_file_is_another_command(tuner: Tuner, tmp_path: Path) -> None:
    file = prompt_file(tmp_path / "mine.jsonl")
    asked = (*INT8, "--task", f"mine={file}")
    assert tuner(*asked).code == 0
    moved = file.rename(tmp_path / "moved.jsonl")
    assert "nothing was changed" in tuner(*INT8, "--task", f"mine={moved}").err
    assert tuner(*INT8, "--task", f"mine={prompt_file(file, 23)}").code == 2


def test_strict_exits_4_where_the_quality_is_not_shown(tuned: Said, tuner: Tuner) -> None:
    asked = ("--precision", "fp32", "--max-loss", "1", "--json")
    said = tuner(*asked)
    assert said.code == 0
    assert said.json["degraded"] is True
    assert said.json["quality_shown_to"] > 1
    assert "degraded: a loss of 1 points or fewer was not shown" in said.err
    strict = tuner(*asked, "--strict")
    assert strict.code == 4
    assert "allow more --max-loss" in strict.err
    assert strict.json["digest"] == said.json["digest"]


def test_a_recipe_with_other_graphs_is_built_timed_and_shipped(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = workshop.knobs
    changes = {"windows": 2, "clip": 0.9, "keep": 1, "scales": "window", "threads": 1}

    def only_other(default: Candidate, **of: Any) -> tuple[Knob, ...]:
        return tuple(
            replace(knob, choices=(changes.get(knob.name, knob.choices[0]),))
            for knob in offered(default, **of)
        )

    monkeypatch.setattr(workshop, "knobs", only_other)
    said = tuner(*INT8, "--json")
    assert said.code == 0, said.err
    assert changes.items() <= said.json["candidate"].items()
    assert said.json["schedules"]["edit"] == {"cpu": ["int8", "int8"]}
    runtime = Runtime.load(tuner.bundle)
    assert runtime.generate("edit:ab,abc", "edit")[0].passes == 12


def test_a_damaged_log_of_trials_is_told_with_its_mend(tuner: Tuner) -> None:
    work = work_of(tuner.bundle)
    assert tuner(*INT8, "--trials", "1").code == 0
    shutil.rmtree(tuner.bundle)
    for damage in (b"[1]\n", b"5\n", b'"x"\n', b"{}\n", b"\xff\n"):
        (work / "trials.jsonl").write_bytes(damage)
        said = tuner(*INT8, "--trials", "1")
        assert said.code == 2
        assert "trials.jsonl, line 1: not a trial" in said.err
        assert "remove the file" in said.err
    (work / "trials.jsonl").unlink()
    assert tuner(*INT8, "--trials", "1").code == 0


def test_a_search_that_its_time_cut_short_goes_on_with_more(tuner: Tuner) -> None:
    cut = tuner(*INT8, "--timeout", "1e-6", "--json")
    assert cut.json["trials"] == 1
    assert tuner(*INT8, "--timeout", "1e-6", "--json").json["made"] is False
    whole = tuner(*INT8, "--json")
    assert whole.json["made"] is True
    assert whole.json["trials"] == 2
    assert tuner(*INT8, "--timeout", "1e-6", "--json").json["made"] is False


def test_a_worker_that_somebody_killed_is_asked_once_more(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def killed_once(child: Child, request: Any, *more: Any) -> Any:
        asked.append(request["do"])
        if asked.count("trial") == 1 and request["do"] == "trial":
            raise ChildError("was killed by the system (SIGKILL), most likely for want of memory")
        return ask(child, request, *more)

    ask = Child.ask
    monkeypatch.setattr(Child, "ask", killed_once)
    said = tuner(*INT8, "--trials", "1", "--json")
    assert said.code == 0, said.err
    assert asked.count("trial") == 2
    assert "trying once more" in said.err
    assert said.json["trials"] == 1


@pytest.mark.parametrize(
    "choice",
    ["windows=[0]", "windows=[99]", "clip=[2.0]", "keep=[99]", "keep=[-1]", "schedule=[foo]"],
)
def test_a_choice_that_is_not_possible_is_refused_before_anything_is_built(
    choice: str, tuner: Tuner
) -> None:
    said = tuner(*INT8, "--set", f"space.{choice}", "--dry-run")
    assert said.code == 2
    assert "mend space in the config" in said.err
    for flag in ("--max-loss", "--gate"):
        assert tuner(flag, "=3").code == 2
    assert tuner(*INT8, "--set", "space.threads=[-3]", "--dry-run").code == 2


def test_no_trial_starts_after_the_timeout_and_it_ends_like_a_finished_search(
    tuner: Tuner,
) -> None:
    said = tuner(*INT8, "--timeout", "1e-6", "--json")
    assert said.code == 0
    assert said.json["trials"] == 1
    assert said.json["complete"] is True


@pytest.mark.slow
def test_engines_that_crash_hang_or_lie_cost_one_candidate_each(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "SERVE", "tests.tuner.broken_worker:serve")
    threads = [0, CRASHES, HANGS, EATS, DIES, NAN, OTHER, 1]
    said = tuner(
        *INT8,
        *("--strategy", "full", "--trials", str(len(threads))),
        *("--child-limit", "30", "--child-memory", str(EATEN // 2)),
        *("--set", f"space.threads={threads}", "--json"),
    )
    assert said.code == 0, said.err
    log = TrialLog(work_of(tuner.bundle) / "trials.jsonl")
    trials = {trial.candidate.options["threads"]: trial for trial in log.read()}
    failed = {name: trial.failed for name, trial in trials.items() if trial.failed is not None}
    assert set(trials) == set(threads)
    assert failed.keys() == {CRASHES, HANGS, EATS, DIES, NAN, OTHER}
    for name, reason in {
        CRASHES: "crashed (SIGSEGV)",
        HANGS: "hung: said nothing for 30 s",
        EATS: "ran out of memory",
        DIES: "most likely for want of memory",
        NAN: "int8 gives logits that are not finite",
        OTHER: "asked for int8, but no GEMM was built in integers",
    }.items():
        assert reason in failed[name]
    for name in (CRASHES, HANGS, EATS, DIES):
        assert trials[name].log[-1] == f"about to build int8 for {name} threads"
    assert said.json["candidate"]["threads"] in {0, 1}
