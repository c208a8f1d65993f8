"""A PostgreSQL of the tests' own: a data folder, a Unix socket, no port; Debian's package."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def binaries() -> Path:
    """Return the folder of the server's programs; without one a test is skipped, in CI failed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if found:
        return found[-1].parent
    reason = "no PostgreSQL server here; install Debian's package postgresql"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def server() -> Iterator[str]:
    """Start a server, yield the URL of a database, and stop it."""
    programs = binaries()
    # It refuses to run as root; the package brings a user for it.
    other = {"user": "postgres", "group": "postgres"} if os.geteuid() == 0 else {}
    folder = Path(tempfile.mkdtemp(prefix="cadenza-postgres-"))
    data = folder / "data"

    def run(program: str, *argv: str) -> None:
        subprocess.run(
            [programs / program, *argv],
            check=True,
            cwd=folder,
            stdout=subprocess.DEVNULL,
            extra_groups=[] if other else None,
            **other,  # type: ignore[arg-type]
        )

    try:
        if other:
            shutil.chown(folder, **other)  # type: ignore[call-overload]
        run("initdb", "-D", str(data), "-A", "trust", "-U", "cadenza", "-E", "UTF8")
        options = f"-k {folder} -c listen_addresses='' -c fsync=off"
        run("pg_ctl", "-D", str(data), "-o", options, "-l", str(folder / "log"), "-w", "start")
        try:
            yield f"postgresql://cadenza@/postgres?host={folder}"
        finally:
            run("pg_ctl", "-D", str(data), "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
