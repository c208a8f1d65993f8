"""The log of trials: one JSON object a line, appended and flushed; the truth of a tune folder.

A study can be rebuilt from it.  A torn last line, what a kill leaves behind, is dropped with a
warning and its trial is run again.
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from engines.errors import InputError
from tuner.space import Candidate


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What a candidate came to.

    Attributes:
        number: From 0 in the order of finishing; in a shared study, the study's own number.
        candidate: One value for each knob.
        cost: Milliseconds a sequence, mean over the tasks; mean bits where nothing is timed.
        low: Lower end of the cost's 95 % interval, against the yardstick of the same rounds.
        high: Upper end.
        loss: Points lost against full precision on tuning prompts, the worst task's.
        memory_mib: Weights of the engines that its schedules use.
        violations: By how much each constraint is missed, at most 0 where it is met.
        tasks: What each task came to: schedule, predictions, loss, agreement, reason.
        distances: Of each precision's logits from full precision's, a first look:
            {precision: {l0, l1, l2, lInf, cos}}; None where it is infinite.
        device: What it was measured on; only results of equal devices compete.
        machine: Load and clocks while it was measured.
        seconds: Spent on it: `build`, `measure`, `evaluate`, `all`.
        failed: Why the candidate is out, in a line, or None.
        log: The last lines of its child's output, where it failed.
        nearest: Where it met no budget, the smallest budgets that it could meet.
        against: How it was timed against the best trial before it, in the same rounds:
            {trial, ratio, low, high}, or None.
    """

    number: int
    candidate: Candidate
    cost: float
    loss: float
    low: float | None = None
    high: float | None = None
    memory_mib: float = 0.0
    violations: dict[str, float] = field(default_factory=dict)
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    distances: dict[str, dict[str, float | None]] = field(default_factory=dict)
    device: str = ""
    machine: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failed: str | None = None
    log: tuple[str, ...] = ()
    nearest: dict[str, float | None] | None = None
    against: dict[str, float] | None = None

    @property
    def feasible(self) -> bool:
        """Whether every constraint is met."""
        return self.failed is None and all(value <= 0.0 for value in self.violations.values())

    @property
    def interval(self) -> tuple[float, float]:
        """The cost's 95 % interval; the cost itself where it is not measured."""
        low = self.cost if self.low is None else self.low
        return low, self.cost if self.high is None else self.high

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return plain | {"candidate": self.candidate.values, "log": list(self.log)}

    @classmethod
    def from_json(cls, value: object) -> TrialResult:
        """Return the result of plain data that came from elsewhere.

        Raises:
            KeyError, TypeError, ValueError: It is none.
        """
        if not isinstance(value, dict):
            raise TypeError(f"expected an object, got {type(value).__name__}")
        given = {"candidate": Candidate.of(value["candidate"]), "log": tuple(value.get("log", ()))}
        result = cls(**(value | given))
        for name in ("violations", "tasks", "distances", "machine", "seconds"):
            if not isinstance(getattr(result, name), dict):
                raise TypeError(f"{name} must be an object")
        if type(result.number) is not int:
            raise TypeError(f"number must be a whole one, got {result.number!r}")
        for task in result.tasks.values():
            schedule = task["schedule"]
            if not (schedule and all(isinstance(each, str) for each in schedule)):
                raise TypeError(f"a schedule must be a list of precisions, got {schedule!r}")
        for state in (*result.machine.values(), *result.seconds.values()):
            if type(state) not in (int, float):
                raise TypeError(f"states and seconds must be numbers, got {state!r}")
        numbers = (result.cost, result.loss, result.memory_mib, *result.violations.values())
        for number in (*numbers, *(each for each in (result.low, result.high) if each)):
            if not math.isfinite(number):
                raise ValueError(f"costs and losses must be finite, got {number}")
        if not result.interval[0] <= result.interval[1]:
            raise ValueError(f"low <= high must hold, got {result.low}, {result.high}")
        return result


class TrialLog:
    """An append-only file of trial results."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[TrialResult]:
        """Return the finished trials; a torn last line is cut off with a warning.

        Raises:
            InputError: A line before the last is not a trial.
        """
        results, torn = self.peek()
        if torn:
            print(f"warning: dropped a torn last line of {self.path}", file=sys.stderr)
            with self.path.open("r+b") as file:
                file.truncate(self.path.stat().st_size - torn)
        return results

    def peek(self) -> tuple[list[TrialResult], int]:
        """Return the finished trials and the bytes of a torn last line; changes nothing.

        Raises:
            InputError: A line before the last is not a trial.
        """
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return [], 0
        results: list[TrialResult] = []
        for number, line in enumerate(lines[:-1], start=1):
            try:
                result = TrialResult.from_json(json.loads(line))
                if results and result.number <= results[-1].number:
                    raise ValueError(f"its number is {result.number}, after {results[-1].number}")
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
                raise InputError(
                    f"{self.path}, line {number}: not a trial ({error}); remove the file to run "
                    f"its trials again, what they measured is in the cache"
                ) from error
            results.append(result)
        return results, len(lines[-1])

    def append(self, result: TrialResult) -> None:
        """Add a finished trial; it survives a kill from here on."""
        line = json.dumps(result.to_json(), sort_keys=True, allow_nan=False) + "\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
