"""The products of a graph replaced by quantized ones: what every precision shares.

    x -> MatMul(Transpose(weight)) -> y    becomes    x -> source_of(x) -> product -> y

Layers are found by the names of their weights; a tensor that several read is rounded once.  With a
rotation R, the activations of every such product are rotated first, x R, by a matrix that lies
with the weights, which hold W R (see `exporter.hadamard`); rounding comes after it:

    x -> Reshape [.., width / block, block] -> MatMul(H) -> Reshape [.., width] -> source_of

Embedding, norms and the LM head stay as they are.  Knows nothing about torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from exporter.graph import Linear, linears
from exporter.hadamard import block_of_width, rotation_name
from exporter.quantize import global_scale_name, quantized_name, scale_name

if TYPE_CHECKING:
    import onnx


class Nodes:
    """Nodes in the order in which they are added."""

    def __init__(self) -> None:
        self.made: list[onnx.NodeProto] = []

    def __call__(
        self, kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any
    ) -> None:
        from onnx import helper

        # A name of its own for each: ONNX Runtime derives the names of what it makes from them.
        name = f"make {outputs[0]}"
        self.made.append(helper.make_node(kind, inputs, outputs, name=name, **attributes))


def copied(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy that may be changed."""
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def constant(model: onnx.ModelProto, name: str, value: np.generic | NDArray[Any]) -> None:
    """Add a small tensor to a graph, in place."""
    from onnx import numpy_helper

    model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))


def rewrite_products(
    model: onnx.ModelProto,
    sites: Mapping[str, str],
    add: Nodes,
    source_of: Callable[[str, str], str],
    product: Callable[[Linear, str], None],
    rotate: bool,
    rest: int = 1,
) -> None:
    """Replace the products of the weights that have a site; what nobody reads any more goes.

    A tensor that several products read is rotated and rounded once.

    Args:
        model: Changed in place.
        sites: Site of each weight to quantize.
        add: The nodes so far, before all others.
        source_of: Adds the rounding of a tensor at a site and returns what it is called.
        product: Adds the product of a layer with its rounded source.
        rotate: Rotate activations first.
        rest: ONNX type of a rotation's matrix.
    """
    quantized = {linear.matmul: linear for linear in linears(model) if linear.weight in sites}
    widths = {each.name: each.dims[1] for each in model.graph.initializer if each.name in sites}
    if rotate:
        _add_rotations(model, set(widths.values()), rest)
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


def _add_rotations(model: onnx.ModelProto, widths: set[int], rest: int) -> None:
    """Add the matrices of some widths, without data, and the shapes that go with them."""
    from onnx import TensorProto

    for block in sorted({block_of_width(width) for width in widths} - {1}):
        matrix = TensorProto(name=rotation_name(block), data_type=rest, dims=[block, block])
        model.graph.initializer.append(matrix)
    for width in sorted(widths):
        block = block_of_width(width)
        if 1 < block < width:  # 0: as it was
            shape = np.array([0, 0, width // block, block], np.int64)
            constant(model, f"rotate_{width}_blocks", shape)
            constant(model, f"rotate_{width}_whole", np.array([0, 0, width], np.int64))


def _rotated(source: str, width: int, add: Nodes) -> str:
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


def replace_weights(
    model: onnx.ModelProto,
    sites: Mapping[str, str],
    kind: int,
    scale_shape: Callable[[int, int], list[int]],
    scale_kind: int = 1,
    scaled_twice: bool = False,
) -> None:
    """Put quantized weights and scales, without data, in the place of those that have a site.

    Args:
        model: Changed in place.
        sites: Names of the weights.
        kind: ONNX type of the quantized weights [in, out].
        scale_shape: Shape of a weight's scales, from its outputs and inputs.
        scale_kind: ONNX type of the scales.
        scaled_twice: Whether the scales have a scale, a float32 number.
    """
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
                    data_type=scale_kind,
                    dims=scale_shape(outputs, inputs),
                ),
            )
        )
        if scaled_twice:
            name = global_scale_name(initializer.name)
            model.graph.initializer.append(TensorProto(name=name, data_type=TensorProto.FLOAT))
