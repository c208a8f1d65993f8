"""Weights of TensorRT's precisions: in 16 bits, int8, int4, fp8 and nvfp4.

A file holds all that a family's graphs need: the weights that have a site quantized, every other
tensor in the type of the rest.  Items make their bytes only when they are written, one at a time.

    int8   integers [in, out], scales F32 [out]              by channel
    int4   packed integers [in, out], scales F16 [in / 32, out]
    int4-int8  packed integers [in, out], scales F16 [out]   by channel
    fp8    E4M3 [in, out], scale F32 []                      the largest magnitude is 448
    nvfp4  packed E2M1 [in, out], scales E4M3 [in / 16, out], and a scale F32 [] of those scales

Integers come from the recipe's rounding; floats of 8 and 4 bits are rounded to the nearest.
Formats and scales: the quantization recipes of ONNX's QuantizeLinear and of NVIDIA's NVFP4.
Knows nothing about graphs or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.errors import InputError
from engines.precision import FP4_GROUP, WEIGHT_GROUP
from exporter.hadamard import block_of_width, hadamard, rotated, rotation_name
from exporter.quantize import (
    SMALLEST_RANGE,
    Parts,
    Rounded,
    Rounding,
    global_scale_name,
    pack_int4,
    quantized_name,
    round_to_nearest,
    scale_name,
    taken,
)
from exporter.weights import Item, Stored, floats, mapped

FP8_LARGEST, FP4_LARGEST = 448.0, 6.0
F16_LARGEST = 65504.0

# From (weight [out, in], bits, whether by channel) to integers and scales.
_Round = Callable[[NDArray[np.float32], int, bool], Rounded]

# Inputs that share a scale, of the families that have groups.
GROUPS = {"int4": WEIGHT_GROUP, "nvfp4": FP4_GROUP}


def cast_to(values: NDArray[np.float32], kind: str, name: str) -> NDArray[np.generic]:
    """Return values in a 16-bit type, or as they are.

    Args:
        values: Finite.
        kind: F16, BF16 or F32.
        name: Of the tensor, for the message.

    Raises:
        InputError: A value does not fit; names the tensor and the value.
    """
    if kind == "F32":
        return values
    if kind == "BF16":
        return to_bfloat16(values)
    if values.size and (largest := float(np.abs(values).max())) > F16_LARGEST:
        raise InputError(
            f"{name} holds {largest:.6g}, and the largest number of float16 is "
            f"{F16_LARGEST:.0f}: it would be clipped; use bf16, or fp32"
        )
    return values.astype(np.float16)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.generic]:
    """Return float32 values rounded to bfloat16, to the nearest even."""
    import ml_dtypes

    rounded: NDArray[np.generic] = values.astype(ml_dtypes.bfloat16)
    return rounded


def to_fp8(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the bytes of E4M3, to the nearest even; what lies beyond 448 becomes 448."""
    import ml_dtypes

    clipped = np.clip(values, -FP8_LARGEST, FP8_LARGEST)
    return clipped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def fp8_values(data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the numbers of bytes of E4M3."""
    import ml_dtypes

    values: NDArray[np.float32] = data.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return values


def to_fp4(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the 4 bits of E2M1, each in a byte, to the nearest even; beyond 6 becomes 6."""
    import ml_dtypes

    clipped = np.clip(values, -FP4_LARGEST, FP4_LARGEST)
    return clipped.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & np.uint8(0xF)


def typed_items(
    tensors: Mapping[str, Stored],
    sites: Mapping[str, str],
    family: str,
    rest: str,
    rounding: Rounding = round_to_nearest,
    rotate: bool = False,
    made: Mapping[str, Stored] | None = None,
) -> list[Item]:
    """Return what the file of a family holds.

    Args:
        tensors: The checkpoint's, by name.
        sites: Site of each weight to quantize; none for a family of 16 bits.
        family: int8, int4, int4-int8, fp8, nvfp4, fp16 or bf16.
        rest: Type of every other tensor: F16, BF16 or F32.
        rounding: How weights become integers.
        rotate: Whether weights are rotated, and the file holds the rotations.
        made: Tensors of another file of the family; a weight that is in it is not quantized again.

    Raises:
        InputError: A weight's shape does not fit the family's groups; names it.  Making an item
            raises it where a value does not fit its type.
    """
    items = []
    if rotate:
        for block in sorted({block_of_width(tensors[name].shape[1]) for name in sites} - {1}):
            make = partial(_cast_hadamard, block, rest)
            items.append(Item(rotation_name(block), rest, (block, block), make))
    for name, stored in tensors.items():
        if name in sites:
            round_ = partial(rounding, name, sites[name])
            new = _quantized(name, stored, family, round_, rotate)
            items += taken(made or {}, new) if quantized_name(name) in (made or {}) else new
        elif stored.kind == rest:
            items.append(Item(name, rest, stored.shape, partial(mapped, stored)))
        else:
            items.append(Item(name, rest, stored.shape, partial(_cast, stored, rest, name)))
    return items


def _cast(stored: Stored, rest: str, name: str) -> NDArray[np.generic]:
    return cast_to(floats(stored), rest, name)


def _cast_hadamard(block: int, rest: str) -> NDArray[np.generic]:
    return cast_to(hadamard(block), rest, rotation_name(block))


def _quantized(name: str, stored: Stored, family: str, round_: _Round, rotate: bool) -> list[Item]:
    """Return the tensors of a weight [out, in] that is quantized."""
    outputs, inputs = stored.shape
    group = GROUPS.get(family, 1)
    if inputs % group or (outputs % 2 and family not in ("int8", "fp8")):
        raise InputError(
            f"{name} has {inputs} inputs and {outputs} outputs, but {family} wants multiples of "
            f"{group} and 2; keep its block with --keep, or leave {family} out"
        )
    packed = (outputs * inputs // 2,)

    def weight() -> NDArray[np.float32]:
        return rotated(floats(stored)) if rotate else floats(stored)

    match family:
        case "int8":
            made = Parts(lambda: round_(floats(stored), 8, True))
            kinds = [("I8", (inputs, outputs)), ("F32", (outputs,))]
        case "int4":
            made = Parts(lambda: _int4(*round_(floats(stored), 4, False), name))
            kinds = [("U8", packed), ("F16", (inputs // group, outputs))]
        case "int4-int8":
            made = Parts(lambda: _int4(*round_(floats(stored), 4, True), name))
            kinds = [("U8", packed), ("F16", (outputs,))]
        case "fp8":
            made = Parts(lambda: quantize_fp8(weight()))
            kinds = [("F8_E4M3", (inputs, outputs)), ("F32", ())]
        case _:
            made = Parts(lambda: quantize_nvfp4(weight()))
            kinds = [("U8", packed), ("F8_E4M3", (inputs // group, outputs)), ("F32", ())]
    names = (quantized_name(name), scale_name(name), global_scale_name(name))
    return [
        Item(each, kind, shape, partial(made, part))
        for part, (each, (kind, shape)) in enumerate(zip(names, kinds, strict=False))
    ]


def _int4(
    integers: NDArray[Any], scales: NDArray[np.float32], name: str
) -> tuple[NDArray[Any], ...]:
    """Return packed integers, and scales in 16 bits: at most one part in 2,048 off."""
    return pack_int4(integers.astype(np.int8)), cast_to(scales, "F16", scale_name(name))


def quantize_fp8(weight: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return (bytes of E4M3 [in, out], scale []) of a weight [out, in]; one scale for all."""
    largest = float(np.abs(weight).max(initial=0.0))
    scale = np.float32(largest / FP8_LARGEST if largest > SMALLEST_RANGE else 1.0)
    return np.ascontiguousarray(to_fp8(weight / scale).T), np.asarray(scale)


def quantize_nvfp4(
    weight: NDArray[np.float32],
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float32]]:
    """Return (packed E2M1 [in, out], scales E4M3 [in / 16, out], their scale []) of [out, in].

    NVFP4: the scale of the scales is largest / (6 * 448), so that every scale fits E4M3; a group's
    is its largest magnitude / 6 in those units.
    """
    outputs, inputs = weight.shape
    grouped = weight.reshape(outputs, inputs // FP4_GROUP, FP4_GROUP)
    magnitude = np.abs(grouped).max(2)
    largest = float(magnitude.max(initial=0.0))
    whole = np.float32(largest / (FP4_LARGEST * FP8_LARGEST) if largest > SMALLEST_RANGE else 1.0)
    scales = to_fp8((magnitude / FP4_LARGEST / whole).astype(np.float32))
    steps = fp8_values(scales) * whole
    divisors = np.where(steps > 0, steps, np.float32(1.0))[:, :, None]
    codes = to_fp4((grouped / divisors).astype(np.float32)).reshape(outputs, inputs)
    turned = np.ascontiguousarray(codes.T).reshape(-1)
    packed = turned[0::2] | (turned[1::2] << np.uint8(4))
    return packed, np.ascontiguousarray(scales.T), np.asarray(whole)
