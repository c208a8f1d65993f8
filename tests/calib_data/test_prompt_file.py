"""Laws of prompt files by their bytes: encodings, ends of lines, and what is too large."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calib_data import prompt_file
from calib_data.errors import WorkloadError
from calib_data.prompt_file import read_lines


def test_ends_of_lines_and_a_byte_order_mark_are_no_part_of_a_prompt(tmp_path: Path) -> None:
    lines = [json.dumps({"id": str(n), "prompt": f"p{n}\r\n "}) for n in range(3)]
    read = []
    for number, (mark, end) in enumerate(((b"", "\n"), (b"\xef\xbb\xbf", "\r\n"))):
        file = tmp_path / str(number)
        file.write_bytes(mark + end.join(lines).encode())
        read.append(read_lines(file))
    assert read[0] == read[1]
    assert [line.prompt.prompt for line in read[0]] == [f"p{n}\r\n " for n in range(3)]
    assert [line.number for line in read[0]] == [1, 2, 3]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"id": "1", "prompt": "p", "id": "2"}', "line 1: not JSON .a key is given twice"),
        (b'{"id": "1", "prompt": "p"}\n{"id": "2", "prompt": "\xff"}', "it is not UTF-8 text"),
        ('{"id": "1", "prompt": "p"}'.encode("utf-16"), "it is not UTF-8 text"),
        (b'{"id": "1", "prompt": "\\udc80"}', "'prompt' must be text"),
        (b'{"id": "1", "prompt": "p", "answer": "\\ud83d"}', "'answer' must be text"),
        (b'{"id": "1", "prompt": "p", "answer": [' + b"9," * 999 + b"9]}", r"got \[9, 9.*\.\.\.;"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    with pytest.raises(WorkloadError, match=says):
        read_lines(file)


def test_both_halves_of_a_character_are_one(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"id": "1", "prompt": "\\ud83d\\ude00"}')
    assert read_lines(file)[0].prompt.prompt == "😀"


def test_a_line_without_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WorkloadError, match="line 1: longer than 16 MiB"):
        read_lines(Path("/dev/zero"))
    monkeypatch.setattr(prompt_file, "PROMPT_LIMIT", 2)
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"id": "{n}", "prompt": "p{n}"}}\n' for n in range(3)))
    with pytest.raises(WorkloadError, match="line 3: more than 2 prompts"):
        read_lines(file)
