"""What a tune works on: every name and prompt is checked before anything is built."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from calib_data.workload import workload_from_name
from exporter.folder import Export
from tests.calib_data.test_harness import TASKS, needs_harness
from tests.tuner.tuning import EFFORT, Tuner, bench_of


@pytest.mark.usefixtures("small_effort")
def test_by_default_every_executed_precision_competes_on_the_export_s_tasks(
    exported: Export, tmp_path: Path
) -> None:
    bench = bench_of(exported, tmp_path)
    assert [each.name for each in bench.precisions] == ["fp32", "int8"]
    assert list(bench.jobs) == list(exported.tasks)
    assert not bench.simulated
    for name, job in bench.jobs.items():
        assert job.sampler == exported.tasks[name].sampler
        sizes = (len(job.calibration), len(job.tuning), len(job.test))
        assert sizes == (EFFORT.calibration, EFFORT.tuning, EFFORT.test)
        texts = [{i.prompt.prompt for i in of} for of in (job.calibration, job.tuning, job.test)]
        assert sum(map(len, texts)) == len(set.union(*texts))
        for item in job.tuning:
            assert bench.tokenizer.encode(item.prompt.prompt) == item.ids


@pytest.mark.usefixtures("small_effort")
def test_named_precisions_come_most_bits_first_and_full_precision_is_shown_beside(
    exported: Export, tmp_path: Path
) -> None:
    bench = bench_of(exported, tmp_path, precisions=("w4a4", "w16a16", "w8a8"))
    assert [each.name for each in bench.precisions] == ["w16a16", "w8a8", "w4a4"]
    assert bench.simulated
    assert [each.name for each in bench.shown_precisions][-1] == "fp32"


@pytest.mark.usefixtures("small_effort")
def test_the_prompts_digest_follows_prompts_tasks_and_seed(
    exported: Export, tmp_path: Path
) -> None:
    digests = [
        bench_of(exported, tmp_path, *tasks, seed=seed).prompts_digest
        for tasks, seed in (((), 0), (("edit", "close"), 0), (("close", "edit"), 0), ((), 1))
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


@pytest.mark.usefixtures("small_effort")
def test_the_prompts_digest_follows_the_grader_and_the_source_of_its_module(
    exported: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, body in (("rule_a", "True"), ("rule_b", "True"), ("rule_c", "False")):
        (tmp_path / f"{name}.py").write_text(f"def fn(prompt, text, answer): return {body}\n")
    file = tmp_path / "mine.jsonl"
    file.write_text(answered_prompts())
    graders = ["exact", "mine=exact", "regex:.*", *(f"python:rule_{n}.fn" for n in "abc")]
    benches = [bench_of(exported, tmp_path, f"mine={file}", graders=(each,)) for each in graders]
    texts = [bench.jobs["mine"].workload.grader for bench in benches]
    assert texts[3].replace("rule_a", "rule_b") == texts[4]
    assert texts[4].replace("rule_b", "rule_c") != texts[5]
    digests = [bench.prompts_digest for bench in benches]
    assert digests[0] == digests[1]
    assert len(set(digests)) == len(set(texts)) == 5
    identities = [bench.config.identity("e", bench.prompts_digest) for bench in benches]
    assert identities[0] == identities[1]
    assert len(set(identities)) == 5


@needs_harness
@pytest.mark.usefixtures("small_effort")
def test_a_task_of_the_harness_is_a_job_like_any_other(exported: Export, tmp_path: Path) -> None:
    bench = bench_of(exported, tmp_path, f"harness:{TASKS / 'letters.yaml'}?steps=12")
    job = bench.jobs["letters"]
    assert (job.sampler.steps, job.sampler.gen_length) == (12, 24)
    sizes = (len(job.calibration), len(job.tuning), len(job.test))
    assert sizes == (EFFORT.calibration, EFFORT.tuning, EFFORT.test)


def answered_prompts() -> str:
    return "".join(
        json.dumps({"id": p.id, "prompt": p.prompt, "answer": p.answer, "split": split}) + "\n"
        for split in ("calibration", "tuning", "test")
        for p in workload_from_name("edit").prompts(split, 5)  # type: ignore[arg-type]
    )


def one_of_each_split(prompt: str) -> str:
    return "".join(
        json.dumps({"id": split, "split": split, "prompt": f"{letter}{prompt}"}) + "\n"
        for letter, split in zip("abc", ("calibration", "tuning", "test"), strict=True)
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is empty; write one JSON object a line"),
        ('{"id": "1", "prompt": "edit:ab"\n', "line 1: not JSON"),
        ('{"id": "1", "prompt": "edit:ab,ab"}\n', "has no"),
        (one_of_each_split("<mask>"), "holds the mask token '<mask>', which stands for what"),
        (one_of_each_split("é"), "use only what the model knows"),
        (one_of_each_split("a" * 60), "or shorten it"),
    ],
)
def test_a_prompt_file_at_fault_exits_2_with_the_mend_and_writes_nothing(
    content: str, says: str, tuner: Tuner, tmp_path: Path
) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(content)
    said = tuner("--task", f"mine={file}")
    assert (said.code, said.out) == (2, "")
    assert says in said.err
    assert list(tmp_path.iterdir()) == [file]


def test_an_export_that_is_none_or_damaged_exits_2(
    tuner: Tuner, exported: Export, tmp_path: Path
) -> None:
    nothing = replace(tuner, export=tmp_path / "none")()
    assert nothing.code == 2
    assert "make one with: cadenza export" in nothing.err
    copy = tmp_path / "EXPORT"
    shutil.copytree(exported.folder, copy)
    with (copy / "int8.serve.onnx").open("r+b") as file:
        file.seek(100)
        file.write(b"\0\1\2")
    damaged = replace(tuner, export=copy)()
    assert damaged.code == 2
    assert "export again" in damaged.err
