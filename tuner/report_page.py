"""The page of a report: one HTML file that needs no network, no script and no font.

Every text is escaped by the template, and cleared of what could reorder or break its line.  Equal
folders give equal pages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines import __version__
from engines.errors import require
from engines.precision import FULL_PRECISION
from tuner import report_figures as figures
from tuner import report_tables as tables
from tuner import report_task_figures as task_figures
from tuner import report_words as words
from tuner.report_data import BITS, Record, Task
from tuner.report_svg import PALETTE
from tuner.report_tables import Table
from tuner.report_trials import MOST_DRAWN, competing, drawn, thinned
from tuner.report_values import figure_of, said, shown

# The first bytes of every report: what carries them may be replaced by another.
MARKER = "<!doctype html><!-- cadenza-report/1 -->"

_TEMPLATE = Path(__file__).parent / "template"

# Tasks and kinds of failures that a page has room for, and trials that importance is told from.
_MOST_TASKS, _MOST_FAILURES, _MOST_TOLD = 40, 50, 1_000

# Facts of the result that are shown, in order.
_FACTS = (
    *("bundle", "digest", "identity", "trial", "trials", "failed", "mode", "seed", "candidate"),
    *("max_loss", "tightened", "over_budget", "engines"),
)


def page(record: Record) -> str:
    """Return the page of a tune folder.

    Raises:
        MissingExtra: jinja2 is not installed.
    """
    jinja2 = require("jinja2", "report", "cadenza report")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATE, encoding="utf-8"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalized,
    )
    template = environment.get_template("report.html")
    return f"{MARKER}\n{template.render(**_context(record))}\n"


def colours(record: Record) -> dict[str, int]:
    """Return the place of each precision in the palette: full precision first, then by bits."""
    bits = {
        **({} if record.sensitivity is None else _bits_of(record)),
        **record.search.bits,
    }
    for task in record.tasks:
        for row in task.rows:
            for name in row.schedule:
                bits.setdefault(name, math.nan)
    order = sorted(
        bits,
        key=lambda name: (
            name != FULL_PRECISION.name,
            -bits[name] if math.isfinite(bits[name]) else math.inf,
            name,
        ),
    )
    return {name: place % len(PALETTE) for place, name in enumerate(order)}


def _bits_of(record: Record) -> dict[str, float]:
    assert record.sensitivity is not None
    return {each.precision.name: each.precision.bits for each in record.sensitivity.precisions}


def _finalized(value: Any) -> Any:
    """Return what the template prints: texts cleared, markup as it is."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return shown(value)
    return value


def _context(record: Record) -> dict[str, Any]:
    palette = colours(record)
    shares, no_shares = _importance(record)
    kinds, more = words.failures(record.trials, _MOST_FAILURES)
    total = len(competing(record))
    on_page = min(len(drawn(record)), MOST_DRAWN)
    return {
        "version": __version__,
        "css": (_TEMPLATE / "report.css").read_text("utf-8"),
        "name": record.name,
        "states": words.states(record),
        "asked": words.asked(record),
        "limits": _limits(record),
        "sentences": [
            (task, words.sentence(task, record), words.verdict(task))
            for task in record.tasks[:_MOST_TASKS]
        ],
        "notes": record.notes,
        "legend": _legend(record, palette),
        "front": figures.front(record),
        "memory": figures.memory(record),
        "thinned": f"{on_page} of {total:,} trials are drawn." if on_page < total else "",
        "elsewhere": sum(trial.failed is None for trial in record.trials) - total,
        "trials": tables.trials(record),
        "tasks": [
            _task(index, task, record, palette)
            for index, task in enumerate(record.tasks[:_MOST_TASKS])
        ],
        "tasks_left": max(len(record.tasks) - _MOST_TASKS, 0),
        "costs": figures.costs(record),
        "in_bits": record.search.unit == BITS,
        "history": figures.history(record),
        "objective": figures.objective_label(record),
        "importance": figures.importance(shares),
        "importance_table": _shares(shares),
        "no_importance": no_shares,
        "space": _space(record),
        "built": tables.built(record),
        "failures": kinds,
        "failures_left": more,
        "distances": tables.distances(record),
        "machines": tables.machines(record),
        "seconds": [(kind, figure_of(value, 1)) for kind, value in tables.seconds(record)],
        "baseline": record.search.baseline,
        "environment": record.search.environment,
        "facts": [(key, said(record.result[key])) for key in _FACTS if key in record.result],
        "config": Table(columns=("key", "value", "from"), rows=record.config),
        "files": Table(
            columns=("file", "#bytes", "sha256"),
            rows=[(name, f"{size:,}", digest) for name, digest, size in record.files],
        ),
    }


def _task(index: int, task: Task, record: Record, palette: Mapping[str, int]) -> dict[str, Any]:
    table = record.sensitivity
    strip = tables.strip(task.rows[0].schedule, palette) if task.rows else None
    return {
        "index": index,
        "name": task.name,
        "sentence": words.sentence(task, record),
        "verdict": words.verdict(task),
        "reason": task.reason,
        "strip": strip,
        "compared": tables.compared(task, palette) if task.rows else None,
        "heat": None if table is None else task_figures.heat(task, index, table, palette),
        "heat_table": None if table is None else tables.sensitivities(task.name, table),
        "latencies": task_figures.latencies(task, index),
        "latency_table": tables.latencies(task),
        "judged": task.judged,
    }


def _limits(record: Record) -> Table:
    heads = ("task", "#points it may lose", "#ms a sequence", "#mean bits", "#memory, MiB")
    return Table(columns=heads, rows=words.limits(record))


def _legend(record: Record, palette: Mapping[str, int]) -> list[tuple[str, int, str]]:
    """Return (precision, place in the palette, what it is)."""
    bits = {**({} if record.sensitivity is None else _bits_of(record)), **record.search.bits}
    rounded = set(record.search.simulated)
    if record.sensitivity is not None:
        rounded |= {
            each.precision.name
            for each in record.sensitivity.precisions
            if each.precision.simulated
        }
    found = []
    for name, place in palette.items():
        says = f"{bits[name]:g} bits" if math.isfinite(bits.get(name, math.nan)) else ""
        found.append((name, place, says + (", simulated" if name in rounded else "")))
    return found


def _importance(record: Record) -> tuple[Mapping[str, Mapping[str, float]], str]:
    """Return what each knob explains of each objective, or {} and why it cannot be told."""
    if not record.search.space:
        return {}, "search.json does not say what was searched."
    try:
        from tuner.search import importance
    except ModuleNotFoundError as error:
        package = shown(error.name or "a package")
        return {}, f"It needs {package}; install it with: pip install 'cadenza[tune]'"
    told = thinned(competing(record), (), _MOST_TOLD)
    try:
        shares = importance(record.search.space, told)
    except (ValueError, TypeError, KeyError):
        shares = {}
    if not any(shares.values()):
        return {}, "It cannot be told: there are too few trials, or all of them are alike."
    return shares, ""


def _shares(shares: Mapping[str, Mapping[str, float]]) -> Table:
    knobs = sorted({knob for each in shares.values() for knob in each})
    rows = [
        [knob, *(figure_of(100 * each.get(knob, 0.0), 1) for each in shares.values())]
        for knob in knobs
    ]
    return Table(columns=("knob", *(f"#{name}, %" for name in shares)), rows=rows)


def _space(record: Record) -> Table:
    return Table(
        columns=("knob", "kind", "choices, the default first", "what it changes"),
        rows=[
            (knob.name, knob.kind, said(knob.choices), knob.says) for knob in record.search.space
        ],
    )
