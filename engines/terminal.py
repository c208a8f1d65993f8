"""What the commands show: progress, schedules as strips, tables, and errors.

On a terminal progress is a bar that redraws itself; elsewhere it is plain lines.  Where the
stream cannot show blocks, ASCII stands in.
"""

from __future__ import annotations

import argparse
import errno
import json
import shutil
import sys
import time
import traceback
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TextIO

from engines.errors import CadenzaError
from engines.schedule import Schedule

_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", ".:-=+*#@"
_REDRAW_S, _LINE_S = 0.1, 10.0


class Progress:
    """Progress of `total` pieces of work, with the time that is left.

    Use as a context manager, or call `close`.
    """

    def __init__(
        self,
        total: int,
        what: str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        quiet: bool = False,
    ) -> None:
        self.total, self.what, self.done, self.note = total, what, 0, ""
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._began = self._drawn = clock()
        self._bar = self._stream.isatty()
        self._closed = quiet
        self._quiet = quiet

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def advance(self, n: int = 1, note: str = "") -> None:
        """Count n pieces as done; `note` says what was done last."""
        self.done += n
        self.note = note or self.note
        now = self._clock()
        if not self._quiet and now - self._drawn >= (_REDRAW_S if self._bar else _LINE_S):
            self._drawn = now
            self._draw(now)

    def close(self) -> None:
        """Show the last state and how long it took; further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        took = duration(self._clock() - self._began)
        self._write(f"{self.what}: {self.done}/{self.total} in {took}", last=True)

    def _draw(self, now: float) -> None:
        share = min(self.done / self.total, 1.0) if self.total > 0 else 1.0
        left = (now - self._began) * (1 / share - 1) if share else None
        eta = "" if left is None else f", {duration(left)} left"
        note = f"  {plain(self.note)}" if self.note else ""
        bar = ""
        if self._bar:
            full, empty = ("█", "░") if can_show(self._stream, "█░") else ("#", "-")
            bar = full * round(20 * share) + empty * (20 - round(20 * share)) + " "
        self._write(f"{self.what}: {bar}{self.done}/{self.total}{eta}{note}", last=False)

    def _write(self, text: str, last: bool) -> None:
        if self._bar:
            columns = shutil.get_terminal_size().columns
            text = f"\r\x1b[K{text[: max(columns - 1, 20)]}"
        end = "\n" if last or not self._bar else ""
        self._stream.write(f"{text}{end}")
        self._stream.flush()


def strip(
    schedule: Schedule | Sequence[str], bits: Mapping[str, float], ascii_: bool = False
) -> str:
    """Return a schedule as one bar a window, the taller the more bits.

    Args:
        schedule: The precision of each window.
        bits: Activation bits of each precision that may stand in it; one scale for all strips.
        ascii_: Draw without blocks.
    """
    names = schedule.precisions if isinstance(schedule, Schedule) else schedule
    glyphs = _glyphs(bits, ascii_)
    return "".join(glyphs[name] for name in names)


def legend(bits: Mapping[str, float], ascii_: bool = False) -> str:
    """Return what the bars of `strip` stand for, most bits first."""
    glyphs = _glyphs(bits, ascii_)
    return "  ".join(f"{glyphs[name]} {name}" for name in sorted(glyphs, key=lambda n: -bits[n]))


def _glyphs(bits: Mapping[str, float], ascii_: bool) -> dict[str, str]:
    marks = _ASCII if ascii_ else _BLOCKS
    names = sorted(bits, key=lambda name: (bits[name], name))
    last = max(len(names) - 1, 1)
    first = len(marks) - 1 if len(names) == 1 else 0
    return {
        name: marks[min(first + rank * (len(marks) - 1) // last, len(marks) - 1)]
        for rank, name in enumerate(names)
    }


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return rows as aligned columns; numbers stand to the right, None is a dash."""
    cells = [[_cell(value) for value in row] for row in (header, *rows)]
    right = [
        bool(rows) and all(v is None or isinstance(v, int | float) for v in column)
        for column in zip(*rows, strict=True)
    ] or [False] * len(header)
    widths = [max(map(width, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = [
            " " * (size - width(cell)) + cell if to_right else cell + " " * (size - width(cell))
            for cell, size, to_right in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return plain(str(value))


def width(text: str) -> int:
    """Return the columns that a text takes on a terminal."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def plain(text: str) -> str:
    """Return a text in one line without what could drive a terminal."""
    return "".join(c if c.isprintable() else "�" for c in text)


def can_show(stream: TextIO, text: str) -> bool:
    """Return whether a stream's encoding has every character of a text."""
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def duration(seconds: float) -> str:
    """Return a time for people: 0.4 s, 12 s, 3 min 05 s, 2 h 07 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def size(count: int) -> str:
    """Return bytes for people: 812 B, 3.1 KiB, 14 GiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"


def emit(text: str) -> None:
    """Print to stdout, with escapes for what its encoding lacks."""
    encoding = sys.stdout.encoding or "ascii"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


def emit_json(value: object, indent: int | None = None) -> None:
    """Print a JSON value to stdout, in a line unless indented."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    print(text if can_show(sys.stdout, text) else json.dumps(value, indent=indent))


def command_parser(name: str, says: str, epilog: str) -> argparse.ArgumentParser:
    """Return the parser of `cadenza NAME`; the epilog, its examples, is printed as it stands."""
    return argparse.ArgumentParser(
        prog=f"cadenza {name}",
        description=says,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


# Stands before what follows `--` while argparse looks for dashes; no argument can hold it.
_PLAIN = "\0"


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments; options may stand between positionals, and nothing after `--` is one.

    argparse reads the former in a form of its own, which does not know the latter.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    marked = [*argv[:end], *(f"{_PLAIN}{text}" for text in argv[end + 1 :])]
    args = parser.parse_intermixed_args(marked)
    for name, value in vars(args).items():
        if isinstance(value, str | Path) and str(value).startswith(_PLAIN):
            setattr(args, name, type(value)(str(value).removeprefix(_PLAIN)))
    return args


def run_command(
    parser: argparse.ArgumentParser,
    body: Callable[[argparse.Namespace], int],
    argv: Sequence[str],
) -> int:
    """Parse, run the body and return the exit code; errors are one line on stderr.

    Adds `-v`, which shows the traceback too.

    Args:
        parser: Whose `prog` names the command.
        body: Takes the arguments, returns the exit code.
        argv: The arguments after the command's name.
    """
    parser.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")
    try:
        args = _parsed(parser, argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    try:
        return body(args)
    except BrokenPipeError:
        raise
    except (CadenzaError, OSError) as error:
        if args.verbose:
            traceback.print_exception(error)
        full = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
        on_disk = isinstance(error, OSError) and error.errno in full
        mend = "; free space there, or mend its rights" if on_disk else ""
        print(f"{parser.prog}: error: {error}{mend}", file=sys.stderr)
        return error.exit_code if isinstance(error, CadenzaError) else CadenzaError.exit_code
