"""A tune folder as values for its report: read, checked, and nothing in it changed.

A tune may be running there, have been interrupted, or be years old: what is missing or cannot be
read is a note, and all the rest is shown.  Only a folder that is none, and a log of trials that is
damaged, are errors.  Numbers that are not finite are NaN here, and told as such.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.document import document_from_text, shorten, text_from_file
from engines.errors import InputError
from tuner.best import best_of
from tuner.folder import COMMAND, CONFIG, TRIALS
from tuner.latencies import latency_source
from tuner.report_values import Object, entries, mapping, number, numbers, said
from tuner.search_file import FORMAT, SEARCH
from tuner.sensitivity_file import Sensitivity
from tuner.space import Knob
from tuner.trials import TrialLog, TrialResult

RESULT, SENSITIVITY, MANIFEST = "result.json", "sensitivity.json", "manifest.json"
DEFAULT_TASK = "default"
BITS = "mean bits"


@dataclass(frozen=True, slots=True)
class Spread:
    """A value with its 95 % interval; NaN where the file's number is not finite."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """A schedule as it was measured on test prompts; None where the file does not say.

    Attributes:
        label: What it stands for in the comparison.
        schedule: The precision of each window.
        mean_bits: Activation bits over the passes.
        ms: Of a sequence.
        accuracy: Share of the prompts.
        agreement: With full precision, share of the prompts.
        n: Prompts.
    """

    label: str
    schedule: tuple[str, ...]
    mean_bits: float | None = None
    ms: Spread | None = None
    accuracy: Spread | None = None
    agreement: Spread | None = None
    n: float | None = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a task came to.

    Attributes:
        name: Its name, or "default".
        rows: What ships, or is best so far, first; then what it is compared with.
        judged: Whether the rows were measured on test prompts.
        reason: In a sentence, or nothing.
        loss: Points lost on test prompts.
        floor: Points that it may lose.
        budget_ms: Most milliseconds a sequence, as measured in the same rounds.
    """

    name: str
    rows: tuple[Row, ...]
    judged: bool = False
    reason: str = ""
    loss: Spread | None = None
    floor: float | None = None
    budget_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class Search:
    """What `search.json` says.

    Attributes:
        goal: "latency", "quality", "memory", or "" if not known.
        facts: (name, value) pairs for people.
        unit: Of a trial's cost.
        latency_from: Where milliseconds are from, if they were not measured here, else "".
        space: The knobs.
        budgets: {task: {budget: bound}}, those that were given.
        floors: {task: points}.
        full: Cost and memory of full precision.
        bits: Activation bits of each precision.
        simulated: Precisions whose activations are only rounded.
        baseline: How full precision compares with the framework: (name, value) pairs.
        environment: (name, value) pairs.
        device: What it ran on.
    """

    goal: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    unit: str = ""
    latency_from: str = ""
    space: tuple[Knob, ...] = ()
    budgets: Mapping[str, Mapping[str, float]]
    floors: Mapping[str, float]
    full: Mapping[str, float]
    bits: Mapping[str, float]
    simulated: frozenset[str] = frozenset()
    baseline: tuple[tuple[str, str], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    device: str = ""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Everything that a tune folder tells.

    Attributes:
        name: Of the folder.
        search: What was asked.
        trials: All that finished, in order.
        chosen: The trial that ships or is the best so far, or None.
        tasks: In the order of the result, `default` last.
        sensitivity: The table, or None.
        result: `result.json` as it stands, {} without one.
        engines: Of the bundle beside the folder, by id, as they stand in its manifest.
        config: (key, value, source) of the effective config.
        files: (name, sha256, bytes) of each file read.
        notes: What is missing, torn or cannot be read, in sentences.
    """

    name: str
    search: Search
    trials: tuple[TrialResult, ...]
    chosen: TrialResult | None
    tasks: tuple[Task, ...]
    sensitivity: Sensitivity | None
    result: Object
    engines: Mapping[str, Object]
    config: tuple[tuple[str, str, str], ...]
    files: tuple[tuple[str, str, int], ...]
    notes: tuple[str, ...]

    @property
    def finished(self) -> bool:
        """Whether there is a result, be it of an interrupted tune."""
        return bool(self.result)

    @property
    def in_bits(self) -> bool:
        """Whether costs are mean bits, for nothing was timed."""
        return self.search.unit == BITS


def read_tune_folder(folder: Path) -> Record:
    """Return what a tune folder tells.

    Raises:
        InputError: It is no tune folder, or its log of trials is damaged.
    """
    if not folder.is_dir() or not any((folder / name).exists() for name in (SEARCH, TRIALS)):
        beside = folder.with_name(f"{folder.name}.tune")
        near = f"did you mean {str(beside)!r}?" if beside.is_dir() else "give BUNDLE.tune, where"
        mend = near if beside.is_dir() else f"{near} cadenza tune -o BUNDLE works"
        raise InputError(f"{str(folder)!r} is not the folder of a tune; {mend}")
    notes: list[str] = []
    log = folder / TRIALS
    try:
        trials, torn = TrialLog(log).peek()
    except OSError as error:
        raise InputError(
            f"{str(log)!r} cannot be read ({error.strerror}); mend its rights"
        ) from error
    if torn:
        notes.append(f"The last line of {TRIALS} is torn and was left out; the file is untouched.")
    if not trials:
        notes.append("No trial has finished yet.")
    search = _search(_object(folder / SEARCH, notes, "what was asked is not known"), notes)
    result = _object(
        folder / RESULT, notes, "the tune is running or was stopped, so nothing is judged"
    )
    bundle = folder.with_name(folder.name.removesuffix(".tune"))
    named = folder.name.endswith(".tune")
    manifest = _object(bundle / MANIFEST, None, "") if named else {}
    made = mapping(manifest.get("tune")).get("identity")
    own = _object(folder / COMMAND, None, "").get("identity")
    engines = {key: mapping(each) for key, each in mapping(manifest.get("engines")).items()}
    if not engines:
        notes.append("No bundle lies beside the folder, so what was built is not shown.")
    elif made not in (own, result.get("identity")):
        notes.append("The bundle beside the folder is another tune's, so it is not shown.")
        engines = {}
    chosen = _chosen(trials, result, search.goal)
    sensitivity = _sensitivity(folder / SENSITIVITY, notes)
    config = _object(folder / CONFIG, notes, "the effective config is not shown")
    return Record(
        name=folder.resolve().name,
        search=search,
        trials=tuple(trials),
        chosen=chosen,
        tasks=_tasks(result, search, chosen, sensitivity),
        sensitivity=sensitivity,
        result=result,
        engines=engines,
        config=tuple(
            (key, said(mapping(each).get("value")), said(mapping(each).get("source"), ""))
            for key, each in config.items()
        ),
        files=_digests(folder, [COMMAND, CONFIG, SEARCH, TRIALS, SENSITIVITY, RESULT]),
        notes=tuple(notes),
    )


def _object(file: Path, notes: list[str] | None, means: str) -> Object:
    """Return the object that a file holds, {} with a note where there is none."""
    problem = ""
    if not file.exists():
        problem = f"{file.name} is missing"
    else:
        try:
            value = json.loads(text_from_file(file, file.name, "what cadenza tune wrote"))
            if isinstance(value, dict):
                return value
            problem = f"{file.name} holds no object"
        except InputError as error:
            problem = str(error)
        except (ValueError, RecursionError) as error:
            problem = f"{file.name} is not valid JSON ({shorten(str(error), quote=False)})"
    if notes is not None:
        notes.append(f"{problem}: {means}.")
    return {}


def _sensitivity(file: Path, notes: list[str]) -> Sensitivity | None:
    if not file.exists():
        notes.append(f"{file.name} is missing: there are no maps of what each window feels.")
        return None
    try:
        text = text_from_file(file, file.name, "what cadenza tune wrote")
        return Sensitivity.from_json(document_from_text(text, file.name))
    except InputError as error:
        notes.append(f"{error}. There are no maps of what each window feels.")
        return None


def _latency_from(found: Object) -> str:
    """Return where the latencies of a search are from; "" where it has none from elsewhere."""
    source, device = said(found.get("source"), ""), said(found.get("device"), "")
    return latency_source(source, device) if source else ""


def _search(found: Object, notes: list[str]) -> Search:
    form = found.get("format")
    if found and form != FORMAT:
        notes.append(f"{SEARCH} has the format {said(form)}, wanted is {FORMAT}: it is not shown.")
        found = {}
    precisions = [mapping(each) for each in entries(found.get("precisions"))]
    facts = [(key, said(found.get(key))) for key in ("goal", "strategy", "seed") if key in found]
    return Search(
        goal=said(found.get("goal"), ""),
        facts=tuple(facts),
        unit=said(found.get("unit"), ""),
        latency_from=_latency_from(mapping(found.get("latencies"))),
        space=tuple(_space(found.get("space"))),
        budgets={task: numbers(each) for task, each in mapping(found.get("budgets")).items()},
        floors=numbers(found.get("floors")),
        full=numbers(found.get("full")),
        bits={said(each.get("name")): number(each.get("bits")) or math.nan for each in precisions},
        simulated=frozenset(
            said(each.get("name")) for each in precisions if each.get("simulated") is True
        ),
        baseline=tuple((key, said(each)) for key, each in mapping(found.get("baseline")).items()),
        environment=tuple(
            (key, said(each)) for key, each in mapping(found.get("environment")).items()
        ),
        device=said(found.get("device"), ""),
    )


def _space(value: object) -> list[Knob]:
    knobs = []
    for each in map(mapping, entries(value)):
        choices = entries(each.get("choices"))
        plain = tuple(one for one in choices if isinstance(one, int | float | str))
        kind = each.get("kind")
        try:
            if kind in ("recipe", "schedule", "backend"):
                knobs.append(Knob(said(each.get("name")), plain, kind, said(each.get("says"))))
        except ValueError:
            continue  # no knob of ours
    return knobs


def _chosen(trials: Sequence[TrialResult], result: Object, goal: str) -> TrialResult | None:
    wanted = result.get("trial")
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        return next((each for each in trials if each.number == wanted), None)
    return best_of(trials, goal or "latency")


def _tasks(
    result: Object, search: Search, chosen: TrialResult | None, table: Sensitivity | None
) -> tuple[Task, ...]:
    verdicts, schedules = mapping(result.get("tasks")), mapping(result.get("schedules"))
    tried = {} if chosen is None else chosen.tasks
    known = (verdicts, schedules, search.floors, tried, {} if table is None else table.tasks)
    names = list(dict.fromkeys(name for each in known for name in each))
    names.sort(key=lambda name: name == DEFAULT_TASK)
    found = []
    for name in names:
        verdict = mapping(verdicts.get(name))
        floor = search.floors.get(name)
        if floor is None and name == DEFAULT_TASK:
            floor = min(search.floors.values(), default=None)
        if verdict:
            rows = [_row(verdict.get("shipped"), "ships")]
            rows += [_row(each, "") for each in entries(verdict.get("compared"))]
            found.append(
                Task(
                    name=name,
                    rows=tuple(rows),
                    judged=True,
                    reason=said(verdict.get("reason"), ""),
                    loss=_spread(verdict.get("loss")),
                    floor=floor,
                    budget_ms=number(verdict.get("budget_ms")),
                )
            )
            continue
        trial = mapping(tried.get(name))
        shipped = next(iter(mapping(schedules.get(name)).values()), None)
        schedule = _schedule(trial.get("schedule") if shipped is None else shipped)
        label = "best so far" if shipped is None else "ships, not judged"
        row = Row(label=label, schedule=schedule, mean_bits=number(trial.get("mean_bits")))
        reason = said(trial.get("reason"), "")
        rows = [row] if schedule else []
        found.append(Task(name=name, rows=tuple(rows), reason=reason, floor=floor))
    return tuple(found)


def _row(value: object, label: str) -> Row:
    each = mapping(value)
    return Row(
        label=said(each.get("label"), label),
        schedule=_schedule(each.get("schedule")),
        mean_bits=number(each.get("mean_bits")),
        ms=_spread(each.get("latency_ms")),
        accuracy=_spread(each.get("accuracy")),
        agreement=_spread(each.get("agreement")),
        n=number(each.get("n")),
    )


def _schedule(value: object) -> tuple[str, ...]:
    return tuple(said(each) for each in entries(value))


def _spread(value: object) -> Spread | None:
    found = [number(each) for each in entries(value)]
    if len(found) != 3:
        return None
    return Spread(*(math.nan if each is None else each for each in found))


def _digests(folder: Path, names: Sequence[str]) -> tuple[tuple[str, str, int], ...]:
    found = []
    for name in names:
        if (folder / name).is_file():
            content = (folder / name).read_bytes()
            found.append((name, hashlib.sha256(content).hexdigest(), len(content)))
    return tuple(found)
