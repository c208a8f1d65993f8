"""`cadenza profile`, `cadenza tune`, `cadenza eval`, and the way to `cadenza allocate`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from engines.build import open_cache
from engines.errors import InputError
from engines.plan_loader import BEST_TARGET
from engines.terminal import command_parser, emit, emit_json, run_command
from tuner import allocate_command, tune_command
from tuner.config import POSITIONS, ProfileConfig
from tuner.gain import PROXIES
from tuner.sensitivity import INFLUENCES
from tuner.tune_command import TASK, WORKLOADS

_PROFILE_EXAMPLES = """\
examples:
  cadenza profile EXPORT -o sensitivity.json
  cadenza profile EXPORT -o s.json --precision w4a3 --precision w4a4 --task edit --dry-run
  cadenza profile EXPORT -o s.json --task mine=prompts.jsonl --proxy flips --positions scored

Measured are, by window of the denoising: K, how far each precision's distributions are from full
precision's at the tokens that it commits; I, how far these travel; and from them the gain of each
precision over the base.  Intervals are 95 %, over prompts.  Executed precisions are timed too;
simulated ones may stand in the same table, but an allocation takes one kind only.  Full precision
is always in it and costs no pass.

--positions scored counts only answer tokens that the grader of a built-in task reads; of a prompt
file, all tokens up to the first end-of-sequence token, and that one.

The same command again changes nothing; an interrupted one resumes with the next task.
A table is evidence and not a decision: tune believes a mixed schedule only where it holds on
tuning prompts, which no table is made from.
"""

_EVAL_EXAMPLES = """\
examples:
  cadenza eval BUNDLE                     every task of the bundle, on its test prompts
  cadenza eval BUNDLE --task edit --limit 200 --json
  cadenza eval BUNDLE --task edit=prompts.jsonl --grader python:my_grader.is_right

Accuracy has Wilson's 95 % interval.  Agreement is with full precision: on all prompts where the
bundle holds a full-precision engine, else on the prompts whose full-precision answers it holds.

"""


def main(argv: Sequence[str]) -> int:
    """Run `argv`, the command's name and its arguments, and return the exit code."""
    commands: dict[str, tuple[Callable[[], argparse.ArgumentParser], Callable[..., int]]] = {
        "profile": (_profile_parser, _profile),
        "tune": (tune_command.parser, tune_command.run),
        "eval": (_eval_parser, _eval),
        "allocate": (allocate_command.parser, allocate_command.run),
    }
    if not argv or argv[0] not in commands:
        raise ValueError(f"the command is one of {', '.join(commands)}, got {list(argv)}")
    parser, body = commands[argv[0]]
    return run_command(parser(), body, argv[1:])


def _profile_parser() -> argparse.ArgumentParser:
    defaults = ProfileConfig(export=Path(), output=Path())
    parser = command_parser(
        "profile",
        "Measure how much each precision damages each window of the denoising, for each task.",
        _PROFILE_EXAMPLES,
    )
    add = parser.add_argument
    add("export", metavar="EXPORT", type=Path, help="the folder that cadenza export wrote")
    add("-o", "--output", metavar="FILE", type=Path, required=True, help="the table to write")
    add("--target", metavar="T", default=defaults.target, help="(default: %(default)s)")
    add(
        "--precision",
        action="append",
        metavar="P",
        help="beside full precision; repeat (default: every one of the export)",
    )
    add(
        "--task",
        action="append",
        metavar="T[=FILE.jsonl]",
        help="a task; repeat (default: those of the export)",
    )
    add(
        "--grader",
        action="append",
        metavar="[NAME=]GRADER",
        help="as for cadenza tune; nothing is graded here, but what does not fit is refused",
    )
    add(
        "--prompts-per-task",
        type=int,
        metavar="N",
        default=defaults.prompts_per_task,
        help="calibration prompts, or all that a file has (default: %(default)s)",
    )
    add(
        "--proxy",
        choices=PROXIES,
        default=defaults.proxy,
        help="what gains are made of (default: %(default)s)",
    )
    add(
        "--influence",
        choices=INFLUENCES,
        default=defaults.influence,
        help="mask a window's tokens again, or go on from other ones, which takes several "
        "generations more (default: %(default)s)",
    )
    add(
        "--positions",
        choices=POSITIONS,
        default=defaults.positions,
        help="which answer tokens count (default: %(default)s)",
    )
    add("--windows", type=int, metavar="W", help="parts of the progress (default: the export's)")
    add("--cache", metavar="DIR", type=Path, help="folder of engines and measurements")
    add("--seed", type=int, metavar="N", default=defaults.seed, help="(default: %(default)s)")
    add("--dry-run", action="store_true", help="only say how many passes it would take")
    add("--force", action="store_true", help="replace another file at the output")
    add("--json", action="store_true", help="print the result as JSON on stdout")
    return parser


def _profile(args: argparse.Namespace) -> int:
    from tuner.profile import profile
    from tuner.profile_report import closing_table, foreseen, summary
    from tuner.profile_setting import prepare_profile, seconds_a_row

    try:
        config = ProfileConfig(
            export=args.export,
            output=args.output,
            target=args.target,
            precisions=tuple(args.precision or ()),
            tasks=tuple(args.task or ()),
            graders=tuple(args.grader or ()),
            prompts_per_task=args.prompts_per_task,
            proxy=args.proxy,
            influence=args.influence,
            positions=args.positions,
            windows=args.windows,
            seed=args.seed,
        )
    except ValueError as error:
        raise InputError(f"{error}; see cadenza profile --help") from error
    if args.dry_run:
        setting = prepare_profile(config)
        rows = {name: setting.rows(name) for name in setting.tasks}
        first = next(iter(setting.tasks.values()))
        a_row = seconds_a_row(setting.export, config.target, first.items, first.sampler)
        seconds = sum(rows.values()) * a_row
        if args.json:
            emit_json({"rows": rows, "seconds": seconds})
        else:
            emit(foreseen(rows, seconds))
        return 0
    outcome = profile(config, open_cache(args.cache, os.environ), _say, args.force)
    if args.json:
        tasks = summary(outcome.tasks)
        emit_json({"file": str(config.output), "made": outcome.made, "tasks": tasks})
    elif outcome.made:
        emit(closing_table(outcome.tasks) + "\n")
        emit(f"{config.output}: {len(outcome.tasks)} tasks")
    return 0


def _eval_parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "eval",
        "Measure a bundle's answers on test prompts that nothing was tuned on.",
        _EVAL_EXAMPLES + WORKLOADS,
    )
    add = parser.add_argument
    add("bundle", metavar="BUNDLE", type=Path, help="the folder that cadenza tune wrote")
    add(
        "--task",
        action="append",
        metavar="TASK",
        help=f"{TASK}(default: every built-in task of the bundle)",
    )
    add(
        "--grader",
        action="append",
        metavar="[NAME=]GRADER",
        help="how answers to prompt files are judged, see below; repeat",
    )
    add("--target", metavar="T", help=f"where to run (default: {BEST_TARGET})")
    add("--limit", type=int, metavar="N", default=1000, help="most prompts (default: %(default)s)")
    add("--seed", type=int, metavar="N", default=0, help="of the prompts (default: %(default)s)")
    add("--json", action="store_true", help="print the result as JSON on stdout")
    return parser


def _eval(args: argparse.Namespace) -> int:
    from tuner.held_out import evaluate_bundle, held_out_table

    if args.limit < 1:
        raise InputError(f"--limit >= 1 must hold, got {args.limit}")
    found = evaluate_bundle(
        args.bundle, args.task or (), args.target, args.limit, args.seed, args.grader or ()
    )
    if args.json:
        emit_json({"bundle": str(args.bundle), "tasks": found})
    else:
        emit(held_out_table(found))
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
