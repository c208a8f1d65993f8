"""Graphs cut at some of their tensors, so that each part between two cuts can be run alone.

Weights stay outside and are never read.  Knows nothing about torch, or about who runs the parts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from engines.errors import InputError
from engines.model import LOGITS
from exporter.graph import linears

if TYPE_CHECKING:
    import onnx


class Parts:
    """What lies between the cuts of a graph.

    Attributes:
        cuts: Names of tensors.
        constants: Dimensions of each initializer.
        halves: Value of each constant number of float16.
    """

    def __init__(self, model: onnx.ModelProto, cuts: Collection[str]) -> None:
        from onnx import TensorProto, numpy_helper

        self.cuts = cuts
        self.constants = {each.name: tuple(each.dims) for each in model.graph.initializer}
        self.halves = {
            each.name: float(numpy_helper.to_array(each))
            for each in model.graph.initializer
            if each.data_type == TensorProto.FLOAT16 and not each.dims and each.raw_data
        }
        self._made_by = {name: node for node in model.graph.node for name in node.output}

    def inside(self, tensor: str) -> list[onnx.NodeProto]:
        """Return the nodes between a cut and those before it, the one that makes it first."""
        found: dict[str, onnx.NodeProto] = {}
        left = [self._made_by[tensor]]
        while left:
            node = left.pop()
            if node.output[0] in found:
                continue
            found[node.output[0]] = node
            left += [
                self._made_by[name]
                for name in node.input
                if name not in self.cuts and name in self._made_by
            ]
        return list(found.values())


def floats_of(model: onnx.ModelProto) -> dict[str, onnx.TypeProto]:
    """Return the types of all tensors of 16 or 32 bits of floating point that an input decides.

    In the order of the graph.  Weights and what is made of them alone are none of them.

    Raises:
        InputError: The graph's shapes do not agree, or it is no graph in order.
    """
    import onnx
    from onnx import TensorProto

    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    try:
        found = onnx.shape_inference.infer_shapes(bare, data_prop=True).graph
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError) as error:
        raise InputError(f"a graph's shapes do not agree ({error}); export again") from error
    types = {each.name: each.type for each in (*found.value_info, *found.output)}
    kinds = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
    decided = {each.name for each in model.graph.input}
    named: dict[str, onnx.TypeProto] = {}
    made = set(decided) | {each.name for each in model.graph.initializer} | {""}
    for node in model.graph.node:
        if not node.output or not made.issuperset(node.input):
            raise InputError("a graph's nodes are out of order; export again")
        made.update(node.output)
        if decided.isdisjoint(node.input):
            continue
        decided.update(node.output)
        for name in node.output:
            if name in types and types[name].tensor_type.elem_type in kinds:
                named[name] = types[name]
    return named


def coarse(model: onnx.ModelProto) -> set[str]:
    """Return the tensors that go into and come out of a full-precision graph's linear layers.

    Cut only there, kernels that a runtime fuses around them stay whole.
    """
    return {name for each in linears(model) for name in (each.source, each.output)} | {LOGITS}


def alone(
    model: onnx.ModelProto,
    wanted: Sequence[str],
    cuts: Collection[str],
    types: Mapping[str, onnx.TypeProto],
) -> tuple[onnx.ModelProto, dict[str, str], tuple[str, ...]]:
    """Return a graph in which each wanted layer is given its inputs from outside.

    Args:
        model: Whose layers.
        wanted: What they make; all of them cuts.
        cuts: Tensors that are given, where a layer reads them.
        types: Of the cuts.

    Returns:
        The graph; by each wanted tensor the name of what the layer makes of it; and the cuts to
        be given, in the order of the graph.
    """
    import onnx

    parts = Parts(model, cuts)
    keep = {node.output[0] for tensor in wanted for node in parts.inside(tensor)}
    own = {name: f"{name}.alone" for name in wanted}
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.node[:], made.graph.output[:], made.graph.value_info[:]
    given: dict[str, None] = {}
    for node in model.graph.node:
        if node.output[0] not in keep:
            continue
        given.update((name, None) for name in node.input if name in cuts)
        one = made.graph.node.add()
        one.CopyFrom(node)
        for index, name in enumerate(one.output):
            if name in cuts:
                one.output[index] = f"{name}.alone"
    for name in given:
        made.graph.input.append(onnx.ValueInfoProto(name=name, type=types[name]))
    for name in wanted:
        made.graph.output.append(onnx.ValueInfoProto(name=own[name], type=types[name]))
    without_unread(made)
    return made, own, tuple(given)


def pruned(model: onnx.ModelProto, wanted: Collection[str]) -> onnx.ModelProto:
    """Return a copy with only the nodes and weights that some tensors need; outputs stay."""
    import onnx

    needed, keep = set(wanted), []
    for node in reversed(model.graph.node):
        if needed & set(node.output):
            needed.update(node.input)
            keep.append(node)
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.node[:]
    made.graph.node.extend(reversed(keep))
    without_unread(made)
    return made


def without_unread(model: onnx.ModelProto) -> None:
    """Take initializers that no node reads out of a graph, in place."""
    read = {name for node in model.graph.node for name in node.input}
    kept = [each for each in model.graph.initializer if each.name in read]
    copies = [type(each).FromString(each.SerializeToString()) for each in kept]
    del model.graph.initializer[:]
    model.graph.initializer.extend(copies)


def without_repeated_types(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy whose Dequantizes name no type that is their scale's: it is so by default.

    ONNX Runtime 1.32 refuses such a one in float16, after it has widened the node itself.
    """
    import onnx

    made = onnx.ModelProto()
    made.CopyFrom(model)
    kinds = {each.name: each.data_type for each in made.graph.initializer}
    for node in made.graph.node:
        if node.op_type != "DequantizeLinear":
            continue
        for each in list(node.attribute):
            if each.name == "output_dtype" and each.i == kinds.get(node.input[1]):
                node.attribute.remove(each)
    return made
