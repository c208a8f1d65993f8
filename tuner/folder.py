"""The working folder of a tune, `BUNDLE.tune`: one command's, and one process's at a time."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engines.errors import InputError

COMMAND, CONFIG, TRIALS = "command.json", "config.json", "trials.jsonl"


# A file that `write_text` was writing.
_PARTIAL = re.compile(r"\.[\w.-]{1,100}\.[a-z0-9_]{8}")


@contextmanager
def tune_folder(output: Path, identity: str, force: bool) -> Iterator[Path]:
    """Yield the working folder of a bundle, locked for this process.

    What another command left there is refused, unless no trial had a result yet.

    Args:
        output: The bundle to be.
        identity: Digest of everything that decides the result.
        force: Throw away the work of another command.

    Raises:
        InputError: Another process works there, or the work of another command lies there, or
            what no tune has made.
    """
    folder = output.parent / f"{output.name}.tune"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"cannot work in {str(folder)!r}: {error.strerror}; choose another --output"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise InputError(
                f"{str(folder)!r} is in use by process {holder}; wait for it, or choose another "
                f"--output"
            ) from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        _claim(folder, identity, force)
        yield folder


def worker_of(work: Path) -> str:
    """Return the name of a working folder among those that share a study: unlike any other's."""
    return str(json.loads((work / COMMAND).read_text(encoding="utf-8")).get("worker", ""))


def write_json(file: Path, value: object) -> None:
    """Write a value as `write_text` does."""
    write_text(file, json.dumps(value, indent=1) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write a text under a temporary name, and rename it: whole, or not at all.

    The name is this process's own, so that of two that write one file, one wins.
    """
    handle, partial = tempfile.mkstemp(prefix=f".{file.name[:100]}.", dir=file.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(partial, 0o666 & ~umask)
        os.replace(partial, file)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(partial)
        raise


def _claim(folder: Path, identity: str, force: bool) -> None:
    """Make the folder this command's, or refuse it."""
    file = folder / COMMAND
    for left in folder.glob(".*.*"):  # of a process that was killed while it wrote
        if left.is_file() and not left.is_symlink() and _PARTIAL.fullmatch(left.name):
            left.unlink()
    others = [path for path in folder.iterdir() if path.name != "lock"]
    if others and not file.is_file():
        raise InputError(
            f"{str(folder)!r} is not the folder of a tune, so it is left as it is; move it away, "
            f"or choose another --output"
        )
    if file.is_file() and _owner(file) == identity:
        return
    if not force and _has_results(folder / TRIALS):
        raise InputError(
            f"{str(folder)!r} holds the work of another command; give --force to throw it away, "
            f"or choose another --output"
        )
    for path in others:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != file:
            path.unlink()
    write_json(file, {"identity": identity, "worker": secrets.token_hex(8)})


def _has_results(log: Path) -> bool:
    """Return whether a log of trials has one that did not fail."""
    try:
        return any(
            json.loads(line)["failed"] is None for line in log.read_bytes().split(b"\n") if line
        )
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError):
        return True  # somebody's work, even if it cannot be read


def _owner(file: Path) -> object:
    """Return the identity of the command that a folder belongs to, or None."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))["identity"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
