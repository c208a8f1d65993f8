"""Dimensions of every tensor of a graph at a batch, a length and a number of asked positions.

ONNX's own shape inference does the work; weights need no data, their dimensions stand in the
graph.  It follows lengths through Shape and Concat, but not into Range, which `_ranges` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.document import shorten
from engines.errors import InputError
from engines.model import ASKED, BATCH, LENGTH

if TYPE_CHECKING:
    import onnx

# More rows, tokens or elements along an axis than any denoiser has.
_MOST = 2**31
_MOST_NODES = 100_000

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What shape inference found.

    Attributes:
        dims: Of each tensor; an axis that could not be told is None.
        floating: Names of tensors of floating point.
    """

    dims: Mapping[str, tuple[int | None, ...]]
    floating: frozenset[str]

    def of(self, name: str) -> Dims:
        """Return the dimensions of a tensor.

        Raises:
            InputError: They are not known, or beyond reason.
        """
        found = self.dims.get(name, (None,))
        dims = tuple(dim for dim in found if dim is not None and 0 <= dim <= _MOST)
        if len(dims) != len(found):
            raise InputError(
                f"the dimensions of the tensor {shorten(name)} cannot be told, got "
                f"{list(found)}; export again with this version of Cadenza"
            )
        return dims

    def numbers(self, name: str) -> int:
        """Return how many elements a tensor has; raises as `of`."""
        return math.prod(self.of(name))


def sizes_from_graph(model: onnx.ModelProto, batch: int, length: int, asked: int) -> Sizes:
    """Return the dimensions of all tensors; no external data are read.

    Args:
        model: Its inputs have the axes batch, length and asked of `engines.model`.
        batch: Rows B.
        length: Tokens of a row L.
        asked: Positions of a row whose tokens are asked for M.

    Raises:
        InputError: A size is out of range, or the graph is damaged or has other axes.
    """
    import onnx

    sizes = {BATCH: batch, LENGTH: length, ASKED: asked}
    for axis, size in sizes.items():
        if not 1 <= size <= 1 << 20:
            raise InputError(f"{axis} must be from 1 to {1 << 20}, got {size}; give another")
    _refuse_disorder(model)
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    del fixed.graph.value_info[:]
    _fix(fixed, sizes)
    try:
        found = onnx.shape_inference.infer_shapes(fixed, strict_mode=True, data_prop=True).graph
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError) as error:
        raise InputError(
            f"the graph's shapes do not agree ({shorten(str(error), quote=False)}); export again "
            f"with this version of Cadenza"
        ) from error
    ranges = _ranges(found)
    dims: dict[str, tuple[int | None, ...]] = {}
    floating = set()
    for value in (*found.input, *found.value_info, *found.output):
        kind = value.type.tensor_type
        # A type of unknown rank has no axis to name.
        dims[value.name] = (
            tuple(ranges.get(d.dim_param) if d.dim_param else d.dim_value for d in kind.shape.dim)
            if kind.HasField("shape")
            else (None,)
        )
        if _is_floating(kind.elem_type):
            floating.add(value.name)
    for initializer in found.initializer:
        dims[initializer.name] = tuple(initializer.dims)
        if _is_floating(initializer.data_type):
            floating.add(initializer.name)
    return Sizes(dims, frozenset(floating))


def _refuse_disorder(model: onnx.ModelProto) -> None:
    """Refuse a graph whose nodes do not stand after what they read: it may hold a loop."""
    if len(model.graph.node) > _MOST_NODES or not all(n.output for n in model.graph.node):
        raise InputError(
            f"the graph is none of ours: it has {len(model.graph.node)} nodes, or one without an "
            f"output; export again with this version of Cadenza"
        )
    known = {value.name for value in (*model.graph.input, *model.graph.initializer)} | {""}
    for node in model.graph.node:
        missing = [name for name in node.input if name not in known]
        if missing or any(name in known for name in node.output if name):
            name = missing[0] if missing else node.output[0]
            raise InputError(
                f"the graph is damaged: {shorten(name)} is read before it is made, or made twice; "
                f"export again"
            )
        known.update(node.output)


def _fix(model: onnx.ModelProto, sizes: Mapping[str, int]) -> None:
    """Put numbers in the place of the named axes of inputs and outputs."""
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                if dim.dim_param not in sizes:
                    raise InputError(
                        f"the tensor {shorten(value.name)} has the axis {shorten(dim.dim_param)}, "
                        f"known are {', '.join(sizes)}; export again with this version of Cadenza"
                    )
                dim.dim_value = sizes[dim.dim_param]


def _ranges(graph: onnx.GraphProto) -> dict[str, int]:
    """Return the length of each Range that counts to an input's axis, by the axis it is given.

    The limit is followed back through Squeeze to `Shape(input, start, end)`.
    """
    made_by = {name: node for node in graph.node for name in node.output}
    shapes = {value.name: value.type.tensor_type.shape.dim for value in graph.input}
    named = {value.name: value.type.tensor_type.shape.dim for value in graph.value_info}
    found = {}
    for node in graph.node:
        if node.op_type != "Range" or len(named.get(node.output[0], ())) != 1:
            continue
        limit = made_by.get(node.input[1])
        if limit is not None and limit.op_type == "Squeeze":
            limit = made_by.get(limit.input[0])
        if limit is None or limit.op_type != "Shape" or limit.input[0] not in shapes:
            continue
        start = next((each.i for each in limit.attribute if each.name == "start"), 0)
        axes = shapes[limit.input[0]]
        if 0 <= start < len(axes):
            found[named[node.output[0]][0].dim_param] = axes[start].dim_value
    return found


def _is_floating(kind: int) -> bool:
    from onnx import TensorProto

    return kind in (
        TensorProto.FLOAT,
        TensorProto.FLOAT16,
        TensorProto.BFLOAT16,
        TensorProto.DOUBLE,
    )
