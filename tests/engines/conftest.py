"""One tiny bundle for all tests of a run; each test that damages it gets its own copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.engines.tiny_bundle import write_tiny_bundle


@pytest.fixture(scope="session")
def bundle_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the shared bundle's folder; not to be written into."""
    scratch = tmp_path_factory.mktemp("tiny")
    return write_tiny_bundle(scratch / "bundle", scratch).folder


@pytest.fixture
def bundle_copy(bundle_folder: Path, tmp_path: Path) -> Path:
    """Return the folder of a copy that may be damaged."""
    return Path(shutil.copytree(bundle_folder, tmp_path / "bundle"))
