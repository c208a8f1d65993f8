"""Workloads from lm-evaluation-harness: prompts, splits and grading of its own generative tasks.

    harness:gsm8k                           a task or a group of tasks, as the harness names it
    harness:gsm8k?fewshot=4&steps=128       with arguments, after a `?`, joined by `&`
    harness:my_task.yaml                    a task file of one's own, in the harness's format
    harness:paper                           the six benchmarks of T2Quant, with its Table 5

Arguments: fewshot (examples in a prompt; else the task's own number), filter and metric (which of
the task's decide; else its first), steps, gen_length, block_length (else the task's max_gen_toks
in one block, four tokens a step), calibration, tuning, test (most prompts of each), longest
(characters; longer prompts are left out).

Test prompts come from the task's test split, or where it has none from its validation split.
Calibration and tuning prompts come from its training split, or else from its validation split.  A
task with one split only is cut, by a digest of the question, in the proportion of the numbers
asked for.  No question is in two parts, however often the data repeat it, and none is among the
examples of its own prompt; no test question is an example.  Prompts are plain text: no chat
template is applied.

A text is cut at the task's stop strings, then judged by its filters and its process_results: right
where the metric is 1, wrong where it is 0.  Tasks that are scored by likelihoods are refused: they
never sample, so no schedule can change their result.

lm_eval is imported only inside functions (extra `harness`).  It reads data sets from its hub; task
files are code, of the harness or of whoever wrote them.  Knows nothing about models.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from calib_data.errors import WorkloadError, shorten

PREFIX = "harness:"

# The benchmarks of T2Quant with its Table 5: tokens and steps of an answer, prompts to calibrate
# and to test.  The paper tells neither the block length, nor the number of examples, nor which
# prompts of which harness: one block, and the tasks' own examples except for MMLU-Pro, whose five
# do not fit beside an answer of 512 tokens.  Tuning prompts have no number there either.
_LONG = "steps=128&gen_length=512&longest=10000"
_COUNTS = "calibration=256&tuning=256&test=512"
PAPER = (
    f"gsm8k={PREFIX}gsm8k?filter=flexible-extract&{_LONG}&{_COUNTS}",
    f"humaneval={PREFIX}humaneval?{_LONG}&calibration=50&tuning=14&test=100",
    f"mmlu_pro={PREFIX}mmlu_pro?fewshot=0&{_LONG}&{_COUNTS}",
    f"bbh={PREFIX}bbh_cot_zeroshot?filter=flexible-extract"
    f"&steps=64&gen_length=256&longest=10000&{_COUNTS}",
    f"arc_challenge={PREFIX}arc_challenge_chat?steps=32&gen_length=128&longest=10000&{_COUNTS}",
    f"drop={PREFIX}drop?metric=em&steps=16&gen_length=64&longest=10000&{_COUNTS}",
)

# Where the task does not say how long an answer is, and how many tokens a step commits.
_TOKENS, _TOKENS_A_STEP = 256, 4

_ALLOW_CODE = "HF_ALLOW_CODE_EVAL"


@dataclass(frozen=True, kw_only=True)
class HarnessSpec:
    """What stands after `harness:`; numbers are None where nothing was said."""

    task: str
    fewshot: int | None = None
    filter: str | None = None
    metric: str | None = None
    steps: int | None = None
    gen_length: int | None = None
    block_length: int | None = None
    calibration: int | None = None
    tuning: int | None = None
    test: int | None = None
    longest: int | None = None

    @property
    def is_file(self) -> bool:
        """Whether the task is a file of the user's."""
        return self.task.endswith((".yaml", ".yml"))


def spec_from_text(text: str) -> HarnessSpec:
    """Return what a text such as `gsm8k?fewshot=4` asks for.

    Raises:
        WorkloadError: An argument is unknown, given twice, or no number where one belongs.
    """
    task, _, rest = text.partition("?")
    known = [each.name for each in fields(HarnessSpec)][1:]
    if not task.strip():
        raise WorkloadError("no task after 'harness:'; for instance harness:gsm8k")
    found: dict[str, Any] = {}
    try:
        pairs = parse_qsl(rest, keep_blank_values=True, strict_parsing=True) if rest else []
    except ValueError as error:
        raise WorkloadError(
            f"arguments are KEY=VALUE joined by '&', got {shorten(rest)}; for instance "
            f"harness:{task}?fewshot=4&steps=128"
        ) from error
    for key, value in pairs:
        if key not in known or key in found or not value:
            raise WorkloadError(
                f"{key}={value} of harness:{shorten(text)} is unknown, empty or given twice; "
                f"arguments are {', '.join(known)}"
            )
        if key not in ("filter", "metric"):
            least = 0 if key == "fewshot" else 1
            if not re.fullmatch("[0-9]{1,7}", value) or int(value) < least:
                raise WorkloadError(
                    f"{key} of harness:{shorten(task)} is a whole number from {least}, got "
                    f"{shorten(value)}; mend it"
                )
        found[key] = value if key in ("filter", "metric") else int(value)
    return HarnessSpec(task=task, **found)


def harness_name(text: str) -> str:
    """Return what the task of a text such as `gsm8k?fewshot=4` is called where nobody names it."""
    task = text.partition("?")[0]
    return re.sub("[^A-Za-z0-9_-]", "_", Path(task).stem if task.endswith(".yaml") else task)[:64]


@contextmanager
def foreign(doing: str, mend: str) -> Iterator[None]:
    """Run code of the harness, of a data set or of a task file, which may raise anything.

    What it prints goes to stderr, what it only notes is not shown.

    Raises:
        WorkloadError: It raised; the cause carries the traceback.
    """
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(sys.stderr):
            yield
    except WorkloadError:
        raise
    except (Exception, SystemExit) as error:
        said = next(iter(str(error).strip().splitlines()), "no reason given")
        raise WorkloadError(f"{doing}: {type(error).__name__}: {said}; {mend}") from error
    finally:
        logger.setLevel(level)


def load_tasks(spec: HarnessSpec) -> dict[str, Any]:
    """Return the harness's tasks that a spec names, by their names, with their data.

    Whatever can be refused is refused before any data are read.

    Raises:
        WorkloadError: The extra is missing, there is no such task, it is not generative, or its
            data cannot be had.
    """
    try:
        with foreign("lm-evaluation-harness cannot be imported", "install it again"):
            manager = _manager(own_files_only=spec.is_file)
    except WorkloadError as error:
        if not isinstance(error.__cause__, ModuleNotFoundError):
            raise
        raise WorkloadError(
            f"harness:{spec.task} needs lm-evaluation-harness, and the package "
            f"{error.__cause__.name!r} is not installed; install it with: "
            f"pip install 'cadenza[harness]'"
        ) from error.__cause__
    task = str(Path(spec.task).resolve()) if spec.is_file else spec.task
    if spec.is_file and not Path(task).is_file():
        raise WorkloadError(f"there is no task file {spec.task!r}; mend the path")
    doing = f"the harness cannot load {spec.task!r}"
    with foreign(doing, "see its task file, or choose another task"):
        if not spec.is_file:
            index = manager.task_index
            if task not in index:
                from difflib import get_close_matches

                near = ", ".join(get_close_matches(task, index, n=3)) or "harness:gsm8k, say"
                raise WorkloadError(f"the harness has no task {task!r}; did you mean {near}?")
            for name, config in _configs(index, task):
                _check_config(name, config, index)
    with foreign(doing, "mend the reason; data sets come from the hub or from its cache"):
        tasks: dict[str, Any] = dict(manager.load([task])["tasks"])
    for name, loaded in tasks.items():
        _check_config(
            name,
            {
                "output_type": loaded.OUTPUT_TYPE,
                "unsafe_code": getattr(loaded, "UNSAFE_CODE", False),
                "image": getattr(loaded, "MULTIMODAL", False),
            },
            {} if spec.is_file else manager.task_index,
        )
        if spec.fewshot is not None:
            loaded.set_config("num_fewshot", spec.fewshot)
    return tasks


@cache  # reading the harness's 14,000 task files takes seconds
def _manager(own_files_only: bool) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=not own_files_only)


def _configs(index: Mapping[str, Any], name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the names and settings of the tasks that a name stands for, groups and tags opened."""
    entry = index.get(name)
    if entry is None:
        return
    config = entry.cfg or {}
    if entry.kind.name == "TAG":
        members: Sequence[Any] = sorted(entry.tags)
    elif entry.kind.name == "GROUP":
        inner = config.get("task")
        members = inner if isinstance(inner, list) else [inner]
    else:
        yield name, config
        return
    for member in members:
        own = member.get("task", member.get("group")) if isinstance(member, dict) else member
        if isinstance(own, str) and own != name:
            yield from _configs(index, own)


def _check_config(name: str, config: Mapping[str, Any], index: Mapping[str, Any]) -> None:
    """Refuse a task that does not sample, reads more than text, or runs what a model wrote."""
    kind = config.get("output_type", "generate_until")
    if kind != "generate_until" and "class" not in config:
        own = index[name].cfg or {} if name in index else {}
        data = (own.get("dataset_path"), own.get("dataset_name"))
        variants = [
            other
            for other, entry in index.items()
            if (entry.cfg or {}).get("output_type") == "generate_until"
            and data == (entry.cfg.get("dataset_path"), entry.cfg.get("dataset_name"))
        ]
        variants.sort(key=lambda other: (not other.startswith(name), len(other), other))
        near = f", for instance {', '.join(variants[:3])}" if variants else ""
        raise WorkloadError(
            f"the harness's task {name!r} is scored by likelihoods ({kind}): it never samples an "
            f"answer, so no schedule of precisions could change its result; choose a generative "
            f"variant (output_type generate_until){near}"
        )
    if config.get("image"):
        raise WorkloadError(
            f"the harness's task {name!r} asks about more than text; choose another"
        )
    if config.get("unsafe_code") and os.environ.get(_ALLOW_CODE) != "1":
        raise WorkloadError(
            f"the harness's task {name!r} runs code that the model writes, with your rights, on "
            f"this machine; in a sandbox, allow it with {_ALLOW_CODE}=1"
        )


@dataclass(frozen=True, kw_only=True)
class HarnessTask:
    """A task of the harness as a workload needs it; the fields are Workload's."""

    says: str
    grader: str
    steps: int
    gen_length: int
    block_length: int
    draw: Callable[..., Any]
    grade: Callable[[str, str], bool]


def harness_task(text: str) -> HarnessTask:
    """Return the task that stands after `harness:`; reads its data.

    Raises:
        WorkloadError: The spec is at fault, or the task cannot be used; says how to mend it.
    """
    from calib_data.questions import Questions

    spec = spec_from_text(text)
    tasks = load_tasks(spec)
    questions = Questions(spec, tasks)
    lengths = [
        (each.config.generation_kwargs or {}).get("max_gen_toks") for each in tasks.values()
    ]
    tokens = spec.gen_length or max((n for n in lengths if isinstance(n, int)), default=_TOKENS)
    return HarnessTask(
        says=f"{questions.count} questions of the harness's {Path(spec.task).name}",
        grader=f"{PREFIX}{Path(spec.task).name}{_digest(spec)}, {questions.rule()}",
        steps=spec.steps or -(-tokens // _TOKENS_A_STEP),
        gen_length=tokens,
        block_length=spec.block_length or tokens,
        draw=questions.draw,
        grade=questions.grade,
    )


def _digest(spec: HarnessSpec) -> str:
    """Return the digest of a task file of the user's, for a record; "" of the harness's own."""
    if not spec.is_file:
        return ""
    return f" sha256:{hashlib.sha256(Path(spec.task).read_bytes()).hexdigest()}"
