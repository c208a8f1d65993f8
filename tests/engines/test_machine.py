"""Laws of the machine's memory."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_HOLDS = """
import re
from pathlib import Path
from engines.machine import give_back_memory

def resident():
    return int(re.search(r"RssAnon:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10

blocks = [bytes(100_000) for _ in range(2000)]  # each in the heap
last = blocks[-1]  # above all others, so that the heap cannot shrink by itself
del blocks
kept = resident()
give_back_memory()
print(kept - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", _HOLDS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100  # MiB
