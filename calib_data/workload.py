"""Workloads: what a model is tuned and judged on, from a task, a prompt file or the harness.

    edit                     a built-in task
    mine=prompts.jsonl       a prompt file (calib_data/prompt_file.py)
    harness:gsm8k            a task of lm-evaluation-harness (calib_data/harness.py)
    mine=harness:gsm8k       the same under another name

A file's answers are judged by the grader that is asked for (calib_data/grader.py); where none is,
an answer on every line means `exact`, and without answers nobody knows what is right.

Knows nothing about models, tokenizers or engines.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from calib_data.errors import WorkloadError as WorkloadError  # also found here
from calib_data.errors import shorten
from calib_data.grader import KINDS, Grader, grader_from_spec, is_grader_spec
from calib_data.harness import PAPER, PREFIX, harness_name, harness_task
from calib_data.prompt_file import Line, read_lines
from calib_data.prompts import Prompt, Split, draw_prompts
from calib_data.tasks import GEN_LENGTH, STEPS, TASKS, Task

# The schedule for requests without a task has this name, so no workload may.
RESERVED = "default"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One task as the commands see it.

    Attributes:
        name: What `--task` calls it.
        says: What the task asks for, in a line.
        steps: Denoising passes for a whole answer.
        gen_length: Tokens of an answer.
        block_length: Tokens that are denoised together.
        source: Whether the prompts are drawn by a built-in task, read from a file, or the
            harness's.
        grade: (prompt, text) to whether the text answers it; None where nobody knows.  Raises
            WorkloadError where the user's or the harness's code fails.
        grader: How answers are judged, as text: equal texts judge alike.  None without a grader,
            "built in" for a built-in task.
        scored: Which of the answer's tokens the grader reads.
        draw: (split, count, seed) to prompts; `prompts` is how to ask.
    """

    name: str
    says: str
    steps: int = STEPS
    gen_length: int = GEN_LENGTH
    block_length: int = GEN_LENGTH
    source: Literal["builtin", "file", "harness"]
    grade: Callable[[str, str], bool] | None
    grader: str | None
    scored: Literal["all", "start", "end"] = "all"
    draw: Callable[[Split, int, int], list[Prompt]] = field(repr=False, compare=False)

    def prompts(self, split: Split, count: int, seed: int = 0) -> list[Prompt]:
        """Return `count` different prompts of a split, or all there are of a file with fewer.

        A larger count returns the same prompts first, then more.

        Raises:
            ValueError: The split is unknown, or count is negative.
        """
        if split not in get_args(Split):
            raise ValueError(f"split is one of {get_args(Split)}, got {split!r}")
        if count < 0:
            raise ValueError(f"count >= 0 must hold, got {count}")
        return self.draw(split, count, seed)


def workload_from_name(name: str) -> Workload:
    """Return the workload of a built-in task.

    Raises:
        WorkloadError: There is none of that name; lists the known ones.
    """
    if name not in TASKS:
        raise WorkloadError(
            f"unknown task {name!r}; built-in tasks are {', '.join(TASKS)}, a task of your own is "
            f"given as NAME=FILE.jsonl, one of lm-evaluation-harness as harness:TASK"
        )
    task: Task = TASKS[name]
    return Workload(
        name=task.name,
        says=task.says,
        steps=task.steps,
        gen_length=task.gen_length,
        block_length=task.block_length,
        source="builtin",
        grade=task.grade,
        grader="built in",
        scored=task.scored,
        draw=partial(draw_prompts, task),
    )


def expand_specs(specs: Sequence[str]) -> tuple[str, ...]:
    """Return the specs with `harness:paper` replaced by those of its six benchmarks."""
    return tuple(
        each for spec in specs for each in (PAPER if spec == f"{PREFIX}paper" else (spec,))
    )


def name_of_spec(spec: str) -> str:
    """Return the name of the task that a spec gives; reads no file."""
    if spec.startswith(PREFIX):
        return harness_name(spec.removeprefix(PREFIX))
    return spec.partition("=")[0]


def graders_by_task(given: Sequence[str], specs: Sequence[str]) -> dict[str, str]:
    """Return the grader asked for, by the name of the task.

    Args:
        given: As given to `--grader`: GRADER for every file task, or NAME=GRADER for one.
        specs: As given to `--task`, expanded.

    Raises:
        WorkloadError: A grader is for a task that is no prompt file, or two are for one.
    """
    files = [name_of_spec(spec) for spec in specs if _is_file(spec)]
    found: dict[str, str] = {}
    for_all = [text for text in given if is_grader_spec(text)]
    if given and not files:
        raise WorkloadError(
            "--grader judges prompt files, and no --task is one; built-in tasks and the harness "
            "have graders of their own: give --task NAME=FILE.jsonl, or leave --grader out"
        )
    if len(for_all) > 1:
        raise WorkloadError(
            f"--grader {for_all[0]} and --grader {for_all[1]} are both for every file; write "
            f"NAME=GRADER to give a task its own"
        )
    for text in given:
        name, _, grader = text.partition("=")
        if text in for_all:
            continue
        if not is_grader_spec(grader):
            raise WorkloadError(
                f"--grader is {KINDS}, or NAME=GRADER for one task, got {shorten(text)}; mend it"
            )
        if name not in files:
            raise WorkloadError(
                f"--grader {shorten(text)} is for the task {name!r}, but prompt files are given "
                f"for {', '.join(files)}; add --task {name}=FILE.jsonl, or mend the name"
            )
        if name in found:
            raise WorkloadError(f"the task {name!r} has two graders; give it one")
        found[name] = grader
    return {**dict.fromkeys(files, for_all[0]), **found} if for_all else found


def workload_from_spec(
    spec: str,
    *,
    steps: int | None = None,
    gen_length: int | None = None,
    block_length: int | None = None,
    grader: str | None = None,
) -> Workload:
    """Return the workload that `--task` names.

    Args:
        spec: NAME, NAME=FILE.jsonl, harness:TASK or NAME=harness:TASK.
        steps: In place of the task's own; a file's default is a built-in task's.
        gen_length: Likewise.
        block_length: Likewise; where only gen_length is given, the whole answer is one block.
        grader: How a file's answers are judged: exact, regex:PATTERN or python:module.fn, whose
            code is imported here; None for what the file says.

    Raises:
        WorkloadError: The name is unknown or reserved, or the file, the harness's task or the
            grader is at fault; says which line and how to mend it.
    """
    name, _, source = spec.partition("=")
    if grader is not None and not _is_file(spec):
        raise WorkloadError(
            f"the task {name!r} has a grader of its own, so {grader!r} is not for it; give "
            f"graders to prompt files"
        )
    if spec.startswith(PREFIX):
        name, source = name_of_spec(spec), spec
    if source.startswith(PREFIX):
        workload = _workload_from_harness(name, source.removeprefix(PREFIX))
    elif _is_file(spec):
        workload = _workload_from_file(name, source, grader)
    else:
        workload = workload_from_name(name)
    return replace(
        workload,
        steps=workload.steps if steps is None else steps,
        gen_length=workload.gen_length if gen_length is None else gen_length,
        block_length=block_length or gen_length or workload.block_length,
    )


def _is_file(spec: str) -> bool:
    name, is_own, source = spec.partition("=")
    return bool(is_own) and not name.startswith(PREFIX) and not source.startswith(PREFIX)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name == RESERVED:
        raise WorkloadError(
            f"a task's name is letters, digits, '_' and '-', and not {RESERVED!r}, got {name!r}; "
            f"choose another name before the '='"
        )


def _workload_from_harness(name: str, source: str) -> Workload:
    _check_name(name)
    task = harness_task(source)
    return Workload(
        name=name,
        says=task.says,
        steps=task.steps,
        gen_length=task.gen_length,
        block_length=task.block_length,
        source="harness",
        grade=task.grade,
        grader=task.grader,
        draw=task.draw,
    )


def _workload_from_file(name: str, file: str, asked: str | None) -> Workload:
    _check_name(name)
    lines = read_lines(Path(file))
    unanswered = next((line for line in lines if line.prompt.answer is None), None)
    if asked is None and unanswered is None:
        asked = "exact"
    grader = None if asked is None else grader_from_spec(asked)
    if grader is not None and grader.needs_answers and unanswered is not None:
        raise WorkloadError(
            f"{file}, line {unanswered.number}: no answer, but the grader {asked} compares with "
            f'it; add "answer" to every line, or use python:module.fn'
        )
    known: dict[str, list[Prompt]] = {}
    for line in lines:
        known.setdefault(line.prompt.prompt, []).append(line.prompt)
    return Workload(
        name=name,
        says=f"{len(lines)} prompts of {Path(file).name}",
        source="file",
        grade=None if grader is None else partial(_grade, grader, known),
        grader=None if grader is None else grader.text,
        draw=partial(_draw_lines, lines),
    )


def _grade(grader: Grader, known: Mapping[str, Sequence[Prompt]], prompt: str, text: str) -> bool:
    """Return whether text is right for the prompt, or for one of several lines that hold it."""
    if prompt not in known:
        raise ValueError(f"the file has no answer for the prompt {prompt!r}")
    for line in known[prompt]:
        try:
            if grader.judge(line, text):
                return True
        except WorkloadError as error:
            raise WorkloadError(f"prompt {line.id!r}: {error}") from error.__cause__
    return False


def _draw_lines(lines: tuple[Line, ...], split: Split, count: int, seed: int) -> list[Prompt]:
    """Return up to `count` prompts of a split in the order of a digest, new for each seed."""

    def order(prompt: Prompt) -> bytes:
        return hashlib.sha256(f"{seed}/{prompt.id}".encode()).digest()

    of_split = [line.prompt for line in lines if line.split == split]
    return sorted(of_split, key=order)[:count]
