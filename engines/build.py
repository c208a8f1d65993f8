"""Build engines once: a content-addressed cache of builds, measurements and evaluations.

An entry is a small JSON file under `FOLDER/v1/KIND/KEY.json`, written whole or not at all, so any
number of processes may share a folder.  The key is the sha256 of everything that the value depends
on; a changed byte anywhere is another key, and nothing is ever invalidated by time.  An entry also
carries the digest of its value: one that was damaged is dropped with a warning and made again.

ONNX Runtime compiles while it loads, so for it a build is: load, read back which kernels run, and
a finite smoke pass.  A cached build skips the last two.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.errors import BackendError, CadenzaError, InputError
from engines.files import digest_file
from engines.options import OrtOptions
from engines.ort import OrtBackend, environment
from engines.precision import Precision

FORMAT = "cadenza-cache/1"
VARIABLE = "CADENZA_CACHE_DIR"

# Any JSON value: entries are data, never code.
Json = Any

_LOG = logging.getLogger(__name__)
_KIND, _KEY = re.compile(r"[a-z][a-z-]{0,30}"), re.compile(r"[0-9a-f]{64}")
_SMOKE_LENGTH = 8

# Seconds after which a half-written entry is nobody's any more.
_STALE_S = 24 * 3600.0


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineSpec:
    """All that an engine depends on.

    Attributes:
        serve: ONNX file with the serve tail, or None.
        trace: ONNX file with the trace tail, or None.
        precision: What the graphs hold.
        scales: Activation scales of each window [W, S], where they are an input.
        options: How sessions are made.
        target: Where it runs; the options' provider.
        digests: sha256 of weight files that are known already, by their path as the graphs name
            it ("weights/model.safetensors"); others are computed.
    """

    serve: Path | None
    trace: Path | None
    precision: Precision
    scales: NDArray[np.float32] | None = None
    options: OrtOptions = field(default_factory=OrtOptions)
    target: str = "cpu"
    digests: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.target != self.options.provider:
            raise ValueError(
                f"target and options.provider must be the same, got {self.target!r} and "
                f"{self.options.provider!r}"
            )
        if self.serve is None and self.trace is None:
            raise ValueError("an engine needs a graph for its serve tail, its trace tail, or both")


@dataclass(slots=True)
class BuildLog:
    """Counts what was built and what was found in the cache."""

    built: int = 0
    reused: int = 0

    def __str__(self) -> str:
        return f"{self.built} engines built, {self.reused} reused"


def digest_json(value: Json) -> str:
    """Return the sha256 of a JSON value, hex; keys in order, no NaN.

    Raises:
        ValueError: The value holds a NaN or an infinity.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def engine_key(spec: EngineSpec) -> str:
    """Return the sha256 of everything that the engine depends on, hex.

    That is: the bytes of the graphs and of the weights they name, precision, scales, options,
    target, version of the backend, and the machine.

    Raises:
        InputError: A graph or a weight file cannot be read.
    """
    scales = None
    if spec.scales is not None:
        data = np.ascontiguousarray(spec.scales, "<f4")
        scales = [list(data.shape), hashlib.sha256(data.tobytes()).hexdigest()]
    return digest_json(
        {
            "format": FORMAT,
            "graphs": [graph_digest(path, spec.digests) for path in (spec.serve, spec.trace)],
            "precision": asdict(spec.precision),
            "scales": scales,
            "options": asdict(spec.options),
            "target": spec.target,
            "environment": environment(spec.options),
        }
    )


class Cache:
    """A folder of entries; see the module's description.

    Attributes:
        folder: Where the entries are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _make_folder(folder)

    def engine(self, spec: EngineSpec, log: BuildLog) -> OrtBackend:
        """Return the loaded engine; builds it first if its key is new, and counts in `log`.

        Raises:
            BackendError: It cannot be loaded, was not built as asked, or gives values that are
                not finite.
            InputError: A graph or a weight file cannot be read.
        """
        key = engine_key(spec)
        record = self.get("engine", key)
        engine = OrtBackend.load(
            spec.serve,
            spec.trace,
            spec.precision,
            spec.scales,
            spec.options,
            read_back=record is None,
        )
        if record is None:
            _smoke(engine, spec)
            self.put("engine", key, {"precision": spec.precision.name, "built": engine.built})
            log.built += 1
        else:
            engine.built = dict(record["built"])
            log.reused += 1
        return engine

    def get(self, kind: str, key: str) -> Json | None:
        """Return the value of an entry, or None where there is none.

        A damaged entry is removed, with a warning; one of another format is left and not read.
        """
        path = self._path(kind, key)
        try:
            data = path.read_bytes()
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                _LOG.warning("cadenza: cannot read %s (%s); made again", path, error.strerror)
            return None
        try:
            entry = json.loads(data)
            if isinstance(entry, dict) and entry.get("format", FORMAT) != FORMAT:
                return None
            if (entry["kind"], entry["key"]) == (kind, key) and (
                digest_json(entry["value"]) == entry["sha256"]
            ):
                with suppress(OSError):
                    os.utime(path)  # used now: `evict` takes the others first
                return entry["value"]
        except (ValueError, KeyError, TypeError, RecursionError):
            pass  # damaged: dropped below
        _LOG.warning("cadenza: dropped a damaged cache entry, %s; made again", path)
        path.unlink(missing_ok=True)
        return None

    def put(self, kind: str, key: str, value: Json) -> None:
        """Write an entry, whole or not at all; an entry of that key is replaced.

        Raises:
            CadenzaError: It cannot be written.
            ValueError: The value is no JSON, or holds a NaN.
        """
        path = self._path(kind, key)
        entry = {
            "format": FORMAT,
            "kind": kind,
            "key": key,
            "sha256": digest_json(value),
            "value": value,
        }
        temporary = ""
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=".partial-", dir=path.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump(entry, stream, allow_nan=False)
            os.replace(temporary, path)
            temporary = ""
        except OSError as error:
            raise CadenzaError(
                f"cannot write the cache entry {str(path)!r}: {error.strerror}; free some space, "
                f"or name another folder with --cache or {VARIABLE}"
            ) from error
        finally:
            if temporary:
                Path(temporary).unlink(missing_ok=True)

    def blobs(self, kind: str) -> Path:
        """Return the folder in which files of a kind lie beside their entries, as `KEY.*`.

        Raises:
            CadenzaError: It cannot be made.
        """
        folder = self._path(kind, "0" * 64).parent
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CadenzaError(
                f"cannot make {str(folder)!r}: {error.strerror}; name another folder with --cache "
                f"or {VARIABLE}"
            ) from error
        return folder

    def evict(self, limit_bytes: float, since: float) -> tuple[int, int]:
        """Remove what was not used for longest until at most so many bytes are left.

        Nothing used since a moment goes, and no file that is not an entry or lies with one.

        Args:
            limit_bytes: That may be left.
            since: Seconds of the epoch: when the run that asks began.

        Returns:
            Entries and bytes removed.
        """
        entries = []
        for files in self._entries():
            with suppress(OSError):
                used = files[0].lstat().st_mtime
                entries.append((used, sum(each.lstat().st_size for each in files), files))
        left, count, removed = sum(size for _, size, _ in entries), 0, 0
        for used, size, files in sorted(entries):
            if left - removed <= limit_bytes or used >= since:
                break
            with suppress(OSError):  # another process may have been first
                for each in reversed(files):  # the entry last: what is left is found again
                    each.unlink()
                count, removed = count + 1, removed + size
        for path in (self.folder / "v1").glob("*/.partial-*"):
            with suppress(OSError):
                if path.lstat().st_mtime < since - _STALE_S:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        return count, removed

    def _entries(self) -> list[list[Path]]:
        """Return each entry's file, and behind it those that lie with it."""
        found: list[list[Path]] = []
        for folder in (self.folder / "v1").glob("*"):
            if not _KIND.fullmatch(folder.name) or not folder.is_dir():
                continue
            by_key: dict[str, list[Path]] = {}
            for path in folder.iterdir():
                if _KEY.fullmatch(path.stem):
                    by_key.setdefault(path.stem, []).append(path)
            for files in by_key.values():
                files.sort(key=lambda path: (path.suffix != ".json", path))
                if files[0].suffix == ".json":
                    found.append(files)
        return found

    def _path(self, kind: str, key: str) -> Path:
        if not _KIND.fullmatch(kind) or not _KEY.fullmatch(key):
            raise ValueError(f"need a kind in lower case and a sha256 in hex, got {kind=}, {key=}")
        return self.folder / "v1" / kind / f"{key}.json"


def open_cache(given: Path | None, environ: Mapping[str, str]) -> Cache:
    """Return the cache that was given, else $CADENZA_CACHE_DIR's, else the user's own.

    Where the user's own folder cannot be written (no home, a read-only one), a folder of this user
    below the system's temporary one is used, and a warning says so.

    Raises:
        InputError: The folder that was asked for by argument or variable cannot be used.
    """
    if given is not None:
        return Cache(given)
    if environ.get(VARIABLE):
        return Cache(Path(environ[VARIABLE]))
    try:
        base = Path(environ.get("XDG_CACHE_HOME", ""))
        return Cache((base if base.is_absolute() else Path.home() / ".cache") / "cadenza")
    except (InputError, RuntimeError) as error:
        cache = Cache(_temporary_folder())
        _LOG.warning(
            "cadenza: no cache folder of your own (%s); using %s; set %s to keep engines",
            error,
            cache.folder,
            VARIABLE,
        )
        return cache


def _temporary_folder() -> Path:
    """Return a folder below the system's temporary one that nobody else can have planted."""
    folder = Path(tempfile.gettempdir()) / f"cadenza-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="cadenza-"))
    private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if private and found.st_uid == os.getuid():
        return folder
    return Path(tempfile.mkdtemp(prefix="cadenza-"))


def _make_folder(folder: Path) -> None:
    """Make a folder for this user alone, or check that the one there can be used.

    Raises:
        InputError: It is no folder, or cannot be written.
    """
    mend = f"name another folder with --cache or {VARIABLE}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"the cache folder {str(folder)!r} cannot be made: {error.strerror}; {mend}"
        ) from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise InputError(f"the cache folder {str(folder)!r} cannot be written; {mend}")


def graph_digest(path: Path | None, digests: Mapping[str, str]) -> Json:
    """Return the digests of a graph and of each weight file whose path it holds, or None.

    Raises:
        InputError: One cannot be read.
    """
    if path is None:
        return None
    try:
        data = path.read_bytes()
        weights = path.parent / "weights"
        stored = sorted(f.name for f in weights.iterdir()) if weights.is_dir() else []
    except OSError as error:
        raise InputError(
            f"cannot read the graph {str(path)!r}: {error.strerror}; export again"
        ) from error
    named = [f"weights/{name}" for name in stored if f"weights/{name}".encode() in data]
    return [
        hashlib.sha256(data).hexdigest(),
        {name: digests.get(name) or digest_file(path.parent / name).sha256 for name in named},
    ]


def _smoke(engine: OrtBackend, spec: EngineSpec) -> None:
    """Run one small ragged pass at the progress of each window; refuses what is not finite."""
    rows = 2 if spec.scales is None else max(2, len(spec.scales))
    lengths = _SMOKE_LENGTH - np.arange(rows) % (_SMOKE_LENGTH // 2)
    ids = np.ones((rows, _SMOKE_LENGTH), np.int64)
    mask = np.arange(_SMOKE_LENGTH) < lengths[:, None]
    positions = np.zeros((rows, 2), np.int64)
    positions[:, 1] = lengths - 1
    progress = (np.arange(rows) / rows).astype(np.float32)
    if spec.serve is not None:
        served = engine.serve(ids, mask, positions, progress)
        found = np.stack([served.probability, served.entropy])
    else:
        found = engine.logits(ids, mask, positions, progress)
    if not np.isfinite(found).all():
        raise BackendError(
            f"engine {spec.precision.name!r} gave values that are not finite in its first pass; "
            f"use a higher precision, or check the checkpoint's weights"
        )
