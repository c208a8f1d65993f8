"""`cadenza tune`: its arguments, its config file, and what it prints."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from engines.build import open_cache
from engines.errors import BudgetError, DegradedError, InputError
from engines.terminal import can_show, command_parser, emit, emit_json
from tuner.config import MODES, OBJECTIVES, TuneConfig, latency_from_text
from tuner.config_file import Effective, Sourced, effective
from tuner.gain import PROXIES
from tuner.strategies import STRATEGIES

INTERRUPTED = 130

_EXAMPLES = """\
examples:
  cadenza tune EXPORT -o BUNDLE                      the fastest within 1 point of full precision
  cadenza tune EXPORT -o BUNDLE --latency-ms 80%     the best within 80 % of full precision's time
  cadenza tune EXPORT -o BUNDLE --mean-bits 4 --precision w4a3 --precision w4a4 --precision w4a8
  cadenza tune RTN GPTQ -o BUNDLE                    two exports: the quantizer is searched too
  cadenza tune EXPORT -o BUNDLE --dry-run            what it would take; nothing is built
  cadenza tune EXPORT -o BUNDLE --max-loss 1 --max-loss chain=3 --mode quick --json
  cadenza tune EXPORT -o BUNDLE --task mine=prompts.jsonl --grader 'regex:answer is (\\d+)'
  cadenza tune --config tune.yaml --set search.trials=40 --print-config
  cadenza tune EXPORT -o BUNDLE --target rtx-sm89 --latencies L4.json --latency-ms 60%
  cadenza tune EXPORT -o BUNDLE --target rtx-sm120 --gpu 'RTX 5090'      latencies are predicted
  cadenza tune EXPORT -o BUNDLE --storage postgresql://me@host/cadenza   shared by many workers

The same command again resumes, or says that it has finished.  Work lies in BUNDLE.tune; engines,
measurements and answers in the cache (--cache, else $CADENZA_CACHE_DIR, else the user's).
Latency is of a whole sequence, for the batch and prompt length that the export declares as best.

A config file is YAML: default < file < --set < flag.  --print-config shows every value with where
it came from, and is such a file itself.  Keys: exports, output, target, precisions, tasks,
graders, baselines; budget.{mean_bits, latency_ms, memory_mib, latencies, gpu}; quality.{objective,
max_loss.TASK (or .all), gates.DISTANCE, proxy}; search.{mode, strategy, trials, timeout_s, seed,
storage}; space.KNOB: a list of choices in place of the built-in ones, the export's own beside
them, or one value, which pins the knob: it is its default and its only choice; run.{cache,
cache_limit_mib, child_limit_s, child_memory_mib, allow_precision_mismatch, strict, force}.

Strategies: tpe is ours, the exact program's schedules first, then what promises most; fast changes
one knob at a time, full tries everything, mixed combines what helped alone, random draws.

"""

# What --task takes, here and in `cadenza eval`, and what --grader means.
TASK = "a built-in task, NAME=FILE.jsonl, or harness:TASK of lm-evaluation-harness; repeat "

WORKLOADS = """\
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


def parser() -> argparse.ArgumentParser:
    """Return the command's parser; what is not given is None, for the config decides."""
    own = TuneConfig(export=Path(), output=Path())
    made = command_parser(
        "tune",
        "Choose the engine of each denoising window, for each task, and write a bundle.",
        _EXAMPLES + WORKLOADS,
    )
    add = made.add_argument
    add(
        "exports",
        metavar="EXPORT",
        type=Path,
        nargs="*",
        help="a folder that cadenza export wrote; more of the same checkpoint by other quantizers",
    )
    add("-o", "--output", metavar="BUNDLE", type=Path, help="the bundle to write")
    add("--config", metavar="FILE.yaml", type=Path, help="values for all of this")
    add("--set", action="append", metavar="KEY=VALUE", help="over the config file; repeat")
    add("--print-config", action="store_true", help="show every value and its source, and stop")
    add("--dry-run", action="store_true", help="check every name, say what it takes, and stop")
    add("--target", metavar="T", help=f"(default: {own.target})")
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
        "--latencies",
        metavar="FILE.json",
        type=Path,
        help="for a target of TensorRT: milliseconds of its engines' passes, measured where the "
        "GPU is (default: predicted)",
    )
    add(
        "--gpu",
        metavar="NAME",
        help="the GPU for which latencies are predicted where --latencies gives none (default: a "
        "usual one of the target)",
    )
    add(
        "--max-loss",
        action="append",
        metavar="[TASK=]POINTS",
        help="points that a task may lose against full precision, every task or one; repeat "
        f"(default: {own.max_loss})",
    )
    add(
        "--gate",
        action="append",
        metavar="DISTANCE=X",
        help="largest l0, l1, l2, lInf or cos of a candidate's logits from full precision's at "
        "a first look; repeat (default: cos=0.5)",
    )
    add(
        "--objective",
        choices=OBJECTIVES,
        help="what to look for (default: quality under a budget, else latency)",
    )
    add("--task", action="append", metavar="TASK", help=f"{TASK}(default: those of the export)")
    add(
        "--grader",
        action="append",
        metavar="[NAME=]GRADER",
        help="how answers to prompt files are judged, see below; repeat",
    )
    add("--strategy", choices=STRATEGIES, help=f"of the search (default: {own.strategy})")
    add("--trials", type=int, metavar="N", help="candidates to try (default: by --mode)")
    add("--timeout", type=float, metavar="S", help="seconds after which no trial starts")
    add("--seed", type=int, metavar="N", help=f"(default: {own.seed})")
    add(
        "--proxy",
        choices=PROXIES,
        help=f"what the allocation takes a window's gain from (default: {own.proxy}); whether a "
        "mixed schedule is believed is decided on tuning prompts that it was not made from",
    )
    add(
        "--storage",
        metavar="URL",
        help="a database, for instance postgresql://me@host/name, through which workers share the "
        "study, each with an --output of its own (default: none)",
    )
    add(
        "--mode",
        choices=tuple(MODES),
        help=f"how much to spend on trials, prompts and repeats (default: {own.mode})",
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
    add(
        "--cache-limit",
        type=float,
        metavar="MIB",
        help="what the cache may hold at the end; what was not used for longest goes first",
    )
    add(
        "--child-limit",
        type=float,
        metavar="S",
        help="seconds that a build, a measurement or an evaluation may say nothing before its "
        f"process is killed and the candidate is out (default: {own.child_limit_s:g})",
    )
    add(
        "--child-memory",
        type=float,
        metavar="MIB",
        help="address space that this process may have, libraries and mapped weights included; a "
        "candidate that wants more is out",
    )
    for name, says in (
        (
            "allow-precision-mismatch",
            "ship an engine of TensorRT that was not built in the precision asked for, with a "
            "warning",
        ),
        ("strict", "exit 4 when the quality asked for is not shown"),
        ("force", "replace what another command left at the output"),
    ):
        add(f"--{name}", action="store_const", const=True, help=says)
    add("--json", action="store_true", help="print the result as JSON on stdout")
    return made


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from tuner.closing_table import closing_table
    from tuner.pipeline import tune
    from tuner.preflight import planned, said
    from tuner.study import redacted

    def shown(key: str, value: Any) -> Any:
        return redacted(value) if key == "search.storage" else value

    asked = effective(defaults(), args.config, args.set or (), _flags(args))
    if args.print_config:
        if args.json:
            emit_json(asked.to_json(shown))
        else:
            emit(asked.to_yaml(shown).rstrip("\n"))
        return 0
    config = config_of(asked)
    cache = open_cache(asked["run.cache"], os.environ)
    if args.dry_run:
        plan = planned(config, cache, _say, bool(asked["run.force"]))
        if args.json:
            emit_json(plan.to_json())
        else:
            emit(said(plan))
        return 0
    try:
        outcome = tune(config, cache, _say, bool(asked["run.force"]), asked.to_json(shown))
    except BudgetError as error:
        if args.json:
            emit_json({"infeasible": error.nearest})
        raise
    if args.json:
        emit_json(outcome.summary)
    else:
        if outcome.verdicts:
            ascii_ = not can_show(sys.stdout, "▁█")
            emit(
                closing_table(outcome.verdicts, outcome.precisions, ascii_, outcome.latency_from)
                + "\n"
            )
        emit(f"{outcome.bundle.folder}: digest {outcome.bundle.digest}")
    if outcome.interrupted:
        return INTERRUPTED
    if outcome.shortfall is not None:
        if asked["run.strict"]:
            raise DegradedError(f"degraded: {outcome.shortfall}")
        _say(f"degraded: {outcome.shortfall}")
    return 0


def defaults() -> dict[str, Any]:
    """Return the default of every key that has one; they live in `TuneConfig`."""
    own: dict[str, Any] = {each.name: each.default for each in fields(TuneConfig)}
    return {
        "target": own["target"],
        "quality.max_loss.all": own["max_loss"],
        **{f"quality.gates.{name}": limit for name, limit in own["gates"]},
        "quality.proxy": own["proxy"],
        "search.mode": own["mode"],
        "search.strategy": own["strategy"],
        "search.seed": own["seed"],
        "run.child_limit_s": own["child_limit_s"],
        "run.allow_precision_mismatch": own["allow_precision_mismatch"],
        "run.strict": False,
        "run.force": False,
    }


def config_of(asked: Effective) -> TuneConfig:
    """Return the config of effective values.

    Raises:
        InputError: Something is missing, or out of its range.
    """
    exports = asked["exports"] or ()
    if not exports or asked["output"] is None:
        what = "an EXPORT" if not exports else "-o BUNDLE"
        raise InputError(f"tune needs {what}, as an argument or in the config; see --help")
    latency_ms, latency_share = latency_from_text(asked["budget.latency_ms"])
    losses = asked.below("quality.max_loss")
    given = {
        "target": asked["target"],
        "precisions": asked["precisions"],
        "mean_bits": asked["budget.mean_bits"],
        "latency_ms": latency_ms,
        "latency_share": latency_share,
        "memory_mib": asked["budget.memory_mib"],
        "latencies": asked["budget.latencies"],
        "gpu": asked["budget.gpu"],
        "max_loss": losses.pop("all", None),
        "objective": asked["quality.objective"],
        "tasks": asked["tasks"],
        "graders": asked["graders"],
        "mode": asked["search.mode"],
        "trials": asked["search.trials"],
        "strategy": asked["search.strategy"],
        "timeout_s": asked["search.timeout_s"],
        "seed": asked["search.seed"],
        "storage": asked["search.storage"],
        "baselines": asked["baselines"],
        "proxy": asked["quality.proxy"],
        "allow_precision_mismatch": asked["run.allow_precision_mismatch"],
        "child_limit_s": asked["run.child_limit_s"],
        "child_memory_mib": asked["run.child_memory_mib"],
        "cache_limit_mib": asked["run.cache_limit_mib"],
        "max_losses": tuple(losses.items()),
        "gates": tuple(asked.below("quality.gates").items()),
        "space": tuple(asked.below("space").items()),
    }
    try:
        return TuneConfig(
            export=exports[0],
            others=tuple(exports[1:]),
            output=asked["output"],
            **{name: value for name, value in given.items() if value is not None},
        )
    except ValueError as error:
        raise InputError(f"{error}; see cadenza tune --help") from error


def _flags(args: argparse.Namespace) -> dict[str, Sourced]:
    """Return what stood on the command line, by key."""
    plain = {
        "exports": ("EXPORT", tuple(args.exports)),
        "output": ("--output", args.output),
        "target": ("--target", args.target),
        "precisions": ("--precision", args.precision),
        "tasks": ("--task", args.task),
        "graders": ("--grader", args.grader),
        "baselines": ("--baseline", args.baseline),
        "budget.mean_bits": ("--mean-bits", args.mean_bits),
        "budget.latency_ms": ("--latency-ms", args.latency_ms),
        "budget.memory_mib": ("--memory-mib", args.memory_mib),
        "budget.latencies": ("--latencies", args.latencies),
        "budget.gpu": ("--gpu", args.gpu),
        "quality.objective": ("--objective", args.objective),
        "quality.proxy": ("--proxy", args.proxy),
        "search.mode": ("--mode", args.mode),
        "search.strategy": ("--strategy", args.strategy),
        "search.trials": ("--trials", args.trials),
        "search.timeout_s": ("--timeout", args.timeout),
        "search.seed": ("--seed", args.seed),
        "search.storage": ("--storage", args.storage),
        "run.cache": ("--cache", args.cache),
        "run.cache_limit_mib": ("--cache-limit", args.cache_limit),
        "run.child_limit_s": ("--child-limit", args.child_limit),
        "run.child_memory_mib": ("--child-memory", args.child_memory),
        "run.allow_precision_mismatch": (
            "--allow-precision-mismatch",
            args.allow_precision_mismatch,
        ),
        "run.strict": ("--strict", args.strict),
        "run.force": ("--force", args.force),
    }
    found = {
        key: Sourced(tuple(value) if isinstance(value, list) else value, flag)
        for key, (flag, value) in plain.items()
        if value not in (None, ())
    }
    for each in args.max_loss or ():
        task, equals, points = each.rpartition("=")
        if equals and not task:
            raise InputError(f"--max-loss {each}: name the task before the =, or leave it out")
        key = f"quality.max_loss.{task if equals else 'all'}"
        found[key] = Sourced(_points(points, "--max-loss", each), "--max-loss")
    for each in args.gate or ():
        name, _, limit = each.partition("=")
        if not name:
            raise InputError(f"--gate {each}: name a distance before the =, for instance cos=0.3")
        found[f"quality.gates.{name}"] = Sourced(_points(limit, "--gate", each), "--gate")
    return found


def _points(text: str, flag: str, given: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise InputError(f"{flag} takes a number, or NAME=NUMBER, got {given!r}") from error


def _say(text: str) -> None:
    print(text, file=sys.stderr)
