"""Graphs that compute with quantized weights and activations, made from the core graph.

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

With a rotation R, the activations of every such product are rotated first, x R, by a matrix that
lies with the weights, which hold W R (see `exporter.hadamard`); rounding comes after it:

    x -> Reshape [.., width / block, block] -> MatMul(H) -> Reshape [.., width] -> as above

Embedding, norms and the LM head stay as they are.  Layers are found by the names of their weights.
Knows nothing about torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engines.model import BATCH, SCALES
from engines.precision import WEIGHT_GROUP, Precision
from exporter.graph import Linear, linears
from exporter.hadamard import block_of_width, rotation_name
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

    copy, add = _copied(model), _Nodes()
    _constant(copy, "int8_zero", np.uint8(_UNSIGNED_ZERO))
    inverse: dict[str, str] = {}
    forward: dict[str, str] = {}
    if scales is None:
        copy.graph.input.append(
            helper.make_tensor_value_info(SCALES, TensorProto.FLOAT, [BATCH, 1, len(order)])
        )
        _constant(copy, "int8_one", np.float32(1.0))
        add("Reciprocal", [SCALES], ["scales_inverse"])
        forward = {site: f"{site}.scale" for site in order}
        inverse = {site: f"{site}.scale_inverse" for site in order}
        for source, names in ((SCALES, forward), ("scales_inverse", inverse)):
            add("Split", [source], [names[s] for s in order], axis=2, num_outputs=len(order))
    else:
        for site, value in zip(order, scales, strict=True):
            forward[site] = f"{site}.scale"
            _constant(copy, forward[site], np.float32(value))

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
    _rewrite(copy, sites, add, quantized_input, product, rotate)
    _replace_weights(copy, sites, TensorProto.INT8, scale_shape)
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

    copy, add = _copied(model), _Nodes()
    largest = float(2 ** (int(precision.bits) - 1) - 1)
    for name, value in (
        ("fake_step", clip / largest),
        ("fake_smallest", _SMALLEST_SCALE),
        ("fake_low", -largest),
        ("fake_high", largest),
    ):
        _constant(copy, name, np.float32(value))
    _constant(copy, "fake_axis", np.array([-1], np.int64))

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
    _rewrite(copy, sites, add, rounded_input, product, rotate)
    _replace_weights(copy, sites, kind[int(precision.weight_bits)], scale_shape)
    return copy


class _Nodes:
    """Nodes in the order in which they are added."""

    def __init__(self) -> None:
        self.made: list[onnx.NodeProto] = []

    def __call__(
        self, kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any
    ) -> None:
        from onnx import helper

        # A name of its own for each: ONNX Runtime derives the names of what it makes from them.
        node = helper.make_node(
            kind, inputs, outputs, f"make {outputs[0]}", None, None, **attributes
        )
        self.made.append(node)


def _copied(model: onnx.ModelProto) -> onnx.ModelProto:
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def _constant(model: onnx.ModelProto, name: str, value: np.generic | NDArray[np.int64]) -> None:
    from onnx import numpy_helper

    model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))


def _rewrite(
    model: onnx.ModelProto,
    sites: Mapping[str, str],
    add: _Nodes,
    source_of: Callable[[str, str], str],
    product: Callable[[Linear, str], None],
    rotate: bool,
) -> None:
    """Replace the products of the weights that have a site; what nobody reads any more goes.

    A tensor that several products read is rotated and rounded once.
    """
    quantized = {linear.matmul: linear for linear in linears(model) if linear.weight in sites}
    widths = {each.name: each.dims[1] for each in model.graph.initializer if each.name in sites}
    if rotate:
        _add_rotations(model, set(widths.values()))
    rounded: dict[str, str] = {}
    for index, node in enumerate(model.graph.node):
        linear = quantized.get(index)
        if linear is None:
            add.made.append(node)
            continue
        if linear.source not in rounded:
            source = linear.source
            if rotate:
                source = _rotated(source, widths[linear.weight], add)
            rounded[linear.source] = source_of(source, sites[linear.weight])
        product(linear, rounded[linear.source])
    nodes, needed = [], {output.name for output in model.graph.output}
    for node in reversed(add.made):
        if needed & set(node.output):
            needed.update(node.input)
            nodes.append(node)
    # Copied first: nodes of a graph die with its list.
    kept = [type(node).FromString(node.SerializeToString()) for node in reversed(nodes)]
    del model.graph.node[:]
    model.graph.node.extend(kept)


def _add_rotations(model: onnx.ModelProto, widths: set[int]) -> None:
    """Add the matrices of some widths, without data, and the shapes that go with them."""
    from onnx import TensorProto

    for block in sorted({block_of_width(width) for width in widths} - {1}):
        name, kind = rotation_name(block), TensorProto.FLOAT
        matrix = TensorProto(name=name, data_type=kind, dims=[block, block])
        model.graph.initializer.append(matrix)
    for width in sorted(widths):
        block = block_of_width(width)
        if 1 < block < width:  # 0: as it was
            shape = np.array([0, 0, width // block, block], np.int64)
            _constant(model, f"rotate_{width}_blocks", shape)
            _constant(model, f"rotate_{width}_whole", np.array([0, 0, width], np.int64))


def _rotated(source: str, width: int, add: _Nodes) -> str:
    """Add the rotation of a tensor [batch, length, width] and return what it is called."""
    block = block_of_width(width)
    if block == 1:
        return source
    rotated = f"{source}.rotated"
    if block == width:
        add("MatMul", [source, rotation_name(block)], [rotated])
        return rotated
    add("Reshape", [source, f"rotate_{width}_blocks"], [f"{source}.blocks"])
    add("MatMul", [f"{source}.blocks", rotation_name(block)], [f"{source}.rotated_blocks"])
    add("Reshape", [f"{source}.rotated_blocks", f"rotate_{width}_whole"], [rotated])
    return rotated


def _replace_weights(
    model: onnx.ModelProto,
    sites: Mapping[str, str],
    kind: int,
    scale_shape: Callable[[int, int], list[int]],
) -> None:
    """Put integers and scales, without data, in the place of the weights that have a site."""
    from onnx import TensorProto

    for initializer in list(model.graph.initializer):
        if initializer.name not in sites:
            continue
        outputs, inputs = initializer.dims
        model.graph.initializer.remove(initializer)
        model.graph.initializer.extend(
            (
                TensorProto(
                    name=quantized_name(initializer.name), data_type=kind, dims=[inputs, outputs]
                ),
                TensorProto(
                    name=scale_name(initializer.name),
                    data_type=TensorProto.FLOAT,
                    dims=scale_shape(outputs, inputs),
                ),
            )
        )
