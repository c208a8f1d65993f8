"""What every test shares: GPU tests are skipped, with the reason, where there is no GPU."""

from __future__ import annotations

import shutil

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked gpu on a machine without one."""
    if shutil.which("nvidia-smi"):
        return
    skip = pytest.mark.skip(reason="no NVIDIA GPU here; on one, install 'cadenza[ort-gpu]'")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
