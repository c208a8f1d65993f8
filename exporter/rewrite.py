"""Graphs of quantized precisions for ONNX Runtime, made from the core graph: int8 and wXaY.

Executed int8 (W8A8): activations symmetric with one scale a site, calibrated beforehand.  A
runtime fuses Quantize - Dequantize - MatMul into one integer GEMM.  Scales stand in the graph as
constants, or come as an input, one row of scales for each row of the batch:

    constants   x -> Q/DQ(scale) -> MatMul(DQ(weight)) -> y
    input       x -> Mul(1 / scale) -> Q/DQ(1) -> MatMul(DQ(weight)) -> Mul(scale) -> y

The constant 1 between keeps the pair one that every runtime fuses.  Activations are written as
unsigned integers with the zero point 128, which is the same numbers: the kernels of ONNX Runtime
on x86 multiply unsigned by signed.

Simulated wXaY: weights in groups of 32 inputs that share a scale; activations rounded to Y bits
for each token by its own largest magnitude, and computed in fp32.

How products are found and replaced, and activations rotated, is `exporter.products`'s.  Knows
nothing about torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engines.model import BATCH, SCALES
from engines.precision import WEIGHT_GROUP, Precision
from exporter.graph import Linear
from exporter.products import Nodes, constant, copied, replace_weights, rewrite_products
from exporter.quantize import quantized_name, scale_name, zeros_name

if TYPE_CHECKING:
    import onnx

# Zero point of activations as unsigned integers.
_UNSIGNED_ZERO = 128

# Below it a token's activations count as zeros; keeps 0 / 0 out of the graph.
_SMALLEST_SCALE = 1e-12


def int8_graph(
    model: onnx.ModelProto,
    sites: Mapping[str, str],
    order: Sequence[str],
    scales: NDArray[np.float32] | None,
    rotate: bool = False,
) -> onnx.ModelProto:
    """Return the graph with integer products.

    Args:
        model: The core graph.
        sites: Site of each weight to quantize.
        order: All sites, in the order of the scales.
        scales: Activation scale of each site [S]; None makes them an input [batch, 1, S].
        rotate: Rotate activations first; the weights are rotated ones.
    """
    from onnx import TensorProto, helper

    copy, add = copied(model), Nodes()
    constant(copy, "int8_zero", np.uint8(_UNSIGNED_ZERO))
    inverse: dict[str, str] = {}
    forward: dict[str, str] = {}
    if scales is None:
        copy.graph.input.append(
            helper.make_tensor_value_info(SCALES, TensorProto.FLOAT, [BATCH, 1, len(order)])
        )
        constant(copy, "int8_one", np.float32(1.0))
        add("Reciprocal", [SCALES], ["scales_inverse"])
        forward = {site: f"{site}.scale" for site in order}
        inverse = {site: f"{site}.scale_inverse" for site in order}
        for source, names in ((SCALES, forward), ("scales_inverse", inverse)):
            add("Split", [source], [names[s] for s in order], axis=2, num_outputs=len(order))
    else:
        for site, value in zip(order, scales, strict=True):
            forward[site] = f"{site}.scale"
            constant(copy, forward[site], np.float32(value))

    def quantized_input(source: str, site: str) -> str:
        scale = forward[site]
        if scales is None:
            add("Mul", [source, inverse[site]], [f"{source}.scaled"])
            source, scale = f"{source}.scaled", "int8_one"
        add("QuantizeLinear", [source, scale, "int8_zero"], [f"{source}.int8"])
        return f"{source}.int8"

    def product(linear: Linear, integers: str) -> None:
        # One Dequantize a product: ONNX Runtime fuses none that is shared.
        scale = "int8_one" if scales is None else forward[sites[linear.weight]]
        source, weight = f"{linear.output}.source", f"{linear.weight}.dequantized"
        add("DequantizeLinear", [integers, scale, "int8_zero"], [source])
        parts = (quantized_name, scale_name, zeros_name)
        add("DequantizeLinear", [name(linear.weight) for name in parts], [weight], axis=1)
        if scales is not None:
            add("MatMul", [source, weight], [linear.output])
            return
        add("MatMul", [source, weight], [f"{linear.output}.unscaled"])
        scale = forward[sites[linear.weight]]
        add("Mul", [f"{linear.output}.unscaled", scale], [linear.output])

    def scale_shape(outputs: int, inputs: int) -> list[int]:
        return [outputs]

    for initializer in list(copy.graph.initializer):
        if initializer.name in sites:
            name, outputs = zeros_name(initializer.name), initializer.dims[0]
            zeros = TensorProto(name=name, data_type=TensorProto.INT8, dims=[outputs])
            copy.graph.initializer.append(zeros)
    rewrite_products(copy, sites, add, quantized_input, product, rotate)
    replace_weights(copy, sites, TensorProto.INT8, scale_shape)
    return copy


def simulated_graph(
    model: onnx.ModelProto,
    sites: Mapping[str, str],
    precision: Precision,
    clip: float,
    rotate: bool = False,
) -> onnx.ModelProto:
    """Return the graph whose activations are rounded for each token and computed in fp32.

    Args:
        model: The core graph.
        sites: Site of each weight to quantize.
        precision: A simulated one.
        clip: Share of a token's largest magnitude that still fits.
        rotate: Rotate activations first; the weights are rotated ones.
    """
    from onnx import TensorProto

    copy, add = copied(model), Nodes()
    largest = float(2 ** (int(precision.bits) - 1) - 1)
    for name, value in (
        ("fake_step", clip / largest),
        ("fake_smallest", _SMALLEST_SCALE),
        ("fake_low", -largest),
        ("fake_high", largest),
    ):
        constant(copy, name, np.float32(value))
    constant(copy, "fake_axis", np.array([-1], np.int64))

    def rounded_input(source: str, site: str) -> str:
        steps = (
            ("Abs", [source], "magnitude"),
            ("ReduceMax", [f"{source}.magnitude", "fake_axis"], "largest"),
            ("Mul", [f"{source}.largest", "fake_step"], "step_or_zero"),
            ("Max", [f"{source}.step_or_zero", "fake_smallest"], "step"),
            ("Div", [source, f"{source}.step"], "steps"),
            ("Round", [f"{source}.steps"], "whole"),
            ("Clip", [f"{source}.whole", "fake_low", "fake_high"], "clipped"),
            ("Mul", [f"{source}.clipped", f"{source}.step"], "rounded"),
        )
        for kind, inputs, end in steps:
            add(kind, inputs, [f"{source}.{end}"])
        return f"{source}.rounded"

    def product(linear: Linear, source: str) -> None:
        weight = f"{linear.weight}.dequantized"
        stored = [quantized_name(linear.weight), scale_name(linear.weight)]
        add("DequantizeLinear", stored, [weight], axis=0, block_size=WEIGHT_GROUP)
        add("MatMul", [source, weight], [linear.output])

    def scale_shape(outputs: int, inputs: int) -> list[int]:
        return [-(-inputs // WEIGHT_GROUP), outputs]

    kind = {4: TensorProto.INT4, 8: TensorProto.INT8, 16: TensorProto.INT16}
    rewrite_products(copy, sites, add, rounded_input, product, rotate)
    replace_weights(copy, sites, kind[int(precision.weight_bits)], scale_shape)
    return copy
