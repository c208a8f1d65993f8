"""Read and write a bundle: the folder that ships.  `BUNDLE.md` states the format.

    bundle = read_bundle("demo/bundle")            # digests checked; nothing is loaded before
    bundle.manifest.tasks["edit"].targets["cpu"].schedule
    write_bundle(out, manifest, files, golden)     # whole, or not at all

A bundle read is hostile until checked.  Nothing is ever written into it.
"""

from __future__ import annotations

import json
import mmap
import posixpath
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engines.document import Document, document_from_text
from engines.errors import BundleError, InputError
from engines.files import (
    check_files,
    check_replaceable,
    digest_file,
    place_file,
    regular_file,
    relative_path,
    whole_folder,
)
from engines.manifest import FORMAT, GOLDEN, MANIFEST, Manifest
from engines.parse import manifest_from_document

_LARGEST_MANIFEST = 64 << 20

# A StringStringEntryProto whose key is "location", as protobuf writes it in every TensorProto
# with external data: field 1, length 8, "location", field 2; the value's length follows.
_LOCATION = b"\x0a\x08location\x12"


@dataclass(frozen=True, kw_only=True)
class Golden:
    """An answer that the bundle gave where it was made; any runtime must give it again.

    Attributes:
        id: Of the prompt.
        task: Whose schedule it followed.
        prompt: The text.
        ids: The answer, end-of-sequence padding included; made alone, in a batch of one.
        full_precision_ids: The same at full precision.
        schedule_digest: `Manifest.schedule_digest` when it was made.
    """

    id: str
    task: str
    prompt: str
    ids: tuple[int, ...]
    full_precision_ids: tuple[int, ...]
    schedule_digest: str


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A bundle on disk whose manifest has been checked, and its files too unless said otherwise.

    Attributes:
        folder: Where it stands.
        manifest: What it says of itself.
        golden: Answers that any runtime must give again.
    """

    folder: Path
    manifest: Manifest
    golden: tuple[Golden, ...]

    @property
    def digest(self) -> str:
        """Digest of schedules and engines; what `cadenza run --expect` compares."""
        return self.manifest.digest

    def path(self, file: str) -> Path:
        """Return where a listed file stands."""
        if file not in self.manifest.files:
            raise ValueError(f"{file!r} is not a file of the bundle {str(self.folder)!r}")
        return self.folder / file


def read_bundle(path: str | Path, verify: bool = True) -> Bundle:
    """Return the bundle of a folder, checked.

    Args:
        path: The folder.
        verify: Whether the sha256 of every file is checked as well.  Paths, kinds and sizes
            always are.

    Raises:
        BundleError: It is missing, damaged, of another version, inconsistent, or leaves its
            folder.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise BundleError(
            f"{str(folder)!r} is not a folder; give the folder that cadenza tune wrote"
        )
    try:
        top = _read_json(folder, MANIFEST)
        manifest = manifest_from_document(top)
        check_files(folder, manifest.files, digests=verify)
        for name, graph in manifest.graphs.items():
            named = _weights_of(folder, graph.file)
            if named != set(graph.weights):
                raise InputError(
                    f"graph {name!r}: {graph.file!r} reads {_listed(named)}, its 'weights' in the "
                    f"manifest are {_listed(graph.weights)}"
                )
        return Bundle(folder=folder, manifest=manifest, golden=_read_golden(folder))
    except BundleError:
        raise
    except InputError as error:
        raise BundleError(
            f"the bundle {str(folder)!r} is damaged: {error}; copy it again from where it was "
            f"whole, or tune again"
        ) from error


def write_bundle(
    out: str | Path,
    manifest: Mapping[str, object],
    files: Mapping[str, Path],
    golden: Sequence[Golden],
    *,
    force: bool = False,
    copy: bool = False,
) -> Bundle:
    """Write a bundle under a temporary name, check it, rename it, and return it.

    Args:
        out: The folder to be.
        manifest: Everything of `BUNDLE.md` but what can be told from the files: `format`,
            `files`, `requires` (empty if absent), the `sha256` and `bytes` of engines, and the
            `weights` of graphs.
        files: Path in the bundle to the file that belongs there.  Large ones are hard-linked.
        golden: Lines of golden.jsonl.
        force: Replace a bundle that is there.  Anything else is never replaced.
        copy: Never link.

    Raises:
        InputError: `out` is there and may not be replaced, or a file is missing.
        BundleError: The manifest is at fault.
    """
    out = Path(out)
    with whole_folder(out, force=force, is_ours=is_bundle, kind="bundle") as folder:
        for path, source in files.items():
            try:
                place_file(source, folder / relative_path(path), copy)
            except FileNotFoundError as error:
                raise InputError(
                    f"the file {str(source)!r} for the bundle is missing; make it again"
                ) from error
        lines = "".join(f"{json.dumps(asdict(line), ensure_ascii=False)}\n" for line in golden)
        (folder / GOLDEN).write_text(lines, encoding="utf-8")
        whole = _completed(folder, manifest, (*files, GOLDEN))
        (folder / MANIFEST).write_text(f"{_pretty(whole)}\n", encoding="utf-8")
        read_bundle(folder, verify=False)
    return read_bundle(out, verify=False)


def is_bundle(folder: Path) -> bool:
    """Return whether a folder holds a bundle, whole or damaged."""
    try:
        return '"cadenza-bundle/' in regular_file(folder, MANIFEST).read_text(encoding="utf-8")
    except (InputError, OSError, UnicodeError):
        return False


def check_output(out: str | Path, force: bool = False) -> None:
    """Check before long work that a bundle may be written there.

    Raises:
        InputError: It may not; says why.
    """
    check_replaceable(Path(out), force=force, is_ours=is_bundle, kind="bundle")


def external_data(file: Path) -> set[str]:
    """Return the locations that an ONNX file names for external data, relative to its folder.

    Found by their spelling in protobuf, without parsing: enough to hold a manifest to what
    export writes.  A file made to hide a location is stopped by ONNX Runtime, which refuses
    what lies outside the graph's folder.
    """
    found: set[str] = set()
    with file.open("rb") as stream:
        if file.stat().st_size == 0:
            return found
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            at = data.find(_LOCATION)
            while at >= 0:
                at += len(_LOCATION)
                length, at = _varint(data[at : at + 5], at)
                found.add(data[at : at + length].decode(errors="replace"))
                at = data.find(_LOCATION, at)
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a protobuf length and where what follows it starts."""
    value = 0
    for index, byte in enumerate(data):
        value |= (byte & 127) << (7 * index)
        if byte < 128:
            return value, at + index + 1
    return 0, at


def _weights_of(folder: Path, file: str) -> set[str]:
    """Return the paths in the bundle of a graph's external data."""
    above = posixpath.dirname(file)
    return {posixpath.normpath(posixpath.join(above, at)) for at in external_data(folder / file)}


def _listed(paths: Collection[str]) -> str:
    return ", ".join(sorted(paths)) or "none"


def _completed(
    folder: Path, manifest: Mapping[str, object], paths: Sequence[str]
) -> dict[str, object]:
    """Return the manifest with what can be told from the files already in place."""
    files = {path: asdict(digest_file(folder / path)) for path in sorted(set(paths))}
    given = Document(dict(manifest), "the manifest to write", BundleError)
    engines = {
        name: {**engine.mapping(), **files.get(engine["file"].text(), {})}
        for name, engine in given["engines"].items()
    }
    graphs = {}
    for name, graph in given["graphs"].items():
        file = graph["file"].text()
        if file not in files:
            graph["file"].fail(f"{file!r} is not among the files; give it too")
        graphs[name] = {
            "scales": None,
            "weights": sorted(_weights_of(folder, file)),
            **graph.mapping(),
        }
    return {
        "format": FORMAT,
        "requires": [],
        **manifest,
        "graphs": graphs,
        "engines": engines,
        "files": files,
    }


def _read_json(folder: Path, path: str) -> Document:
    file = regular_file(folder, path)
    size = file.stat().st_size
    if size > _LARGEST_MANIFEST:
        raise InputError(f"{path!r} has {size} bytes, more than any manifest")
    return document_from_text(_read_text(file), path)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InputError(f"cannot read {file.name!r}: {error}") from error


def _read_golden(folder: Path) -> tuple[Golden, ...]:
    found = []
    for number, text in enumerate(_read_text(folder / GOLDEN).split("\n"), start=1):
        if not text:
            continue
        line = document_from_text(text, f"{GOLDEN}, line {number}")
        found.append(
            Golden(
                id=line["id"].text(),
                task=line["task"].text(),
                prompt=line["prompt"].text(),
                ids=_ids(line["ids"]),
                full_precision_ids=_ids(line["full_precision_ids"]),
                schedule_digest=line["schedule_digest"].text(),
            )
        )
    return tuple(found)


def _ids(ids: Document) -> tuple[int, ...]:
    return tuple(token.integer() for token in ids.entries())


def _pretty(value: object, indent: str = "") -> str:
    """Return JSON to be read and edited by people: a list of plain values stands in one line."""
    inner = f"{indent} "
    if isinstance(value, Mapping) and value:
        rows = [f"{inner}{json.dumps(key)}: {_pretty(v, inner)}" for key, v in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if isinstance(value, list | tuple) and any(
        isinstance(v, Mapping | list | tuple) for v in value
    ):
        return "[\n" + ",\n".join(f"{inner}{_pretty(v, inner)}" for v in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
