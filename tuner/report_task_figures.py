"""The figures of one task: what each window feels at each precision, and latencies with spread.

Each function returns an `svg` element, or None where there is nothing to draw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tuner.costs import Reals
from tuner.report_data import Task
from tuner.report_svg import (
    CARD,
    CHOSEN,
    HEAT,
    INK,
    MUTED,
    PALETTE,
    canvas,
    inlined,
    padded,
    plain_axes,
    short,
)
from tuner.report_trials import drawable
from tuner.report_values import entries, number
from tuner.sensitivity_file import Sensitivity, TaskTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Indices = NDArray[np.int64]

# Windows, precisions and schedules that a figure has room for.
MOST_WINDOWS, MOST_PRECISIONS, MOST_SCHEDULES = 128, 12, 40
# Windows whose cells have room for a number.
_ROOM = 8
# Powers of ten that a map of K spans; what is less is as light as the least.
_DECADES = 5.0


def interval(table: TaskTable, name: str, shape: tuple[int, ...]) -> tuple[Reals, Reals] | None:
    """Return the ends of a table's intervals, or None where the file has none of that shape."""
    ends = []
    for end in ("low", "high"):
        given = entries(table.extra.get(f"{name}_{end}"))
        rows = [entries(each) for each in given] if len(shape) == 2 else [given]
        flat = [number(each) for row in rows for each in row]
        known = [each for each in flat if each is not None and math.isfinite(each)]
        if len(flat) != len(known) or len(flat) != math.prod(shape):
            return None
        ends.append(np.array(known).reshape(shape))
    return ends[0], ends[1]


def heat(
    task: Task, index: int, sensitivity: Sensitivity, colours: Mapping[str, int]
) -> str | None:
    """Draw influence, K and gain by window and precision, with the schedule that ships below.

    Args:
        task: What ships.
        index: Unlike any other task's.
        sensitivity: Has a table of the task, or there is no figure.
        colours: Place of each precision in the palette.
    """
    from matplotlib.ticker import MaxNLocator

    table = sensitivity.tasks.get(task.name)
    names = [each.precision.name for each in sensitivity.precisions]
    if table is None or sensitivity.windows > MOST_WINDOWS or len(names) > MOST_PRECISIONS:
        return None
    windows = sensitivity.windows
    order = sorted(range(len(names)), key=lambda at: -sensitivity.precisions[at].precision.bits)
    rows = 21 * len(names)
    heights = [66, 66, rows, rows, 22]
    with canvas(640, sum(heights) + 140) as figure:
        panels = figure.subplots(5, 1, sharex=True, height_ratios=heights)
        influence, gains, maps_k, maps_gain, strip = panels
        at = np.arange(1.0, windows + 1.0)
        _lines(influence, at, table.influence, interval(table, "influence", (windows,)), INK)
        influence.set_title("influence I", loc="left")
        ends = interval(table, "gain", (windows, len(names)))
        for column in order:
            of = None if ends is None else (ends[0][:, column], ends[1][:, column])
            colour = _colour(names[column], colours)
            _lines(gains, at, table.gain[:, column], of, colour)
        gains.set_title(f"gain over {short(sensitivity.base)}, with 95 % bands", loc="left")
        if ends is None:
            gains.set_title(f"gain over {short(sensitivity.base)}", loc="left")
        labels = [short(names[column], 12) for column in order]
        _map(maps_k, table.kl[:, order], labels, "K, on a scale of powers of ten", True)
        _map(maps_gain, table.gain[:, order], labels, "gain", False)
        _strip(strip, task, windows, colours)
        strip.set_xlabel("window")
        strip.set_xlim(0.5, windows + 0.5)
        strip.xaxis.set_major_locator(MaxNLocator(integer=True))
        said = (
            f"{task.name}: influence, K and gain of {windows} windows at {len(names)} precisions"
        )
        return inlined(figure, f"heat{index}", said)


def latencies(task: Task, index: int) -> str | None:
    """Draw milliseconds a sequence of what ships and of what it is compared with."""
    rows = [
        (row, row.ms)
        for row in task.rows[:MOST_SCHEDULES]
        if row.ms is not None and all(map(math.isfinite, (row.ms.middle, row.ms.low, row.ms.high)))
    ]
    if not rows:
        return None
    with canvas(640, 60 + 21 * len(rows)) as figure:
        axes = figure.add_subplot()
        for place, (row, ms) in enumerate(rows):
            ships = row is task.rows[0]
            colour = CHOSEN if ships else MUTED
            axes.plot([ms.low, ms.high], [place, place], color=colour, linewidth=2.0)
            axes.plot([ms.middle], [place], "o", color=colour, markersize=6)
            axes.text(
                1.01,
                place,
                f"{ms.middle:.4g}",
                transform=axes.get_yaxis_transform(),
                va="center",
                color=INK if ships else MUTED,
            )
        values = [end for _, ms in rows for end in (ms.low, ms.middle, ms.high)]
        budget = task.budget_ms
        if budget is not None and drawable(budget):
            values.append(budget)
            axes.axvline(budget, color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
            axes.set_title(f"dashed: budget {budget:.4g} ms", loc="right", size=10.5, color=MUTED)
        axes.set_xlim(*padded(values))
        axes.set_yticks(range(len(rows)), [short(row.label, 34) for row, _ in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlabel("ms a sequence, with 95 % interval")
        plain_axes(axes, "x")
        said = f"{task.name}: milliseconds a sequence of {len(rows)} schedules"
        return inlined(figure, f"latency{index}", said)


def _lines(
    axes: Axes, at: Reals, values: Reals, ends: tuple[Reals, Reals] | None, colour: str
) -> None:
    from matplotlib.ticker import MaxNLocator

    if ends is not None:
        axes.fill_between(at, ends[0], ends[1], color=colour, alpha=0.18, linewidth=0)
    axes.plot(at, values, "o-", color=colour, markersize=4, linewidth=1.5)
    plain_axes(axes, "y")
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.yaxis.set_major_formatter("{x:.6g}")


def _map(axes: Axes, values: Reals, labels: Sequence[str], title: str, by_ten: bool) -> None:
    """Draw values [W, P] as cells, a row a precision, on a scale of their own."""
    from matplotlib.patches import Rectangle

    levels = _levels(values, by_ten)
    for (window, row), level in np.ndenumerate(levels):
        axes.add_patch(
            Rectangle((window + 0.5, row - 0.5), 1, 1, facecolor=HEAT[level], edgecolor=CARD)
        )
        if len(values) <= _ROOM:
            colour = CARD if level >= 5 else INK
            said = f"{values[window, row]:.2g}"
            axes.text(window + 1, row, said, ha="center", va="center", size=10, color=colour)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(title, loc="left")
    ends = f"lightest {values.min():.2g}, darkest {values.max():.2g}"
    axes.set_title(ends, loc="right", size=10.5, color=MUTED)


def _levels(values: Reals, by_ten: bool) -> Indices:
    """Return the level of each value, 0 to the darkest; 0 everywhere where all are one."""
    if by_ten:
        positive = values[values > 0]
        if not positive.size:
            return np.zeros(values.shape, np.int64)
        top = np.log10(positive.max())
        least = max(np.log10(positive.min()), top - _DECADES)
        scaled = np.log10(np.maximum(values, 10.0 ** (least - 1.0))) - least
        share = (scaled + 0.15 * (top - least or 1.0)) / (1.15 * (top - least or 1.0))
        share[values <= 0] = 0.0
    else:
        low, high = values.min(), values.max()
        share = (values - low) / (high - low) if high > low else np.zeros(values.shape)
    levels: Indices = np.clip(np.round(share * (len(HEAT) - 1)), 0, len(HEAT) - 1).astype(np.int64)
    return levels


def _strip(axes: Axes, task: Task, windows: int, colours: Mapping[str, int]) -> None:
    from matplotlib.patches import Rectangle

    schedule = task.rows[0].schedule if task.rows else ()
    known = len(schedule) == windows
    axes.set_yticks([0], [short(task.rows[0].label, 14) if known else "unknown"])
    axes.set_ylim(0.5, -0.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if not known:
        return
    for window, name in enumerate(schedule):
        fill = _colour(name, colours)
        axes.add_patch(Rectangle((window + 0.5, -0.5), 1, 1, facecolor=fill, edgecolor=CARD))
        if windows <= 2 * _ROOM:
            said = short(name, 8)
            axes.text(window + 1, 0, said, ha="center", va="center", size=10, color=CARD)


def _colour(name: str, colours: Mapping[str, int]) -> str:
    return PALETTE[colours.get(name, 0) % len(PALETTE)]
