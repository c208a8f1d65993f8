"""`sensitivity.json`: the table on which an allocation is based; `tune` leaves it in its folder.

Format `cadenza-sensitivity/1`.  Everything an allocation needs for a set of tasks stands in it: no
model and no engine is asked again.  Keys that are not known are kept as they are.  What is wrong
with a file is an `InputError` that names the place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from engines.document import Document
from engines.errors import InputError
from engines.precision import Precision
from engines.schedule import SamplerConfig
from tuner.costs import Costs, Reals
from tuner.gain import TaskSensitivity

FORMAT = "cadenza-sensitivity/1"

# What costs and gains may be at most, and costs other than 0 at least the inverse of: their sums,
# products and quotients stay far from where floating point ends.
_LARGEST, _LEAST = 1e60, 1e-60

_TASK_KEYS = (
    "steps",
    "gen_length",
    "block_length",
    "sampler",
    "passes",
    "latency_ms",
    "kl",
    "influence",
    "gain",
    "n_prompts",
)
# Of a TaskSensitivity: what has a place of its own in the file.
_OWN_KEYS = ("precisions", "base", "kl", "influence", "gain", "n_prompts")

_PRECISION_KEYS = (
    *("name", "family", "weight_bits", "bits"),
    *("simulated", "latency_ms", "memory_mib"),
)
_KEYS = (
    "format",
    "precisions",
    "families",
    "activation_mib",
    "base",
    "shape",
    "switch_ms",
    "windows",
    "tasks",
)


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """A precision as it was measured.

    Attributes:
        precision: What it is.
        latency_ms: Of a pass at the table's shape; None if not known, as for all simulated ones.
        memory_mib: What it adds to its family; None if not known.
        extra: Further keys of the file.
    """

    precision: Precision
    latency_ms: float | None = None
    memory_mib: float | None = None
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskTable:
    """A task's sensitivity: W windows, P precisions of the table.

    Attributes:
        steps: Passes of an answer, the most of them by threshold.
        gen_length: Tokens of an answer.
        block_length: Tokens denoised together.
        sampler: Name of the rule by which tokens are committed.
        passes: Expected in each window [W].
        latency_ms: Of a pass by window [W, P], NaN if not known; None: the precisions' own.
        kl: E[K] [W, P].
        influence: E[I] [W].
        gain: Over the base [W, P].
        n_prompts: That the means are over.
        extra: Further keys of the file, for instance intervals.
    """

    steps: int
    gen_length: int
    block_length: int
    sampler: str
    passes: Reals
    latency_ms: Reals | None
    kl: Reals
    influence: Reals
    gain: Reals
    n_prompts: int
    extra: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        found: TaskSensitivity,
        sampler: SamplerConfig,
        passes: Reals,
        latency_ms: Reals | None = None,
        grader: str | None = None,
    ) -> TaskTable:
        """Return what was found as the file has it; intervals and the like among `extra`."""
        content = found.to_json()
        known = {"threshold": sampler.threshold, "grader": grader}
        return cls(
            steps=sampler.steps,
            gen_length=sampler.gen_length,
            block_length=sampler.block_length,
            sampler=sampler.rule,
            passes=passes,
            latency_ms=latency_ms,
            kl=found.kl,
            influence=found.influence,
            gain=found.gain,
            n_prompts=found.n_prompts,
            extra={
                **{key: value for key, value in known.items() if value is not None},
                **{key: value for key, value in content.items() if key not in _OWN_KEYS},
            },
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Sensitivity:
    """The table.

    Attributes:
        precisions: All that were profiled, P.
        families: MiB of the weights of each family.
        activation_mib: The largest activation memory.
        base: Name of the precision that gains are counted from.
        shape: For which latencies hold; as the file has it.
        switch_ms: Of a change of precision between windows.
        windows: W.
        tasks: By name.
        extra: Further keys of the file.
    """

    precisions: tuple[Profiled, ...]
    families: Mapping[str, float]
    activation_mib: float
    base: str
    shape: object
    switch_ms: float
    windows: int
    tasks: Mapping[str, TaskTable]
    extra: Mapping[str, object] = field(default_factory=dict)

    def candidates(self, names: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the precisions that compete: those named, else all executed ones.

        Raises:
            InputError: A name is unknown or given twice, nothing is left, or simulated ones are
                named beside executed ones.
        """
        known = {each.precision.name: each.precision for each in self.precisions}
        missing = [name for name in names if name not in known]
        if missing:
            raise InputError(
                f"the table has no precision {missing[0]!r}, only {', '.join(known)}; name one of "
                f"these"
            )
        if len(set(names)) < len(names):
            raise InputError(f"each precision is named once, got {', '.join(names)}; name it once")
        chosen = tuple(names) or tuple(name for name, each in known.items() if not each.simulated)
        if not chosen:
            raise InputError(
                f"all precisions of the table are simulated, and these compete only when named; "
                f"add {' '.join(f'--precision {name}' for name in known)}"
            )
        if len({known[name].simulated for name in chosen}) > 1:
            executed = [name for name in chosen if not known[name].simulated]
            raise InputError(
                f"simulated and executed precisions cannot compete, got {', '.join(chosen)}; "
                f"leave out {', '.join(executed)}, or name only these"
            )
        return chosen

    def gain(self, task: str, names: Sequence[str]) -> Reals:
        """Return the gains of a task at the named precisions [W, len(names)]."""
        return self.tasks[task].gain[:, self._columns(names)]

    def costs(self, task: str, names: Sequence[str]) -> Costs:
        """Return the costs of a task at the named precisions."""
        columns = self._columns(names)
        rows = [self.precisions[column] for column in columns]
        table = self.tasks[task]
        own = np.array([row.latency_ms for row in rows], dtype=np.float64)
        return Costs(
            names=tuple(names),
            bits=np.array([row.precision.bits for row in rows]),
            passes=table.passes,
            latency_ms=own if table.latency_ms is None else table.latency_ms[:, columns],
            families=tuple(row.precision.family for row in rows),
            family_mib=self.families,
            alone_mib=np.array([row.memory_mib for row in rows], dtype=np.float64),
            activation_mib=self.activation_mib,
            switch_ms=self.switch_ms,
            simulated=tuple(row.precision.simulated for row in rows),
        )

    def _columns(self, names: Sequence[str]) -> list[int]:
        order = [each.precision.name for each in self.precisions]
        return [order.index(name) for name in names]

    def to_json(self) -> dict[str, object]:
        """Return the file's content; NaN becomes null."""
        return {
            **self.extra,
            "format": FORMAT,
            "precisions": [
                {
                    **each.extra,
                    "name": each.precision.name,
                    "family": each.precision.family,
                    "weight_bits": each.precision.weight_bits,
                    "bits": each.precision.bits,
                    "simulated": each.precision.simulated,
                    "latency_ms": each.latency_ms,
                    "memory_mib": each.memory_mib,
                }
                for each in self.precisions
            ],
            "families": dict(self.families),
            "activation_mib": self.activation_mib,
            "base": self.base,
            "shape": self.shape,
            "switch_ms": self.switch_ms,
            "windows": self.windows,
            "tasks": {
                name: {
                    **table.extra,
                    "steps": table.steps,
                    "gen_length": table.gen_length,
                    "block_length": table.block_length,
                    "sampler": table.sampler,
                    "passes": table.passes.tolist(),
                    "latency_ms": None if table.latency_ms is None else _nulled(table.latency_ms),
                    "kl": table.kl.tolist(),
                    "influence": table.influence.tolist(),
                    "gain": table.gain.tolist(),
                    "n_prompts": table.n_prompts,
                }
                for name, table in self.tasks.items()
            },
        }

    @classmethod
    def from_json(cls, document: Document) -> Sensitivity:
        """Return the table of a file's content.

        Raises:
            InputError: Another format, a key is missing, shapes disagree, a number is not finite
                or of the wrong sign, a name is given twice, the base or the tasks are missing.
        """
        form = document["format"].text()
        if form != FORMAT:
            document.fail(f"the format is {form!r}, wanted is {FORMAT!r}; make it with profile")
        precisions = tuple(_precision(each) for each in document["precisions"].entries())
        names = [each.precision.name for each in precisions]
        if not names or len(set(names)) < len(names):
            document["precisions"].fail(
                f"names must be given and differ, got {', '.join(names) or 'none'}; rename them"
            )
        base = document["base"].text()
        if base not in names:
            document["base"].fail(f"{base!r} is none of {', '.join(names)}; name one of these")
        families = document.get("families")
        if families is not None and (stored := families.mapping()):
            for each in document["precisions"].entries():
                if each["family"].text() not in stored:
                    each["family"].fail(
                        f"{each['family'].text()!r} is none of the families, "
                        f"{', '.join(stored)}; add it there with its MiB"
                    )
        activation = document.get("activation_mib")
        windows = document["windows"].integer(1, 100_000)
        tasks = {
            name: _task(task, windows, len(names)) for name, task in document["tasks"].items()
        }
        if not tasks:
            document["tasks"].fail("there are no tasks; profile at least one")
        return cls(
            precisions=precisions,
            families={}
            if families is None
            else {name: _number(size, 0.0) for name, size in families.items()},
            activation_mib=0.0 if activation is None else _number(activation, 0.0),
            base=base,
            shape=document["shape"].value,
            switch_ms=_number(document["switch_ms"], 0.0),
            windows=windows,
            tasks=tasks,
            extra=_extra(document, _KEYS),
        )


def _precision(document: Document) -> Profiled:
    latency, memory = document.get("latency_ms"), document.get("memory_mib")
    precision = Precision(
        name=document["name"].name(),
        family=document["family"].name(),
        weight_bits=_positive(document["weight_bits"]),
        bits=_positive(document["bits"]),
        simulated=document["simulated"].flag(),
    )
    return Profiled(
        precision=precision,
        latency_ms=None if latency is None else _positive(latency),
        memory_mib=None if memory is None else _number(memory, 0.0),
        extra=_extra(document, _PRECISION_KEYS),
    )


def _task(document: Document, windows: int, count: int) -> TaskTable:
    passes = _row(document["passes"], windows, "windows", 0.0)
    if not passes.sum() > 0:
        document["passes"].fail("must sum to more than 0; give the expected passes of each window")
    latency = document.get("latency_ms")
    return TaskTable(
        steps=document["steps"].integer(1),
        gen_length=document["gen_length"].integer(1),
        block_length=document["block_length"].integer(1),
        sampler=document["sampler"].name(),
        passes=passes,
        latency_ms=None if latency is None else _latencies(latency, windows, count),
        kl=_rows(document["kl"], windows, count),
        influence=_row(document["influence"], windows, "windows"),
        gain=_rows(document["gain"], windows, count),
        n_prompts=document["n_prompts"].integer(0),
        extra=_extra(document, _TASK_KEYS),
    )


def _row(document: Document, count: int, of: str, least: float = -np.inf) -> Reals:
    entries = document.entries()
    if len(entries) != count:
        document.fail(f"must have an entry for each of {count} {of}, got {len(entries)}; mend it")
    return np.array([_number(entry, least) for entry in entries])


def _rows(document: Document, windows: int, count: int) -> Reals:
    entries = document.entries()
    if len(entries) != windows:
        document.fail(
            f"must have a row for each of {windows} windows, got {len(entries)}; mend it"
        )
    return np.array([_row(entry, count, "precisions") for entry in entries])


def _latencies(document: Document, windows: int, count: int) -> Reals:
    rows = document.entries()
    if len(rows) != windows or any(len(row.entries()) != count for row in rows):
        document.fail(f"must have {windows} rows, a window each, of {count} precisions; mend it")
    return np.array(
        [
            [np.nan if entry.value is None else _positive(entry) for entry in row.entries()]
            for row in rows
        ]
    )


def _number(document: Document, least: float) -> float:
    value = document.number()
    if value < least:
        document.fail(f"must be at least {least:g}, got {value}; mend it")
    if abs(value) > _LARGEST:
        document.fail(f"must be at most {_LARGEST:g}, got {value}; mend it")
    if least == 0 and 0 < value < _LEAST:
        document.fail(f"must be 0 or at least {_LEAST:g}, got {value}; mend it")
    return value


def _positive(document: Document) -> float:
    value = _number(document, -np.inf)
    if value <= 0:
        document.fail(f"must be positive, got {value}; mend it, or null if it is not known")
    return _number(document, 0.0)


def _extra(document: Document, known: Sequence[str]) -> dict[str, object]:
    return {key: value for key, value in document.mapping().items() if key not in known}


def _nulled(values: Reals) -> list[list[float | None]]:
    return [[None if np.isnan(value) else float(value) for value in row] for row in values]
