"""Prompt files: one JSON object a line, read a line at a time and checked.

    {"id": "a1", "prompt": "edit:ab,aabb", "answer": "bbbbbbbb", "split": "test"}

`answer` and `split` are optional.  Without `split`, a digest of the prompt's text puts it into
calibration, tuning or test, so a prompt never changes sides when the file grows.

Standard library only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from calib_data.errors import WorkloadError, shorten
from calib_data.prompts import Prompt, Split

# Longest line of a prompt file, in bytes, and most prompts of one: what is larger is no list of
# prompts, and would fill the memory before it is found to be none.
LINE_LIMIT, PROMPT_LIMIT = 16 * 2**20, 1_000_000

_SPLITS: tuple[Split, ...] = ("calibration", "tuning", "test")
_KEYS = ("id", "prompt", "answer", "split")


@dataclass(frozen=True, slots=True)
class Line:
    """One line: its prompt, the split that it belongs to, and its number from 1."""

    prompt: Prompt
    split: Split
    number: int


def read_lines(file: Path) -> tuple[Line, ...]:
    """Return the lines of a prompt file, in their order, each with an id of its own.

    Raises:
        WorkloadError: The file or a line is at fault; says which line and how to mend it.
    """
    lines: list[Line] = []
    by_id: dict[str, int] = {}
    by_text: dict[str, Line] = {}
    for number, content in _contents(file):
        if len(lines) == PROMPT_LIMIT:
            raise WorkloadError(
                f"{file}, line {number}: more than {PROMPT_LIMIT:,} prompts; split the file"
            )
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


def _contents(file: Path) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of the lines that hold something; a byte order mark is no part of it.

    Raises:
        WorkloadError: The file cannot be read, is not UTF-8, or no list of prompts by its size.
    """
    number = 0
    try:
        with file.open("rb") as lines:
            while raw := lines.readline(LINE_LIMIT + 1):
                number += 1
                if len(raw) > LINE_LIMIT:
                    raise WorkloadError(
                        f"{file}, line {number}: longer than {LINE_LIMIT // 2**20} MiB; write one "
                        f"JSON object a line"
                    )
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield number, text
    except (OSError, ValueError) as error:
        if isinstance(error, WorkloadError):
            raise
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeError) else str(error)
        raise WorkloadError(
            f"cannot read the prompt file {str(file)!r}: {reason}; give a file of JSON lines"
        ) from error


def _parse_line(content: str, number: int, file: Path) -> Line:
    where = f"{file}, line {number}"
    try:
        value = json.loads(content, object_pairs_hook=_unique)
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
        if not isinstance(value[key], str) or not is_unicode(value[key]):
            raise WorkloadError(
                f"{where}: {key!r} must be text, got {shorten(value[key])}; quote it"
            )
    for key in ("id", "prompt"):
        if not value[key].strip():
            raise WorkloadError(f"{where}: the {key} is empty; write one or remove the line")
    split = value.get("split")
    if split is not None and split not in get_args(Split):
        raise WorkloadError(
            f"{where}: 'split' is one of {', '.join(get_args(Split))}, got "
            f"{shorten(split)}; "
            f"mend it or leave it out"
        )
    prompt = Prompt(value["id"], value["prompt"], value.get("answer"))
    return Line(prompt, split or _split_of_text(prompt.prompt), number)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found


def _split_of_text(prompt: str) -> Split:
    digest = hashlib.sha256(prompt.encode()).digest()
    return _SPLITS[digest[0] % len(_SPLITS)]


def is_unicode(text: str) -> bool:
    """Return whether text can be encoded; JSON can spell half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
