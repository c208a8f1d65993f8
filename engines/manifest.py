"""The manifest of a bundle as values, and the digests of what decides its answers.

`BUNDLE.md` states the format, `engines.parse` reads it.  Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from engines.buckets import Buckets
from engines.files import FileEntry
from engines.model import ModelInfo
from engines.precision import Precision
from engines.schedule import SamplerConfig, Schedule

FORMAT = "cadenza-bundle/1"
MANIFEST, GOLDEN, TOKENIZER = "manifest.json", "golden.jsonl", "tokenizer/tokenizer.json"
DEFAULT_TASK = "default"
TAILS = ("serve", "trace")

# Optional features that this version knows, so that a bundle may list them in `requires`.
FEATURES: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Shape:
    """Least, best and most rows of a batch, and tokens of a prompt."""

    batch: tuple[int, int, int]
    prompt: tuple[int, int, int]

    def __post_init__(self) -> None:
        for name in ("batch", "prompt"):
            low, best, high = getattr(self, name)
            if not 1 <= low <= best <= high:
                raise ValueError(
                    f"1 <= min <= opt <= max must hold for {name}, got {low}:{best}:{high}"
                )


@dataclass(frozen=True, kw_only=True)
class Graph:
    """An ONNX file of the bundle.

    Attributes:
        file: Its path.
        tail: "serve" or "trace".
        precision: What it computes in.
        windows: The windows that it serves.
        weights: Every file that its external data names.
        scales: Activation scales of each window [W][S] where they are an input, else None.
    """

    file: str
    tail: str
    precision: str
    windows: tuple[int, ...]
    weights: tuple[str, ...]
    scales: tuple[tuple[float, ...], ...] | None


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What a target runs: a file, and what was read back when it was built."""

    file: str
    graph: str
    precision: str
    target: str
    sha256: str
    bytes: int
    built: Mapping[str, object] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A schedule for one task on one target, with what was asked, predicted and measured."""

    schedule: Schedule
    budgets: Mapping[str, object]
    measured: Mapping[str, object]
    predicted: Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class BundleTask:
    """A task of the bundle: its sampler settings, and a schedule for each target."""

    windows: int
    sampler: SamplerConfig
    says: str
    targets: Mapping[str, Tuned]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that a bundle says of itself; whatever it names is there and fits together.

    Attributes:
        buckets: Shapes that passes of plans are padded to; None where none are declared.
        raw: As it stands in the file, unknown keys included.
    """

    model: ModelInfo
    sampler: SamplerConfig
    targets: tuple[str, ...]
    shape: Shape
    buckets: Buckets | None
    precisions: Mapping[str, Precision]
    families: Mapping[str, int]
    graphs: Mapping[str, Graph]
    engines: Mapping[str, Engine]
    tasks: Mapping[str, BundleTask]
    environment: Mapping[str, object]
    degraded: bool
    files: Mapping[str, FileEntry]
    raw: Mapping[str, object]

    def serving(self, target: str) -> dict[str, Engine]:
        """Return the engine of each precision that answers on a target."""
        return {
            engine.precision: engine
            for engine in self.engines.values()
            if engine.target == target and self.graphs[engine.graph].tail == "serve"
        }

    def schedule_digest(self, task: str, target: str) -> str:
        """Return the digest of what decides a task's answers, given the engines."""
        return schedule_digest(
            self.tasks[task].targets[target].schedule, self.tasks[task].sampler, target
        )

    @property
    def digest(self) -> str:
        """The digest of schedules and engines: equal where two bundles answer alike.

        Measurements, environment and texts for people are left out.
        """
        return _digest(
            {
                "model": asdict(self.model),
                "tokenizer": self.files[TOKENIZER].sha256,
                "engines": {
                    name: self._engine_identity(engine) for name, engine in self.engines.items()
                },
                "tasks": {
                    name: {target: self.schedule_digest(name, target) for target in task.targets}
                    for name, task in self.tasks.items()
                },
            }
        )

    def _engine_identity(self, engine: Engine) -> dict[str, object]:
        graph = self.graphs[engine.graph]
        return {
            "sha256": engine.sha256,
            "target": engine.target,
            "precision": engine.precision,
            "options": dict(engine.options),
            "scales": graph.scales,
            "weights": {path: self.files[path].sha256 for path in graph.weights},
        }


def schedule_digest(schedule: Schedule, sampler: SamplerConfig, target: str) -> str:
    """Return the hex sha256 of a schedule, the sampler that follows it, and where it runs."""
    return _digest(
        {"schedule": schedule.precisions, "sampler": sampler.to_json(), "target": target}
    )


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
