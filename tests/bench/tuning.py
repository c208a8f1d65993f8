"""Figures of tuning: what a repeated tune builds, and what a tune spends on itself."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.figure import Figure
from tests.bench.generate import BUNDLE, ROOT

OVERHEAD_RUNS = 3


def demo_tune() -> list[str]:
    """Return the arguments of the demo's `cadenza tune`, as the Makefile has them."""
    (found,) = re.findall(
        r"\$\(call timed,tune,cadenza (tune .*)\)$", (ROOT / "Makefile").read_text("utf-8"), re.M
    )
    return shlex.split(found)


def tuned_again(*more: str) -> dict[str, Any]:
    """Return what the demo's tune says, run into a fresh output.

    Args:
        more: Further arguments.
    """
    argv = [*demo_tune(), *more]
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
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def rebuild_count() -> Figure:
    """Return how many engines the demo's tune builds again, into a fresh output, same cache."""
    built = float(tuned_again()["engines"]["built"])
    return Figure(
        name="rebuild_count",
        value=built,
        unit="engines",
        against="0 built by a second identical tune into a fresh output with the same cache",
        reference=0.0,
        spread=(built, built),
        n=1,
    )


def search_overhead() -> Figure:
    """Return the share of a tune's time outside builds, measurements and evaluations.

    Of the demo's tune with an empty cache, from the first look at the export to the bundle.
    """
    shares = []
    for _ in range(OVERHEAD_RUNS):
        with tempfile.TemporaryDirectory(dir=BUNDLE.parent) as cache:
            seconds = dict(tuned_again("--cache", cache, "--trials", "12")["seconds"])
        every = seconds.pop("all")
        shares.append(1.0 - sum(seconds.values()) / every)
    return Figure(
        name="search_overhead",
        value=float(np.median(shares)),
        unit="share of the time",
        against="0.05",
        reference=0.05,
        spread=(min(shares), max(shares)),
        n=len(shares),
    )
