"""Run `cadenza tune` on the tiny export and keep what it says."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cadenza import main
from engines.build import Cache
from exporter.folder import Export
from tuner.config import Effort, TuneConfig
from tuner.workbench import Workbench, prepare

EFFORT = Effort(
    trials=2, calibration=2, tuning=5, test=5, repeats=1, refinements=2, permutations=1
)


@dataclass(frozen=True)
class Said:
    """Exit code and streams of a command, and the bundle that it was to write."""

    code: int
    out: str
    err: str
    bundle: Path

    @property
    def json(self) -> Any:
        """Stdout as JSON."""
        return json.loads(self.out)


@dataclass(frozen=True)
class Tuner:
    """`cadenza tune` of one export."""

    export: Path
    bundle: Path
    cache: Path
    capsys: pytest.CaptureFixture[str] | None = None

    def __call__(self, *argv: object, bundle: Path | None = None) -> Said:
        """Run it with further arguments."""
        assert self.capsys is not None
        out = bundle or self.bundle
        self.capsys.readouterr()
        code = main(self._argv(out, argv))
        said = self.capsys.readouterr()
        return Said(code, said.out, said.err, out)

    def run_quietly(self, patch: pytest.MonkeyPatch, *argv: object) -> Said:
        """Run it where no test captures the streams."""
        out, err = io.StringIO(), io.StringIO()
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        code = main(self._argv(self.bundle, argv))
        return Said(code, out.getvalue(), err.getvalue(), self.bundle)

    def _argv(self, bundle: Path, argv: tuple[object, ...]) -> list[str]:
        settings = ("--mode", "quick", "--cache", self.cache, *argv)
        return ["tune", *map(str, (self.export, "-o", bundle, *settings))]


def bench_of(exported: Export, folder: Path, *tasks: str, **asked: object) -> Workbench:
    """Return what a tune works on, with a cache of its own unless the folder has one."""
    config = TuneConfig(
        export=exported.folder,
        output=folder / "BUNDLE",
        mode="quick",
        tasks=tasks,
        **asked,  # type: ignore[arg-type]
    )
    return prepare(config, Cache(folder / "cache"), lambda text: None)


def snapshot(*folders: Path) -> dict[Path, tuple[int, int]]:
    """Return size and time of every file below folders."""
    return {
        path: (path.stat().st_size, path.stat().st_mtime_ns)
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
