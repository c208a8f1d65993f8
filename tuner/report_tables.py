"""The tables of a report: the numbers behind its figures, and what has no figure.  Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from tuner.costs import Reals
from tuner.report_data import Record, Row, Spread, Task
from tuner.report_task_figures import interval
from tuner.report_trials import MOST_ROWS, competing, non_dominated, status, thinned
from tuner.report_values import NOTHING, figure_of, mapping, number, said
from tuner.sensitivity_file import Sensitivity
from tuner.trials import TrialResult

# Windows of a table of sensitivities, precisions together.
_MOST_CELLS = 2_000
# Runs of equal windows that a strip spells out.
_MOST_RUNS = 8

_DISTANCES = ("l0", "l1", "l2", "lInf", "cos")


@dataclass(frozen=True, slots=True)
class Strip:
    """A schedule as coloured runs of windows.

    Attributes:
        runs: (precision, its place in the palette, windows) of each run.
        says: The same in words.
    """

    runs: tuple[tuple[str, int, int], ...]
    says: str


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows for people.

    Attributes:
        columns: Their heads; one that begins with `#` holds numbers.
        rows: Cells: text, numbers as text, or strips.
        note: What was left out, or nothing.
    """

    columns: tuple[str, ...]
    rows: Sequence[Sequence[str | Strip]] = field(default_factory=tuple)
    note: str = ""


def strip(schedule: Sequence[str], colours: Mapping[str, int]) -> Strip:
    """Return a schedule as a strip."""
    runs = [(name, colours.get(name, 0), len(list(of))) for name, of in groupby(schedule)]
    words = [f"{name} ×{count}" for name, _, count in runs[:_MOST_RUNS]]  # noqa: RUF001
    return Strip(tuple(runs), ", ".join(words) + (", …" if len(runs) > _MOST_RUNS else ""))


def spread(value: Spread | None, digits: int, scale: float = 1.0) -> str:
    """Return a value with its interval."""
    if value is None:
        return NOTHING
    middle, low, high = (
        figure_of(scale * each, digits) for each in (value.middle, value.low, value.high)
    )
    return f"{middle} [{low}, {high}]"


def compared(task: Task, colours: Mapping[str, int]) -> Table:
    """Return what ships beside what it is compared with."""
    timed = any(row.ms is not None for row in task.rows)
    graded = any(row.accuracy is not None for row in task.rows)
    columns = ["schedule", "windows", "#bits", *(["#ms a sequence"] if timed else [])]
    columns += [*(["#accuracy %"] if graded else []), "#agreement %"]
    return Table(
        columns=tuple(columns),
        rows=[_compared(row, colours, timed, graded) for row in task.rows[:200]],
        note="" if len(task.rows) <= 200 else f"200 of {len(task.rows)} schedules are listed.",
    )


def _compared(
    row: Row, colours: Mapping[str, int], timed: bool, graded: bool
) -> list[str | Strip]:
    return [
        row.label,
        strip(row.schedule, colours),
        figure_of(row.mean_bits, 2),
        *([spread(row.ms, 1)] if timed else []),
        *([spread(row.accuracy, 1, 100.0)] if graded else []),
        spread(row.agreement, 1, 100.0),
    ]


def latencies(task: Task) -> Table:
    """Return milliseconds a sequence of what ships and of what it is compared with."""
    rows: list[list[str | Strip]] = []
    for row in task.rows[:200]:
        if row.ms is not None:
            ends = (row.ms.middle, row.ms.low, row.ms.high)
            rows.append([row.label, *(figure_of(end, 3) for end in ends)])
    return Table(columns=("schedule", "#median, ms", "#low", "#high"), rows=rows)


def sensitivities(task: str, sensitivity: Sensitivity) -> Table | None:
    """Return influence, K and gain of a task by window and precision, with their intervals."""
    table = sensitivity.tasks.get(task)
    if table is None:
        return None
    names = [each.precision.name for each in sensitivity.precisions]
    shape = (sensitivity.windows, len(names))
    ends = {key: interval(table, key, shape) for key in ("kl", "gain")}
    influence = interval(table, "influence", shape[:1])
    rows: list[list[str | Strip]] = []
    for window in range(min(shape[0], _MOST_CELLS // len(names))):
        for column, name in enumerate(names):
            found = []
            for key, values in (("kl", table.kl), ("gain", table.gain)):
                end = ends[key]
                found.append(_with(values, end, (window, column)))
            first = _with(table.influence, influence, (window,))
            passes = figure_of(float(table.passes[window]), 2)
            own = [str(window + 1), passes, first] if column == 0 else ["", "", ""]
            rows.append([*own, name, *found])
    left = shape[0] * len(names) - len(rows)
    return Table(
        columns=("#window", "#passes", "#influence", "precision", "#K", "#gain"),
        rows=rows,
        note=f"{left} further cells are in sensitivity.json." if left else "",
    )


def _with(values: Reals, ends: tuple[Reals, Reals] | None, at: tuple[int, ...]) -> str:
    if ends is None:
        return f"{values[at]:.3g}"
    return f"{values[at]:.3g} [{ends[0][at]:.3g}, {ends[1][at]:.3g}]"


def listed(record: Record) -> tuple[list[TrialResult], str]:
    """Return the trials that tables have room for, and what is said of the others."""
    best = non_dominated(competing(record), lambda trial: trial.cost)
    keep = best if record.chosen is None else [*best, record.chosen]
    rows = thinned(record.trials, keep, MOST_ROWS)
    total = len(record.trials)
    if len(rows) == total:
        return rows, ""
    return rows, f"{len(rows)} of {total:,} trials are listed; trials.jsonl has all."


def trials(record: Record) -> Table:
    """Return every trial: its status, objectives, and how it differs from the first."""
    rows, note = listed(record)
    first = record.trials[0].candidate.values if record.trials else {}
    chosen = None if record.chosen is None else record.chosen.number
    cells: list[list[str | Strip]] = []
    for trial in rows:
        values = trial.candidate.values
        changed = [
            f"{name} {said(value)}" for name, value in values.items() if first.get(name) != value
        ]
        failed = trial.failed is not None
        cells.append(
            [
                str(trial.number),
                status(trial) + (", chosen" if trial.number == chosen else ""),
                NOTHING if failed else _cost(trial),
                NOTHING if failed else figure_of(trial.loss, 2),
                NOTHING if failed else figure_of(trial.memory_mib, 2),
                ", ".join(changed) or "the defaults",
                _missed(trial),
                _against(trial),
            ]
        )
    unit = f"#cost, {record.search.unit}" if record.search.unit else "#cost"
    heads = ("#trial", "status", unit, "#loss, points", "#memory, MiB")
    return Table(
        columns=(*heads, "unlike the first", "missed by", "time over the best then"),
        rows=cells,
        note=note,
    )


def _cost(trial: TrialResult) -> str:
    low, high = trial.interval
    if low == high:
        return figure_of(trial.cost, 2)
    return spread(Spread(trial.cost, low, high), 2)


def _missed(trial: TrialResult) -> str:
    over = {name: value for name, value in trial.violations.items() if value > 0.0}
    if trial.failed is not None or not over:
        return NOTHING
    return ", ".join(f"{name} {value:.3g}" for name, value in over.items())


def _against(trial: TrialResult) -> str:
    known = mapping(trial.against)
    ratio, low, high = (number(known.get(key)) for key in ("ratio", "low", "high"))
    if ratio is None or low is None or high is None:
        return NOTHING
    tie = ", a tie" if low <= 1.0 <= high else ""
    return f"{spread(Spread(ratio, low, high), 3)} of trial {said(known.get('trial'))}{tie}"


def distances(record: Record) -> Table:
    """Return how far each precision's logits are from full precision's, by trial."""
    rows, note = listed(record)
    cells: list[list[str | Strip]] = []
    for trial in rows:
        for name, found in trial.distances.items():
            known = mapping(found)
            each = [_distance(known, key) for key in _DISTANCES]
            cells.append([str(trial.number), name, *each])
    heads = ("#trial", "precision", *(f"#{key}" for key in _DISTANCES))
    return Table(columns=heads, rows=cells[: 2 * MOST_ROWS], note=note)


def _distance(known: Mapping[str, object], key: str) -> str:
    if key not in known:
        return NOTHING
    value = number(known[key])
    return "infinite" if value is None else said(value) if math.isnan(value) else f"{value:.3g}"


def machines(record: Record) -> Table:
    """Return each trial's device, the machine's state while it ran, and its seconds."""
    rows, note = listed(record)
    kinds = list(dict.fromkeys(key for trial in rows for key in trial.seconds))[:8]
    states = list(dict.fromkeys(key for trial in rows for key in trial.machine))[:8]
    cells: list[list[str | Strip]] = [
        [
            str(trial.number),
            said(trial.device, NOTHING) or NOTHING,
            *(figure_of(number(trial.machine.get(key)), 2) for key in states),
            *(figure_of(number(trial.seconds.get(key)), 1) for key in kinds),
        ]
        for trial in rows
    ]
    heads = [*(f"#{key}" for key in states), *(f"#{_kind(key)}" for key in kinds)]
    return Table(columns=("#trial", "device", *heads), rows=cells, note=note)


def _kind(key: str) -> str:
    """Return the head of a column of `seconds`; `built` counts engines."""
    return "engines built" if key == "built" else f"{key}, s"


def seconds(record: Record) -> list[tuple[str, float]]:
    """Return the sums over all trials of what `seconds` holds, by kind."""
    sums: dict[str, float] = {}
    for trial in record.trials:
        for key, value in trial.seconds.items():
            found = number(value)
            if found is not None and math.isfinite(found):
                sums[key] = sums.get(key, 0.0) + found
    return [(_kind(key), total) for key, total in list(sums.items())[:8]]


def built(record: Record) -> Table:
    """Return which kernels each engine of the bundle was built of, beside what was asked."""
    cells: list[list[str | Strip]] = []
    for name, engine in list(record.engines.items())[:MOST_ROWS]:
        kernels = mapping(engine.get("built"))
        cells.append(
            [
                name,
                said(engine.get("precision")),
                said(engine.get("target")),
                ", ".join(f"{kernel}: {said(count)}" for kernel, count in kernels.items())
                or "not read back",
                said(engine.get("options")),
                said(engine.get("file")),
            ]
        )
    heads = ("engine", "asked for", "target", "built: GEMMs by kernel", "options", "file")
    return Table(columns=heads, rows=cells)
