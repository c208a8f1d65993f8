"""What `tune` and `profile` are asked for: frozen values, checked once; all defaults live here."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from engines.distance import DISTANCES
from engines.errors import InputError
from engines.targets import target_from_name
from tuner.gain import PROXIES
from tuner.sensitivity import INFLUENCES, Influence
from tuner.space import NEVER_PINNED, Value
from tuner.strategies import STRATEGIES

OBJECTIVES = ("latency", "quality", "memory")


@dataclass(frozen=True, slots=True)
class Effort:
    """How much a mode spends.

    Attributes:
        trials: Candidates of the search, the export's own recipe included.
        calibration: Prompts a task whose traces give the sensitivity.
        tuning: Prompts a task that choices are measured on.
        test: Prompts a task that the bundle is judged on, once.
        repeats: Measured generations of each engine.
        refinements: Schedules a task that the measured refinement may try.
        permutations: Random permutations of a mixed schedule that it is compared with.
    """

    trials: int
    calibration: int
    tuning: int
    test: int
    repeats: int
    refinements: int
    permutations: int


MODES: dict[str, Effort] = {
    "quick": Effort(4, 64, 192, 400, 9, 5, 2),
    "default": Effort(12, 256, 256, 1000, 15, 12, 8),
    "extensive": Effort(40, 512, 512, 2000, 25, 30, 16),
}


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """The arguments of a tune.

    Attributes:
        export: Folder that `cadenza export` wrote.
        output: The bundle to write.
        others: Further exports of the same checkpoint, by other quantizers.
        target: Where the engines run.
        precisions: Names that compete; empty means every executed one of the export.
        mean_bits: Upper bound on mean activation bits, or None.
        latency_ms: Upper bound on milliseconds a sequence, or None.
        latency_share: The same as a share of full precision's measured latency, or None.
        memory_mib: Upper bound on weights and activations, or None.
        max_loss: Points that a task may lose against full precision.
        objective: "latency", "quality" or "memory"; None: quality under budgets, else latency.
        tasks: As given to `--task`; empty means the export's.
        graders: How answers to prompt files are judged: GRADER, or NAME=GRADER for one task.
        mode: A key of MODES.
        trials: In place of the mode's, or None.
        strategy: Of the search.
        timeout_s: Seconds after which no trial starts, or None.
        seed: Of prompts, search and bootstrap.
        proxy: By which windows are scored; see `tuner.gain`.
        storage: URL of a database for the study, or None.
        baselines: Files of schedules written by hand, which compete and are judged too.
        max_losses: Points that a task of that name may lose, in place of `max_loss`.
        gates: Largest distance, by its name, that a candidate's logits may have from full
            precision's at a first look.
        space: By the knob's name its choices in place of the built-in ones, the export's own
            beside them; or one value, no tuple: the knob is pinned to it.
        latencies: File of latencies of engines that do not run here, or None.
        gpu: The GPU for which they are predicted where there is no file; None for a usual one.
        allow_precision_mismatch: Whether a plan that was not built as asked ships, with a warning.
        child_limit_s: Seconds that a build, a measurement or an evaluation may say nothing.
        child_memory_mib: Address space that their process may have, or None.
        cache_limit_mib: What the cache may hold when the tune ends, or None.
    """

    export: Path
    output: Path
    others: tuple[Path, ...] = ()
    target: str = "cpu"
    precisions: tuple[str, ...] = ()
    mean_bits: float | None = None
    latency_ms: float | None = None
    latency_share: float | None = None
    memory_mib: float | None = None
    max_loss: float = 1.0
    objective: str | None = None
    tasks: tuple[str, ...] = ()
    graders: tuple[str, ...] = ()
    mode: str = "default"
    trials: int | None = None
    strategy: str = "tpe"
    timeout_s: float | None = None
    seed: int = 0
    proxy: str = PROXIES[0]
    storage: str | None = None
    baselines: tuple[Path, ...] = ()
    max_losses: tuple[tuple[str, float], ...] = ()
    gates: tuple[tuple[str, float], ...] = (("cos", 0.5),)
    space: tuple[tuple[str, Value | tuple[Value, ...]], ...] = ()
    latencies: Path | None = None
    gpu: str | None = None
    allow_precision_mismatch: bool = False
    child_limit_s: float = 1800.0
    child_memory_mib: float | None = None
    cache_limit_mib: float | None = None

    def __post_init__(self) -> None:
        # One spelling: SMs of one engine may be named in any order.
        object.__setattr__(self, "target", target_from_name(self.target).name)
        for name in (
            "mean_bits",
            "latency_ms",
            "latency_share",
            "memory_mib",
            "timeout_s",
            "child_limit_s",
            "child_memory_mib",
            "cache_limit_mib",
        ):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} > 0 must hold, got {value}")
        if self.latency_ms is not None and self.latency_share is not None:
            raise ValueError("give a latency in milliseconds or in percent, not both")
        if not (math.isfinite(self.max_loss) and self.max_loss >= 0):
            raise ValueError(f"max_loss >= 0 must hold, got {self.max_loss}")
        if self.objective is not None and self.objective not in OBJECTIVES:
            raise ValueError(
                f"objective is one of {', '.join(OBJECTIVES)}, got {self.objective!r}"
            )
        if self.mode not in MODES:
            raise ValueError(f"mode is one of {', '.join(MODES)}, got {self.mode!r}")
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy is one of {', '.join(STRATEGIES)}, got {self.strategy!r}")
        for name, limit in self.gates:
            if name not in DISTANCES:
                raise ValueError(f"a gate is one of {', '.join(DISTANCES)}, got {name!r}")
            if not limit >= 0:
                raise ValueError(f"the gate {name} must be at least 0, got {limit}")
        for name, points in self.max_losses:
            if not (math.isfinite(points) and points >= 0):
                raise ValueError(f"max_loss of {name!r} must be at least 0, got {points}")
        for name, choices in self.choices.items():
            if not choices or len(set(map(repr, choices))) != len(choices):
                raise ValueError(f"knob {name!r} needs different choices, got {choices}")
        for name in self.pinned:
            if name in NEVER_PINNED:
                raise ValueError(
                    f"knob {name!r} cannot be pinned, for what ships is chosen after the search; "
                    f"give a list of choices, or name the candidates with --precision"
                )
        if self.proxy not in PROXIES:
            raise ValueError(f"proxy is one of {', '.join(PROXIES)}, got {self.proxy!r}")
        if self.trials is not None and self.trials < 1:
            raise ValueError(f"trials >= 1 must hold, got {self.trials}")
        if self.seed < 0:
            raise ValueError(f"seed >= 0 must hold, got {self.seed}")
        if len(set(self.precisions)) != len(self.precisions):
            raise ValueError(f"each precision is named once, got {', '.join(self.precisions)}")

    @property
    def choices(self) -> dict[str, tuple[Value, ...]]:
        """Choices of knobs in place of the built-in ones, by name; less pinned knobs."""
        return {name: each for name, each in self.space if isinstance(each, tuple)}

    @property
    def pinned(self) -> dict[str, Value]:
        """The one value of each pinned knob, by name."""
        return {name: each for name, each in self.space if not isinstance(each, tuple)}

    @property
    def effort(self) -> Effort:
        """What the mode spends."""
        return MODES[self.mode]

    @property
    def has_latency(self) -> bool:
        """Whether a latency is asked for."""
        return self.latency_ms is not None or self.latency_share is not None

    def latency_bound(self, full_ms: float) -> float | None:
        """Return the most milliseconds a sequence, given full precision's; None: no bound."""
        return self.latency_ms if self.latency_share is None else self.latency_share * full_ms

    def floor_of(self, task: str) -> float:
        """Return the points that a task may lose."""
        return dict(self.max_losses).get(task, self.max_loss)

    @property
    def budgeted(self) -> bool:
        """Whether any budget is asked for."""
        budgets = (self.mean_bits, self.latency_ms, self.latency_share, self.memory_mib)
        return any(budget is not None for budget in budgets)

    @property
    def goal(self) -> str:
        """The objective that is followed."""
        if self.objective is not None:
            return self.objective
        return "quality" if self.budgeted else "latency"

    def identity(self, export_digest: str, prompts_digest: str) -> str:
        """Return the digest of everything that decides the result: equal means the same command.

        Paths are not part of it, but the contents of the export, of prompt files, of baselines and
        of a grader's module are: `prompts_digest` holds the last three.
        """
        elsewhere = (
            *("output", "storage", "timeout_s", "baselines", "graders", "others", "latencies"),
            *("child_limit_s", "child_memory_mib", "cache_limit_mib"),
            "trials",  # more of them go on where fewer ended
        )
        parts = asdict(self) | {"export": export_digest, "tasks": prompts_digest}
        parts |= dict.fromkeys(elsewhere)
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def latency_from_text(given: str | None) -> tuple[float | None, float | None]:
    """Return (milliseconds, share of full precision) of `--latency-ms`; one is None at least.

    Raises:
        InputError: It is neither a number nor a percentage.
    """
    if given is None:
        return None, None
    number, share = given.removesuffix("%"), given.endswith("%")
    try:
        value = float(number)
    except ValueError as error:
        raise InputError(
            f"--latency-ms takes milliseconds or a percentage, got {given!r}; "
            f"for instance 12.5 or 80%"
        ) from error
    return (None, value / 100.0) if share else (value, None)


POSITIONS = ("all", "scored")


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """The arguments of a profile.

    Attributes:
        export: Folder that `cadenza export` wrote.
        output: The table to write.
        target: Where the engines run.
        precisions: Names beside full precision; empty means every one of the export.
        tasks: `NAME` or `NAME=FILE.jsonl`; empty means the export's.
        graders: How answers to prompt files are judged, as for a tune: nothing is graded here, but
            what does not fit is refused, and the table says it.
        prompts_per_task: Calibration prompts of each task; a file may have fewer.
        proxy: By which windows are scored; see `tuner.gain`.
        influence: Its form; see `tuner.influence`.
        positions: Whether all positions count or only those that are scored.
        windows: W; None for the export's.
        seed: Of prompts and bootstrap.
        repeats: Measured generations of each engine.
    """

    export: Path
    output: Path
    target: str = "cpu"
    precisions: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    graders: tuple[str, ...] = ()
    prompts_per_task: int = 256
    proxy: str = PROXIES[0]
    influence: Influence = "remask"
    positions: str = "all"
    windows: int | None = None
    seed: int = 0
    repeats: int = MODES["default"].repeats

    def __post_init__(self) -> None:
        for name in ("prompts_per_task", "windows", "repeats"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} >= 1 must hold, got {value}")
        if self.seed < 0:
            raise ValueError(f"seed >= 0 must hold, got {self.seed}")
        for name, known in (
            ("proxy", PROXIES),
            ("influence", INFLUENCES),
            ("positions", POSITIONS),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} is one of {', '.join(known)}, got {getattr(self, name)!r}"
                )
        if len(set(self.precisions)) != len(self.precisions):
            raise ValueError(f"each precision is named once, got {', '.join(self.precisions)}")

    def identity(self, export_digest: str, prompts_digest: str) -> str:
        """Return the digest of everything that decides the table: equal means the same command."""
        parts = asdict(self) | {"export": export_digest, "tasks": prompts_digest}
        parts |= {"output": None, "graders": None}  # the digest of the prompts holds these
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
