"""Made-up tune folders, written as `cadenza tune` writes them, for the tests of the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engines.document import Document
from engines.schedule import Schedule
from tests.tuner.spaces import Landscape, large
from tuner.closing_table import Measured, Verdict, verdict_json
from tuner.sensitivity_file import Sensitivity
from tuner.space import Candidate
from tuner.trials import TrialLog, TrialResult

DEVICE = "a processor, 2 cores (01234567)"
PRECISIONS = {"fp32": 32.0, "int8": 8.0}
TASKS = ("edit", "rename", "chain")
WINDOWS = 6
IDENTITY = "5a" * 32

# Names as nobody should give them, and somebody does.
ODD = (
    "a/b\\c",
    "<b>bold</b>",
    "\"quoted\" & 'so'",
    "]]><script>alert(1)</script></style></svg>",
    "$\\frac{1}{2}$ _x_ 100 %",
    "日本語 \N{GRINNING FACE} العربية",
    "right\u202eleft \u200f mark",
    "two\nlines\tand a tab\x00\x1b[31m",
    "half \ud800 of a character",
    "n" * 300,
    "#010101",
)


def results(count: int, tasks: Sequence[str] = TASKS, seed: int = 0) -> list[TrialResult]:
    """Return finished trials: some feasible, some not, about one in nine failed."""
    rng = np.random.default_rng(seed)
    space = large()
    landscape = Landscape(space, seed)
    found = []
    for number in range(count):
        drawn = [each.choices[int(rng.integers(len(each.choices)))] for each in space]
        values = [each.choices[0] for each in space] if number == 0 else drawn
        names = [each.name for each in space]
        result = landscape.result(Candidate(tuple(zip(names, values, strict=True))), number)
        schedule = ["int8"] * (WINDOWS - 2) + ["fp32"] * 2
        found.append(
            replace(
                result,
                low=result.cost * float(rng.uniform(0.95, 0.99)),
                high=result.cost * float(rng.uniform(1.01, 1.06)),
                violations={
                    f"{tasks[0]}: loss": result.loss - 8.0,
                    f"{tasks[0]}: latency_ms": result.cost - 52.0,
                },
                tasks={
                    name: {
                        "schedule": schedule,
                        "mean_bits": 16.0,
                        "latency_ms": result.cost,
                        "gain": 0.25,
                        "loss": result.loss,
                        "agreement": 0.97,
                        "reason": "mixed: the one that loses least",
                    }
                    for name in tasks
                },
                distances={"int8": {"l0": 0.99, "l1": 0.5, "l2": 0.7, "lInf": 5.4, "cos": 0.005}},
                device=DEVICE,
                machine={"load": 0.2, "mhz_mean": 2596.1, "available_mib": 23510.3},
                seconds={"build": 1.5, "measure": 2.5, "evaluate": 4.0, "all": 8.25},
            )
        )
        if number % 9 == 4:
            found[-1] = failed(found[-1], "the engine was not built: no kernel for int8 at clip 0")
    return found


def failed(result: TrialResult, reason: str) -> TrialResult:
    """Return a trial as it is logged where its child died."""
    return TrialResult(
        number=result.number,
        candidate=result.candidate,
        cost=0.0,
        loss=100.0,
        device=result.device,
        seconds={"all": 1.0},
        failed=reason,
        log=("building int8.all.serve.onnx", "Killed"),
    )


def search(tasks: Sequence[str] = TASKS, **changes: Any) -> dict[str, Any]:
    """Return what `search.json` holds."""
    return {
        "format": "cadenza-search/1",
        "cadenza": "0.1.0",
        "goal": "latency",
        "strategy": "tpe",
        "seed": 0,
        "unit": "ms a sequence",
        "space": [
            {
                "name": knob.name,
                "choices": list(knob.choices),
                "kind": knob.kind,
                "says": knob.says,
            }
            for knob in large()
        ],
        "budgets": {
            name: {"mean_bits": None, "latency_ms": 52.0, "memory_mib": None} for name in tasks
        },
        "floors": dict.fromkeys(tasks, 8.0),
        "full": {"cost": 60.0, "memory_mib": 3.0},
        "baseline": {"max_error": 1.4e-5, "largest": 15.0, "agreement": 1.0, "positions": 416},
        "precisions": [
            {"name": name, "bits": bits, "simulated": False} for name, bits in PRECISIONS.items()
        ],
        "environment": {"python": "3.11.7", "numpy": "2.4.6", "system": "Linux x86_64"},
        "device": DEVICE,
        **changes,
    }


def sensitivity(tasks: Sequence[str] = TASKS, windows: int = WINDOWS) -> dict[str, Any]:
    """Return what `sensitivity.json` holds."""
    rng = np.random.default_rng(1)
    made = {}
    for name in tasks:
        kl = np.stack([np.sort(10.0 ** rng.uniform(-5, -1, windows)), np.zeros(windows)], axis=1)
        influence = 1.0 + rng.uniform(0, 1, windows)
        gain = (kl[:, :1] - kl) * influence[:, None]
        made[name] = {
            "steps": 12,
            "gen_length": 24,
            "block_length": 24,
            "sampler": "low_confidence",
            "passes": [12 / windows] * windows,
            "latency_ms": None,
            "kl": kl.tolist(),
            "influence": influence.tolist(),
            "gain": gain.tolist(),
            "n_prompts": 64,
            "kl_low": (0.8 * kl).tolist(),
            "kl_high": (1.3 * kl).tolist(),
            "influence_low": (0.95 * influence).tolist(),
            "influence_high": (1.1 * influence).tolist(),
            "gain_low": (0.7 * gain).tolist(),
            "gain_high": (1.4 * gain).tolist(),
        }
    content = {
        "format": "cadenza-sensitivity/1",
        "precisions": [
            {
                "name": name,
                "family": name,
                "weight_bits": bits,
                "bits": bits,
                "simulated": False,
                "latency_ms": bits / 10.0,
                "memory_mib": 0.0,
            }
            for name, bits in (("int8", 8.0), ("fp32", 32.0))
        ],
        "families": {"fp32": 2.9, "int8": 0.8},
        "activation_mib": 0.0,
        "base": "int8",
        "shape": {"batch": [1, 8], "prompt": [1, 16]},
        "switch_ms": 0.0,
        "windows": windows,
        "tasks": made,
    }
    return Sensitivity.from_json(Document(content, "sensitivity.json")).to_json()


def verdict(task: str, budget_ms: float | None = 52.0) -> Verdict:
    """Return a verdict as a judged task has."""
    mixed = Schedule(("int8",) * (WINDOWS - 2) + ("fp32",) * 2)

    def measured(label: str, schedule: Schedule, bits: float, ms: float, share: float) -> Measured:
        return Measured(
            label=label,
            schedule=schedule,
            mean_bits=bits,
            ms=(ms, 0.97 * ms, 1.03 * ms),
            accuracy=(share, share - 0.03, min(1.0, share + 0.03)),
            agreement=(share, share - 0.02, min(1.0, share + 0.02)),
            n=400,
        )

    uniform = {name: Schedule.uniform(name, WINDOWS) for name in PRECISIONS}
    return Verdict(
        task=task,
        shipped=measured("ships", mixed, 16.0, 48.2, 0.97),
        others=(
            measured("uniform fp32", uniform["fp32"], 32.0, 60.0, 0.98),
            measured("uniform int8, best within budget", uniform["int8"], 8.0, 37.5, 0.86),
            measured("same bits, most first", Schedule(mixed.precisions[::-1]), 16.0, 48.0, 0.9),
        ),
        reason="mixed: the one that loses least, within 8 points of full precision",
        loss=(0.5, -0.4, 1.4),
        budget_ms=budget_ms,
    )


def result(trial: int, count: int, names: Sequence[str] = TASKS, **changes: Any) -> dict[str, Any]:
    """Return what `result.json` holds."""
    every = (*names, "default")
    shipped = ["int8"] * (WINDOWS - 2) + ["fp32"] * 2
    return {
        "bundle": "BUNDLE",
        "digest": "d1" * 32,
        "degraded": False,
        "schedules": {name: {"cpu": shipped} for name in every},
        "tasks": {name: verdict_json(verdict(name)) for name in every},
        "made": True,
        "engines": {"built": 12, "reused": 3},
        "identity": IDENTITY,
        "complete": True,
        "candidate": {},
        "trial": trial,
        "trials": count,
        "failed": 2,
        "goal": "latency",
        "max_loss": dict.fromkeys(names, 8.0),
        "seed": 0,
        "mode": "default",
        "quality_shown_to": 1.4,
        "short": {},
        "tightened": 1.0,
        "over_budget": None,
        **changes,
    }


def config(**changes: str) -> dict[str, Any]:
    """Return what `config.json` holds."""
    values = {
        "exports": ["EXPORT"],
        "target": "cpu",
        "search.mode": "default",
        "budget.latency_ms": "85%",
        **changes,
    }
    sources = {"exports": "flag", "budget.latency_ms": "tune.yaml:4"}
    return {
        key: {"value": value, "source": sources.get(key, "default")}
        for key, value in values.items()
    }


def manifest() -> dict[str, Any]:
    """Return the parts of a bundle's manifest that a report reads."""
    options = {"threads": 0, "graph_optimization": "all", "spinning": False, "arena": True}
    kernels = {"fp32": {"MatMul(float)": 29}, "int8": {"MatMulIntegerToFloat(uint8)": 28}}
    return {
        "format": "cadenza-bundle/1",
        "tune": {"identity": IDENTITY},
        "engines": {
            f"{name}.cpu": {
                "file": f"{name}.serve.onnx",
                "graph": f"{name}.serve",
                "precision": name,
                "target": "cpu",
                "built": built,
                "options": options,
            }
            for name, built in kernels.items()
        },
    }


def tune_folder(
    root: Path,
    trials: Sequence[TrialResult] | None = None,
    tasks: Sequence[str] = TASKS,
    **files: Mapping[str, Any] | None,
) -> Path:
    """Write a tune folder with a bundle's manifest beside it, and return it.

    Args:
        root: Where they are to lie.
        trials: Finished ones; 27 of them if not given.
        tasks: Their names.
        files: What another content than usual has, by name without its ending: None for no file.
    """
    folder = root / "BUNDLE.tune"
    folder.mkdir(parents=True)
    (root / "BUNDLE").mkdir()
    log = TrialLog(folder / "trials.jsonl")
    finished = results(27, tasks) if trials is None else trials
    for each in finished:
        log.append(each)
    best = min(
        (each for each in finished if each.feasible), key=lambda each: each.cost, default=None
    )
    number = 0 if best is None else best.number
    usual: dict[str, Callable[[], Mapping[str, Any]]] = {
        "command": lambda: {"identity": IDENTITY, "worker": "0123456789abcdef"},
        "search": lambda: search(tasks),
        "sensitivity": lambda: sensitivity(tasks),
        "result": lambda: result(number, len(finished), tasks),
        "config": lambda: config(),
        "manifest": manifest,
    }
    for name, made in usual.items():
        content = files[name] if name in files else made()
        place = root / "BUNDLE" if name == "manifest" else folder
        if content is not None:
            (place / f"{name}.json").write_text(json.dumps(content, indent=1), "utf-8")
    return folder
