"""The figures of the evidence, as SVG files, drawn from `results.json` alone.

sensitivity.QUANTIZER.svg   sensitivity by window and task, as the proxy predicts it and as
                            measured, raising single windows, with bands (the paper's Fig. 1)
proxies.QUANTIZER.svg       predicted against measured gains (the paper's Fig. 3)
bits.svg                    accuracy over mean bits: the allocation against uniform
calibration.svg             number of calibration prompts (the paper's Fig. 4a and 5)
high_windows.svg            accuracy over the number of windows at the highest level (Fig. 8)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Proxies that the scatter shows; all are in the tables.
SHOWN = ("kl*influence", "kl", "influence", "flips", "rollout")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


def draw(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw every figure into a folder and return the files."""
    import matplotlib as mpl

    mpl.use("svg")
    # The same results give the same bytes.
    mpl.rcParams.update({"svg.hashsalt": "cadenza", "font.size": 9, "svg.fonttype": "none"})
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, entry in results["quantizers"].items():
        made.append(_sensitivity(entry["tasks"], folder / f"sensitivity.{name}.svg", name))
        made.append(_proxies(entry["tasks"], folder / f"proxies.{name}.svg", name))
    made.append(_bits(results["quantizers"], folder / "bits.svg"))
    made.append(_calibration(results["further"]["calibration_sizes"], folder / "calibration.svg"))
    made.append(_high_windows(results["quantizers"], folder / "high_windows.svg"))
    return made


def _grid(count: int, width: float = 3.0, height: float = 2.4) -> tuple[Any, Sequence[Any]]:
    from matplotlib import pyplot as plt

    columns = min(count, 3)
    rows = -(-count // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(width * columns, height * rows),
        squeeze=False,
        layout="constrained",
    )
    flat = list(axes.flat)
    for axis in flat[count:]:
        axis.set_visible(False)
    return figure, flat


def _save(figure: Any, file: Path) -> Path:
    from matplotlib import pyplot as plt

    figure.savefig(file, metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return file


def _sensitivity(tasks: Mapping[str, Any], file: Path, name: str) -> Path:
    figure, axes = _grid(len(tasks))
    for axis, (task, entry) in zip(axes, tasks.items(), strict=False):
        found = entry["correlations"]
        for kind, colour in (("accuracy", COLOURS[0]), ("agreement", COLOURS[2])):
            measured = found["measured"][kind]
            windows = np.arange(1, len(measured) + 1)
            axis.plot(windows, [each["mean"] for each in measured], "o-", color=colour, label=kind)
            axis.fill_between(
                windows,
                [each["low"] for each in measured],
                [each["high"] for each in measured],
                color=colour,
                alpha=0.2,
            )
        axis.axhline(0, color="black", linewidth=0.5)
        axis.set_title(task)
        axis.set_xlabel("window")
        axis.set_ylabel("points gained")
        other = axis.twinx()
        predicted = next(iter(found["predicted"].values()))
        peak = max(map(abs, predicted)) or 1.0
        windows = np.arange(1, len(predicted) + 1)
        other.plot(windows, np.array(predicted) / peak, "s--", color=COLOURS[1])
        other.fill_between(
            windows,
            np.array(found["bands"]["low"]) / peak,
            np.array(found["bands"]["high"]) / peak,
            color=COLOURS[1],
            alpha=0.2,
        )
        other.set_yticks([])
    axes[0].legend(fontsize=7, loc="upper left")
    figure.suptitle(
        f"{name}: raising one window from 4 to 8 bits; dashed: predicted, K x I, share of the peak"
    )
    return _save(figure, file)


def _proxies(tasks: Mapping[str, Any], file: Path, name: str) -> Path:
    figure, axes = _grid(len(tasks))
    for axis, (task, entry) in zip(axes, tasks.items(), strict=False):
        found = entry["correlations"]
        measured = [each["mean"] for each in found["measured"]["accuracy"]]
        shown = {name: each for name, each in found["predicted"].items() if name in SHOWN}
        for (proxy, predicted), colour in zip(shown.items(), COLOURS, strict=False):
            peak = max(map(abs, predicted)) or 1.0
            r = found["proxies"][proxy]["accuracy"]["pearson"]["mean"]
            said = "n/a" if r is None else f"{r:.2f}"
            axis.plot(
                np.array(predicted) / peak, measured, "o", color=colour, label=f"{proxy} {said}"
            )
        axis.set_title(task)
        axis.set_xlabel("predicted, share of the peak")
        axis.set_ylabel("points of accuracy")
        axis.legend(fontsize=5)
    figure.suptitle(f"{name}: predicted and measured gains of single windows, Pearson's r")
    return _save(figure, file)


def _bits(quantizers: Mapping[str, Any], file: Path) -> Path:
    figure, axes = _grid(len(quantizers))
    for axis, (name, entry) in zip(axes, quantizers.items(), strict=False):
        for (task, each), colour in zip(entry["tasks"].items(), COLOURS, strict=False):
            rows = each["rows"]
            uniform = sorted(
                (row["mean_bits"], row["accuracy"]["mean"])
                for label, row in rows.items()
                if label.startswith("uniform ")
            )
            own = sorted(
                (row["mean_bits"], row["accuracy"]["mean"])
                for label, row in rows.items()
                if label == "dp" or label.startswith("dp at ")
            )
            rolled = sorted(
                (row["mean_bits"], row["accuracy"]["mean"])
                for label, row in rows.items()
                if label == "rollout" or label.startswith("rollout at ")
            )
            axis.plot(*zip(*uniform, strict=True), "o:", color=colour, markersize=3)
            axis.plot(*zip(*own, strict=True), "s-", color=colour, markersize=4, label=task)
            axis.plot(*zip(*rolled, strict=True), "^--", color=colour, markersize=4)
        axis.set_title(name)
        axis.set_xlabel("mean activation bits (simulated)")
        axis.set_ylabel("accuracy %")
        axis.legend(fontsize=6)
    figure.suptitle("Allocation on K x I (squares), on rollouts (triangles), and uniform (dots)")
    return _save(figure, file)


def _calibration(sizes: Mapping[str, Any], file: Path) -> Path:
    figure, axes = _grid(2)
    numbers = [int(size) for size in sizes]
    axes[0].plot(numbers, [each["pearson"] for each in sizes.values()], "o-", label="mean")
    axes[0].plot(numbers, [each["pearson_least"] for each in sizes.values()], "s:", label="least")
    axes[0].set_ylabel("r with the gains of all prompts")
    axes[0].legend(fontsize=7)
    gaps = [each["minus_all_prompts"] for each in sizes.values()]
    means = np.array([gap["mean"] for gap in gaps])
    ends = np.array([[gap["mean"] - gap["low"], gap["high"] - gap["mean"]] for gap in gaps]).T
    axes[1].errorbar(numbers, means, yerr=ends, fmt="o-", capsize=3)
    axes[1].axhline(0, color="black", linewidth=0.5)
    axes[1].set_ylabel("points against all prompts")
    for axis in axes[:2]:
        axis.set_xscale("log", base=2)
        axis.set_xlabel("calibration prompts a task")
    return _save(figure, file)


def _high_windows(quantizers: Mapping[str, Any], file: Path) -> Path:
    figure, axes = _grid(len(quantizers))
    for axis, (name, entry) in zip(axes, quantizers.items(), strict=False):
        for (task, each), colour in zip(entry["tasks"].items(), COLOURS, strict=False):
            found = {
                int(label.split()[0]): row
                for label, row in each["rows"].items()
                if label.endswith(" high windows")
            }
            if not found:
                continue
            axis.plot(
                list(found),
                [row["accuracy"]["mean"] for row in found.values()],
                "o-",
                color=colour,
                label=task,
            )
            own = each["rows"]["dp"]["schedule"].count("w4a8")
            if own in found:
                axis.plot(
                    [own],
                    [found[own]["accuracy"]["mean"]],
                    "o",
                    color=colour,
                    markersize=10,
                    fillstyle="none",
                )
        axis.set_title(name)
        axis.set_xlabel("windows at 8 bits, at the same mean bits")
        axis.set_ylabel("accuracy %")
        axis.legend(fontsize=6)
    figure.suptitle("Number of high windows; circled: the allocation's own choice")
    return _save(figure, file)
