"""How RESULTS.md writes numbers, intervals and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def milliseconds(interval: Mapping[str, float]) -> str:
    """Return a latency with its interval."""
    return f"{interval['mean']:.1f} [{interval['low']:.1f}, {interval['high']:.1f}]"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def points(interval: Mapping[str, float]) -> str:
    """Return an interval of points."""
    return f"{interval['mean']:.1f} [{interval['low']:.1f}, {interval['high']:.1f}]"


def number(value: float | None) -> str:
    """Return a number, or n/a for none."""
    return "n/a" if value is None else f"{value:.2f}"


def bits(value: float | None) -> str:
    """Return mean bits, or none."""
    return "none" if value is None else f"{value:.2f}"


def met(met: bool) -> str:
    """Return whether an aim was met, in a word."""
    return "met" if met else "missed"


def yes(true: bool) -> str:
    """Return yes or no."""
    return "yes" if true else "no"


def at_most(value: float | None, bound: float) -> bool:
    """Return whether there is a value and it is at most a bound."""
    return value is not None and value <= bound


def at_least(value: float | None, bound: float) -> bool:
    """Return whether there is a value and it is at least a bound."""
    return value is not None and value >= bound


def direction(interval: Mapping[str, float]) -> str:
    """Return which way an interval of a difference points, in words."""
    if interval["low"] > 0:
        return "better, shown"
    if interval["high"] < 0:
        return "worse, shown"
    return "not told apart"
