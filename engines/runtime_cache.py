"""The kernels that TensorRT-RTX compiled when it first ran a plan, kept for the next time.

One file a GPU and version, in this user's cache folder, never in the bundle.  It holds code, so it
is read only where nobody else can have written it; what is damaged is passed over and made again.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

_MAGIC = b"cadenza-runtime-cache/1\n"
_DIGEST_BYTES = 32
_MOST_BYTES = 1 << 30


def cache_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of this user's caches; None where there is no home."""
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    try:
        return (base if base.is_absolute() else Path.home() / ".cache") / "cadenza" / "runtime"
    except RuntimeError:
        return None


def cache_file(folder: Path, gpu: str, version: str) -> Path:
    """Return the file for a GPU and a version of TensorRT-RTX."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{gpu}-{version}")[:120].strip(".-")
    return folder / f"{name}.cache"


def read_cache(file: Path) -> bytes | None:
    """Return what was kept; None where there is nothing, it is damaged, or others may write it."""
    try:
        for each in (file.parent, file):
            found = each.lstat()
            private = not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if found.st_uid != os.getuid() or not private or stat.S_ISLNK(found.st_mode):
                return None
        if not file.is_file() or file.stat().st_size > _MOST_BYTES:
            return None
        whole = file.read_bytes()
    except OSError:
        return None
    begin = len(_MAGIC) + _DIGEST_BYTES
    digest, data = whole[len(_MAGIC) : begin], whole[begin:]
    if not whole.startswith(_MAGIC) or hashlib.sha256(data).digest() != digest:
        return None
    return data


def write_cache(file: Path, data: bytes) -> bool:
    """Keep data under a temporary name, then rename it; returns whether that could be done."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".partial-", dir=file.parent)
    except OSError:
        return False
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(_MAGIC + hashlib.sha256(data).digest() + data)
        os.replace(name, file)
    except OSError:
        Path(name).unlink(missing_ok=True)
        return False
    return True
