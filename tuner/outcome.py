"""What a tune ended with, what it has not shown, and whether it was done before."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.bundle import Bundle, is_bundle, read_bundle
from engines.errors import BundleError
from engines.precision import Precision
from tuner.closing_table import Verdict, verdict_json


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a tune ended with.

    Attributes:
        bundle: As written, or as found.
        verdicts: On each task and `default`; empty where nothing was judged now.
        precisions: That a schedule of the verdicts may run.
        latency_from: Where milliseconds are from, if they were not measured here, else "".
        shortfall: What was asked for and not shown, or None; the bundle says it is degraded.
        interrupted: Whether it was stopped and the bundle is the best so far.
        summary: For `--json`.
    """

    bundle: Bundle
    verdicts: tuple[Verdict, ...]
    precisions: tuple[Precision, ...]
    latency_from: str
    shortfall: str | None
    interrupted: bool
    summary: Mapping[str, Any]


def tune_of(output: Path) -> Mapping[str, Any]:
    """Return what the bundle at the output says of the tune that made it; {} without one."""
    if not is_bundle(output):
        return {}
    try:
        made = json.loads((output / "manifest.json").read_text(encoding="utf-8")).get("tune")
    except (OSError, ValueError, AttributeError):
        return {}
    return made if isinstance(made, dict) else {}


def finished(
    output: Path, identity: str, trials: int, force: bool, timeout_s: float | None = None
) -> Bundle | None:
    """Return the bundle that this very command wrote before, whole, or None.

    Args:
        output: Where it would be.
        identity: The command's.
        trials: That are asked for; of a bundle of fewer, the search goes on.
        force: Whether a damaged one may be replaced.
        timeout_s: Of the search now; one that ended by a shorter one goes on.

    Raises:
        BundleError: It is damaged, and may not be replaced.
    """
    made = tune_of(output)
    if made.get("identity") != identity or not made.get("complete"):
        return None
    ended_by = made.get("timeout_s")  # of a search that its time cut short
    if isinstance(ended_by, int | float):
        if timeout_s is None or timeout_s > ended_by:
            return None
    elif made.get("asked_trials", 0) < trials:
        return None
    try:
        return read_bundle(output)
    except BundleError as error:
        if force:
            return None
        raise BundleError(f"{error}, with --force") from error


def shortfall(made: Mapping[str, Any]) -> str | None:
    """Return what a tune asked for and has not shown, with the mend, or None.

    Args:
        made: What the manifest says of the tune.
    """
    if not made.get("complete"):
        return "interrupted, so not judged on test prompts; the same command finishes it"
    if made.get("over_budget") is not None:
        return (
            f"timed as a whole, a schedule takes {made['over_budget']:.3f} times its latency; "
            f"allow more --latency-ms"
        )
    short = made.get("short", {})
    if short:
        floors = made["max_loss"]
        least = min(floors.values())
        allowed = "/".join(f"{floor:g}" for floor in dict.fromkeys(floors.values()))
        tasks = ", ".join(
            f"{name} {m:.2f} [{low}, {high}]" for name, (m, low, high) in short.items()
        )
        more = any(low <= floors.get(name, least) for name, (_, low, _) in short.items())
        return (
            f"a loss of {allowed} points or fewer was not shown on test prompts for "
            f"{tasks}; {'tune with more prompts (--mode), or ' if more else ''}"
            f"allow more --max-loss"
        )
    return None


def summary(
    bundle: Bundle, verdicts: Sequence[Verdict], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what `--json` prints and `result.json` holds."""
    manifest = bundle.manifest
    return {
        "bundle": str(bundle.folder),
        "digest": bundle.digest,
        "degraded": manifest.degraded,
        "schedules": {
            name: {
                target: list(tuned.schedule.precisions) for target, tuned in task.targets.items()
            }
            for name, task in manifest.tasks.items()
        },
        "tasks": {verdict.task: verdict_json(verdict) for verdict in verdicts},
        **facts,
    }
