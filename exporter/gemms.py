"""The products of a graph: shapes, bytes, operations at a batch and length.

Read from a full-precision graph whose weights need no data; what every precision moves is
derived from it.  A linear layer multiplies as many rows as the tensor that enters it has, so the
last block counts asked positions after its Gather and all positions before it.  Attention is two
products in one kernel: scores Q K^T and mixture P V; neither the scores nor P leave the chip.

Linear layers that read the same tensor are one call of a kernel on wider weights, as TensorRT
merges q, k, v and gate, up; not so where weights alone are quantized, which it does not merge.

Quantized are the linear layers from whose output another product is reached: the LM head, the
embedding and attention keep the graph's other type, 32 bits at fp32 and 16 bits elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from engines.document import shorten
from engines.errors import InputError
from engines.precision import Precision
from exporter.graph import linears
from exporter.groups import Group, groups_from_graph
from exporter.sizes import Dims, Sizes, sizes_from_graph

if TYPE_CHECKING:
    import onnx

# Larger graphs are none of ours: weights stand outside.
_MOST_BYTES = 1 << 26

LINEAR, SCORES, MIXTURE, PLAIN = "linear", "scores", "mixture", "product"


@dataclass(frozen=True, slots=True)
class Product:
    """`count` products [M, K] x [K, N] side by side.

    Attributes:
        name: The weight's, or of the tensor that is made.
        kind: linear, scores, mixture, or product (of two activations, outside attention).
        m: Rows M.
        k: Inner width K.
        n: Columns N.
        count: 1 for a linear layer, rows times heads in attention.
        weights: Numbers read that are weights.
        reads: Numbers read that are activations.
        writes: Numbers written.
        source: Tensor of the activations, which linear layers may share.
        quantized: Whether it is multiplied at the precision, not in the graph's other type.
    """

    name: str
    kind: str
    m: int
    k: int
    n: int
    count: int
    weights: int
    reads: int
    writes: int
    source: str
    quantized: bool

    def __post_init__(self) -> None:
        if min(self.m, self.k, self.n, self.count) < 1:
            raise ValueError(
                f"sizes >= 1 must hold, got {self.m=}, {self.k=}, {self.n=}, {self.count=}"
            )

    @property
    def operations(self) -> int:
        """Multiplications and additions: 2 M K N, times count."""
        return 2 * self.m * self.k * self.n * self.count

    def weight_bytes(self, precision: Precision) -> float:
        """Return bytes of weights that are read at a precision."""
        bits = precision.weight_bits if self.quantized else rest_bits(precision)
        return self.weights * bits / 8

    def activation_bytes(self, precision: Precision) -> float:
        """Return bytes of activations read at a precision, and written in the other type."""
        return self.read_bytes(precision) + self.writes * rest_bits(precision) / 8

    def read_bytes(self, precision: Precision) -> float:
        """Return bytes of activations read at a precision."""
        rest = rest_bits(precision)
        return self.reads * (min(precision.bits, rest) if self.quantized else rest) / 8

    def bytes(self, precision: Precision) -> float:
        """Return all bytes moved at a precision, each operand once."""
        return self.weight_bytes(precision) + self.activation_bytes(precision)

    def intensity(self, precision: Precision) -> float:
        """Return operations a byte moved."""
        return self.operations / self.bytes(precision)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a kernel: linear layers that share what they read, or an attention."""

    products: tuple[Product, ...]

    @property
    def operations(self) -> int:
        """Of all its products."""
        return sum(each.operations for each in self.products)

    def weight_bytes(self, precision: Precision) -> float:
        """Return bytes of all its weights at a precision."""
        return sum(each.weight_bytes(precision) for each in self.products)

    def activation_bytes(self, precision: Precision) -> float:
        """Return bytes of activations at a precision; what is shared is read once."""
        first, *others = self.products
        shared = len(others) * (first.read_bytes(precision) if first.kind == LINEAR else 0.0)
        return sum(each.activation_bytes(precision) for each in self.products) - shared

    def bytes(self, precision: Precision) -> float:
        """Return all bytes moved at a precision."""
        return self.weight_bytes(precision) + self.activation_bytes(precision)


@dataclass(frozen=True, slots=True)
class Pass:
    """What one evaluation of a graph computes and moves.

    Attributes:
        batch: Rows B.
        length: Tokens of a row L.
        asked: Positions asked for of a row M.
        products: In the order of the graph.
        groups: All other kernels: norms, activations, rotations, sums, gathers, moves.
    """

    batch: int
    length: int
    asked: int
    products: tuple[Product, ...]
    groups: tuple[Group, ...]

    @property
    def operations(self) -> int:
        """Of all products."""
        return sum(product.operations for product in self.products)

    def calls(self, precision: Precision) -> list[Call]:
        """Return the kernels that compute the products at a precision, in the order of the graph.

        Every product is in one of them.
        """
        merged = precision.weight_bits >= precision.bits
        found: dict[tuple[str, ...], list[Product]] = {}
        for each in self.products:
            key = (each.source, str(each.quantized)) if each.kind == LINEAR and merged else ()
            found.setdefault(key or (each.name,), []).append(each)
        return [Call(tuple(products)) for products in found.values()]

    def bytes_between(self, precision: Precision) -> list[float]:
        """Return the bytes of each group at a precision: what it rounds it writes rounded."""
        rest = rest_bits(precision)
        saved = max(0.0, rest - precision.bits) / 8
        rounded = {each.source: each.reads for each in self.products if each.quantized}
        return [
            group.bytes(rest) - saved * sum(rounded.get(name, 0) for name in group.outputs)
            for group in self.groups
        ]


def rest_bits(precision: Precision) -> int:
    """Return bits of what a precision does not quantize, on a GPU."""
    return 32 if precision.bits > 16 else 16


def pass_from_file(file: Path, batch: int, length: int, asked: int) -> Pass:
    """Return what one evaluation of the graph in a file computes; see `pass_from_graph`.

    Raises:
        InputError: As `pass_from_graph`; or the file is no ONNX graph, or too large for one.
    """
    import onnx

    data = file.read_bytes() if file.stat().st_size <= _MOST_BYTES else None
    if data is None:
        raise InputError(f"{str(file)!r} has more than {_MOST_BYTES >> 20} MiB; export again")
    try:
        model = onnx.load_model_from_string(data)
    except import_module("google.protobuf.message").DecodeError as error:
        raise InputError(f"{str(file)!r} is no ONNX graph ({error}); export again") from error
    return pass_from_graph(model, batch, length, asked)


def pass_from_graph(model: onnx.ModelProto, batch: int, length: int, asked: int) -> Pass:
    """Return the products of a full-precision graph and what lies between them.

    No weight is read.

    Args:
        model: As `exporter.graph` makes it.
        batch: Rows B.
        length: Tokens of a row L.
        asked: Positions asked for of a row M.

    Raises:
        InputError: A size is out of range, or the graph is damaged or is none of ours.
    """
    sizes = sizes_from_graph(model, batch, length, asked)
    feeding = _feeding(model)
    weights = {linear.matmul: linear.weight for linear in linears(model)}
    products: list[Product] = []
    for index, node in enumerate(model.graph.node):
        if index in weights:
            products.append(_linear(node, weights[index], sizes, index in feeding))
        elif node.op_type == "MatMul":
            products.append(_plain(node, sizes))
        elif node.op_type == "Attention":
            products += _attention(node, sizes)
    if not products:
        raise InputError("the graph multiplies nothing; give the export of a denoiser")
    return Pass(batch, length, asked, tuple(products), groups_from_graph(model, sizes))


def _feeding(model: onnx.ModelProto) -> set[int]:
    """Return the indices of nodes from whose output a product is reached."""
    reach: set[str] = set()
    found = set()
    for index in range(len(model.graph.node) - 1, -1, -1):
        node = model.graph.node[index]
        reached = any(name in reach for name in node.output)
        if reached:
            found.add(index)
        if reached or node.op_type in ("MatMul", "Attention"):
            reach.update(name for name in node.input if name)
    return found


def _linear(node: onnx.NodeProto, weight: str, sizes: Sizes, quantized: bool) -> Product:
    source, (k, n) = node.input[0], _axes(sizes, node.input[1], 2)
    numbers = sizes.numbers(source)
    if not numbers or sizes.of(source)[-1:] != (k,):
        raise InputError(
            f"the layer of {shorten(weight)} multiplies {list(sizes.of(source))} by {[k, n]}, "
            f"which do not fit; export again"
        )
    m = numbers // k
    return Product(weight, LINEAR, m, k, n, 1, k * n, numbers, m * n, source, quantized)


def _plain(node: onnx.NodeProto, sizes: Sizes) -> Product:
    """Return a product of two activations."""
    left, right, made = (sizes.of(name) for name in (*node.input[:2], node.output[0]))
    if min(len(left), len(right)) < 2 or 0 in (*left, *right):
        raise InputError(
            f"the product {shorten(node.output[0])} is of {list(left)} and {list(right)}, which "
            f"is no product of matrices; export again"
        )
    reads = math.prod(left) + math.prod(right)
    count = math.prod(made[:-2])
    return Product(
        *(node.output[0], PLAIN, left[-2], left[-1], right[-1], count, 0, reads),
        math.prod(made),
        node.input[0],
        quantized=False,
    )


def _attention(node: onnx.NodeProto, sizes: Sizes) -> list[Product]:
    """Return the two products of ONNX's Attention, [B, L, heads * D] or [B, heads, L, D]."""
    attributes = {each.name: each.i for each in node.attribute}
    (batch, heads, asked, width) = _heads(node, 0, "q_num_heads", attributes, sizes)
    (_, kv_heads, length, _) = _heads(node, 1, "kv_num_heads", attributes, sizes)
    mixed = _heads(node, 2, "kv_num_heads", attributes, sizes)[3]
    if len(node.input) > 4 and node.input[4]:  # keys and values of earlier passes
        length += _axes(sizes, node.input[4], 4)[2]
    query = batch * heads * asked * width
    keys, values = (batch * kv_heads * length * each for each in (width, mixed))
    made, count = batch * heads * asked * mixed, batch * heads
    name, source = node.output[0], node.input[0]
    sizes_ = ((SCORES, asked, width, length), (MIXTURE, asked, length, mixed))
    moved = ((query + keys, 0), (values, made))
    return [
        Product(name, *shape, count, 0, *numbers, source, quantized=False)
        for shape, numbers in zip(sizes_, moved, strict=True)
    ]


def _heads(
    node: onnx.NodeProto, at: int, key: str, attributes: Mapping[str, int], sizes: Sizes
) -> tuple[int, int, int, int]:
    """Return (rows, heads, tokens, width of a head) of an input of Attention."""
    name = node.input[at] if at < len(node.input) else ""
    dims, heads = sizes.of(name), attributes.get(key, 0)
    if len(dims) == 4 and min(dims) > 0:
        return dims[0], dims[1], dims[2], dims[3]
    if len(dims) != 3 or min(dims) < 1 or heads < 1 or dims[2] % heads:
        raise InputError(
            f"the attention {shorten(node.output[0])} reads {list(dims)} as {heads} heads, which "
            f"do not fit; export again"
        )
    return dims[0], heads, dims[1], dims[2] // heads


def _axes(sizes: Sizes, name: str, count: int) -> Dims:
    dims = sizes.of(name)
    if len(dims) != count or min(dims) < 1:
        raise InputError(
            f"the tensor {shorten(name)} must have {count} axes, got {list(dims)}; export again"
        )
    return dims
