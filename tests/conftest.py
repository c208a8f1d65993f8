"""What every test shares: a tiny export, and no GPU tests where there is no GPU."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from exporter.denoiser import Denoiser
    from exporter.folder import Export


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked gpu, with the reason, on a machine without one."""
    if shutil.which("nvidia-smi"):
        return
    skip = pytest.mark.skip(
        reason="no NVIDIA GPU here; on one, install 'cadenza[ort-gpu]', and for plans "
        "'cadenza[tensorrt-rtx]' or 'cadenza[tensorrt]'"
    )
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def denoiser() -> Denoiser:
    """Return random weights; torch is imported only where they are asked for."""
    from tests.tiny_export import random_denoiser, tiny_config

    return random_denoiser(tiny_config())


@pytest.fixture(scope="session")
def checkpoint(denoiser: Denoiser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the shared checkpoint; not to be written into."""
    from exporter.checkpoint import save_checkpoint
    from exporter.train import vocabulary

    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    save_checkpoint(denoiser, vocabulary(), folder)
    return folder


@pytest.fixture(scope="session")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Return the shared checkpoint's export; not to be written into."""
    from exporter.export import export
    from exporter.folder import read_export
    from tests.tiny_export import small_export

    out = tmp_path_factory.mktemp("exported") / "EXPORT"
    return read_export(export(small_export(checkpoint, out)), verify=True)
