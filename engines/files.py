"""Files of a folder that ships: paths that stay inside, digests, and writing all or nothing.

Knows nothing about what the files hold.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from engines.errors import InputError

# Smaller files are copied even where links are wanted: a graph costs kilobytes, and a copy can
# be edited without editing the other folder.
LINK_FROM_BYTES = 1 << 20

_OPEN = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What a manifest says of a file: hex sha256 and size."""

    sha256: str
    bytes: int


def relative_path(path: str) -> str:
    """Return a path if it names a place inside a folder on every system, by its spelling alone.

    Raises:
        InputError: It is absolute, climbs, or holds what a file system may read otherwise.
    """
    parts = path.split("/")
    problem = ""
    if not path or path.startswith("/") or ":" in path or "\\" in path:
        problem = "must be relative, with '/' between its parts"
    elif not path.isprintable():
        problem = "holds characters that cannot be printed"
    elif any(part in ("", ".", "..") or part[-1] in " ." for part in parts):
        problem = "has a part that is empty, '.', '..', or ends in a dot or a space"
    elif any(len(part.encode(errors="replace")) > 255 for part in parts) or len(path) > 1000:
        problem = "is too long"
    if problem:
        raise InputError(f"the path {path!r} {problem}; nothing outside the folder is ever read")
    return path


def regular_file(folder: Path, path: str) -> Path:
    """Return folder / path, a regular file reached without any symbolic link below the folder.

    Raises:
        InputError: The path leaves the folder, or there is no such regular file.
    """
    place = folder
    parts = PurePosixPath(relative_path(path)).parts
    for number, part in enumerate(parts, start=1):
        place = place / part
        try:
            mode = place.lstat().st_mode
        except OSError as error:
            raise InputError(f"the file {path!r} is missing ({error.strerror})") from error
        wanted = stat.S_ISREG if number == len(parts) else stat.S_ISDIR
        if not wanted(mode):
            kind = "a symbolic link" if stat.S_ISLNK(mode) else "not a regular file"
            raise InputError(f"{path!r}: {part!r} is {kind}; put the file itself there")
    return place


def digest_file(file: Path) -> FileEntry:
    """Return digest and size of a regular file; never waits on a pipe, follows no last link.

    Raises:
        InputError: It cannot be read, or is no regular file.
    """
    try:
        handle = os.open(file, _OPEN)
        with os.fdopen(handle, "rb") as stream:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise InputError(f"{str(file)!r} is not a regular file")
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            return FileEntry(digest, stream.tell())
    except OSError as error:
        raise InputError(f"cannot read {str(file)!r}: {error.strerror}") from error


def check_files(folder: Path, files: Mapping[str, FileEntry], digests: bool = True) -> None:
    """Check that every file is there, inside, regular, of its size, and unchanged.

    All paths and sizes are checked before the first byte is read.

    Raises:
        InputError: The first file that is not as it is listed, with both values.
    """
    places = {path: regular_file(folder, path) for path in files}
    for path, place in places.items():
        size = place.stat().st_size
        if size != files[path].bytes:
            raise InputError(f"{path!r} has {size} bytes, listed are {files[path].bytes}")
    if not digests:
        return
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for path, found in zip(places, pool.map(digest_file, places.values()), strict=True):
            if found.sha256 != files[path].sha256:
                raise InputError(
                    f"{path!r} has the sha256 {found.sha256}, listed is {files[path].sha256}: "
                    f"its content has changed"
                )


def place_file(source: Path, destination: Path, copy: bool = False) -> bool:
    """Put a file at a new place, by a hard link where that serves; return whether it is linked.

    Symbolic links of the source are followed to the real file first.  Small files are copied.
    """
    real = source.resolve(strict=True)
    destination.parent.mkdir(parents=True, exist_ok=True)
    if not copy and real.stat().st_size >= LINK_FROM_BYTES:
        try:
            os.link(real, destination)
        except OSError:
            pass  # another file system, or one without links: copied below
        else:
            return True
    shutil.copyfile(real, destination)
    return False


@contextmanager
def whole_folder(
    out: Path, *, force: bool, is_ours: Callable[[Path], bool], kind: str
) -> Iterator[Path]:
    """Yield a temporary sibling that becomes `out` when the block ends well, and vanishes else.

    A folder that is there already is replaced only by `force`, and only if it is empty or
    `is_ours`; it stands complete under its name until the new one is complete.  What a killed
    run left behind is removed by the next.

    Raises:
        InputError: `out` is there and may not be replaced, or its parent cannot be written.
    """
    out = Path(os.path.realpath(out))
    mark = hashlib.sha256(out.name.encode(errors="surrogateescape")).hexdigest()[:12]
    partial, replaced = (out.parent / f".cadenza-{mark}.{end}" for end in ("partial", "replaced"))
    if replaced.exists():
        _restore(replaced, out)
    shutil.rmtree(partial, ignore_errors=True)
    check_replaceable(out, force=force, is_ours=is_ours, kind=kind)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except OSError as error:
        raise InputError(
            f"cannot write into {str(out.parent)!r}: {error.strerror}; choose another place"
        ) from error
    try:
        yield partial
        _sync(partial)
        if out.exists():
            out.rename(replaced)
        partial.rename(out)
        _sync_one(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if replaced.exists():
            _restore(replaced, out)


def check_replaceable(
    out: Path, *, force: bool, is_ours: Callable[[Path], bool], kind: str
) -> None:
    """Check that `out` may be written: not there, empty, or ours and `force` is given.

    Raises:
        InputError: It may not; says why.
    """
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir():
        raise InputError(f"{str(out)!r} is not a folder; choose another place for the {kind}")
    if not any(out.iterdir()):
        return
    if not is_ours(out):
        raise InputError(
            f"{str(out)!r} holds other files and is no {kind}; choose another place for the {kind}"
        )
    if not force:
        raise InputError(
            f"{str(out)!r} is there already; give --force to replace it, or choose another place"
        )


def _restore(replaced: Path, out: Path) -> None:
    """Remove the replaced folder, or put it back where no new one stands in its place."""
    if out.exists():
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        replaced.rename(out)


def _sync(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            _sync_one(Path(root, name))
        _sync_one(Path(root))


def _sync_one(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
