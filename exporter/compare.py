"""Two graphs held against each other layer by layer: what pairs up, and what may differ.

Layers are told by the tensors that they make.  Tensors of floating point that an input decides and
that have the same name in both graphs pair up; a product keeps the name of its output however it
is quantized, and what only one graph has belongs to the next layer that both have.

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
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engines.precision import Precision
from exporter.cuts import Parts
from exporter.names import linear_from_key
from exporter.quantize import INT8_LARGEST, is_quantized

if TYPE_CHECKING:
    import onnx

# Unit roundoff of the types by safetensors' name: half the distance from 1 to the next number.
ROUNDOFF = {"F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8}

# Roundings to its type in the longest single layer, a softmax between two products: scores,
# their largest taken off, exp, sum, quotient, mixture; and one of each operand as it comes in.
_ROUNDINGS = 8

# Two sums of K products in float32 differ by 2^-24 sqrt(K), times a small number: the
# probabilistic bound of Higham and Mary, SIAM J. Sci. Comput. 41 (2019), A2815.
_LIKELY = 4

# Largest magnitude over root mean square of weights that share a scale: a column, a group of 32.
# That of activations is measured: models have outliers in some layers and not in others.
_COLUMN, _GROUP = 6.0, 3.0

# Products whose terms cancel lose what the terms have; so do scales of a whole window in a state
# whose own largest activation is smaller.
_MARGIN = 4.0

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
        step: The scale that it does that by, where it has 16 bits, else 0.
        sources: The tensors that it is given when it runs alone.
    """

    tensor: str
    node: str
    op: str
    place: str
    weight: str
    inner: int
    quantized: bool
    rounds: bool
    step: float
    sources: tuple[str, ...]


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


def differs(found: Difference, tolerance: float, step: float = 0.0) -> bool:
    """Return whether a difference is more than a tolerance explains; NaN and infinity always are.

    A single element may be off by as much of the largest element: of many deviates the largest is
    about as many times their root mean square as the largest element is of the output's.  Or by
    one `step` (and its own rounding), where there is one.
    """
    most = max(tolerance * found.largest, 1.001 * step)
    within = found.relative <= tolerance and found.absolute <= most
    return not (within and math.isfinite(found.largest))


def first_difference(rows: Sequence[Row]) -> Row | None:
    """Return the first layer that differs, in the order of the graph; None where all agree."""
    return next((row for row in rows if row.differs), None)


def largest_jump(rows: Sequence[Row]) -> Row | None:
    """Return the layer that adds most error of its own, by the norm; None where none adds any."""
    worst = max(rows, key=lambda row: row.alone.relative, default=None)
    return worst if worst is not None and worst.alone.relative > 0 else None


def tolerance(
    layer: Layer, rest: str, length: int, precision: Precision | None = None, crest: float = 1.0
) -> float:
    """Return what a layer's output may differ by, relative to its norm.

    Args:
        layer: Which.
        rest: Type of both graphs' results as they are rounded, by safetensors' name.
        length: Tokens of a row, which attention sums over.
        precision: What one of the graphs is quantized to and the other is not; None where both
            round alike.
        crest: Largest magnitude over root mean square of what the layer is given, of what shares
            a scale.
    """
    k = max(layer.inner, length if layer.op == "Attention" else 1)
    if layer.step:
        # QuantizeLinear rounds the quotient to the type of the scale first, unless it is told
        # otherwise.  A share 2^-11 |q| of the quotients q falls to the other side of a step, and
        # is off by 1: relative to q's mean square, 2^-11 / |q|.  Scales are a window's, a state's
        # own largest quotient may be a quarter of 127.
        return 2 * math.sqrt(2 * ROUNDOFF["F16"] * crest / INT8_LARGEST)
    arithmetic = _ROUNDINGS * ROUNDOFF[rest] + _LIKELY * math.sqrt(k) * ROUNDOFF["F32"]
    return arithmetic + (0.0 if precision is None else noise(layer, precision, crest))


def noise(layer: Layer, precision: Precision, crest: float) -> float:
    """Return the error, relative to its norm, that quantization may add to a product.

    `_MARGIN` times what is expected of two independent sides:

    A step of a uniform format is 1 / (2^(bits - 1) - 1) of the largest magnitude, its error the
    step over sqrt(12).  A floating-point format with m explicit bits errs by 2^-(m + 1) / sqrt(3)
    of each number.  Errors of both sides add as squares.
    """
    family, sides = precision.family, []
    if layer.quantized:
        shared = _GROUP if family == "int4" or precision.simulated else _COLUMN
        sides.append(_noise(family, precision.weight_bits, shared))
    if layer.rounds:
        sides.append(_noise(family, precision.bits, crest))
    return _MARGIN * math.hypot(*sides)


def _noise(family: str, bits: float, crest: float) -> float:
    mantissa = {"fp8": 3, "nvfp4": 1}.get(family)
    if mantissa is not None:
        return float(2.0 ** -(mantissa + 1) / math.sqrt(3))
    return float(crest / (2 ** (int(bits) - 1) - 1) / math.sqrt(12))


def layers_of(
    model: onnx.ModelProto, cuts: Collection[str], architecture: str
) -> tuple[Layer, ...]:
    """Return the layers of a graph, in its order, each up to the cuts before it."""
    parts = Parts(model, cuts)
    found = []
    behind = "before the blocks"
    for node in model.graph.node:
        for tensor in node.output:
            if tensor not in cuts:
                continue
            inside = parts.inside(tensor)
            read = [name for each in inside for name in each.input if name in parts.constants]
            given = {name: None for each in inside for name in each.input if name in cuts}
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
                    step=max((_half_step(each, parts) for each in inside), default=0.0),
                    sources=tuple(given),
                )
            )
    return tuple(found)


def crest_of(values: NDArray[Any], by_row: bool) -> float:
    """Return the largest magnitude over the root mean square; 1 where there is none.

    Args:
        values: What is rounded [.., K].
        by_row: Whether each row has a scale of its own; then squares of largest are averaged.
    """
    wide = np.abs(np.atleast_1d(values).astype(np.float64))
    mean = float(np.sqrt(np.square(wide).mean())) if wide.size else 0.0
    if not 0.0 < mean < np.inf:
        return 1.0
    largest = np.sqrt(np.square(wide.max(-1)).mean()) if by_row else wide.max()
    return float(largest) / mean


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


def _half_step(node: onnx.NodeProto, parts: Parts) -> float:
    """Return the scale of a node that rounds by one of 16 bits, else 0."""
    return parts.halves.get(node.input[1], 0.0) if node.op_type == "QuantizeLinear" else 0.0


def _most(left: float, right: float) -> float:
    return math.nan if math.isnan(left) or math.isnan(right) else max(left, right)
