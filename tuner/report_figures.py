"""The figures of a search: its front, its history, and what its knobs explain.

Each function returns an `svg` element, or None where there is nothing to draw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tuner.report_data import Record
from tuner.report_svg import (
    BAD,
    CHOSEN,
    FAILED,
    GOOD,
    INK,
    MUTED,
    canvas,
    inlined,
    padded,
    plain_axes,
    short,
)
from tuner.report_trials import (
    MOST_DRAWN,
    OBJECTIVES,
    best_by_trial,
    drawable,
    non_dominated,
    thinned,
)
from tuner.report_trials import drawn as _drawn
from tuner.trials import TrialResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Trials in the figure of costs, the cheapest.
MOST_COSTS = 40
# Knobs in the figure of importance, the most telling.
MOST_KNOBS = 15

# Above this ratio between the largest and the usual, an axis goes in powers of ten.
_WIDE = 20.0


def front(record: Record) -> str | None:
    """Draw cost against loss of every trial, with the front, the limits and what was chosen."""
    return _scatter(
        record,
        "front",
        lambda trial: trial.cost,
        _cost_label(record),
        _bounds(record, "mean_bits" if record.in_bits else "latency_ms"),
        record.search.full.get("cost"),
        with_intervals=not record.in_bits,
    )


def memory(record: Record) -> str | None:
    """Draw memory against loss of every trial, likewise."""
    return _scatter(
        record,
        "memory",
        lambda trial: trial.memory_mib,
        "memory of the engines used, MiB",
        _bounds(record, "memory_mib"),
        record.search.full.get("memory_mib"),
        with_intervals=False,
    )


def history(record: Record) -> str | None:
    """Draw the objective of every trial in order, the best feasible one so far, and failures."""
    from matplotlib.ticker import MaxNLocator

    objective = OBJECTIVES.get(record.search.goal, OBJECTIVES["latency"])
    worked = _drawn(record)
    failed = [trial for trial in record.trials if trial.failed is not None]
    if not worked and not failed:
        return None
    best = best_by_trial(worked, objective)
    label = objective_label(record)
    with canvas(640, 300) as figure:
        axes = figure.add_subplot()
        drawn = thinned(worked, _chosen(record), MOST_DRAWN)
        _marks(axes, worked, drawn, lambda trial: float(trial.number), objective)
        if best:
            ends = [*best, (record.trials[-1].number, best[-1][1])]
            axes.step(*zip(*ends, strict=True), where="post", color=GOOD, label="best feasible")
        axes.set_ylim(*padded([objective(trial) for trial in drawn], 0.12))
        if not drawn:
            axes.set_yticks([])
        if failed:
            shown = thinned(failed, (), MOST_DRAWN)
            axes.plot(
                [trial.number for trial in shown],
                [0.03] * len(shown),
                "x",
                color=FAILED,
                transform=axes.get_xaxis_transform(),
                label=f"failed ({len(failed)}), without a value",
                clip_on=False,
            )
        for trial in _chosen(record):
            _ring(axes, float(trial.number), objective(trial))
        axes.set_xlim(*padded([record.trials[0].number, record.trials[-1].number], 0.03))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("trial")
        axes.set_ylabel(label)
        plain_axes(axes)
        figure.legend(loc="outside upper left", ncols=5, handletextpad=0.4, columnspacing=1.4)
        said = f"{len(record.trials)} trials in order: {label}, the best feasible one so far"
        return inlined(figure, "history", said)


def costs(record: Record) -> str | None:
    """Draw the cheapest trials' costs with their intervals, the cheapest on top."""
    worked = sorted(_drawn(record), key=lambda trial: (trial.cost, trial.number))
    shown = worked[:MOST_COSTS]
    if not shown or record.in_bits:
        return None
    with canvas(640, 70 + 15 * len(shown)) as figure:
        axes = figure.add_subplot()
        chosen = {trial.number for trial in _chosen(record)}
        for row, trial in enumerate(shown):
            colour = GOOD if trial.feasible else BAD
            low, high = trial.interval
            axes.plot([low, high], [row, row], color=colour, linewidth=1.4)
            mark = "o" if trial.feasible else "^"
            face = colour if trial.feasible else "none"
            axes.plot([trial.cost], [row], mark, color=colour, markerfacecolor=face, markersize=5)
            if trial.number in chosen:
                _ring(axes, trial.cost, row)
        axes.set_yticks(range(len(shown)), [f"trial {trial.number}" for trial in shown])
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_xlabel(_cost_label(record))
        plain_axes(axes, "x")
        said = f"cost with 95 % interval of the {len(shown)} cheapest trials"
        return inlined(figure, "costs", said)


def importance(shares: Mapping[str, Mapping[str, float]]) -> str | None:
    """Draw how much of each objective's variance each knob explains.

    Args:
        shares: {objective: {knob: share}}.
    """
    known = {name: each for name, each in shares.items() if each}
    if not known:
        return None
    knobs = sorted(
        {knob for each in known.values() for knob in each},
        key=lambda knob: (-max(each.get(knob, 0.0) for each in known.values()), knob),
    )[:MOST_KNOBS]
    with canvas(640, 70 + 22 * len(knobs)) as figure:
        panels = figure.subplots(1, len(known), sharey=True, squeeze=False)[0]
        for axes, (name, each) in zip(panels, known.items(), strict=True):
            values = [100 * each.get(knob, 0.0) for knob in knobs]
            axes.barh(range(len(knobs)), values, color=GOOD, height=0.6)
            for row, value in enumerate(values):
                axes.text(value + 1.5, row, f"{value:.0f}", va="center", size=10, color=MUTED)
            axes.set_xlim(0, 112)
            axes.set_xticks([0, 50, 100])
            axes.set_title(f"{name}, %", loc="left")
            axes.set_yticks(range(len(knobs)), [short(knob) for knob in knobs])
            axes.set_ylim(len(knobs) - 0.4, -0.6)
            plain_axes(axes, "x")
        return inlined(figure, "importance", "share of each objective's variance by knob")


def objective_label(record: Record) -> str:
    """Return what is minimised, for an axis."""
    goal = record.search.goal
    if goal == "quality":
        return "loss, points"
    return "memory, MiB" if goal == "memory" else _cost_label(record)


def _cost_label(record: Record) -> str:
    unit = short(record.search.unit)
    return f"cost, {unit}" if unit else "cost"


def _chosen(record: Record) -> list[TrialResult]:
    chosen = record.chosen
    return [trial for trial in _drawn(record) if trial is chosen]


def _bounds(record: Record, budget: str) -> list[float]:
    """Return the different bounds of a budget over the tasks, in order."""
    found = {each[budget] for each in record.search.budgets.values() if budget in each}
    return sorted(bound for bound in found if drawable(bound))


def _scatter(
    record: Record,
    name: str,
    across: Callable[[TrialResult], float],
    label: str,
    bounds: Sequence[float],
    full: float | None,
    with_intervals: bool,
) -> str | None:
    worked = _drawn(record)
    if not worked:
        return None
    best = non_dominated(worked, across)
    failed = sum(trial.failed is not None for trial in record.trials)
    drawn = thinned(worked, [*best, *_chosen(record)], MOST_DRAWN)
    floors = sorted({floor for floor in record.search.floors.values() if drawable(floor)})
    full = full if full is not None and drawable(full) else None
    with canvas(640, 400) as figure:
        axes = figure.add_subplot()
        if with_intervals:
            for feasible, colour in ((True, GOOD), (False, BAD)):
                of = [trial for trial in drawn if trial.feasible is feasible]
                axes.hlines(
                    [trial.loss for trial in of],
                    [trial.interval[0] for trial in of],
                    [trial.interval[1] for trial in of],
                    colors=colour,
                    alpha=0.45,
                    linewidth=1.0,
                    zorder=1.5,
                )
        _marks(axes, worked, drawn, across, lambda trial: trial.loss)
        if best:
            axes.step(
                [across(trial) for trial in best],
                [trial.loss for trial in best],
                where="post",
                color=GOOD,
                linewidth=1.6,
                label="nothing feasible is better",
                zorder=1.8,
            )
        if failed:
            axes.plot([], [], "x", color=FAILED, label=f"failed ({failed}), without a cost")
        _limits(axes.axvline, bounds, "budget")
        _limits(axes.axhline, floors, "most points lost")
        for trial in _chosen(record):
            _ring(axes, across(trial), trial.loss)
        ends = [end for trial in drawn for end in (trial.interval if with_intervals else ())]
        places = [*map(across, drawn), *ends, *bounds]
        if full is not None:
            low, high = min(places), max(places)
            far = not low - (high - low) <= full <= high + (high - low)
            label_of_full = f"full precision, at {full:.4g}" if far else "full precision"
            spot = ([], []) if far else ([full], [0.0])
            hollow: dict[str, Any] = {"color": INK, "markerfacecolor": "none"}
            axes.plot(*spot, "D", markersize=6, label=label_of_full, **hollow)
            places += [] if far else [full]
        losses = [*(trial.loss for trial in drawn), *floors, *([] if full is None else [0.0])]
        axes.set_xlim(*padded(places))
        axes.set_ylim(*padded(losses))
        if max(losses) > _WIDE * max([1.0, *floors]):
            axes.set_yscale("symlog", linthresh=max([1.0, *floors]), linscale=0.8)
            axes.set_ylim(padded(losses)[0], max(losses) * 1.3)
        if max(places) > _WIDE * min(places) > 1e-9 * max(places):
            axes.set_xscale("log")
            axes.set_xlim(min(places) / 1.2, max(places) * 1.2)
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() != "linear":
                axis.set_major_formatter("{x:g}")
        axes.set_xlabel(label)
        axes.set_ylabel("loss of the worst task, points")
        plain_axes(axes)
        figure.legend(loc="outside upper left", ncols=3, handletextpad=0.5, columnspacing=1.6)
        said = f"{len(drawn)} of {len(record.trials)} trials: {label}, against points lost"
        return inlined(figure, name, said)


def _marks(
    axes: Axes,
    every: Sequence[TrialResult],
    drawn: Sequence[TrialResult],
    across: Callable[[TrialResult], float],
    up: Callable[[TrialResult], float],
) -> None:
    """Draw feasible trials as dots, the others as hollow triangles."""
    for feasible, mark, colour, label in (
        (True, "o", GOOD, "feasible"),
        (False, "^", BAD, "misses a limit"),
    ):
        of = [trial for trial in drawn if trial.feasible is feasible]
        count = sum(trial.feasible is feasible for trial in every)
        if of:
            axes.plot(
                [across(trial) for trial in of],
                [up(trial) for trial in of],
                mark,
                color=colour,
                markersize=5.5,
                markerfacecolor=colour if feasible else "none",
                markeredgewidth=1.1,
                label=f"{label} ({count:,})",
            )


def _ring(axes: Axes, x: float, y: float) -> None:
    """Ring the chosen trial."""
    known = [handle.get_label() for handle in axes.get_lines()]
    axes.plot(
        [x],
        [y],
        "o",
        color=CHOSEN,
        markerfacecolor="none",
        markersize=12,
        markeredgewidth=2.0,
        label="chosen" if "chosen" not in known else None,
        zorder=4,
    )


def _limits(draw: Callable[..., object], bounds: Sequence[float], label: str) -> None:
    """Draw bounds as dashed lines; of many, the least and the most."""
    shown = [bounds[0], bounds[-1]] if len(bounds) > 1 else list(bounds)
    for index, bound in enumerate(shown):
        said = " to ".join(f"{each:.4g}" for each in shown)
        first = f"{label} {said}" if index == 0 else None
        draw(bound, color=MUTED, linewidth=1.0, linestyle=(0, (4, 3)), label=first, zorder=1.2)
