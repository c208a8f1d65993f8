"""Laws of what the commands show."""

from __future__ import annotations

import io
import sys

import pytest

from engines.schedule import Schedule
from engines.terminal import (
    Progress,
    can_show,
    duration,
    emit,
    emit_json,
    legend,
    plain,
    size,
    strip,
    table,
    width,
)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Clock:
    """Seconds that pass only when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def work(stream: io.StringIO, pieces: int, seconds: float) -> str:
    clock = Clock()
    with Progress(pieces, "builds", stream, clock) as progress:
        for piece in range(pieces):
            clock.now += seconds
            progress.advance(note=f"int8.{piece}\x1b[2J\n")
    return stream.getvalue()


def test_a_bar_redraws_one_line_and_tells_the_time_left() -> None:
    shown = work(Terminal(), 4, 30.0)
    assert shown.count("\n") == 1
    assert "█████░░░░░░░░░░░░░░░ 1/4, 1 min 30 s left  int8.0" in shown
    assert shown.endswith("builds: 4/4 in 2 min 00 s\n")


def test_elsewhere_progress_is_a_plain_line_now_and_then() -> None:
    lines = work(io.StringIO(), 100, 1.0).splitlines()
    assert 9 <= len(lines) <= 12
    assert lines[0].startswith("builds: 10/100, 1 min 30 s left")
    assert lines[-1] == "builds: 100/100 in 1 min 40 s"
    assert all(line.isprintable() for line in lines)


def test_short_work_is_one_line() -> None:
    assert work(io.StringIO(), 5, 0.01) == "builds: 5/5 in 0.1 s\n"


def test_progress_closed_twice_quiet_or_without_work_is_harmless() -> None:
    stream = io.StringIO()
    progress = Progress(0, "none", stream, Clock())
    progress.close()
    progress.close()
    assert stream.getvalue() == "none: 0/0 in 0.0 s\n"
    clock, quiet = Clock(), io.StringIO()
    with Progress(3, "one", quiet, clock, quiet=True) as progress:
        clock.now += 99.0
        progress.advance(5)
    assert quiet.getvalue() == ""


def test_what_was_interrupted_says_how_far_it_came() -> None:
    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt), Progress(5, "trials", stream, Clock()) as progress:
        progress.advance(2)
        raise KeyboardInterrupt
    assert stream.getvalue() == "trials: 2/5 in 0.0 s\n"


BITS = {"fp32": 32.0, "int8": 8.0, "w4a4": 4.0}


def test_a_strip_has_a_bar_a_window_and_more_bits_stand_higher() -> None:
    drawn = strip(Schedule(("w4a4", "int8", "fp32", "fp32")), BITS)
    assert len(drawn) == 4
    assert drawn == "".join(sorted(drawn))
    assert drawn[0] == "▁"
    assert drawn[-1] == "█"
    assert strip(["fp32"], {"fp32": 32}) == "█"


def test_every_strip_and_its_legend_agree_also_in_ascii() -> None:
    for ascii_ in (False, True):
        said = dict(pair.split(" ")[::-1] for pair in legend(BITS, ascii_).split("  "))
        assert set(said) == set(BITS)
        assert len(set(said.values())) == 3
        assert all(strip([name], BITS, ascii_) == said[name] for name in BITS)
    assert strip(list(BITS), BITS, ascii_=True).isascii()


def test_a_table_aligns_numbers_right_and_wide_characters_by_their_width() -> None:
    rows = [("模型", 1.0, None), ("a", 12.5, "x"), ("\x1b[2J", 100, "y\n")]
    lines = table(("name", "ms", "note"), rows).splitlines()
    assert lines[0] == "name    ms  note"
    assert lines[1] == "模型     1  -"
    assert lines[2] == "a     12.5  x"
    assert all(line.isprintable() for line in lines)
    assert table(("a", "b"), []) == "a  b"


def test_sizes_and_times_read_well() -> None:
    assert [size(n) for n in (0, 1023, 1536, 5 << 20, 3 << 40)] == [
        "0 B", "1023 B", "1.5 KiB", "5 MiB", "3.07e+03 GiB",
    ]  # fmt: skip
    assert [duration(s) for s in (0.04, 9.94, 59.4, 61, 3599, 3600, 7500)] == [
        "0.0 s", "9.9 s", "59 s", "1 min 01 s", "59 min 59 s", "1 h 00 min", "2 h 05 min",
    ]  # fmt: skip


def test_what_could_drive_a_terminal_is_made_plain() -> None:
    assert plain("a\x1b[31mb\nc\u202ed").isprintable()
    assert plain("模型 é") == "模型 é"
    assert width("e\u0301模") == 3


def test_a_stream_without_blocks_gets_escapes_not_a_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="ascii"))
    assert not can_show(sys.stdout, "█")
    emit("é")
    emit_json({"é": "模"})
    sys.stdout.flush()
    assert buffer.getvalue() == b'\\xe9\n{"\\u00e9": "\\u6a21"}\n'
