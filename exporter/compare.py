"""Two graphs held against each other layer by layer: what pairs up, and what may differ.

Layers are told by the tensors that they make.  Tensors of floating point that depend on a graph's
inputs and have the same name in both graphs pair up; a product keeps the name of its output however
it is quantized, and what only one graph has belongs to the next layer that both have.

Each layer of one graph is run *alone*: it is given what the other graph's layer was given.  So an
error is told where it is made, and not again in every layer behind it, and what a layer may differ
by follows from its own arithmetic:

    few roundings to its type  +  a sum of K products in another order  +  what is quantized in it

Pure: no file, no clock, no runner.  Knows nothing about torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.errors import InputError
from engines.model import LOGITS
from engines.precision import Precision
from exporter.graph import linears
from exporter.names import linear_from_key
from exporter.quantize import is_quantized

if TYPE_CHECKING:
    import onnx

# Unit roundoff of the types by safetensors' name: half the distance from 1 to the next number.
ROUNDOFF = {"F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8}

# Roundings to its type in the longest single layer, a softmax between two products: scores,
# their largest taken off, exp, sum, quotient, mixture; and one of each operand as it comes in.
_ROUNDINGS = 8

# Two sums of K products in float32 differ by 2^-24 sqrt(K), times a small number (the probabilistic
# bound of Higham and Mary 2019, whose number is 4 for a failure in some thousands).
_LIKELY = 4

# An element may differ by more than the root mean square: of a million normal deviates the largest
# is 5, and the largest element of what they are held against is about as far out.  Twice for what
# is not normal.
_PEAK = 2.0

# Largest magnitude over root mean square, of what shares a scale: activations (outliers of whole
# windows, or of a token), columns of a weight, groups of 16 or 32 weights.
_ACTIVATIONS, _COLUMN, _GROUP = 16.0, 6.0, 3.0

_SITE = re.compile(r"(blocks\.(\d+)\.[a-z_]+)\.")


@dataclass(frozen=True, slots=True)
class Layer:
    """What makes one tensor of the graph that is looked into, of tensors that both graphs have.

    Attributes:
        tensor: Its name, the same in both graphs.
        node: Name of the ONNX node that makes it.
        op: That node's operator.
        place: Block and site in Cadenza's words, `blocks.0.attn_in`; of what lies between,
            `behind blocks.0.attn_in`.
        weight: The quantizable or plain matrix that it multiplies by, else "".
        inner: Largest extent of what it sums over, as far as constants tell; at least 1.
        quantized: Whether it holds quantized weights.
        rounds: Whether it rounds activations to fewer bits.
    """

    tensor: str
    node: str
    op: str
    place: str
    weight: str
    inner: int
    quantized: bool
    rounds: bool


@dataclass(frozen=True, slots=True)
class Difference:
    """How a layer's output differs, the worst of all states.

    Attributes:
        absolute: Largest difference of an element.
        relative: Norm of the difference over the norm of the output it is held against.
        cosine: Of the angle between the two.
        largest: Largest magnitude of the output it is held against.
    """

    absolute: float
    relative: float
    cosine: float
    largest: float

    def worst(self, other: Difference) -> Difference:
        """Return the worse of each number; what is no number is worst."""
        return Difference(
            absolute=_most(self.absolute, other.absolute),
            relative=_most(self.relative, other.relative),
            cosine=-_most(-self.cosine, -other.cosine),
            largest=_most(self.largest, other.largest),
        )


@dataclass(frozen=True, slots=True)
class Row:
    """A layer, how it differs, and by how much it may.

    Attributes:
        layer: Which.
        alone: The difference where it is given what the other graph's layer was given.
        run: The relative difference of the whole run, with all that came before.
        tolerance: What `alone.relative` may be.
        differs: Whether it is more than that, a single element is far off, or one is no number.
    """

    layer: Layer
    alone: Difference
    run: float
    tolerance: float
    differs: bool


def differs(found: Difference, tolerance: float) -> bool:
    """Return whether a difference is more than a tolerance explains; NaN and infinity always are.

    A single element may be off by more, see `_PEAK`.
    """
    within = found.relative <= tolerance and found.absolute <= _PEAK * tolerance * found.largest
    return not (within and math.isfinite(found.largest))


def first_difference(rows: Sequence[Row]) -> Row | None:
    """Return the first layer that differs, in the order of the graph; None where all agree."""
    return next((row for row in rows if row.differs), None)


def largest_jump(rows: Sequence[Row]) -> Row | None:
    """Return the layer that adds most error of its own, by the norm; None where none adds any."""
    worst = max(rows, key=lambda row: row.alone.relative, default=None)
    return worst if worst is not None and worst.alone.relative > 0 else None


def tolerance(layer: Layer, rest: str, length: int, precision: Precision | None = None) -> float:
    """Return what a layer's output may differ by, relative to its norm.

    Args:
        layer: Which.
        rest: Type of both graphs' results as they are rounded, by safetensors' name.
        length: Tokens of a row, which attention sums over.
        precision: What one of the graphs is quantized to and the other is not; None where both
            round alike.
    """
    k = max(layer.inner, length if layer.op == "Attention" else 1)
    arithmetic = _ROUNDINGS * ROUNDOFF[rest] + _LIKELY * math.sqrt(k) * ROUNDOFF["F32"]
    return arithmetic + (0.0 if precision is None else noise(layer, precision))


def noise(layer: Layer, precision: Precision) -> float:
    """Return twice the error, relative to its norm, that quantization adds to a product.

    A step of a uniform format is 1 / (2^(bits - 1) - 1) of the largest magnitude, its error the
    step over sqrt(12).  A floating-point format with m explicit bits errs by 2^-(m + 1) / sqrt(3)
    of each number.  Errors of both sides add as squares.
    """
    sides = []
    if layer.quantized:
        sides.append(_noise(precision.family, precision.weight_bits, weights=True))
    if layer.rounds:
        sides.append(_noise(precision.name, precision.bits, weights=False))
    return 2 * math.hypot(*sides)


def _noise(name: str, bits: float, weights: bool) -> float:
    if name.startswith("fp8"):
        return float(2**-4 / math.sqrt(3))
    if name.startswith("nvfp4"):
        return float(2**-2 / math.sqrt(3))
    crest = (_COLUMN if bits >= 8 else _GROUP) if weights else _ACTIVATIONS
    if name == "int4-int8" and weights:  # a column shares a scale
        crest = _COLUMN
    if name == "int4-int8" and not weights:
        bits = 8
    return float(crest / (2 ** (int(bits) - 1) - 1) / math.sqrt(12))


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


def layers_of(
    model: onnx.ModelProto, cuts: Collection[str], architecture: str
) -> tuple[Layer, ...]:
    """Return the layers of a graph, in its order, each up to the cuts before it."""
    parts = _Parts(model, cuts)
    found = []
    behind = "before the blocks"
    for node in model.graph.node:
        for tensor in node.output:
            if tensor not in cuts:
                continue
            inside = parts.inside(tensor)
            read = [name for each in inside for name in each.input if name in parts.constants]
            weight, place = _place(tensor, read, architecture)
            # Scales of all sites may stand at the head of the graph; they lead nowhere yet.
            if place and weight:
                behind = f"behind {place}"
            if node.op_type == "MatMul" and not weight:  # the LM head has no site
                weight = next((name for name in read if len(parts.constants[name]) == 2), "")
            sizes = [size for name in read for size in parts.constants[name]]
            found.append(
                Layer(
                    tensor=tensor,
                    node=node.name,
                    op=node.op_type,
                    place=place or behind,
                    weight=weight,
                    inner=max([1, *sizes]),
                    quantized=any(is_quantized(name) for name in read),
                    rounds=any(each.op_type in ("QuantizeLinear", "Round") for each in inside),
                )
            )
    return tuple(found)


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

    parts = _Parts(model, cuts)
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


def chunks(
    layers: Sequence[Layer], sizes: Mapping[str, int], most: int
) -> Iterator[tuple[Layer, ...]]:
    """Yield the layers in runs whose outputs together hold at most so many numbers, or one."""
    run: list[Layer] = []
    held = 0
    for layer in layers:
        if run and held + sizes[layer.tensor] > most:
            yield tuple(run)
            run, held = [], 0
        run.append(layer)
        held += sizes[layer.tensor]
    if run:
        yield tuple(run)


class _Parts:
    """What lies between the cuts of a graph."""

    def __init__(self, model: onnx.ModelProto, cuts: Collection[str]) -> None:
        self.cuts = cuts
        self.constants = {each.name: tuple(each.dims) for each in model.graph.initializer}
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


def _place(tensor: str, read: Sequence[str], architecture: str) -> tuple[str, str]:
    """Return the matrix that a layer reads and its block and site, each "" where it has none."""
    for name in read:
        weight = re.sub(r"\.(quantized|scale|global_scale|zeros)$", "", name)
        known = linear_from_key(architecture, weight)
        if known is not None:
            return weight, known[1]
    for name in (tensor, *read):
        match = _SITE.match(name)
        if match is not None:
            return "", match[1]
    return "", ""


def _most(left: float, right: float) -> float:
    return math.nan if math.isnan(left) or math.isnan(right) else max(left, right)
