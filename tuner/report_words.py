"""What a report says in sentences: what ships, what falls short, what was asked.  Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from engines.precision import FULL_PRECISION
from tuner.report_data import Record, Row, Task
from tuner.report_tables import spread
from tuner.report_trials import FEASIBLE, status
from tuner.report_values import NOT_FINITE, entries, figure_of, mapping, number, said
from tuner.trials import TrialResult

# What a state is: as asked, to know, or to mend.
GOOD, NOTE, BAD = "good", "note", "bad"

_ASKED = {"target": "target", "exports": "exports", "search.mode": "mode"}


def states(record: Record) -> list[tuple[str, str, str]]:
    """Return (kind, word, sentence) of each state that a reader must know at once, worst first."""
    result, found = record.result, []
    if not record.finished:
        found.append(
            (BAD, "Not finished", "The tune is running, or was stopped. Shown is what it has.")
        )
    elif result.get("complete") is not True:
        says = "Not judged on test prompts; the same command finishes it."
        found.append((BAD, "Interrupted", says))
    over = number(result.get("over_budget"))
    if over is not None:
        says = f"Timed as a whole, a schedule takes {figure_of(over, 3)} times its latency."
        found.append((BAD, "Over budget", says))
    short = mapping(result.get("short"))
    if short:
        tasks = ", ".join(f"{name} ({_ends(each)} points)" for name, each in short.items())
        says = f"The loss allowed was not shown on test prompts for {tasks}."
        found.append((BAD, "Quality not shown", says))
    if result.get("degraded") is True:
        says = "The bundle is marked as degraded: it does not show all that was asked for."
        found.append((BAD, "Degraded", says))
    worked = [trial for trial in record.trials if trial.failed is None]
    if record.trials and not worked:
        found.append((BAD, "All failed", "No trial came to a result; the reasons are below."))
    elif worked and not any(trial.feasible for trial in worked):
        found.append((BAD, "None feasible", "No trial met every limit."))
    if _has_nan(record):
        says = "Some numbers of the files are not finite: they are told as such, and not drawn."
        found.append((BAD, "Not finite", says))
    if simulated(record):
        says = "Activations are rounded, not computed, at their bits: no latency claim is made."
        found.append((NOTE, "Simulated", says))
    every = number(result.get("trials"))
    if every is not None and every > len(record.trials) > 0:
        says = (
            f"The study was shared: {every - len(record.trials):.0f} of its {every:.0f} trials "
            f"are other workers', in their own folders, and not shown."
        )
        found.append((NOTE, "Shared", says))
    if where := record.search.latency_from:
        says = f"No engine was timed where this was tuned: milliseconds are {where}."
        found.append((NOTE, "Latencies from elsewhere", says))
    missed = [
        f"{task.name}: {says}"
        for task in record.tasks
        for kind, says in verdict(task)
        if kind == BAD
    ]
    if missed and not any(kind == BAD for kind, _, _ in found):
        found.insert(0, (BAD, "Not all met", f"{'; '.join(missed[:10])}."))
    if not any(kind == BAD for kind, _, _ in found):
        says = "Everything that was asked for was shown on test prompts."
        found.insert(0, (GOOD, "Complete", says))
    return found


def simulated(record: Record) -> bool:
    """Return whether what ships, or all that was tried, computes in rounded floating point."""
    used = {name for task in record.tasks for row in task.rows[:1] for name in row.schedule}
    return record.in_bits or bool(used & record.search.simulated)


def asked(record: Record) -> list[tuple[str, str]]:
    """Return what was asked, in (name, value) pairs."""
    config = {key: value for key, value, _ in record.config}
    found = list(record.search.facts)
    found += [(label, config[key]) for key, label in _ASKED.items() if key in config]
    if record.search.device:
        found.append(("device", record.search.device))
    failed = sum(trial.failed is not None for trial in record.trials)
    feasible = sum(status(trial) == FEASIBLE for trial in record.trials)
    counts = f"{len(record.trials):,} ({feasible:,} feasible, {failed:,} failed)"
    found.append(("trials", counts))
    full = record.search.full
    if "cost" in full:
        memory = figure_of(full.get("memory_mib"), 2)
        cost = f"{figure_of(full['cost'], 2)} {record.search.unit}, {memory} MiB"
        found.append(("full precision", cost))
    if record.chosen is not None:
        words = "trial {} of the log" if record.finished else "trial {} so far"
        found.append(("chosen", words.format(record.chosen.number)))
    return found


def limits(record: Record) -> list[list[str]]:
    """Return what each task may lose and cost: a row a task; no row where nothing is known."""
    search = record.search
    names = dict.fromkeys([*search.floors, *search.budgets])
    rows = []
    for name in names:
        budget = search.budgets.get(name, {})
        bounds = (budget.get("latency_ms"), budget.get("mean_bits"), budget.get("memory_mib"))
        each = [search.floors.get(name), *bounds]
        rows.append([name, *("none" if value is None else figure_of(value, 2) for value in each)])
    return rows


def sentence(task: Task, record: Record) -> str:
    """Return what ships for a task, in a plain sentence that begins with a verb."""
    if not task.rows or not task.rows[0].schedule:
        return "has no schedule yet."
    row = task.rows[0]
    verb = "ships" if record.finished else "would ship, as of now,"
    parts = [f"{verb} {_windows(row.schedule)}"]
    if row.ms is not None:
        parts.append(f"{spread(row.ms, 1)} ms a sequence{_share(task, row)}")
    elif row.mean_bits is not None:
        parts.append(f"{figure_of(row.mean_bits, 2)} mean bits, not timed")
    if task.loss is not None:
        allowed = "" if task.floor is None else f" (allowed: {_plain(task.floor)})"
        lost = spread(task.loss, 2)
        tested = "" if row.n is None else f" on {figure_of(row.n, 0)} test prompts"
        parts.append(f"{lost} points lost{tested}{allowed}")
    elif not task.judged:
        parts.append("not judged on test prompts")
    return f"{parts[0]}: {'; '.join(parts[1:])}." if parts[1:] else f"{parts[0]}."


def verdict(task: Task) -> list[tuple[str, str]]:
    """Return (kind, words) of how a task stands to what it was held to."""
    found = []
    floor = math.nan if task.floor is None else task.floor
    if task.loss is not None and math.isfinite(task.loss.high + floor):
        kept = task.loss.high <= floor
        found.append((GOOD if kept else BAD, "quality shown" if kept else "quality not shown"))
    ms = task.rows[0].ms if task.rows else None
    if task.budget_ms is not None and ms is not None and math.isfinite(ms.middle + task.budget_ms):
        if ms.middle <= task.budget_ms:
            found.append((GOOD, "latency met"))
        elif ms.low <= task.budget_ms:
            found.append((NOTE, "latency met within the spread"))
        else:
            over = 100 * (ms.middle / task.budget_ms - 1.0) if task.budget_ms else math.inf
            found.append((BAD, f"latency missed by {figure_of(over, 1)} %"))
    return found


def failures(
    trials: Sequence[TrialResult], most: int
) -> tuple[list[tuple[str, str, list[str], str]], int]:
    """Return (reason, trials, last lines, nearest) of each kind of failure, and how many more.

    Args:
        trials: All.
        most: Kinds.
    """
    groups: dict[str, list[TrialResult]] = {}
    for trial in trials:
        if trial.failed is not None:
            groups.setdefault(said(trial.failed), []).append(trial)
    found = []
    for reason, of in list(groups.items())[:most]:
        numbers = ", ".join(str(trial.number) for trial in of[:20])
        words = f"trial{'s' if len(of) > 1 else ''} {numbers}{', …' if len(of) > 20 else ''}"
        log = next((list(map(said, trial.log[-40:])) for trial in of if trial.log), [])
        nearest = next((said(trial.nearest) for trial in of if trial.nearest is not None), "")
        found.append((reason, words, log, nearest))
    return found, max(len(groups) - most, 0)


def _windows(schedule: Sequence[str]) -> str:
    counts: dict[str, int] = {}
    for name, of in groupby(sorted(schedule)):
        counts[name] = len(list(of))
    total = len(schedule)
    if len(counts) == 1:
        return f"{schedule[0]} in {f'all {total} windows' if total > 1 else 'its one window'}"
    ordered = [f"{name} in {counts[name]}" for name in dict.fromkeys(schedule)]
    return f"{', '.join(ordered[:-1])} and {ordered[-1]} of {total} windows"


def _share(task: Task, row: Row) -> str:
    """Return how long a schedule takes as a share of full precision, in words."""
    full = next(
        (each.ms for each in task.rows if set(each.schedule) == {FULL_PRECISION.name}), None
    )
    if full is None or row.ms is None or set(row.schedule) == {FULL_PRECISION.name}:
        return ""
    ratio = row.ms.middle / full.middle if full.middle > 0 else math.nan
    return "" if not math.isfinite(ratio) else f", {ratio:.2f} of full precision's"


def _plain(value: float) -> str:
    return f"{value:g}" if math.isfinite(value) else NOT_FINITE


def _has_nan(record: Record) -> bool:
    """Return whether a number that the page is about is not finite."""
    found = [*record.search.floors.values(), *record.search.full.values()]
    for budget in record.search.budgets.values():
        found += budget.values()
    for task in record.tasks:
        spreads = [task.loss, *(each for row in task.rows for each in (row.ms, row.accuracy))]
        spreads += [row.agreement for row in task.rows]
        for each in spreads:
            found += [] if each is None else [each.middle, each.low, each.high]
    return not all(map(math.isfinite, found))


def _ends(value: object) -> str:
    found = [number(each) for each in entries(value)]
    if len(found) != 3:
        return NOT_FINITE
    middle, low, high = (figure_of(each, 2) for each in found)
    return f"{middle} [{low}, {high}]"
