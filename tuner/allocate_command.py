"""`cadenza allocate`: a sensitivity table in, the best schedule of each task out.

Needs no model, no engine and no backend: everything stands in the table.  Budgets hold for every
task asked for.  Where one task has no schedule within them, there is no answer: a bundle needs a
schedule for each task, and the budgets that are named then are within reach of all of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from engines.document import document_from_text, text_from_file
from engines.errors import BudgetError, InputError
from engines.terminal import can_show, command_parser, emit, emit_json, legend, strip, table
from tuner.allocate import FRONT, Allocation, Budget, allocate, in_words
from tuner.config import latency_from_text
from tuner.costs import BUDGETS, Costs, Point
from tuner.problem import MOST_PRECISIONS
from tuner.sensitivity_file import Sensitivity

_WANTED = "a table that cadenza profile or tune wrote"
_MOST_FRONT = 1_000_000

_EXAMPLES = f"""\
examples:
  cadenza allocate sensitivity.json --mean-bits 16      the most gain within 16 bits, each task
  cadenza allocate sensitivity.json --latency-ms 85%    ... of the most precise candidate's time
  cadenza allocate sensitivity.json --mean-bits 4 --precision w4a3 --precision w4a6
  cadenza allocate sensitivity.json --task edit --latency-ms 30 --memory-mib 500 --front 20
  cadenza allocate - --mean-bits 16 --json < sensitivity.json

The table is what cadenza profile writes, and cadenza tune leaves in BUNDLE.tune.  The answer is
exact: no schedule within the budgets gains more.  Ties go to the uniform schedule of most bits.
Gain is over the table's base precision, in the unit of the table's proxy (nats for K x I, else a
count or a share of tokens).  Latency is of a whole sequence at the table's
shape; a percentage is of the uniform schedule of the candidate with the most bits, of each task.
Without a budget the answer is the schedule of most gain, whatever it costs, for gain alone is
left to decide.  The budgets hold for every task: where one cannot meet them, nothing is answered,
the exit code is 3, and the smallest budgets are told that all tasks can meet.

--json prints {{TASK: {{schedule, mean_bits, latency_ms, memory_mib, gain, uniform, reason,
runner_up, front, front_complete, prices}}}}, with a front of about {FRONT} schedules for each
budget unless --front says otherwise; or {{"infeasible": {{BUDGET: smallest, or null}}}}: null
where raising that budget alone does not help.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of `cadenza allocate`."""
    made = command_parser(
        "allocate",
        "Find the schedule of most gain within budgets, from a sensitivity table.",
        _EXAMPLES,
    )
    add = made.add_argument
    add("table", metavar="SENSITIVITY.json", help="the table; - reads it from stdin")
    add("--mean-bits", type=float, metavar="B", help="most activation bits, mean over the passes")
    add(
        "--latency-ms",
        metavar="L",
        help="most milliseconds a sequence, or a percentage of full precision's, such as 80%%",
    )
    add("--memory-mib", type=float, metavar="M", help="most MiB of weights and activations")
    add(
        "--precision",
        action="append",
        metavar="P",
        help="a candidate; repeat (default: every executed one of the table)",
    )
    add("--task", action="append", metavar="T", help="a task; repeat (default: all of the table)")
    add(
        "--front",
        type=int,
        metavar="N",
        help=f"show the front, thinned to N steps of each budgeted cost; 0 for none "
        f"(default: {FRONT} with --json, else 0)",
    )
    add("--json", action="store_true", help="print the answer as JSON on stdout")
    return made


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code.

    Raises:
        InputError: An argument or the table is at fault.
        BudgetError: A task has no schedule within the budgets; with `--json` they are printed.
    """
    limit = (FRONT if args.json else 0) if args.front is None else args.front
    if not 0 <= limit <= _MOST_FRONT:
        raise InputError(f"--front takes 0 to {_MOST_FRONT}, got {limit}; for instance {FRONT}")
    latency_ms, share = latency_from_text(args.latency_ms)
    budget = _budget(args.mean_bits, latency_ms, args.memory_mib)
    if share is not None and not 0 < share < np.inf:
        raise InputError(
            f"--latency-ms must be above 0 % and finite, got {args.latency_ms}; for instance 80%"
        )
    where = "stdin" if args.table == "-" else str(args.table)
    if not args.table:
        raise InputError("the table's name is empty; give a file, or - for stdin")
    text = text_from_file(None if args.table == "-" else Path(args.table), where, _WANTED)
    found = Sensitivity.from_json(document_from_text(text, where))
    names = found.candidates(args.precision or ())
    if args.memory_mib is not None and len(names) > MOST_PRECISIONS:
        raise InputError(
            f"under --memory-mib at most {MOST_PRECISIONS} precisions can compete, there are "
            f"{len(names)}; choose with --precision"
        )
    tasks = _tasks(found, args.task or ())
    costs = {task: _costs(found, task, names, where) for task in tasks}
    budgets = {
        task: budget
        if share is None
        else _budget(
            args.mean_bits, share * _full_ms(costs[task], found, names, task), args.memory_mib
        )
        for task in tasks
    }
    if budget == Budget() and share is None:
        _say(
            "no budget is given: the answer is the schedule of most gain, whatever it costs; "
            "bound it with --mean-bits, --latency-ms or --memory-mib"
        )
    try:
        answers = _allocate(found, names, costs, budgets, limit)
    except BudgetError as error:
        if args.json:
            emit_json({"infeasible": error.nearest})
        raise
    if args.json:
        emit_json({task: answer.to_json() for task, answer in answers.items()})
    else:
        bits = dict(zip(names, costs[tasks[0]].bits.tolist(), strict=True))
        emit(_for_people(answers, bits, not can_show(sys.stdout, "▁█")))
    return 0


def _allocate(
    found: Sensitivity,
    names: Sequence[str],
    costs: Mapping[str, Costs],
    budgets: Mapping[str, Budget],
    limit: int,
) -> dict[str, Allocation]:
    """Return the answer of each task.

    Raises:
        BudgetError: Some have none; `nearest` holds what is within reach of all of them.
    """
    answers: dict[str, Allocation] = {}
    failed: dict[str, BudgetError] = {}
    for task, cost in costs.items():
        try:
            if not failed:
                answers[task] = allocate(found.gain(task, names), cost, budgets[task], limit)
            else:  # only whether there is an answer matters now
                allocate(found.gain(task, names), cost, budgets[task], 0)
        except BudgetError as error:
            failed[task] = error
    if not failed:
        return answers
    first, cause = next(iter(failed.items()))
    left = [each.precision.name for each in found.precisions if each.precision.name not in names]
    others = f"; not among the candidates: {', '.join(left)}, see --precision" if left else ""
    if len(failed) == 1:
        raise BudgetError(f"task {first!r}: {cause}{others}", cause.nearest) from cause
    nearest: dict[str, float | None] = {}
    for name in BUDGETS:
        values = [each.nearest[name] for each in failed.values() if name in each.nearest]
        if values:
            known = [value for value in values if value is not None]
            nearest[name] = max(known) if len(known) == len(values) else None
    reach = {name: value for name, value in nearest.items() if value is not None}
    alike = ", ".join(map(repr, list(failed)[1:]))
    mend = f"; give {in_words(reach)}, within reach of all" if reach else ""
    raise BudgetError(
        f"task {first!r}: {cause}; likewise {alike}{mend}{others}", nearest
    ) from cause


def _tasks(found: Sensitivity, asked: Sequence[str]) -> list[str]:
    unknown = [name for name in asked if name not in found.tasks]
    if unknown:
        raise InputError(
            f"the table has no task {unknown[0]!r}, only {', '.join(found.tasks)}; name one of "
            f"these"
        )
    if len(set(asked)) < len(asked):
        raise InputError(f"each task is named once, got {', '.join(asked)}; name it once")
    return list(asked or found.tasks)


def _budget(mean_bits: float | None, latency_ms: float | None, memory: float | None) -> Budget:
    try:
        return Budget(mean_bits, latency_ms, memory)
    except ValueError as error:
        raise InputError(f"{error}; see cadenza allocate --help") from error


def _costs(found: Sensitivity, task: str, names: Sequence[str], where: str) -> Costs:
    try:
        return found.costs(task, names)
    except ValueError as error:  # each number is sound, and all together are too large
        raise InputError(f"{where}: tasks: {task}: {error}; mend the table") from error


def _full_ms(costs: Costs, found: Sensitivity, names: Sequence[str], task: str) -> float:
    """Return the milliseconds of the most precise candidate, alone in all windows.

    Raises:
        InputError: They are not known.
    """
    rows = {each.precision.name: each.precision for each in found.precisions}
    best = max(names, key=lambda name: (rows[name].bits, rows[name].weight_bits))
    spent = costs.latency_of(np.full(len(costs.passes), names.index(best)))
    if spent is None:
        raise InputError(
            f"task {task!r}: a percentage of the latency of {best}, the most precise candidate, "
            f"is asked for, and it is not known{_why_untimed(costs)}"
        )
    return spent


def _why_untimed(costs: Costs) -> str:
    if any(costs.simulated):
        return ": simulated precisions have none; budget them with --mean-bits"
    return "; give milliseconds, or name the candidates that are timed with --precision"


def _for_people(answers: Mapping[str, Allocation], bits: Mapping[str, float], ascii_: bool) -> str:
    """Return the answers as tables, with the legend and the reasons."""

    def cells(point: Point) -> list[object]:
        return [
            strip(point.schedule, bits, ascii_),
            point.mean_bits,
            point.latency_ms,
            point.memory_mib,
            point.gain,
            "yes" if point.uniform else "no",
        ]

    columns = ["schedule", "bits", "ms a sequence", "MiB", "gain", "uniform"]
    rows: list[list[object]] = []
    for task, answer in answers.items():
        rows.append([task, "best", *cells(answer.point)])
        if answer.runner_up is not None:
            rows.append(["", "runner-up", *cells(answer.runner_up)])
    lines = [table(["task", "", *columns], rows), "", legend(bits, ascii_), ""]
    for task, answer in answers.items():
        prices = [
            f"one more {unit} gains {price:.4g}"
            for unit, price in (
                ("mean bit", answer.prices.bit),
                ("ms", answer.prices.ms),
                ("MiB", answer.prices.mib),
            )
            if price is not None
        ]
        lines.append("; ".join([f"{task}: {answer.reason}", *prices]))
    for task, answer in answers.items():
        if answer.front:
            whole = "complete" if answer.front_complete else "thinned"
            lines += ["", f"front of {task}, {whole}:", ""]
            lines.append(table(columns, [cells(point) for point in answer.front]))
    return "\n".join(lines)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
