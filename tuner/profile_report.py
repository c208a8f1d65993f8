"""What a profile says: the closing table, what `--json` prints, and what a dry run foresees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engines.terminal import duration, table
from tuner.costs import Reals
from tuner.gain import TaskSensitivity


def indistinct(found: TaskSensitivity) -> str:
    """Return the sentence for a task none of whose windows can be told from another."""
    return (
        f"no two windows can be told apart on {found.n_prompts} prompts, so a mixed schedule "
        f"would follow noise; profile more prompts, or take a uniform one"
    )


def closing_table(found: Mapping[str, TaskSensitivity]) -> str:
    """Return what was measured for people: a row a task and window, with 95 % intervals.

    K is the base's, the gain that of the most precise candidate over it; `alike` are the windows
    whose gains cannot be told from this one's.
    """
    rows: list[list[object]] = []
    notes: list[str] = []
    for name, each in found.items():
        base, best = (each.precisions.index(one) for one in (each.base, each.best))
        for window in range(len(each.gain)):
            others = [
                str(other + 1)
                for other, alike in enumerate(each.alike[window])
                if alike and other != window
            ]
            rows.append(
                [
                    name,
                    window + 1,
                    _spread(each.kl, each.kl_low, each.kl_high, (window, base)),
                    _spread(each.influence, each.influence_low, each.influence_high, (window,)),
                    _spread(each.gain, each.gain_low, each.gain_high, (window, best)),
                    " ".join(others) or "-",
                ]
            )
        if each.indistinct:
            notes.append(f"{name}: {indistinct(each)}")
    first = next(iter(found.values()))
    header = [
        "task",
        "window",
        f"K of {first.base}",
        "I",
        f"gain of {first.best} ({first.proxy})",
        "alike",
    ]
    return "\n".join([table(header, rows), *notes])


def _spread(value: Reals, low: Reals, high: Reals, at: tuple[int, ...]) -> str:
    return f"{value[at]:.3g} [{low[at]:.3g}, {high[at]:.3g}]"


def summary(found: Mapping[str, TaskSensitivity]) -> dict[str, Any]:
    """Return the tasks of a profile as `--json` has them."""
    return {
        name: {
            "n_prompts": each.n_prompts,
            "rows": each.rows,
            "base": each.base,
            "best": each.best,
            "proxy": each.proxy,
            "kl": each.kl.tolist(),
            "influence": each.influence.tolist(),
            "gain": each.gain.tolist(),
            "alike": each.alike,
            "indistinct": each.indistinct,
        }
        for name, each in found.items()
    }


def foreseen(rows: Mapping[str, int], seconds: float | None) -> str:
    """Return a dry run for people: passes by task, and the time.

    Args:
        rows: Forward passes of single rows, by task, at most.
        seconds: That they take, about.
    """
    total: list[list[object]] = [*([name, count] for name, count in rows.items())]
    total.append(["all", sum(rows.values())])
    took = (
        ""
        if seconds is None
        else (
            f"\nabout {duration(seconds)}, if every precision is as fast as full precision, apart "
            f"from what the cache holds and the timing of passes"
        )
    )
    return table(["task", "passes of a row"], total) + took
