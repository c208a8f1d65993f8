"""Weights on disk: byte ranges of safetensors files that graphs name, and their writer.

A safetensors file is 8 bytes (the length of the header, little endian), the header (JSON: for each
tensor its dtype, shape and byte range), then the data.  ONNX external data names a file, an offset
and a length, so a graph can use the very bytes of a checkpoint.

Everything here works tensor by tensor on mapped files: memory does not grow with the model.
Checkpoints are only read; `engines.files.place_file` links or copies them.

Knows nothing about torch.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engines.document import Document, document_from_text
from engines.errors import InputError

if TYPE_CHECKING:
    import onnx

# Bytes of an element, and the number of ONNX's TensorProto.DataType.
SIZES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1, "I16": 2}
ONNX_TYPES = {"F32": 1, "U8": 2, "I8": 3, "I16": 5, "F16": 10, "BF16": 16, "F8_E4M3": 17}
FLOATS = ("F32", "BF16", "F16")

_CHUNK = 1 << 24
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor lies.

    Attributes:
        file: The safetensors file.
        kind: Its dtype by safetensors' name.
        shape: Its shape.
        start: First byte in the file.
        size: Bytes.
    """

    file: Path
    kind: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor to be written: what the header says of it, and who makes its bytes."""

    name: str
    kind: str
    shape: tuple[int, ...]
    make: Callable[[], NDArray[Any]]


def read_header(file: Path) -> dict[str, Stored]:
    """Return where each tensor of a safetensors file lies.

    Raises:
        InputError: The file is missing, truncated or no safetensors file.
    """
    try:
        found_file = file.stat()
        if not stat.S_ISREG(found_file.st_mode):
            raise InputError(f"{str(file)!r} is not a regular file; give a complete checkpoint")
        total = found_file.st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            text = stream.read(min(length, _LONGEST_HEADER))
    except OSError as error:
        raise InputError(
            f"cannot read the weights {str(file)!r}: {error.strerror}; give a complete checkpoint"
        ) from error
    if total < 8 or length > _LONGEST_HEADER or len(text) < length:
        raise InputError(
            f"{file} is not a whole safetensors file: {total} bytes, header of {length}; "
            f"download it again"
        )
    try:
        header = document_from_text(text.decode(), f"{file}: the safetensors header")
    except UnicodeError as error:
        raise InputError(
            f"{file}: the safetensors header is no text ({error}); download it again"
        ) from error
    found = {
        name: _stored(file, 8 + length, value)
        for name, value in header.items()
        if name != "__metadata__"
    }
    for name, stored in found.items():
        size = SIZES.get(stored.kind)
        if stored.size < 0:
            raise InputError(f"{file}: {name} has an impossible byte range; download it again")
        if stored.start + stored.size > total:
            raise InputError(
                f"{file} is truncated: {name} ends at byte {stored.start + stored.size}, the file "
                f"at {total}; download it again"
            )
        if size is not None and size * math.prod(stored.shape) != stored.size:
            raise InputError(
                f"{file}: {name} of shape {list(stored.shape)} and type {stored.kind} has "
                f"{stored.size} bytes; download it again"
            )
    at = 8 + length
    for name, stored in sorted(found.items(), key=lambda item: (item[1].start, item[1].size)):
        if stored.start != at:
            raise InputError(
                f"{file}: {name} overlaps another tensor, or a gap lies before it; download it "
                f"again"
            )
        at += stored.size
    if at != total:
        raise InputError(f"{file} has {total - at} bytes after its tensors; download it again")
    return found


def _stored(file: Path, data: int, value: Document) -> Stored:
    """Return where a tensor lies by its entry in the header; `data` is where the data begin."""
    offsets = [offset.integer() for offset in value["data_offsets"].entries()]
    if len(offsets) != 2:
        value.fail(f"has {len(offsets)} data_offsets instead of 2; download it again")
    shape = tuple(size.integer() for size in value["shape"].entries())
    start, end = offsets
    return Stored(file, value["dtype"].name(), shape, data + start, end - start)


def mapped(stored: Stored) -> NDArray[np.uint8]:
    """Return the bytes of a tensor, mapped and read only."""
    if stored.size == 0:
        return np.zeros(0, np.uint8)
    return np.memmap(stored.file, np.uint8, "r", stored.start, (stored.size,))


def floats(stored: Stored) -> NDArray[np.float32]:
    """Return a tensor as float32, in its shape; a copy only where its type is another."""
    raw = mapped(stored)
    if stored.kind == "F32":
        values = raw.view("<f4")
    elif stored.kind == "F16":
        values = raw.view("<f2").astype(np.float32)
    elif stored.kind == "BF16":
        values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        raise ValueError(f"a tensor of {', '.join(FLOATS)} is wanted, got {stored.kind}")
    return values.reshape(stored.shape)


def is_finite(stored: Stored) -> bool:
    """Return whether a tensor of floats holds neither NaN nor infinity; reads it in chunks."""
    kind, exponent = ("<u4", 0x7F800000) if stored.kind == "F32" else ("<u2", 0x7F80)
    if stored.kind == "F16":
        exponent = 0x7C00
    bits = mapped(stored).view(kind)
    return not any(
        bool(((bits[at : at + _CHUNK] & exponent) == exponent).any())
        for at in range(0, len(bits), _CHUNK)
    )


def write_family(file: Path, items: Iterable[Item]) -> dict[str, Stored]:
    """Write a new safetensors file tensor by tensor and return where each lies.

    Raises:
        FileExistsError: There is one; it may be a hard link of somebody's.
        ValueError: Two items have one name, or a tensor is not what its item says.
    """
    listed = list(items)
    header: dict[str, object] = {}
    at = 0
    for item in listed:
        size = SIZES[item.kind] * math.prod(item.shape)
        if item.name in header:
            raise ValueError(f"two tensors are called {item.name!r}")
        header[item.name] = {
            "dtype": item.kind,
            "shape": list(item.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for item in listed:
            values = np.ascontiguousarray(item.make())
            if values.nbytes != SIZES[item.kind] * math.prod(item.shape):
                raise ValueError(f"{item.name}: {values.nbytes} bytes for {item.kind}{item.shape}")
            for chunk in _chunks(values):
                stream.write(chunk)
    return read_header(file)


def _chunks(values: NDArray[Any]) -> Iterator[memoryview]:
    data = values.reshape(-1).view(np.uint8)
    for at in range(0, len(data), _CHUNK):
        yield data[at : at + _CHUNK].data


def bind(model: onnx.ModelProto, stored: Mapping[str, Stored]) -> None:
    """Give each initializer without data its byte range in `weights/`, in place.

    Args:
        model: Initializers that have data keep it.
        stored: Where the tensors lie, by the initializers' names.

    Raises:
        ValueError: An initializer has no data and is not in `stored`, or differs in size.
    """
    from onnx import TensorProto

    for initializer in model.graph.initializer:
        if initializer.name not in stored:
            if not initializer.raw_data and initializer.data_location != TensorProto.EXTERNAL:
                raise ValueError(f"the initializer {initializer.name!r} has no data anywhere")
            continue
        found = stored[initializer.name]
        packed = initializer.data_type in (TensorProto.INT4, TensorProto.FLOAT4E2M1)
        count = math.prod(initializer.dims)
        wanted = (count + 1) // 2 if packed else count * SIZES[found.kind]
        if wanted != found.size:
            raise ValueError(f"{initializer.name}: {wanted} bytes wanted, {found.size} stored")
        initializer.data_location = TensorProto.EXTERNAL
        del initializer.external_data[:]
        for key, value in (
            ("location", f"weights/{found.file.name}"),
            ("offset", str(found.start)),
            ("length", str(found.size)),
        ):
            entry = initializer.external_data.add()
            entry.key, entry.value = key, value


def external_ranges(model: onnx.ModelProto) -> set[tuple[str, int, int]]:
    """Return (location, offset, length) of every initializer that lies outside the graph."""
    ranges = set()
    for initializer in model.graph.initializer:
        entry = {item.key: item.value for item in initializer.external_data}
        if entry:
            ranges.add((entry["location"], int(entry["offset"]), int(entry["length"])))
    return ranges


def check_graph(model: onnx.ModelProto, folder: Path) -> None:
    """Check a graph by ONNX's rules, and that every byte range lies in its file.

    The checker refuses hard links, so it sees a copy whose weights are inputs.

    Raises:
        ValueError: The graph is at fault; a mistake of ours.
    """
    import onnx
    from onnx import checker, helper

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for initializer in list(copy.graph.initializer):
        if initializer.external_data:
            copy.graph.input.append(
                helper.make_tensor_value_info(
                    initializer.name, initializer.data_type, list(initializer.dims)
                )
            )
            copy.graph.initializer.remove(initializer)
    try:
        checker.check_model(copy, full_check=True)
    except (checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ValueError(f"the graph breaks ONNX's rules: {error}") from error
    for location, offset, length in external_ranges(model):
        size = (folder / location).stat().st_size
        if offset + length > size:
            raise ValueError(f"{location}: bytes {offset} to {offset + length} of {size}")
