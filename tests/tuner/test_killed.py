"""A search killed by SIGKILL at any moment, and resumed: nothing lost, nothing twice, one choice.

`CADENZA_KILLS=25` sets how often it is killed; 5 times otherwise.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

KILLS = int(os.environ.get("CADENZA_KILLS", "5"))


def start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.tuner.given_latencies", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def whole_lines(log: Path) -> list[str]:
    return log.read_text().splitlines(keepends=True) if log.exists() else []


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed_it_ends_as_if_it_had_not_been(
    tmp_path: Path,
) -> None:
    (tmp_path / "whole").mkdir()
    began = time.monotonic()
    whole, err = start(tmp_path / "whole").communicate(timeout=300)
    took = time.monotonic() - began
    assert whole, err
    rng, killed = random.Random(11), 0
    done: list[str] = []
    log = tmp_path / "broken" / "BUNDLE.tune" / "trials.jsonl"
    (tmp_path / "broken").mkdir()
    while killed < KILLS:
        process = start(tmp_path / "broken")
        # While it imports nothing happens, so the moments lie where trials are.
        time.sleep(took * rng.uniform(0.3, 1.0))
        if process.poll() is not None:
            assert process.returncode == 0
            log.unlink()  # it came through: once more from the start
            done = []
        else:
            process.kill()
            killed += 1
        process.communicate()
        found = [line for line in whole_lines(log) if line.endswith("\n")]
        assert found[: len(done)] == done, "a finished trial was lost or changed"
        done = found
        candidates = [json.dumps(json.loads(line)["candidate"]) for line in done]
        assert len(set(candidates)) == len(candidates), "a trial was repeated"
    resumed, err = start(tmp_path / "broken").communicate(timeout=300)
    assert resumed == whole, err


@pytest.mark.slow
def test_a_second_process_on_the_folder_is_refused_and_told_the_first(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    first = start(tmp_path / "folder")
    lock = tmp_path / "folder" / "BUNDLE.tune" / "lock"
    while first.poll() is None and not (lock.exists() and lock.read_text().strip()):
        time.sleep(0.01)
    assert first.poll() is None, "it was through before the second one came"
    second = start(tmp_path / "folder")
    _, err = second.communicate(timeout=60)
    first.communicate(timeout=300)
    assert second.returncode != 0
    assert f"in use by process {first.pid}" in err
