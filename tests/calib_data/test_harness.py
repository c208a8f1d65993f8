"""Laws of harness tasks as workloads: specs, refusals, and the paper's benchmarks.

The tasks are those of `harness_tasks/`, which need no download.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from calib_data.errors import WorkloadError
from calib_data.harness import PAPER, HarnessSpec, _configs, _manager, load_tasks, spec_from_text
from calib_data.workload import expand_specs, workload_from_spec

TASKS = Path(__file__).parent / "harness_tasks"

needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="lm-evaluation-harness is not here; install 'cadenza[harness]'",
)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the harness's data sets ask no network, whatever the product would allow."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    yield


def test_a_spec_is_a_task_with_arguments() -> None:
    assert spec_from_text("gsm8k") == HarnessSpec(task="gsm8k")
    assert spec_from_text("a/b.yaml?fewshot=0&filter=strict-match&test=9") == HarnessSpec(
        task="a/b.yaml", fewshot=0, filter="strict-match", test=9
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no task after 'harness:'"),
        ("?fewshot=4", "no task after 'harness:'"),
        ("gsm8k?", ""),
        ("gsm8k?fewshot", "KEY=VALUE joined by '&'"),
        ("gsm8k?shots=4", "arguments are fewshot, filter"),
        ("gsm8k?task=arc", "arguments are fewshot, filter"),
        ("gsm8k?fewshot=4&fewshot=5", "given twice"),
        ("gsm8k?filter=", "empty"),
        ("gsm8k?fewshot=four", "a whole number from 0"),
        ("gsm8k?steps=0", "a whole number from 1"),
        ("gsm8k?steps=-1", "a whole number from 1"),
        ("gsm8k?steps=99999999", "a whole number from 1"),
    ],
)
def test_arguments_that_say_nothing_are_refused(text: str, says: str) -> None:
    if not says:
        assert spec_from_text(text) == HarnessSpec(task="gsm8k")
        return
    with pytest.raises(WorkloadError, match=says):
        spec_from_text(text)


def test_without_the_extra_a_sentence_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("lm_eval"):
            raise ModuleNotFoundError("No module named 'lm_eval'", name="lm_eval")
        return real(name, *rest)

    _manager.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(WorkloadError, match=r"pip install 'cadenza\[harness\]'"):
        workload_from_spec("harness:gsm8k")


@needs_harness
def test_the_harness_is_imported_only_when_one_of_its_tasks_is_asked_for() -> None:
    code = (
        "import sys, calib_data.workload as w; w.workload_from_spec('edit'); "
        "w.name_of_spec('harness:gsm8k'); assert not {'lm_eval', 'datasets'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@needs_harness
@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("letters_scored.yaml", "scored by likelihoods .multiple_choice.*never samples"),
        ("letters_code.yaml", "runs code that the model writes.*HF_ALLOW_CODE_EVAL=1"),
        ("letters_lengths.yaml", "'length' says 2, not right .1. or wrong .0.*verdict"),
        ("letters.yaml?filter=loose", "no filter 'loose'; choose one of whole, half"),
        ("letters.yaml?metric=bleu", "no metric 'bleu'; choose one of exact_match"),
        ("missing.yaml", "there is no task file"),
        ("letters.py.yaml", "there is no task file"),
    ],
)
def test_a_task_that_cannot_be_judged_is_refused_with_the_mend(task: str, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        workload_from_spec(f"harness:{TASKS / task}")


@needs_harness
def test_a_task_that_runs_code_is_allowed_by_the_harness_s_own_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "1")
    assert workload_from_spec(f"harness:{TASKS / 'letters_code.yaml'}").grade is not None


@needs_harness
def test_a_task_file_that_fails_is_told_with_the_reason(tmp_path: Path) -> None:
    for content in ("- 1\n", "task: x\noutput_type: generate_until\n", "{", "\0", ""):
        file = tmp_path / "own.yaml"
        file.write_text(content)
        with pytest.raises(WorkloadError, match=r"the harness cannot load '.*own\.yaml'.*; "):
            workload_from_spec(f"harness:{file}")


@needs_harness
def test_settings_come_from_the_spec_else_from_the_task() -> None:
    own = workload_from_spec(f"harness:{TASKS / 'letters.yaml'}")
    assert (own.name, own.source) == ("letters", "harness")
    assert (own.gen_length, own.steps, own.block_length) == (24, 6, 24)
    asked = workload_from_spec(f"x=harness:{TASKS / 'letters.yaml'}?steps=8&gen_length=16")
    assert (asked.name, asked.gen_length, asked.steps, asked.block_length) == ("x", 16, 8, 16)
    assert workload_from_spec(f"harness:{TASKS / 'letters.yaml'}", steps=3).steps == 3
    for part in ("filter whole", "metric exact_match", "version 1.0", "lm-eval 0.4", "sha256:"):
        assert own.grader is not None
        assert part in own.grader


@needs_harness
def test_the_paper_s_settings_are_those_of_its_table() -> None:
    found = {spec.partition("=")[0]: spec_from_text(spec.split("harness:")[1]) for spec in PAPER}
    assert {
        name: (each.gen_length, each.steps, each.calibration, each.test)
        for name, each in found.items()
    } == {
        "gsm8k": (512, 128, 256, 512),
        "humaneval": (512, 128, 50, 100),
        "mmlu_pro": (512, 128, 256, 512),
        "bbh": (256, 64, 256, 512),
        "arc_challenge": (128, 32, 256, 512),
        "drop": (64, 16, 256, 512),
    }
    assert expand_specs(("harness:paper",)) == PAPER


@needs_harness
@pytest.mark.slow
def test_the_paper_s_benchmarks_are_generative_tasks_of_the_installed_harness() -> None:
    index = _manager(own_files_only=False).task_index
    for text in PAPER:
        spec = spec_from_text(text.split("harness:")[1])
        configs = dict(_configs(index, spec.task))
        assert len(configs) == {"mmlu_pro": 14, "bbh_cot_zeroshot": 27}.get(spec.task, 1)
        for name, config in configs.items():
            assert config["output_type"] == "generate_until"
            filters = [each["name"] for each in config.get("filter_list") or []]
            assert spec.filter is None or spec.filter in filters, name
            metrics = [each["metric"] for each in config["metric_list"]]
            assert spec.metric is None or spec.metric in metrics, name


@needs_harness
@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("arc_challenge", "choose a generative variant .*arc_challenge_chat"),
        ("gsm8kk", "did you mean .*gsm8k"),
        ("humaneval", "HF_ALLOW_CODE_EVAL=1"),
        ("mmlu", "scored by likelihoods"),
    ],
)
def test_the_harness_s_own_tasks_are_refused_before_any_data_are_read(
    task: str, says: str
) -> None:
    with pytest.raises(WorkloadError, match=says) as caught:
        load_tasks(spec_from_text(task))
    assert caught.value.__cause__ is None


@needs_harness
@pytest.mark.slow
def test_data_that_cannot_be_had_are_told_with_the_mend(tmp_path: Path) -> None:
    # In a process of its own: the library reads its folders and its mode when it is imported.
    code = "from calib_data.workload import workload_from_spec as w; w('harness:gsm8k')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert "WorkloadError: the harness cannot load 'gsm8k': " in last
    assert last.endswith("data sets come from the hub or from its cache")
