"""Workloads: what a model is tuned and judged on, from a built-in task or from a prompt file.

A prompt file has one JSON object a line:

    {"id": "a1", "prompt": "edit:ab,aabb", "answer": "bbbbbbbb", "split": "test"}

`answer` and `split` are optional.  Without `split`, a digest of the prompt's text puts it into
calibration, tuning or test, so a prompt never changes sides when the file grows.  An answer on
every line gives an exact-match grader.

Knows nothing about models, tokenizers or engines.  Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from calib_data.prompts import Prompt, Split, draw_prompts
from calib_data.tasks import GEN_LENGTH, STEPS, TASKS, Task

# The schedule for requests without a task has this name, so no workload may.
RESERVED = "default"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_FILE_SPLITS: tuple[Split, ...] = ("calibration", "tuning", "test")
_KEYS = ("id", "prompt", "answer", "split")


class WorkloadError(ValueError):
    """A task's name or a prompt file is at fault; the message ends with the mend."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One task as the commands see it.

    Attributes:
        name: What `--task` calls it.
        says: What the task asks for, in a line.
        steps: Denoising passes for a whole answer.
        gen_length: Tokens of an answer.
        block_length: Tokens that are denoised together.
        source: Whether the prompts are drawn by a built-in task or read from a file.
        grade: (prompt, text) to whether the text answers it; None where nobody knows.
        scored: Which of the answer's tokens the grader reads.
        draw: (split, count, seed) to prompts; `prompts` is how to ask.
    """

    name: str
    says: str
    steps: int = STEPS
    gen_length: int = GEN_LENGTH
    block_length: int = GEN_LENGTH
    source: Literal["builtin", "file"]
    grade: Callable[[str, str], bool] | None
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
            f"unknown task {name!r}; built-in tasks are {', '.join(TASKS)}, and a task of your "
            f"own is given as NAME=FILE.jsonl"
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
        scored=task.scored,
        draw=partial(draw_prompts, task),
    )


def workload_from_spec(
    spec: str,
    *,
    steps: int | None = None,
    gen_length: int | None = None,
    block_length: int | None = None,
) -> Workload:
    """Return the workload of `NAME`, a built-in task, or of `NAME=FILE.jsonl`.

    Args:
        spec: As given to `--task`.
        steps: In place of the task's own; a file's default is a built-in task's.
        gen_length: Likewise.
        block_length: Likewise; where only gen_length is given, the whole answer is one block.

    Raises:
        WorkloadError: The name is unknown or reserved, or the file is missing or at fault; says
            which line and how to mend it.
    """
    name, is_file, file = spec.partition("=")
    workload = _workload_from_file(name, file) if is_file else workload_from_name(name)
    return replace(
        workload,
        steps=workload.steps if steps is None else steps,
        gen_length=workload.gen_length if gen_length is None else gen_length,
        block_length=block_length or gen_length or workload.block_length,
    )


@dataclass(frozen=True, slots=True)
class _Line:
    prompt: Prompt
    split: Split
    number: int


def _workload_from_file(name: str, file: str) -> Workload:
    if not _NAME.fullmatch(name) or name == RESERVED:
        raise WorkloadError(
            f"a task's name is letters, digits, '_' and '-', and not {RESERVED!r}, got {name!r}; "
            f"choose another name before the '='"
        )
    lines = _read_lines(Path(file))
    right: dict[str, frozenset[str]] = {}
    for line in lines:
        if line.prompt.answer is not None:
            known = right.get(line.prompt.prompt, frozenset())
            right[line.prompt.prompt] = known | {line.prompt.answer.strip()}
    graded = all(line.prompt.answer is not None for line in lines)
    return Workload(
        name=name,
        says=f"{len(lines)} prompts of {Path(file).name}",
        source="file",
        grade=partial(_grade_exact, right) if graded else None,
        draw=partial(_draw_lines, lines),
    )


def _grade_exact(right: dict[str, frozenset[str]], prompt: str, text: str) -> bool:
    """Return whether text is a right answer of the prompt, apart from spaces around it."""
    if prompt not in right:
        raise ValueError(f"the file has no answer for the prompt {prompt!r}")
    return text.strip() in right[prompt]


def _draw_lines(lines: tuple[_Line, ...], split: Split, count: int, seed: int) -> list[Prompt]:
    """Return up to `count` prompts of a split in the order of a digest, new for each seed."""

    def order(prompt: Prompt) -> bytes:
        return hashlib.sha256(f"{seed}/{prompt.id}".encode()).digest()

    of_split = [line.prompt for line in lines if line.split == split]
    return sorted(of_split, key=order)[:count]


def _read_lines(file: Path) -> tuple[_Line, ...]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeError) else str(error)
        raise WorkloadError(
            f"cannot read the prompt file {str(file)!r}: {reason}; give a file of JSON lines"
        ) from error
    lines: list[_Line] = []
    by_id: dict[str, int] = {}
    by_text: dict[str, _Line] = {}
    for number, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        line = _parse_line(content, number, file)
        first = by_id.setdefault(line.prompt.id, number)
        if first != number:
            raise WorkloadError(
                f"{file}, line {number}: the id {line.prompt.id!r} is that of line {first} "
                f"already; give each prompt its own"
            )
        twin = by_text.setdefault(line.prompt.prompt, line)
        if twin.split != line.split:
            raise WorkloadError(
                f"{file}, line {number}: the prompt of line {twin.number} again, there for "
                f"{twin.split}, here for {line.split}; nothing may be tuned on what judges it, "
                f"so give both the same split"
            )
        lines.append(line)
    if not lines:
        raise WorkloadError(
            f"the prompt file {str(file)!r} is empty; write one JSON object a line, for instance "
            f'{{"id": "1", "prompt": "..."}}'
        )
    return tuple(lines)


def _parse_line(content: str, number: int, file: Path) -> _Line:
    where = f"{file}, line {number}"
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise WorkloadError(
            f"{where}: not JSON ({error}); write one JSON object a line"
        ) from error
    if not isinstance(value, dict):
        raise WorkloadError(f'{where}: not an object; write {{"id": ..., "prompt": ...}}')
    for key in ("id", "prompt"):
        if key not in value:
            raise WorkloadError(f"{where}: the key {key!r} is missing; add it")
    for key in _KEYS:
        if value.get(key) is None and key in ("answer", "split"):
            continue
        if not isinstance(value[key], str) or not _is_unicode(value[key]):
            raise WorkloadError(f"{where}: {key!r} must be text, got {value[key]!r}; quote it")
    for key in ("id", "prompt"):
        if not value[key].strip():
            raise WorkloadError(f"{where}: the {key} is empty; write one or remove the line")
    split = value.get("split")
    if split is not None and split not in get_args(Split):
        raise WorkloadError(
            f"{where}: 'split' is one of {', '.join(get_args(Split))}, got {split!r}; "
            f"mend it or leave it out"
        )
    prompt = Prompt(value["id"], value["prompt"], value.get("answer"))
    return _Line(prompt, split or _split_of_text(prompt.prompt), number)


def _split_of_text(prompt: str) -> Split:
    digest = hashlib.sha256(prompt.encode()).digest()
    return _FILE_SPLITS[digest[0] % len(_FILE_SPLITS)]


def _is_unicode(text: str) -> bool:
    """Return whether text can be encoded; JSON can spell half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
