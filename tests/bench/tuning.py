"""Figures of tuning: the exact allocation's time, and what a repeated tune builds."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.bench.figure import Figure, median_interval
from tests.bench.generate import BUNDLE, ROOT
from tuner.allocate import allocate
from tuner.costs import Budget, Costs

PROBLEMS = 15
ALL = 1_000_000


def allocate_16x4() -> Figure:
    """Return the ms of one allocation with the complete front: 16 windows, 4 precisions."""
    costs = Costs(
        names=("int4", "int8", "fp16", "fp32"),
        bits=np.array([4.0, 8.0, 16.0, 32.0]),
        passes=np.full(16, 2.0),
        latency_ms=np.array([1.0, 1.4, 2.1, 3.9]),
    )
    budget = Budget(mean_bits=12.0, latency_ms=60.0)
    took = []
    for seed in range(-1, PROBLEMS):
        rng = np.random.default_rng(seed + 1)
        steps = rng.exponential(size=(16, 3)) * rng.exponential(size=(16, 1))
        gain = np.concatenate((np.zeros((16, 1)), steps.cumsum(axis=1)), axis=1)
        start = time.perf_counter()
        answer = allocate(gain, costs, budget, front_limit=ALL)
        took.append(1000.0 * (time.perf_counter() - start))
        if not answer.front_complete:
            raise RuntimeError(f"the front of problem {seed} is not complete")
    took = took[1:]  # the first warmed up
    return Figure(
        name="allocate_16x4",
        value=float(np.median(took)),
        unit="ms",
        against="at most 50 for the complete front, equal passes, one latency a precision",
        reference=50.0,
        spread=median_interval(took),
        n=len(took),
    )


def demo_tune() -> list[str]:
    """Return the arguments of the demo's `cadenza tune`, as the Makefile has them."""
    (found,) = re.findall(
        r"\$\(call timed,tune,cadenza (tune .*)\)$", (ROOT / "Makefile").read_text("utf-8"), re.M
    )
    return shlex.split(found)


def rebuild_count() -> Figure:
    """Return how many engines the demo's tune builds again, into a fresh output, same cache."""
    argv = demo_tune()
    with tempfile.TemporaryDirectory(dir=BUNDLE.parent) as folder:
        argv[argv.index("-o") + 1] = str(Path(folder) / "bundle")
        done = subprocess.run(
            [sys.executable, "-m", "cadenza", *argv, "--json"],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
    if done.returncode:
        raise RuntimeError(f"cadenza {shlex.join(argv)} failed:\n{done.stderr}")
    built = float(json.loads(done.stdout)["engines"]["built"])
    return Figure(
        name="rebuild_count",
        value=built,
        unit="engines",
        against="0 built by a second identical tune into a fresh output with the same cache",
        reference=0.0,
        spread=(built, built),
        n=1,
    )
