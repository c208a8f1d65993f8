"""Figures of tuning: what a repeated tune builds."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench.figure import Figure
from tests.bench.generate import BUNDLE, ROOT


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
