"""Laws of the peak memory of serving: it is of a process of its own, and never falls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engines.bundle import read_bundle
from engines.errors import InputError
from engines.footprint import engines_of, footprint
from engines.schedule import Schedule
from tests.engines.tiny_bundle import SAMPLER, SCHEDULES

pytest.importorskip("onnxruntime", reason="install with: pip install cadenza[ort]")

ROOT = Path(__file__).resolve().parent.parent.parent
PROMPTS = [(1, 2, 3), (4, 5, 6)]


def test_the_peak_never_falls_and_grows_by_what_is_touched() -> None:
    code = (
        "import numpy as np\n"
        "from engines.footprint import peak_resident_bytes as peak\n"
        "before = peak()\n"
        "touched = np.ones(before, np.uint8)\n"  # as much again
        "after = peak()\n"
        "del touched\n"
        "print(before, after, peak())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    before, after, last = map(int, done.stdout.split())
    assert after == pytest.approx(2 * before, rel=0.2)
    assert last == pytest.approx(after, rel=0.02)  # the kernel counts in lots of pages


def test_a_child_s_peak_is_its_own_and_not_that_of_who_asks(
    bundle_folder: Path, tmp_path: Path
) -> None:
    touched = np.ones(400 << 20, np.uint8)  # this process is large
    found = footprint(
        bundle_folder, "cpu", 1, Schedule(SCHEDULES["edit"]), SAMPLER, PROMPTS, tmp_path / "log"
    )
    del touched
    assert set(found) == {"peak_mib", "device_bytes"}
    assert 10.0 < found["peak_mib"] < 400.0
    assert found["device_bytes"] is None


def test_only_the_engines_that_are_named_are_loaded(bundle_folder: Path) -> None:
    bundle = read_bundle(bundle_folder)
    engines, taken = engines_of(bundle, "cpu", 1, ["int8"])
    assert list(engines) == ["int8"]
    assert taken is None


def test_what_the_engines_refuse_is_told_as_it_would_be_here(
    bundle_folder: Path, tmp_path: Path
) -> None:
    beyond = [(999,)]
    uniform = Schedule.uniform("int8", 3)
    with pytest.raises(InputError, match="999"):
        footprint(bundle_folder, "cpu", 1, uniform, SAMPLER, beyond, tmp_path / "log")
