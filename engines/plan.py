"""What a TensorRT plan says of itself, read without a GPU and without TensorRT.

Every plan has a header of 64 bytes: its size, the version that wrote it, the SMs that it is for.
Plans of TensorRT-RTX also hold, in plain text, the program that its compiler made for each SM: the
tensors with their types, and the kernels with their operands.  That text is undocumented; it is
read for the versions that it was tried with, and for no other.  So it is a best effort: good to
find a product that was not built as asked, never the only gate, and no sign of who made a plan.

Nothing in a plan is trusted: reading takes time linear in its size and raises InputError alone.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from engines.errors import InputError

MAGIC = b"vtrt"
HEADER_BYTES = 64

# How plans of TensorRT itself begin.  Of their header only the version's four bytes are known,
# at the same place (NVIDIA's answer in issue 3073 of NVIDIA/TensorRT); none was seen here.
TENSORRT_MAGIC = b"ftrt"

# Bits of the header's mask of SMs.
_SM_BITS = {75: 0x01, 80: 0x02, 86: 0x04, 89: 0x08, 120: 0x10, 121: 0x20}

# Versions whose programs were read: (major, minor).
READ_VERSIONS = ((1, 7),)

_PROGRAM = b"header {\n  version"
_MOST_PROGRAMS, _LONGEST_PROGRAM, _LONGEST_LINE = 4096, 64 << 20, 1 << 16

# Lines of a program that say something of tensors, memory and products; others are passed over.
_LINES = re.compile(
    rb"^[ \t]{0,16}((?:sub_)?tensor=\{|region = |fully_connected=\{|runtime_fusion=\{)[^\n]*",
    re.MULTILINE,
)

# Sections of a plan: how many there are, where their table begins, and a row of it.
_SECTIONS, _SECTION = HEADER_BYTES, struct.Struct("<8sQQ")
_MOST_SECTIONS, _WEIGHTS = 64, b"THGW\0\0\0\0"
_NAME, _TYPE = re.compile(r' name="([^"]{1,400})"'), re.compile(r" type=(\w{1,40})")
_DIMS = re.compile(r" dims=\{ ([^}]{1,400}) \}")
_SMS = re.compile(rb"accelerators=\{((?:sm\d{2,4} ?){1,16})\}")
_REGION = re.compile(r"region = \{ name=devmem\w{0,80} size=(\d{1,18}) ")
_QUOTED, _LAYERS = re.compile(r'"([^"]{0,400})"'), re.compile(r' layers="([^"]{0,4000})"')
_FUSION = re.compile(r"\bname=(\w{1,200})")


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of a product: its name, type, and extents as far as they are fixed."""

    name: str
    type: str
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product as it was compiled.

    Attributes:
        layers: The ONNX nodes that it computes.
        operands: What it reads, sizes of the shapes left out.
        fused: Name of the kernel that computes it with its neighbours, "" where it stands alone.
    """

    layers: tuple[str, ...]
    operands: tuple[Operand, ...]
    fused: str

    @property
    def types(self) -> tuple[str, ...]:
        """Type of each operand: of what is multiplied, then of what its kernel reads besides."""
        return tuple(each.type for each in self.operands)

    @property
    def elements(self) -> int:
        """Elements of its largest matrix of fixed size, inputs times outputs of a layer."""
        return max(
            (each.dims[-1] * each.dims[-2] for each in self.operands if len(each.dims) >= 2),
            default=0,
        )


@dataclass(frozen=True, slots=True)
class Program:
    """What was compiled for an SM, or for several at once.

    Attributes:
        sms: As the plan calls them.
        products: In the order of the text.
        stored: Elements of the constants, by their type.
        scratch_bytes: Of memory that a pass needs besides its inputs and outputs.
    """

    sms: tuple[str, ...]
    products: tuple[Product, ...]
    stored: Mapping[str, int]
    scratch_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan, as far as it could be read.

    Attributes:
        bytes: Of the whole plan.
        version: Of the module that wrote it.
        sms: For which it was built; empty for a plan of TensorRT itself, which does not say.
        weight_bytes: Of the section of weights; None where the version was never read.
        programs: Of its SMs; empty where they were not read.
        why: Why they were not, or "".
    """

    bytes: int
    version: tuple[int, ...]
    sms: tuple[int, ...]
    weight_bytes: int | None
    programs: tuple[Program, ...]
    why: str


def plan_from_file(file: Path) -> Plan:
    """Return what a plan's file says.

    Raises:
        InputError: It cannot be read, or is no whole plan.
    """
    try:
        with file.open("rb") as stream:
            if file.stat().st_size < HEADER_BYTES:
                raise InputError(f"{file.name} is no TensorRT plan: it is too short; rebuild it")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return plan_from_bytes(data, file.name)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the plan {str(file)!r}: {error}; rebuild it") from error


def plan_from_bytes(data: bytes | mmap.mmap, name: str = "the plan") -> Plan:
    """Return what a plan says.

    Raises:
        InputError: It is no whole plan.
    """
    if len(data) >= HEADER_BYTES and data[:4] == TENSORRT_MAGIC:
        why = "plans of TensorRT itself were never read"
        return Plan(len(data), tuple(data[24:28]), (), None, (), why)
    if len(data) < HEADER_BYTES or data[:4] != MAGIC:
        raise InputError(f"{name} is no TensorRT plan; rebuild it")
    (size,) = struct.unpack("<Q", data[16:24])
    if size != len(data):
        raise InputError(
            f"{name} is not whole: it says {size} bytes and has {len(data)}; rebuild it"
        )
    version = tuple(data[24:28])
    (mask,) = struct.unpack("<I", data[32:36])
    sms = tuple(sm for sm, bit in _SM_BITS.items() if mask & bit)
    if version[:2] not in READ_VERSIONS:
        said = ".".join(map(str, version))
        return Plan(size, version, sms, None, (), f"programs of version {said} were never read")
    programs = tuple(_programs(data))
    why = "" if programs else "it holds no program in text"
    return Plan(size, version, sms, _weight_bytes(data), programs, why)


def _weight_bytes(data: bytes | mmap.mmap) -> int:
    """Return the bytes of the sections of weights."""
    (count,) = struct.unpack("<Q", data[8:16])
    table = data[_SECTIONS : _SECTIONS + min(count, _MOST_SECTIONS) * _SECTION.size]
    whole = len(table) // _SECTION.size * _SECTION.size
    rows = _SECTION.iter_unpack(table[:whole])
    return sum(size for tag, _, size in rows if tag == _WEIGHTS and size <= len(data))


def _programs(data: bytes | mmap.mmap) -> Iterator[Program]:
    """Yield the programs for given SMs; those for any SM are parts of others."""
    at = data.find(_PROGRAM)
    for _ in range(_MOST_PROGRAMS):
        if at < 0:
            return
        end = data.find(b"\0", at, at + _LONGEST_PROGRAM)
        if end < 0:
            return
        found = _SMS.search(data, at, min(end, at + _LONGEST_LINE))
        if found:
            yield _program(tuple(found[1].decode().split()), data, at, end)
        at = data.find(_PROGRAM, end)


def _program(sms: tuple[str, ...], data: bytes | mmap.mmap, begin: int, end: int) -> Program:
    tensors: dict[str, Operand] = {}
    kept: list[str] = []
    stored: Counter[str] = Counter()
    scratch = 0
    for found in _LINES.finditer(data, begin, end):
        if found.end() - found.start() > _LONGEST_LINE:
            continue
        line = found[0].decode("utf-8", "replace").strip()
        if line.startswith(("tensor={", "sub_tensor={")):
            tensor = _tensor(line)
            if tensor is not None:
                tensors[tensor.name] = tensor
                if " const_payload_size=" in line:
                    stored[tensor.type] += math.prod(tensor.dims)
        elif line.startswith("region = "):
            region = _REGION.match(line)
            scratch += int(region[1]) if region else 0
        elif line.startswith("fully_connected={") or "backbone=gemm" in line:
            kept.append(line)
    return Program(sms, tuple(_product(line, tensors) for line in kept), dict(stored), scratch)


def _tensor(line: str) -> Operand | None:
    name, kind, dims = _NAME.search(line), _TYPE.search(line), _DIMS.search(line)
    if name is None or kind is None:
        return None
    extents = dims[1].split() if dims else []
    fixed = tuple(int(each) for each in extents if each.isascii() and each.isdigit())
    return Operand(name[1], kind[1], fixed if len(fixed) == len(extents) else fixed[-1:])


def _product(line: str, tensors: dict[str, Operand]) -> Product:
    fused = line.startswith("runtime_fusion={")
    key = "input_args={" if fused else " input={"
    begin = line.find(key)
    inside = line[begin + len(key) : line.find("}", begin)] if begin >= 0 else ""
    names = _QUOTED.findall(inside)
    # Behind the two sides of a product stand its factors alpha and beta.
    known = [tensors[name] for name in (names if fused else names[:2]) if name in tensors]
    layers = _LAYERS.search(line)
    said = layers[1] if layers else ""
    name = _FUSION.search(line)
    return Product(
        layers=tuple(re.findall(r"\[ONNX Layer: ([^\]]{1,400})\]", said)),
        operands=tuple(each for each in known if each.type not in ("int64", "int32", "bool")),
        fused=name[1] if fused and name else "",
    )
