"""The closing table of a tune: what ships for each task, beside what it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engines.precision import Precision
from engines.schedule import Schedule
from engines.terminal import legend, strip, table


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One schedule as it was measured on one task.

    Attributes:
        label: What it stands for in the comparison.
        schedule: The precision of each window.
        mean_bits: Mean activation bits over the passes, as run on the test prompts.
        ms: (median, low, high) milliseconds a sequence at the declared shape, 95 %, with the
            passes as run; None where the schedule is simulated.
        accuracy: (share, low, high) of test prompts answered right, 95 %; None without a grader.
        agreement: (share, low, high) of test prompts answered as full precision does, 95 %.
        n: Test prompts.
    """

    label: str
    schedule: Schedule
    mean_bits: float
    ms: tuple[float, float, float] | None
    accuracy: tuple[float, float, float] | None
    agreement: tuple[float, float, float]
    n: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What ships for a task, and why.

    Attributes:
        task: Its name, or "default".
        shipped: As it was measured on test prompts.
        others: Full precision, each uniform schedule, the best uniform one within the budget, and
            the same bits permuted.
        reason: In a sentence.
        loss: (points, low, high) lost against full precision on test prompts, 95 %; of `default`
            the worst task's.
        budget_ms: Most milliseconds a sequence that were asked for, a share of full precision's
            taken of what it took in the same rounds; None where nothing was asked.
    """

    task: str
    shipped: Measured
    others: tuple[Measured, ...]
    reason: str
    loss: tuple[float, float, float]
    budget_ms: float | None = None

    @property
    def quality_shown_to(self) -> float:
        """Upper end of the loss's interval, points."""
        return self.loss[2]


def closing_table(
    verdicts: Sequence[Verdict],
    precisions: Sequence[Precision],
    ascii_: bool = False,
    latency_from: str = "",
) -> str:
    """Return the table that ends a tune, with its legend and the reasons.

    Args:
        verdicts: Of each task and `default`.
        precisions: That their schedules may run.
        ascii_: Draw schedules in letters.
        latency_from: Where milliseconds are from, if they were not measured here.
    """
    bits = {precision.name: precision.bits for precision in precisions}
    rows: list[list[object]] = []
    for verdict in verdicts:
        for index, each in enumerate((verdict.shipped, *verdict.others)):
            rows.append(
                [
                    verdict.task if index == 0 else "",
                    each.label,
                    strip(each.schedule, bits, ascii_),
                    f"{each.mean_bits:.2f}",
                    _range(each.ms, 1.0, 1),
                    _range(each.accuracy, 100.0, 1),
                    _range(each.agreement, 100.0, 1),
                    _range(verdict.loss, 1.0, 2) if index == 0 else None,
                ]
            )
    header = ["task", "schedule", "windows", "bits", "ms a sequence", "accuracy %", "agreement %"]
    header.append("loss, points")
    lines = [table(header, rows), "", legend(bits, ascii_), ""]
    if latency_from:
        lines += [f"No engine was timed here: milliseconds are {latency_from}.", ""]
    lines += [f"{verdict.task}: {verdict.reason}{_budget(verdict)}" for verdict in verdicts]
    return "\n".join(lines)


def _budget(verdict: Verdict) -> str:
    """Return whether the latency asked for was met when it was measured again, in words."""
    if verdict.budget_ms is None or verdict.shipped.ms is None:
        return ""
    median, low, _ = verdict.shipped.ms
    if median <= verdict.budget_ms:
        met = "met"
    elif low <= verdict.budget_ms:
        met = "met within the spread"
    else:
        met = f"missed by {100 * (median / verdict.budget_ms - 1.0):.1f} %"
    return f"; budget {verdict.budget_ms:.1f} ms: {met}"


def _range(value: tuple[float, float, float] | None, scale: float, digits: int) -> str | None:
    if value is None:
        return None
    middle, low, high = (scale * part for part in value)
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as `tune --json` prints it."""
    return {
        "shipped": _measured_json(verdict.shipped),
        "compared": [_measured_json(each) for each in verdict.others],
        "reason": verdict.reason,
        "loss": list(verdict.loss),
        "quality_shown_to": verdict.quality_shown_to,
        "budget_ms": verdict.budget_ms,
    }


def _measured_json(each: Measured) -> dict[str, Any]:
    return {
        "label": each.label,
        "schedule": list(each.schedule.precisions),
        "mean_bits": each.mean_bits,
        "latency_ms": None if each.ms is None else list(each.ms),
        "accuracy": None if each.accuracy is None else list(each.accuracy),
        "agreement": list(each.agreement),
        "n": each.n,
    }
