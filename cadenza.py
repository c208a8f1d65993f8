"""The command `cadenza`: finds export, tune, run, ... and hands over.

Each subcommand belongs to a part, whose `main(argv)` gets the arguments from the subcommand's
name on and returns the exit code.  A part is imported only when asked for, so `cadenza --help`
is quick and works with no extra installed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import FrameType

from engines import __version__
from engines.errors import CadenzaError, InputError, MissingExtra

INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand.

    Attributes:
        module: Its part's command line.
        extra: What `pip install 'cadenza[...]'` must bring for it.
        says: What it does, in a line.
    """

    module: str
    extra: str
    says: str


COMMANDS: dict[str, Command] = {
    "export": Command("exporter.cli", "export", "a checkpoint to checked ONNX graphs"),
    "profile": Command("tuner.cli", "tune", "how much each precision damages each window"),
    "allocate": Command("tuner.cli", "ort", "a sensitivity table to schedules, without a model"),
    "tune": Command("tuner.cli", "tune", "graphs to a bundle: the engine each window should run"),
    "report": Command("tuner.report_command", "report", "what a tune did, as one HTML page"),
    "run": Command("engines.cli", "ort", "answer prompts with a bundle"),
    "eval": Command("tuner.cli", "tune", "accuracy and agreement on held-out prompts"),
    "bench": Command(
        "tuner.bench_command", "ort", "a bundle's speed and memory, an export's passes"
    ),
    "inspect": Command("engines.cli", "ort", "what an export or a bundle holds"),
    "compare": Command(
        "exporter.compare_command", "compare", "the first layer that differs across runners"
    ),
    "rebuild": Command("engines.rebuild", "tensorrt-rtx", "a bundle's plans for another target"),
    "verify": Command("engines.cli", "ort", "check a bundle: every byte, and its golden answers"),
}

# With its flag a command is another part's, which needs more than the command alone.
FLAGGED: dict[tuple[str, str], Command] = {
    ("inspect", "--gemms"): Command(
        "tuner.gemms_command", "tune", "the products of a pass, and what a GPU makes of them"
    ),
}

EXAMPLES = """\
cadenza export calib_data/reference -o EXPORT
cadenza tune EXPORT -o BUNDLE --latency-ms 80%
cadenza run BUNDLE --task edit 'edit:ab,aabbccddabcd'
cadenza verify BUNDLE"""


def usage() -> str:
    """Return what `cadenza --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [
        "usage: cadenza COMMAND ...",
        "",
        "Export a diffusion language model to ONNX, find the precision that each window of its",
        "denoising should run under a budget, and run the result.",
        "",
        "commands:",
        *(f"  {name:{width}}  {command.says}" for name, command in COMMANDS.items()),
        "",
        "examples:",
        *(f"  {line}" for line in EXAMPLES.splitlines()),
        "",
        "`cadenza COMMAND --help` tells a command's options; `cadenza --version` the version.",
        "Exit codes: 0 done, 1 the work failed, 2 an argument or a file given is at fault, 3 no",
        "candidate meets the budgets, 4 degraded under --strict, 130 interrupted.",
    ]
    return "\n".join(lines)


def command_from_name(name: str) -> Command:
    """Return the command of a name.

    Raises:
        InputError: There is none; names the nearest.
    """
    if name in COMMANDS:
        return COMMANDS[name]
    from difflib import get_close_matches

    near = get_close_matches(name, COMMANDS, n=1)
    mend = f"did you mean {near[0]!r}?" if near else f"commands are {', '.join(COMMANDS)}"
    raise InputError(f"unknown command {name!r}; {mend}")


def command_from_argv(argv: Sequence[str]) -> Command:
    """Return the command of arguments, its name first; a flag may make it another part's.

    Raises:
        InputError: There is none; names the nearest.
    """
    command = command_from_name(argv[0])
    options = argv[1 : argv.index("--") if "--" in argv else len(argv)]
    flagged = (FLAGGED[argv[0], flag] for flag in options if (argv[0], flag) in FLAGGED)
    return next(flagged, command)


def hand_over(command: Command, argv: Sequence[str]) -> int:
    """Import the command's part, run it, and return its exit code.

    Raises:
        MissingExtra: A package that the command needs is not installed; names the extra.
    """
    try:
        code: int = import_module(command.module).main(list(argv))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "cadenza", "tuner", "exporter", "engines", "calib_data"):
            raise
        raise MissingExtra(
            f"this command needs the package {package!r}, which is not installed; "
            f"install it with: pip install 'cadenza[{command.extra}]'"
        ) from error
    return code


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _open_streams() -> None:
    """Open the null device for each standard stream that the caller has closed.

    Otherwise the next file that is opened takes the stream's number, and is written to.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit code.

    A part tells its own errors; told here is what happens before it has started.
    """
    _open_streams()
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else InputError.exit_code
    if argv[0] in ("-V", "--version"):
        print(f"cadenza {__version__}")
        return 0
    said = "cadenza"
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        command = command_from_argv(argv)
        said = f"cadenza {argv[0]}"
        code = hand_over(command, argv)
        sys.stdout.flush()
    except CadenzaError as error:
        print(f"{said}: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{said}: error: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough; leave nothing for the exit to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        signal.signal(signal.SIGTERM, before)
    return code


if __name__ == "__main__":
    sys.exit(main())
