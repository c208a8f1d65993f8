"""Quantized weights: integers and scales, made tensor by tensor.

int8: symmetric, one scale an output channel.  w4, w8, w16: symmetric, groups of 32 inputs of a
channel share a scale.  How a weight is rounded to them is an argument; to the nearest is here,
`exporter.gptq` has the other.  Knows nothing about graphs or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.errors import InputError
from engines.precision import WEIGHT_GROUP
from exporter.hadamard import block_of_width, hadamard, rotation_name
from exporter.weights import Item, Stored, floats, mapped

INT8_LARGEST = 127

# Weights whose largest magnitude is not above it count as zeros: no float could be their scale.
SMALLEST_RANGE = 1e-30

# Integers [in, out] and scales, [out] by channel or [groups, out] by group.
Rounded = tuple[NDArray[np.integer[Any]], NDArray[np.float32]]

# From (name, site, weight [out, in], bits, whether by channel) to integers and scales.
Rounding = Callable[[str, str, NDArray[np.float32], int, bool], Rounded]

# Type of a weight's integers by their bits; 4 bits are packed when they are stored.
INTEGERS: Mapping[int, type[np.int8] | type[np.int16]] = {4: np.int8, 8: np.int8, 16: np.int16}

_KIND = {4: "U8", 8: "I8", 16: "I16"}


def quantized_name(weight: str) -> str:
    """Return the name of a weight's integers."""
    return f"{weight}.quantized"


def is_quantized(name: str) -> bool:
    """Return whether a tensor's name is that of quantized weights."""
    return name.endswith(".quantized")


def scale_name(weight: str) -> str:
    """Return the name of a weight's scales."""
    return f"{weight}.scale"


def global_scale_name(weight: str) -> str:
    """Return the name of the scale of a weight's scales, where they have one."""
    return f"{weight}.global_scale"


def zeros_name(weight: str) -> str:
    """Return the name of a weight's zero points, all 0.

    By ONNX's rules they could be left out or shared; ONNX Runtime 1.32 fails on both when it turns
    signed integers into unsigned ones.
    """
    return f"{weight}.zeros"


def largest_integer(bits: int) -> int:
    """Return the largest integer of some bits; the smallest is its negative."""
    return int(2 ** (bits - 1)) - 1


def to_nearest(weight: NDArray[np.float32], bits: int, by_channel: bool) -> Rounded:
    """Return a weight [out, in] rounded to the nearest, by channel or by group."""
    return quantize_channels(weight, bits) if by_channel else quantize_groups(weight, bits)


def round_to_nearest(
    name: str, site: str, weight: NDArray[np.float32], bits: int, by_channel: bool
) -> Rounded:
    """Round to the nearest, whatever the weight is called and wherever it stands."""
    return to_nearest(weight, bits, by_channel)


def quantize_channels(
    weight: NDArray[np.float32], bits: int = 8
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return (integers [in, out], scales [out]) of a weight [out, in], to the nearest.

    Transposed, so that it is the right side of a product.  A channel of zeros has the scale 1.
    """
    largest = np.abs(weight).max(1)
    scale = np.where(largest > SMALLEST_RANGE, largest / largest_integer(bits), 1.0)
    scale = scale.astype(np.float32)
    return np.rint(weight / scale[:, None]).astype(np.int8).T, scale


def quantize_groups(weight: NDArray[np.float32], bits: int) -> Rounded:
    """Return (integers [in, out], scales [groups, out]) of a weight [out, in].

    Each group of 32 inputs of a channel shares a scale; the last may be shorter.  Symmetric: the
    most negative integer is not used.
    """
    outputs, inputs = weight.shape
    groups = -(-inputs // WEIGHT_GROUP)
    padded = np.zeros((outputs, groups * WEIGHT_GROUP), np.float32)
    padded[:, :inputs] = weight
    grouped = padded.reshape(outputs, groups, WEIGHT_GROUP)
    largest = np.abs(grouped).max(2)
    scale = np.where(largest > SMALLEST_RANGE, largest / largest_integer(bits), 1.0).astype(
        np.float32
    )
    rounded = np.rint(grouped / scale[:, :, None]).reshape(outputs, -1)[:, :inputs]
    return rounded.T.astype(INTEGERS[bits]), np.ascontiguousarray(scale.T)


def pack_int4(values: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Return two integers of 4 bits a byte, the first in the low half, rows after each other."""
    flat = values.reshape(-1).view(np.uint8) & np.uint8(0xF)
    if flat.size % 2:
        flat = np.concatenate((flat, np.zeros(1, np.uint8)))
    packed: NDArray[np.uint8] = flat[0::2] | (flat[1::2] << np.uint8(4))
    return packed


def quantized_items(
    tensors: Mapping[str, Stored],
    sites: Mapping[str, str],
    bits: int,
    family: str,
    rounding: Rounding = round_to_nearest,
    rotate: bool = False,
    made: Mapping[str, Stored] | None = None,
) -> list[Item]:
    """Return what a family's file holds: integers and scales of the weights that have a site.

    All other tensors stand in it as they are, so that the file is all its graphs need.
    Items make their bytes only when they are written.

    Args:
        tensors: The checkpoint's, by name.
        sites: Site of each weight to quantize.
        bits: Of an integer.
        family: "int8" has a scale a channel, others one a group.
        rounding: How weights become integers.
        rotate: Whether the file holds the rotations of its weights' widths too.
        made: Tensors of a file of the same family; weights that are in it are not rounded again.

    Making an item raises InputError where that file holds another shape or type.
    """
    made = made or {}
    items = []
    if rotate:
        widths = {tensors[name].shape[1] for name in sites}
        for block in sorted({block_of_width(width) for width in widths} - {1}):
            items.append(
                Item(rotation_name(block), "F32", (block, block), partial(hadamard, block))
            )
    for name, stored in tensors.items():
        if name not in sites:
            items.append(Item(name, stored.kind, stored.shape, partial(mapped, stored)))
            continue
        outputs, inputs = stored.shape
        count, groups = outputs * inputs, -(-inputs // WEIGHT_GROUP)
        integers = (-(-count // 2),) if bits == 4 else (inputs, outputs)
        scales = (outputs,) if family == "int8" else (groups, outputs)
        round_ = partial(rounding, name, sites[name])
        parts = Parts(partial(_rounded, stored, bits, family == "int8", round_))
        new = [
            Item(quantized_name(name), _KIND[bits], integers, partial(parts, 0)),
            Item(scale_name(name), "F32", scales, partial(parts, 1)),
        ]
        items += taken(made, new) if quantized_name(name) in made else new
        if family == "int8":
            zeros = partial(np.zeros, outputs, np.int8)
            items.append(Item(zeros_name(name), "I8", (outputs,), zeros))
    return items


def check_family(found: Mapping[str, Stored], items: Iterable[Item], where: str) -> None:
    """Check that a family's file holds its items, each of its shape and type.

    Raises:
        InputError: It does not; names the first that is amiss.
    """
    for item in items:
        _found(found, item.name, item.kind, item.shape, where)


def _found(
    found: Mapping[str, Stored], name: str, kind: str, shape: tuple[int, ...], where: str
) -> Stored:
    """Return where a tensor lies, if it is of its shape and type."""
    stored = found.get(name)
    if stored is None or (stored.kind, stored.shape) != (kind, shape):
        has = "lacks it" if stored is None else f"has {stored.kind}{list(stored.shape)}"
        raise InputError(
            f"{where}: {name} must be {kind}{list(shape)}, but the file {has}; export again"
        )
    return stored


def taken(made: Mapping[str, Stored], items: Iterable[Item]) -> list[Item]:
    """Return items whose bytes are those of another file of the same family.

    Making one raises InputError where that file holds another shape or type.
    """
    return [Item(each.name, each.kind, each.shape, partial(_taken, made, each)) for each in items]


def _taken(made: Mapping[str, Stored], item: Item) -> NDArray[np.generic]:
    return mapped(_found(made, item.name, item.kind, item.shape, "the weights of the source"))


class Parts:
    """The tensors of one weight: made once, when the first is written; the small ones are kept.

    Calling it with a part's number gives that tensor.  The first is large and never kept.
    """

    def __init__(self, make: Callable[[], tuple[NDArray[Any], ...]]) -> None:
        self._make = make
        self._small: tuple[NDArray[Any], ...] | None = None

    def __call__(self, part: int) -> NDArray[Any]:
        if part == 0 or self._small is None:
            large, *small = self._make()
            self._small = tuple(small)
            if part == 0:
                return large
        return self._small[part - 1]


def _rounded(
    stored: Stored,
    bits: int,
    by_channel: bool,
    rounding: Callable[[NDArray[np.float32], int, bool], Rounded],
) -> tuple[NDArray[Any], ...]:
    """Return a stored weight's integers, packed where they have 4 bits, and their scales."""
    values, scale = rounding(floats(stored), bits, by_channel)
    return pack_int4(values.astype(np.int8)) if bits == 4 else values, scale
