"""The log of trials: one JSON object a line, appended and flushed; the truth of a tune folder.

A study can be rebuilt from it.  A torn last line, what a kill leaves behind, is dropped with a
warning and its trial is run again.
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engines.errors import InputError
from tuner.space import Candidate


@dataclass(frozen=True)
class TrialResult:
    """What a candidate came to.

    Attributes:
        number: Counted from 0 in the order of finishing.
        candidate: One value for each knob.
        cost: Milliseconds a sequence, mean over the tasks; mean bits where nothing is timed.
        loss: Points lost against full precision on tuning prompts, the worst task's.
        violations: By how much each constraint is missed, at most 0 where it is met.
        tasks: What each task, and `default`, came to: schedule, predictions, loss, reason.
        failed: Why the candidate is out, or None.
        nearest: Where it met no budget, the smallest budgets that it could meet.
    """

    number: int
    candidate: Candidate
    cost: float
    loss: float
    violations: dict[str, float] = field(default_factory=dict)
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: str | None = None
    nearest: dict[str, float | None] | None = None

    @property
    def feasible(self) -> bool:
        """Whether every constraint is met."""
        return self.failed is None and all(value <= 0.0 for value in self.violations.values())


class TrialLog:
    """An append-only file of trial results."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[TrialResult]:
        """Return the finished trials; a torn last line is cut off with a warning.

        Raises:
            InputError: A line before the last is not a trial.
        """
        if not self.path.exists():
            return []
        content = self.path.read_bytes()
        lines = content.split(b"\n")
        if lines[-1]:
            print(f"warning: dropped a torn last line of {self.path}", file=sys.stderr)
            with self.path.open("r+b") as file:
                file.truncate(len(content) - len(lines[-1]))
        results: list[TrialResult] = []
        for number, line in enumerate(lines[:-1], start=1):
            try:
                result = _result(json.loads(line))
                if result.number != len(results):
                    raise ValueError(f"its number is {result.number}, expected {len(results)}")
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
                raise InputError(
                    f"{self.path}, line {number}: not a trial ({error}); remove the file to run "
                    f"its trials again, what they measured is in the cache"
                ) from error
            results.append(result)
        return results

    def append(self, result: TrialResult) -> None:
        """Add a finished trial; it survives a kill from here on."""
        line = json.dumps(asdict(result), sort_keys=True) + "\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def _result(value: object) -> TrialResult:
    """Return the result of a line.

    Raises:
        KeyError, TypeError, ValueError: It is none.
    """
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, got {type(value).__name__}")
    candidate = Candidate.from_values(value["candidate"])
    result = TrialResult(**(value | {"candidate": candidate}))
    for name in ("violations", "tasks"):
        if not isinstance(getattr(result, name), dict):
            raise TypeError(f"{name} must be an object")
    for number in (result.cost, result.loss, *result.violations.values()):
        if not math.isfinite(number):
            raise ValueError(f"costs and losses must be finite, got {number}")
    return result
