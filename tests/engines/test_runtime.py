"""Laws of the runtime: the sampler's answers as text, in order, from only the engines in use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.bundle import read_bundle
from engines.errors import BackendError, BundleError, InputError
from engines.manifest import TOKENIZER
from engines.ort import OrtBackend
from engines.precision import EXECUTED
from engines.runtime import Runtime, load_engine, probe
from engines.sampler import Request, generate
from engines.text import tokenizer_from_file
from tests.engines.tiny_bundle import (
    CPU,
    ENGINE,
    LARGEST_BATCH,
    LONGEST_PROMPT,
    PROMPTS,
    SAMPLER,
    SCHEDULES,
    drop,
    edited,
    external_graph,
    put,
    relist,
)

MANY = [prompt * n for n in (1, 2) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def runtime(bundle_folder: Path) -> Runtime:
    return Runtime.load(bundle_folder)


def test_an_answer_is_the_samplers(runtime: Runtime) -> None:
    bundle = runtime.bundle
    tokenizer = tokenizer_from_file(bundle.path(TOKENIZER), bundle.manifest.model)
    engines = {
        name: load_engine(bundle, engine)
        for name, engine in bundle.manifest.serving("cpu").items()
    }
    for task in SCHEDULES:
        for prompt in PROMPTS:
            request = Request(
                prompt=tokenizer.encode(prompt),
                sampler=SAMPLER,
                schedule=bundle.manifest.tasks[task].targets["cpu"].schedule,
                task=task,
            )
            (wanted,) = generate([request], engines, bundle.manifest.model)
            (answer,) = runtime.generate(prompt, task=task)
            assert answer.ids == wanted.ids
            assert (answer.passes, answer.tokens, answer.bits) == (6, wanted.tokens, wanted.bits)
            assert answer.text == tokenizer.decode(wanted.ids)
            assert answer.task == task
            assert len(answer.engine_ms) == 3


def test_golden_answers_come_again(runtime: Runtime) -> None:
    for line in runtime.bundle.golden:
        (answer,) = runtime.generate(line.prompt, task=line.task, batch=1)
        assert answer.ids == line.ids


@pytest.mark.parametrize("batch", [1, 3, None])
def test_answers_stand_in_the_order_of_the_prompts(runtime: Runtime, batch: int | None) -> None:
    alone = [runtime.generate(prompt)[0].ids for prompt in MANY]
    done: list[int] = []
    together = runtime.generate(MANY, batch=batch, on_answers=done.append)
    assert [answer.ids for answer in together] == alone
    assert sum(done) == len(MANY)
    assert max(done) == min(batch or LARGEST_BATCH, len(MANY))


def test_a_prompt_without_a_task_follows_default(runtime: Runtime) -> None:
    (answer,) = runtime.generate("abc")
    assert answer.task == "default"
    bits = [EXECUTED[name].bits for name in SCHEDULES["default"]]
    assert answer.bits == pytest.approx(np.mean(bits))


def test_tasks_may_differ_by_prompt_and_split_runs_each_on_its_own(runtime: Runtime) -> None:
    tasks = ["edit", None, "default", "edit"]
    answers = runtime.generate(list(PROMPTS[:4]), task=tasks, policy="split")
    assert [answer.task for answer in answers] == ["edit", "default", "default", "edit"]
    for answer in answers:
        bits = [EXECUTED[name].bits for name in SCHEDULES[answer.task]]
        assert answer.bits == pytest.approx(np.mean(bits))
    safest = runtime.generate(list(PROMPTS[:4]), task=tasks, policy="safest")
    assert all(a.bits >= b.bits for a, b in zip(safest, answers, strict=True))


def test_no_prompts_are_no_answers(runtime: Runtime) -> None:
    assert runtime.generate([]) == []


def test_what_is_at_fault_is_refused_before_anything_runs(runtime: Runtime) -> None:
    with pytest.raises(InputError, match="unknown task 'sort'; this bundle has default, edit"):
        runtime.generate("abc", task="sort")
    with pytest.raises(InputError, match="prompt 2: a prompt must not be empty"):
        runtime.generate(["abc", ""])
    with pytest.raises(InputError, match=r"prompt 1: .* holds the mask token"):
        runtime.generate("ab<mask>")
    with pytest.raises(InputError, match="prompt 1 has 21 tokens, the bundle is made for 20 at"):
        runtime.generate("a" * (LONGEST_PROMPT + 1))
    with pytest.raises(InputError, match="the policy must be safest or split, got 'fast'"):
        runtime.generate("abc", policy="fast")
    for batch in (0, -1, LARGEST_BATCH + 1):
        with pytest.raises(InputError, match="the batch must be from 1 to 4"):
            runtime.generate("abc", batch=batch)
    with pytest.raises(ValueError, match="2 prompts need as many tasks, got 1"):
        runtime.generate(["abc", "b"], task=["edit"])
    assert runtime.generate("a" * LONGEST_PROMPT)[0].passes == 6


def test_it_is_ready_once_every_engine_has_run(bundle_folder: Path) -> None:
    assert Runtime.load(bundle_folder).ready
    cold = Runtime.load(bundle_folder, warmup=False)
    assert not cold.ready
    cold.generate("abc")
    assert cold.ready
    assert cold.tasks == ("default", "edit")


def test_only_engines_that_a_schedule_uses_are_loaded(bundle_copy: Path) -> None:
    assert set(Runtime.load(bundle_copy).engines) == {"fp32", "int8"}
    edited(bundle_copy, put(["int8"] * 3, *CPU, "schedule"))
    edited(bundle_copy, put(["int8"] * 3, "tasks", "default", "targets", "cpu", "schedule"))
    assert set(Runtime.load(bundle_copy).engines) == {"int8"}


def test_nothing_is_written_next_to_the_bundle(bundle_copy: Path) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in bundle_copy.parent.rglob("*"))
    Runtime.load(bundle_copy).generate(MANY)
    after = sorted((path, path.stat().st_mtime_ns) for path in bundle_copy.parent.rglob("*"))
    assert after == before


def test_a_changed_byte_is_found_before_anything_is_loaded(bundle_copy: Path) -> None:
    (bundle_copy / "int8.serve.onnx").write_bytes(b"not onnx")
    with pytest.raises(BundleError, match="is damaged"):
        Runtime.load(bundle_copy)


def test_a_digest_that_is_expected_must_be_there(bundle_folder: Path) -> None:
    digest = read_bundle(bundle_folder).digest
    assert Runtime.load(bundle_folder, expect=digest).digest == digest
    for other in (digest[:12], "0" * 64, ""):
        with pytest.raises(BundleError, match=f"has the digest {digest}, expected is {other}"):
            Runtime.load(bundle_folder, expect=other)


def test_an_unknown_target_lists_the_known(bundle_folder: Path) -> None:
    with pytest.raises(BundleError, match="has no target 'trt'; it has cpu"):
        Runtime.load(bundle_folder, target="trt")


def test_a_target_of_a_later_version_is_refused_by_name(bundle_copy: Path) -> None:
    def rename(manifest: dict[str, Any]) -> None:
        manifest["targets"] = ["npu"]
        for engine in manifest["engines"].values():
            engine["target"] = "npu"
        for task in manifest["tasks"].values():
            task["targets"] = {"npu": task["targets"]["cpu"]}

    edited(bundle_copy, rename)
    with pytest.raises(BundleError, match="is for target 'npu', which this version cannot run"):
        Runtime.load(bundle_copy, target="npu")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"threads": -1}, "threads: must be an integer from 0"),
        ({"graph_optimization": "most"}, "must be one of all, extended, basic"),
        ({"spinning": "yes"}, "spinning: must be true or false"),
        ({"magic": 1}, "magic: this version knows only"),
    ],
)
def test_options_that_are_unknown_or_wrong_are_refused(
    bundle_copy: Path, options: dict[str, object], says: str
) -> None:
    edited(bundle_copy, put(options, *ENGINE, "options"))
    with pytest.raises(BundleError, match=says):
        Runtime.load(bundle_copy)


def test_threads_given_go_before_those_recorded(bundle_folder: Path) -> None:
    bundle = read_bundle(bundle_folder)
    engine = bundle.manifest.serving("cpu")["fp32"]
    plain = replace(engine, options={})
    for recorded, given, wanted in ((engine, 0, 1), (engine, 2, 2), (plain, 0, 0)):
        loaded = load_engine(bundle, recorded, given)
        assert isinstance(loaded, OrtBackend)
        assert loaded.options.threads == wanted


def test_an_engine_that_gives_no_finite_number_is_found_by_the_warm_up(bundle_copy: Path) -> None:
    external_graph(bundle_copy / "fp32.serve.onnx", "serve", "weights/fp32.bin", poison=True)
    relist(bundle_copy, "fp32.serve.onnx")
    relist(bundle_copy, "weights/fp32.bin")
    with pytest.raises(BackendError, match="engine 'fp32' gives numbers that are not finite"):
        Runtime.load(bundle_copy)


def test_scales_that_the_graph_does_not_take_are_an_error(bundle_copy: Path) -> None:
    edited(bundle_copy, put([[1.0]] * 3, "graphs", "int8.serve", "scales"))
    with pytest.raises(BackendError, match="scales"):
        Runtime.load(bundle_copy)
    edited(bundle_copy, drop("graphs", "int8.serve", "scales"))
    with pytest.raises(BackendError, match="scales"):
        Runtime.load(bundle_copy)


def test_a_trace_engine_is_probed_by_its_own_tail(bundle_folder: Path) -> None:
    bundle = read_bundle(bundle_folder)
    engine = bundle.manifest.engines["fp32.trace.cpu"]
    probe(bundle, load_engine(bundle, engine), "trace")
