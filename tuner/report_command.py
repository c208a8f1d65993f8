"""`cadenza report`: a tune folder in, one HTML page out that works without a network.

Reads only: it may run while a tune works in the folder.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from engines.errors import InputError, require
from engines.terminal import command_parser, emit_json, run_command, size
from tuner.folder import write_text
from tuner.report_data import read_tune_folder
from tuner.report_page import MARKER, page
from tuner.report_values import shown

_EXAMPLES = """\
examples:
  cadenza report BUNDLE.tune -o report.html
  cadenza report BUNDLE.tune -o report.html --json      {"file", "trials", "tasks"} on stdout

The folder is the one that cadenza tune -o BUNDLE leaves beside its bundle.  It is only read, so a
report can be made while the tune runs: it shows the trials so far.  The page is one file: it loads
nothing, runs no script, and can be mailed or printed.

A report that is there already is replaced; any other file only with --force.
"""


def main(argv: Sequence[str]) -> int:
    """Run `argv`, the command's name and its arguments, and return the exit code."""
    return run_command(parser(), run, argv[1:])


def parser() -> argparse.ArgumentParser:
    """Return the parser of `cadenza report`."""
    made = command_parser("report", "Show what a tune did, as one HTML page.", _EXAMPLES)
    add = made.add_argument
    add("folder", metavar="TUNE_DIR", type=Path, help="the folder of a tune, BUNDLE.tune")
    add("-o", "--output", metavar="FILE", type=Path, required=True, help="the page to write")
    add("--force", action="store_true", help="replace a file that is no report")
    add("--json", action="store_true", help="print what was written as JSON on stdout")
    return made


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code.

    Raises:
        InputError: The folder is none of a tune, or the output may not be replaced.
        MissingExtra: A package for the page is not installed.
    """
    require("jinja2", "report", "cadenza report")
    require("matplotlib", "report", "cadenza report")
    output = Path(os.path.realpath(args.output))
    _check(output, args.output, args.folder, args.force)
    record = read_tune_folder(args.folder)
    for note in record.notes:
        print(f"note: {shown(note)}", file=sys.stderr)
    text = page(record)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_text(output, text)
    except OSError as error:
        raise InputError(
            f"cannot write {str(args.output)!r}: {error.strerror}; choose another --output"
        ) from error
    names = [task.name for task in record.tasks]
    if args.json:
        emit_json({"file": str(args.output), "trials": len(record.trials), "tasks": names})
    else:
        said = f"{args.output}: {len(record.trials)} trials, {len(names)} tasks"
        print(f"{said}, {size(len(text.encode()))}", file=sys.stderr)
    return 0


def _check(output: Path, given: Path, folder: Path, force: bool) -> None:
    """Check that the output may be written: not there, a report, or any file by force.

    Raises:
        InputError: It may not; says why.
    """
    inside = Path(os.path.realpath(folder))
    if not output.exists():
        return
    if not output.is_file():
        raise InputError(f"{str(given)!r} is no file; choose another --output")
    with output.open("rb") as stream:
        if stream.read(len(MARKER)) == MARKER.encode():
            return
    if inside in output.parents:
        raise InputError(f"{str(given)!r} is a file of the tune itself; choose another --output")
    if not force:
        raise InputError(
            f"{str(given)!r} is there and no report; give --force to replace it, or choose "
            f"another --output"
        )
