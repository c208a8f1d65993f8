"""Quantized weights: integers and scales, made tensor by tensor.

int8: symmetric, one scale an output channel.  w4, w8, w16: symmetric, groups of 32 inputs of a
channel share a scale.  Knows nothing about graphs or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from engines.precision import WEIGHT_GROUP
from exporter.weights import Item, Stored, floats, mapped

INT8_LARGEST = 127

_Make = Callable[[], NDArray[np.generic]]

_KIND = {4: "U8", 8: "I8", 16: "I16"}
_DTYPE = {4: np.int8, 8: np.int8, 16: np.int16}


def quantized_name(weight: str) -> str:
    """Return the name of a weight's integers."""
    return f"{weight}.quantized"


def scale_name(weight: str) -> str:
    """Return the name of a weight's scales."""
    return f"{weight}.scale"


def zeros_name(weight: str) -> str:
    """Return the name of a weight's zero points, all 0.

    By ONNX's rules they could be left out or shared; ONNX Runtime 1.32 fails on both when it turns
    signed integers into unsigned ones.
    """
    return f"{weight}.zeros"


def quantize_channels(weight: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return (integers [in, out], scales [out]) of a weight [out, in], to the nearest of 8 bits.

    Transposed, so that it is the right side of a product.  A channel of zeros has the scale 1.
    """
    largest = np.abs(weight).max(1)
    scale = np.where(largest > 0, largest / INT8_LARGEST, 1.0).astype(np.float32)
    return np.rint(weight / scale[:, None]).astype(np.int8).T, scale


def quantize_groups(
    weight: NDArray[np.float32], bits: int
) -> tuple[NDArray[np.int8] | NDArray[np.int16], NDArray[np.float32]]:
    """Return (integers [in, out], scales [groups, out]) of a weight [out, in].

    Each group of 32 inputs of a channel shares a scale; the last may be shorter.  Symmetric: the
    most negative integer is not used.
    """
    largest_integer = 2 ** (bits - 1) - 1
    outputs, inputs = weight.shape
    groups = -(-inputs // WEIGHT_GROUP)
    padded = np.zeros((outputs, groups * WEIGHT_GROUP), np.float32)
    padded[:, :inputs] = weight
    grouped = padded.reshape(outputs, groups, WEIGHT_GROUP)
    largest = np.abs(grouped).max(2)
    scale = np.where(largest > 0, largest / largest_integer, 1.0).astype(np.float32)
    rounded = np.rint(grouped / scale[:, :, None]).reshape(outputs, -1)[:, :inputs]
    return rounded.T.astype(_DTYPE[bits]), np.ascontiguousarray(scale.T)


def pack_int4(values: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Return two integers of 4 bits a byte, the first in the low half, rows after each other."""
    flat = values.reshape(-1).view(np.uint8) & np.uint8(0xF)
    if flat.size % 2:
        flat = np.concatenate((flat, np.zeros(1, np.uint8)))
    packed: NDArray[np.uint8] = flat[0::2] | (flat[1::2] << np.uint8(4))
    return packed


def quantized_items(
    tensors: Mapping[str, Stored], sites: Mapping[str, str], bits: int, family: str
) -> list[Item]:
    """Return what a family's file holds: integers and scales of the weights that have a site.

    All other tensors stand in it as they are, so that the file is all its graphs need.
    Items make their bytes only when they are written.
    """
    items = []
    for name, stored in tensors.items():
        if name not in sites:
            items.append(Item(name, stored.kind, stored.shape, partial(mapped, stored)))
            continue
        outputs, inputs = stored.shape
        count, groups = outputs * inputs, -(-inputs // WEIGHT_GROUP)
        make_integers, make_scales = _quantizer(stored, bits, by_channel=family == "int8")
        integers = (-(-count // 2),) if bits == 4 else (inputs, outputs)
        scales = (outputs,) if family == "int8" else (groups, outputs)
        items += [
            Item(quantized_name(name), _KIND[bits], integers, make_integers),
            Item(scale_name(name), "F32", scales, make_scales),
        ]
        if family == "int8":
            zeros = partial(np.zeros, outputs, np.int8)
            items.append(Item(zeros_name(name), "I8", (outputs,), zeros))
    return items


def _quantizer(stored: Stored, bits: int, by_channel: bool) -> tuple[_Make, _Make]:
    """Return what makes the integers of a stored weight, and what gives their scales."""
    scales: list[NDArray[np.float32]] = []  # small; kept, so that a weight is rounded once

    def integers() -> NDArray[np.generic]:
        weight = floats(stored)
        rounded, scale = quantize_channels(weight) if by_channel else quantize_groups(weight, bits)
        scales.append(scale)
        return pack_int4(rounded.astype(np.int8)) if bits == 4 else rounded

    def scale() -> NDArray[np.generic]:
        if not scales:
            integers()
        return scales[-1]

    return integers, scale
