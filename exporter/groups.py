"""What a pass computes between its products, as groups of nodes that one kernel can hold.

A group is a set of nodes that touch each other and have the same number of products behind them,
so that all can run when the last of those products is done: a residual sum with the norm that
follows, or the gate of a feed-forward layer.  Attention reads and writes heads apart from each
other: a group that makes its input lays them out on the way, a product cannot, so a kernel moves
them, and another moves the mixture back.

So TensorRT-RTX 1.7 builds a block, seen in its plans: norm, (products), values moved, queries
rotated, keys rotated, (attention), mixture moved back, (product), sum and norm, (products), gate,
(product), sum and next norm.  What rounds a tensor for a quantized product is part of the group
that makes it.

Left out: what depends on weights alone (folded when an engine is built), integers that follow from
shapes alone, and views (Reshape, Expand, ...), whose bytes are those of what they show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from exporter.sizes import Sizes

if TYPE_CHECKING:
    import onnx

_PRODUCTS = ("MatMul", "Attention")
_VIEWS = ("Reshape", "Expand", "Unsqueeze", "Squeeze", "Identity")
_OTHER_BYTES = 8  # of an integer; masks are counted as such too


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that one kernel computes.

    Attributes:
        operators: Kinds of its nodes, in the order of the graph.
        floats: Numbers of floating point that it reads and writes.
        others: Integers and booleans that it reads and writes.
        outputs: Tensors that it writes.
    """

    operators: tuple[str, ...]
    floats: int
    others: int
    outputs: tuple[str, ...]

    def bytes(self, bits: float) -> float:
        """Return bytes moved when floating point has so many bits."""
        return self.floats * bits / 8 + self.others * _OTHER_BYTES


def groups_from_graph(model: onnx.ModelProto, sizes: Sizes) -> tuple[Group, ...]:
    """Return the groups in the order of their first nodes."""
    nodes = model.graph.node
    roots, levels = _roots(model), _levels(model, sizes)
    made_by: dict[str, int] = {}  # the node of each tensor that a group makes
    leader: dict[int, int] = {}  # towards the first node of a node's group

    def first(index: int) -> int:
        while leader[index] != index:
            leader[index] = leader[leader[index]]
            index = leader[index]
        return index

    for index, node in enumerate(nodes):
        level = levels[node.output[0]]
        if level is None or node.op_type in (*_PRODUCTS, *_VIEWS):
            continue
        leader[index] = index
        for name in node.input:
            root = roots.get(name, name)
            if root in made_by and levels[root] == level:
                low, high = sorted((first(made_by[root]), first(index)))
                leader[high] = low
        made_by |= {name: index for name in node.output if name}
    groups: dict[int, list[int]] = {}
    for index in leader:
        groups.setdefault(first(index), []).append(index)
    readers = _readers(model, roots)
    made = [_group(model, members, roots, readers, sizes) for members in groups.values()]
    return (*made, *_layouts(model, roots, sizes))


def _layouts(model: onnx.ModelProto, roots: dict[str, str], sizes: Sizes) -> list[Group]:
    """Return the kernels that only move heads, before attentions and behind them."""
    by_products = {
        name for node in model.graph.node if node.op_type in _PRODUCTS for name in node.output
    }
    found = []
    for node in model.graph.node:
        if node.op_type != "Attention" or len(sizes.of(node.input[0])) != 3:
            continue
        read = [roots.get(name, name) for name in node.input[:3]]
        for name in (*(name for name in read if name in by_products), node.output[0]):
            moved = 2 * sizes.numbers(name)
            found.append(Group(("Transpose",), moved, 0, (name,) if name in node.output else ()))
    return found


def _roots(model: onnx.ModelProto) -> dict[str, str]:
    """Return the tensor that each view shows."""
    roots: dict[str, str] = {}
    for node in model.graph.node:
        if node.op_type in _VIEWS:
            roots[node.output[0]] = roots.get(node.input[0], node.input[0])
    return roots


def _levels(model: onnx.ModelProto, sizes: Sizes) -> dict[str, int | None]:
    """Return how many products stand behind each tensor; None where nothing need be computed."""
    levels: dict[str, int | None] = {value.name: 0 for value in model.graph.input}
    weights = {initializer.name for initializer in model.graph.initializer}
    from_weights = set(weights)
    for node in model.graph.node:
        inputs = [name for name in node.input if name]
        behind = [level for name in inputs if (level := levels.get(name)) is not None]
        if inputs and all(name in from_weights for name in inputs):
            from_weights.update(node.output)
            level = None
        elif node.op_type == "Shape":
            level = None
        elif behind:
            level = max(behind) + (node.op_type in _PRODUCTS)
        else:  # from shapes alone: angles are computed, numbers of rows and tokens are not
            level = 0 if node.output[0] in sizes.floating else None
        levels |= {name: level for name in node.output if name}
    return levels


_OUTSIDE = -1


def _readers(model: onnx.ModelProto, roots: dict[str, str]) -> dict[str, set[int]]:
    """Return the nodes that read each tensor, through views; the world reads outputs."""
    readers: dict[str, set[int]] = {}
    for index, node in enumerate(model.graph.node):
        if node.op_type not in _VIEWS:
            for name in node.input:
                readers.setdefault(roots.get(name, name), set()).add(index)
    for value in model.graph.output:
        readers.setdefault(roots.get(value.name, value.name), set()).add(_OUTSIDE)
    return readers


def _group(
    model: onnx.ModelProto,
    members: list[int],
    roots: dict[str, str],
    readers: dict[str, set[int]],
    sizes: Sizes,
) -> Group:
    """Return what a group reads from outside and writes for others, each tensor once."""
    inside = set(members)
    nodes = [model.graph.node[index] for index in members]
    own = {name for node in nodes for name in node.output if name}
    moved: dict[str, int] = {}
    for node in nodes:
        for at, name in enumerate(node.input):
            root = roots.get(name, name)
            if root and root not in own:
                numbers = sizes.numbers(root)
                if node.op_type == "Gather" and at == 0:  # only the rows asked for
                    numbers = min(numbers, sizes.numbers(node.output[0]))
                moved[root] = max(moved.get(root, 0), numbers)
    moved |= {name: sizes.numbers(name) for name in own if readers.get(name, set()) - inside}
    floats = sum(numbers for name, numbers in moved.items() if name in sizes.floating)
    kinds = tuple(node.op_type for node in nodes)
    return Group(kinds, floats, sum(moved.values()) - floats, tuple(sorted(own & set(moved))))
