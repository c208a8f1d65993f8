"""`cadenza profile`, `cadenza tune`, `cadenza eval`, and the way to `cadenza allocate`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from engines.build import open_cache
from engines.errors import BudgetError, DegradedError, InputError
from engines.terminal import can_show, command_parser, emit, emit_json, run_command
from tuner import allocate_command
from tuner.config import (
    MODES,
    OBJECTIVES,
    POSITIONS,
    ProfileConfig,
    TuneConfig,
    latency_from_text,
)
from tuner.gain import PROXIES
from tuner.sensitivity import INFLUENCES

INTERRUPTED = 130

_TUNE_EXAMPLES = """\
examples:
  cadenza tune EXPORT -o BUNDLE                      the fastest within 1 point of full precision
  cadenza tune EXPORT -o BUNDLE --latency-ms 80%     the best within 80 % of full precision's time
  cadenza tune EXPORT -o BUNDLE --mean-bits 4 --precision w4a3 --precision w4a4 --precision w4a8
  cadenza tune EXPORT -o BUNDLE --mode quick --cache CACHE --json
  cadenza tune EXPORT -o BUNDLE --task mine=prompts.jsonl --grader 'regex:answer is (\\d+)'
  cadenza tune EXPORT -o BUNDLE --task harness:gsm8k?filter=flexible-extract

The same command again resumes, or says that it has finished.  Work lies in BUNDLE.tune; engines,
measurements and answers in the cache (--cache, else $CADENZA_CACHE_DIR, else the user's).
Latency is of a whole sequence, for the batch and prompt length that the export declares as best.

"""

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

_TASK = "a built-in task, NAME=FILE.jsonl, or harness:TASK of lm-evaluation-harness; repeat "

# For both commands: what --task takes, and what --grader means.
_WORKLOADS = """\
A task of your own is a file with one JSON object a line: {"id": ..., "prompt": ..., "answer":
optional, "split": optional}.  --grader says when its answers are right, for every file, or for one
with NAME=GRADER:
  exact             the text equals the answer, apart from spaces (where every line has an answer)
  regex:PATTERN     of the pattern's last match in the text the first group, or all of it, equals
                    the answer; the last 20,000 characters are searched, and a pattern such as
                    (a+)+b can take very long
  python:module.fn  fn(prompt, text, answer) returns True or False; answer is None where the line
                    has none.  The module is looked for in the current directory, then on sys.path,
                    and runs with your rights; a bundle or an export never names code to run
Without a grader quality is agreement with full precision.  harness:TASK brings prompts and grading
(pip install 'cadenza[harness]'); harness:TASK?fewshot=4&filter=NAME sets its arguments, and
harness:paper stands for the six benchmarks of T2Quant.
"""


def main(argv: Sequence[str]) -> int:
    """Run `argv`, the command's name and its arguments, and return the exit code."""
    commands: dict[str, tuple[Callable[[], argparse.ArgumentParser], Callable[..., int]]] = {
        "profile": (_profile_parser, _profile),
        "tune": (_tune_parser, _tune),
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
        seconds = sum(rows.values()) * seconds_a_row(setting)
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


def _tune_parser() -> argparse.ArgumentParser:
    defaults = TuneConfig(export=Path(), output=Path())
    parser = command_parser(
        "tune",
        "Choose the engine of each denoising window, for each task, and write a bundle.",
        _TUNE_EXAMPLES + _WORKLOADS,
    )
    add = parser.add_argument
    add("export", metavar="EXPORT", type=Path, help="the folder that cadenza export wrote")
    add("-o", "--output", metavar="BUNDLE", type=Path, required=True, help="the bundle to write")
    add("--target", metavar="T", default=defaults.target, help="(default: %(default)s)")
    add(
        "--precision",
        action="append",
        metavar="P",
        help="a candidate; repeat (default: every executed one of the export)",
    )
    add("--mean-bits", type=float, metavar="B", help="most activation bits, mean over the passes")
    add(
        "--latency-ms",
        metavar="L",
        help="most milliseconds a sequence, or a percentage of full precision's, such as 80%%",
    )
    add("--memory-mib", type=float, metavar="M", help="most MiB of weights that the schedules use")
    add(
        "--max-loss",
        type=float,
        metavar="POINTS",
        default=defaults.max_loss,
        help="points that a task may lose against full precision (default: %(default)s)",
    )
    add(
        "--objective",
        choices=OBJECTIVES,
        help="what to look for (default: quality under a budget, else latency)",
    )
    add(
        "--task",
        action="append",
        metavar="TASK",
        help=f"{_TASK}(default: those of the export)",
    )
    add(
        "--grader",
        action="append",
        metavar="[NAME=]GRADER",
        help="how answers to prompt files are judged, see below; repeat",
    )
    add("--strategy", choices=("tpe", "random"), default=defaults.strategy, help="of the search")
    add("--trials", type=int, metavar="N", help="candidates to try (default: by --mode)")
    add("--timeout", type=float, metavar="S", help="seconds after which no trial starts")
    add("--seed", type=int, metavar="N", default=defaults.seed, help="(default: %(default)s)")
    add(
        "--proxy",
        choices=PROXIES,
        default=defaults.proxy,
        help="what the allocation takes a window's gain from (default: %(default)s); whether a "
        "mixed schedule is believed is decided on tuning prompts that it was not made from",
    )
    add("--storage", metavar="URL", help="database of the study (default: a file in BUNDLE.tune)")
    add(
        "--mode",
        choices=tuple(MODES),
        default=defaults.mode,
        help="how much to spend on trials, prompts and repeats (default: %(default)s)",
    )
    add(
        "--baseline",
        action="append",
        metavar="SCHEDULE.json",
        type=Path,
        help="a schedule written by hand, which competes and is judged beside what ships: a list "
        "with the precision of each window, or such a list for each task; repeat",
    )
    add("--cache", metavar="DIR", type=Path, help="folder of engines and measurements")
    add("--strict", action="store_true", help="exit 4 when the quality asked for is not shown")
    add("--force", action="store_true", help="replace what another command left at the output")
    add("--json", action="store_true", help="print the result as JSON on stdout")
    return parser


def _tune(args: argparse.Namespace) -> int:
    from tuner.pipeline import tune
    from tuner.report import closing_table

    latency_ms, latency_share = latency_from_text(args.latency_ms)
    try:
        config = TuneConfig(
            export=args.export,
            output=args.output,
            target=args.target,
            precisions=tuple(args.precision or ()),
            mean_bits=args.mean_bits,
            latency_ms=latency_ms,
            latency_share=latency_share,
            memory_mib=args.memory_mib,
            max_loss=args.max_loss,
            objective=args.objective,
            tasks=tuple(args.task or ()),
            graders=tuple(args.grader or ()),
            mode=args.mode,
            trials=args.trials,
            strategy=args.strategy,
            timeout_s=args.timeout,
            seed=args.seed,
            storage=args.storage,
            baselines=tuple(args.baseline or ()),
            proxy=args.proxy,
        )
    except ValueError as error:
        raise InputError(f"{error}; see cadenza tune --help") from error
    try:
        outcome = tune(config, open_cache(args.cache, os.environ), _say, args.force)
    except BudgetError as error:
        if args.json:
            emit_json({"infeasible": error.nearest})
        raise
    if args.json:
        emit_json(outcome.summary)
    else:
        if outcome.verdicts:
            ascii_ = not can_show(sys.stdout, "▁█")
            emit(closing_table(outcome.verdicts, outcome.precisions, ascii_) + "\n")
        emit(f"{outcome.bundle.folder}: digest {outcome.bundle.digest}")
    if outcome.interrupted:
        return INTERRUPTED
    if outcome.shortfall is not None:
        if args.strict:
            raise DegradedError(f"degraded: {outcome.shortfall}")
        _say(f"degraded: {outcome.shortfall}")
    return 0


def _eval_parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "eval",
        "Measure a bundle's answers on test prompts that nothing was tuned on.",
        _EVAL_EXAMPLES + _WORKLOADS,
    )
    add = parser.add_argument
    add("bundle", metavar="BUNDLE", type=Path, help="the folder that cadenza tune wrote")
    add(
        "--task",
        action="append",
        metavar="TASK",
        help=f"{_TASK}(default: every built-in task of the bundle)",
    )
    add(
        "--grader",
        action="append",
        metavar="[NAME=]GRADER",
        help="how answers to prompt files are judged, see below; repeat",
    )
    add("--target", metavar="T", default="cpu", help="(default: %(default)s)")
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
