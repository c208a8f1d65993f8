"""Graphs of TensorRT's precisions, made from a core graph whose activations have 16 bits.

TensorRT is strongly typed: a precision is what the graph says.  Products with few bits on both
sides are written so that the builder makes one GEMM of them:

    int8, fp8    x -> Q/DQ(c) -> MatMul(DQ(weight)) -> y                       static scales c
    int4-int8    likewise, the weight from int4; one set of scales, since TensorRT-RTX refuses the
                 form below for int4, as it does groups of inputs
    nvfp4        x -> TRT_FP4DynamicQuantize -> DQ -> DQ -> MatMul(DQ(DQ(weight)))
    *-w          x -> MatMul(DQ(weight)) -> y

Static scales are constants, or an input with one row for each row of the batch.  Then the pair
keeps a constant c, and the row's scale s comes in around it:

    x -> Mul(c / s) -> Q/DQ(c) -> MatMul(DQ(weight)) -> Mul(s / c) -> y

With c the smallest scale of the windows the product between is never above what it is in the end,
so nothing overflows in 16 bits that does not overflow anyway.

Scales are float32 whatever the rest is: the Q and DQ of opset 23 take both.  Recipes were tried
with TensorRT-RTX 1.7; which target takes which precision is `engines.targets`'s.  The graphs that
ONNX Runtime runs in their place are `exporter.simulation`'s.  Knows nothing about torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engines.errors import InputError
from engines.model import BATCH, SCALES
from engines.precision import FP4_GROUP, WEIGHT_GROUP, Precision
from exporter.graph import Linear
from exporter.products import Nodes, constant, copied, replace_weights, rewrite_products
from exporter.quantize import (
    INT8_LARGEST,
    global_scale_name,
    is_quantized,
    quantized_name,
    scale_name,
)
from exporter.typed_weights import FP4_LARGEST, FP8_LARGEST
from exporter.weights import ONNX_TYPES

if TYPE_CHECKING:
    import onnx

# Largest number of a static activation format; its scale is the largest magnitude over it.
LARGEST = {"int8": float(INT8_LARGEST), "fp8": FP8_LARGEST, "int4-int8": float(INT8_LARGEST)}

# TensorRT's own operators.
TRT_DOMAIN = "trt"


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a precision's products are written, for TensorRT and for ONNX Runtime alike.

    Attributes:
        precision: Of the products.
        rest: Type of everything else: F16, BF16 or F32.
        sites: Site of each weight to quantize.
        order: All sites, in the order of the scales.
        scales: Of a precision with static scales: of each window [W, S].  Of nvfp4: largest
            magnitude at each site [1, S].
        as_input: Make the scales an input [batch, 1, S]; otherwise one set is a constant, the
            largest of the windows'.
        rotate: Rotate activations first; the weights are rotated ones.

    Raises:
        ValueError: Scales are to be an input of a precision that takes none.
    """

    precision: Precision
    rest: str
    sites: Mapping[str, str]
    order: Sequence[str] = ()
    scales: NDArray[np.float32] | None = None
    as_input: bool = False
    rotate: bool = False

    def __post_init__(self) -> None:
        if self.as_input and (self.scales is None or not self.precision.has_static_scales):
            raise ValueError(f"{self.precision.name} takes no scales as an input")

    @property
    def kind(self) -> int:
        """ONNX's number of the rest's type."""
        return ONNX_TYPES[self.rest]

    @property
    def narrow(self) -> int:
        """ONNX's number of the type that activations with static scales are rounded to."""
        from onnx import TensorProto

        kind: int = TensorProto.INT8
        return TensorProto.FLOAT8E4M3FN if self.precision.name == "fp8" else kind

    def static_scales(self) -> dict[str, np.floating[Any]]:
        """Return the scale of each site that stands in the graph; none where there are none.

        Raises:
            InputError: One is not above 0 in its type; names the site.
        """
        if self.scales is None:
            return {}
        name = self.precision.name
        values = self.scales.min(0) if self.as_input else self.scales.max(0)
        if name == "nvfp4":  # the scale of the groups' scales
            values = values / np.float32(FP4_LARGEST * FP8_LARGEST)
        # TensorRT wants the scales of both sides to have one type, and int4's have 16 bits.
        typed = values.astype(np.float16 if name == "int4-int8" else np.float32)
        found = dict(zip(self.order, typed, strict=True))
        for site, value in found.items():
            if not 0.0 < float(value) < np.inf:
                raise InputError(
                    f"the activations at {site} have the scale {float(value):.3g}, which "
                    f"{name} cannot hold; leave {name} out"
                )
        return found


def typed_graph(core: onnx.ModelProto, form: Form) -> onnx.ModelProto:
    """Return the graph of a precision with 8 bits or fewer, its weights without data.

    Args:
        core: The core graph, traced with the type of the rest.
        form: How its products are written.

    Raises:
        InputError: A scale does not fit its type; names the site.
    """
    made, add = copied(core), Nodes()
    kind, name, family = form.kind, form.precision.name, form.precision.family
    for site, value in form.static_scales().items():
        constant(made, f"{site}.scale", value)
    if form.as_input:
        scale_inputs(
            made, add, form.order, lambda source, out: add("Cast", [source], [out], to=kind)
        )

    def source_of(source: str, site: str) -> str:
        if name == "nvfp4":
            return _fp4_source(add, source, f"{site}.scale", kind)
        if name not in LARGEST:
            return source
        if form.as_input:
            add("Mul", [source, f"{site}.before"], [f"{source}.before"])
            source = f"{source}.before"
        scale, low, back = f"{site}.scale", f"{source}.low", f"{source}.back"
        add("QuantizeLinear", [source, scale], [low], output_dtype=form.narrow)
        add("DequantizeLinear", [low, scale], [back], output_dtype=kind)
        return back

    def product(linear: Linear, source: str) -> None:
        weight = dequantized_weight(add, linear.weight, family, kind)
        if not form.as_input:
            add("MatMul", [source, weight], [linear.output])
            return
        add("MatMul", [source, weight], [f"{linear.output}.unscaled"])
        after = f"{form.sites[linear.weight]}.after"
        add("Mul", [f"{linear.output}.unscaled", after], [linear.output])

    rewrite_products(made, form.sites, add, source_of, product, form.rotate, kind)
    replace_weights(made, form.sites, *weight_types(family))
    if name == "nvfp4":
        made.opset_import.add(domain=TRT_DOMAIN, version=1)
    return made


def bare(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy whose matrices are inputs: engines of a family then share one allocation.

    Inputs have the names of the tensors in the family's file.  Vectors, scales and constants stay
    in the graph; so do groups of 4 bits, which TensorRT would not fuse.
    """
    from onnx import TensorProto, helper

    made = copied(model)
    for each in list(made.graph.initializer):
        packed = each.data_type in (TensorProto.INT4, TensorProto.FLOAT4E2M1)
        if each.raw_data or len(each.dims) < 2 or packed or each.name.endswith(".scale"):
            continue
        value = helper.make_tensor_value_info(each.name, each.data_type, list(each.dims))
        made.graph.input.append(value)
        made.graph.initializer.remove(each)
    return made


def quantized_elements(file: Path) -> int:
    """Return the elements of all quantized weights of a graph; 0 where none is quantized."""
    import onnx

    graph = onnx.load(str(file), load_external_data=False).graph
    shapes = [list(each.dims) for each in graph.initializer if is_quantized(each.name)]
    shapes += [
        [dim.dim_value for dim in each.type.tensor_type.shape.dim]
        for each in graph.input
        if is_quantized(each.name)
    ]
    return sum(math.prod(shape) for shape in shapes)


def weight_types(family: str) -> tuple[int, Callable[[int, int], list[int]], int, bool]:
    """Return what `exporter.products.replace_weights` must know of a family.

    That is the type of the quantized weights, the shape of their scales from (outputs, inputs),
    the type of the scales, and whether the scales have a scale.
    """
    from onnx import TensorProto

    float32, half = TensorProto.FLOAT, TensorProto.FLOAT16
    return {
        "int8": (TensorProto.INT8, lambda o, i: [o], float32, False),
        "fp8": (TensorProto.FLOAT8E4M3FN, lambda o, i: [], float32, False),
        "int4": (TensorProto.INT4, lambda o, i: [i // WEIGHT_GROUP, o], half, False),
        "int4-int8": (TensorProto.INT4, lambda o, i: [o], half, False),
        "nvfp4": (
            TensorProto.FLOAT4E2M1,
            lambda o, i: [i // FP4_GROUP, o],
            TensorProto.FLOAT8E4M3FN,
            True,
        ),
    }[family]


def dequantized_weight(add: Nodes, weight: str, family: str, kind: int) -> str:
    """Add what makes a weight of its stored form, and return what it is called."""
    from onnx import TensorProto

    stored, scale, made = quantized_name(weight), scale_name(weight), f"{weight}.dequantized"
    match family:
        case "int8" | "int4-int8":
            add("DequantizeLinear", [stored, scale], [made], axis=1, output_dtype=kind)
        case "fp8":
            add("DequantizeLinear", [stored, scale], [made], output_dtype=kind)
        case "int4":
            groups = {"axis": 0, "block_size": WEIGHT_GROUP, "output_dtype": kind}
            add("DequantizeLinear", [stored, scale], [made], **groups)
        case _:
            wide, steps = f"{weight}.wide_scale", f"{weight}.steps"
            float32 = TensorProto.FLOAT
            whole = [scale, global_scale_name(weight)]
            add("DequantizeLinear", whole, [wide], output_dtype=float32)
            add("Cast", [wide], [steps], to=kind)
            add("DequantizeLinear", [stored, steps], [made], axis=0, block_size=FP4_GROUP)
    return made


def scale_inputs(
    model: onnx.ModelProto, add: Nodes, order: Sequence[str], narrow: Callable[[str, str], object]
) -> None:
    """Add the input of scales, and for each site what goes before and behind its product.

    Args:
        model: Given the input `scales` [batch, 1, S].
        add: Given the nodes; `SITE.before` is c / s and `SITE.after` is s / c, in 16 bits.
        order: All sites, in the order of the scales.
        narrow: Adds the rounding of the tensor of a name to the type of the rest, under another.
    """
    from onnx import TensorProto, helper

    shape: list[str | int | None] = [BATCH, 1, len(order)]
    model.graph.input.append(helper.make_tensor_value_info(SCALES, TensorProto.FLOAT, shape))
    own = [f"{site}.row_scale" for site in order]
    add("Split", [SCALES], own, axis=2, num_outputs=len(order))
    for site, row in zip(order, own, strict=True):
        for name, pair in (("before", (f"{site}.scale", row)), ("after", (row, f"{site}.scale"))):
            add("Div", pair, [f"{site}.{name}_exact"])
            narrow(f"{site}.{name}_exact", f"{site}.{name}")


def _fp4_source(add: Nodes, source: str, scale: str, kind: int) -> str:
    """Add the rounding of activations to nvfp4, groups of 16 by their own largest magnitude."""
    from onnx import TensorProto

    low, groups, back = f"{source}.low", f"{source}.groups", f"{source}.back"
    add(
        "TRT_FP4DynamicQuantize",
        [source, scale],
        [low, groups],
        domain=TRT_DOMAIN,
        axis=-1,
        block_size=FP4_GROUP,
        scale_type=TensorProto.FLOAT8E4M3FN,
    )
    add("DequantizeLinear", [groups, scale], [f"{groups}.wide"], output_dtype=TensorProto.FLOAT)
    add("Cast", [f"{groups}.wide"], [f"{groups}.steps"], to=kind)
    pair = [low, f"{groups}.steps"]
    add("DequantizeLinear", pair, [back], axis=-1, block_size=FP4_GROUP)
    return back
