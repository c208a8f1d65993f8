"""What the tests of whole tunes share: little effort, one cache, and one finished tune."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exporter.folder import Export
from tests.tuner.tuning import EFFORT, Said, Tuner
from tuner import config, workshop
from tuner.space import Candidate, Knob, knobs


@pytest.fixture(scope="package")
def small_effort() -> Iterator[None]:
    """Let a tune try two candidates, which differ only in threads, on a few prompts.

    For TensorRT there are no threads, and what can be searched of plans stays.
    """
    kept = ("weights",)

    def options_only(default: Candidate, **of: Any) -> tuple[Knob, ...]:
        return tuple(
            knob
            if knob.name in kept
            else replace(knob, choices=(0, 1) if knob.name == "threads" else knob.choices[:1])
            for knob in knobs(default, **of)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(config.MODES, "quick", EFFORT)
        patch.setattr(workshop, "knobs", options_only)
        yield


@pytest.fixture
def every_knob(small_effort: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a tune of little effort have all its knobs again."""
    monkeypatch.setattr(workshop, "knobs", knobs)


@pytest.fixture(scope="package")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the cache of every tune that does not ask for its own."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="package")
def tuned(
    small_effort: None,
    exported: Export,
    shared_cache: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Said:
    """Return a finished tune of int8 windows, as --json says it; its bundle is only read."""
    patch = pytest.MonkeyPatch()
    tuner = Tuner(exported.folder, tmp_path_factory.mktemp("tuned") / "BUNDLE", shared_cache)
    try:
        return tuner.run_quietly(patch, "--precision", "int8", "--max-loss", "100", "--json")
    finally:
        patch.undo()


@pytest.fixture
def tuner(
    small_effort: None,
    exported: Export,
    shared_cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> Tuner:
    """Return the command for a fresh output, with what it says."""
    return Tuner(exported.folder, tmp_path / "BUNDLE", shared_cache, capsys)
