"""The header of a safetensors file, checked: where each tensor lies, and that it is all there.

    8 bytes n, little-endian | n bytes of JSON: {name: {dtype, shape, data_offsets}} | data

Serving machines have no safetensors package, and no more than this is needed.  Nothing in the file
is trusted: offsets must follow one another without a gap, and hold what dtype and shape say.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path

from engines.document import document_from_text
from engines.errors import BundleError

# Bits of an element, by the type's name in the file.
BITS = {
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "I8": 8,
    "U8": 8,
    "F8_E4M3": 8,
    "I32": 32,
    "I64": 64,
    "BOOL": 8,
    "F4": 4,
}

_LONGEST_HEADER = 100 << 20  # the format's own limit
_MOST_AXES = 8


@dataclass(frozen=True, slots=True)
class Range:
    """A tensor of a file: its type, shape, and bytes [begin, end) from the file's start."""

    type: str
    shape: tuple[int, ...]
    begin: int
    end: int


def tensors_of(file: Path) -> dict[str, Range]:
    """Return where each tensor of a file lies.

    Raises:
        BundleError: It cannot be read, or is no whole safetensors file.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            (length,) = struct.unpack("<Q", prefix) if len(prefix) == 8 else (0,)
            if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
                raise BundleError(f"{file.name} is no safetensors file; get it again")
            text = stream.read(length).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"cannot read {file.name}: {error}; get it again") from error
    top = document_from_text(text, file.name, BundleError)
    found: dict[str, Range] = {}
    for name, entry in top.items():
        if name == "__metadata__":
            continue
        kind = entry["dtype"].text()
        shape = tuple(each.integer() for each in entry["shape"].entries())
        offsets = [each.integer() for each in entry["data_offsets"].entries()]
        if len(offsets) != 2 or len(shape) > _MOST_AXES:
            entry.fail("must have two offsets and eight axes at most; get the file again")
        held = offsets[1] - offsets[0]
        if kind in BITS and held * 8 != math.prod(shape) * BITS[kind]:
            entry.fail(f"has {held} bytes for {kind} {list(shape)}; get the file again")
        found[name] = Range(kind, shape, 8 + length + offsets[0], 8 + length + offsets[1])
    at = 8 + length
    for name, each in sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)):
        if each.begin != at or each.end < each.begin:
            raise BundleError(
                f"{file.name}: {name!r} begins at {each.begin}, the one before ends at {at}; get "
                f"the file again"
            )
        at = each.end
    if at != size:
        raise BundleError(f"{file.name} has {size} bytes, its tensors end at {at}; get it again")
    return found
