"""Graphs that compute in float32 what TensorRT's graphs compute in fewer bits, for ONNX Runtime.

No ONNX Runtime on a CPU runs every format, and none runs them as a GPU does.  So every precision
of TensorRT has a second graph over the same weights: whatever is rounded there is rounded here, to
the same numbers, and everything else is computed in float32:

    16 bits   the result of each operator -> Cast(16 bits) -> Cast(float32)
    int8, fp8 Q/DQ in float32; products of 8 by 8 bits are not rounded again before they are summed
    *-w       the dequantized weight is rounded to 16 bits, as it is on its way into the product
    nvfp4     groups of 16 rounded to E2M1 by operators of ONNX; packed weights by a table

`rounded_core` makes the first of the core graph, `simulation_graph` puts the products into it.
Knows nothing about torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engines.precision import FP4_GROUP, WEIGHT_GROUP, Precision
from exporter.graph import Linear
from exporter.products import Nodes, constant, copied, replace_weights, rewrite_products
from exporter.quantize import global_scale_name, quantized_name, scale_name
from exporter.typed import LARGEST, Form, scale_inputs, weight_types
from exporter.weights import ONNX_TYPES

if TYPE_CHECKING:
    import onnx

# Operators that hand numbers on as they are.
_MOVES = {
    *("Transpose", "Gather", "Reshape", "Expand", "Unsqueeze", "Squeeze", "Concat", "Split"),
    *("Slice", "Identity", "Where", "Flatten"),
}

# The numbers of E2M1 by their code.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def rounded_core(core: onnx.ModelProto, rest: str) -> onnx.ModelProto:
    """Return a core graph in float32 whose every result is rounded as the type of the rest does.

    Weights keep their type and are cast where they enter.

    Args:
        core: Traced with the type of the rest.
        rest: F16, BF16 or F32; F32 changes nothing.
    """
    import onnx
    from onnx import TensorProto, numpy_helper

    kind = ONNX_TYPES[rest]
    made = copied(core)
    if kind == TensorProto.FLOAT:
        return made
    known = onnx.shape_inference.infer_shapes(core, strict_mode=True).graph
    narrow = {each.name for each in known.value_info if each.type.tensor_type.elem_type == kind}
    add = Nodes()
    entered: dict[str, str] = {}
    for each in made.graph.initializer:
        if each.data_type != kind:
            continue
        if each.raw_data:  # a constant of the graph
            values = numpy_helper.to_array(each).astype(np.float32)
            each.CopyFrom(numpy_helper.from_array(values, each.name))
            continue
        entered[each.name] = f"{each.name}.float"
        add("Cast", [each.name], [entered[each.name]], to=TensorProto.FLOAT)
    for node in core.graph.node:
        one = type(node).FromString(node.SerializeToString())
        for index, name in enumerate(one.input):
            one.input[index] = entered.get(name, name)
        add.made.append(one)
        if one.op_type in _MOVES or not set(one.output) & narrow:
            continue
        (out,) = [name for name in one.output if name in narrow]
        one.output[list(one.output).index(out)] = f"{out}.exact"
        if one.op_type == "Cast":
            (to,) = [each for each in one.attribute if each.name == "to"]
            to.i = TensorProto.FLOAT
        _round(add, f"{out}.exact", out, kind)
    del made.graph.node[:]
    made.graph.node.extend(add.made)
    return made


def simulation_graph(core: onnx.ModelProto, form: Form) -> onnx.ModelProto:
    """Return the graph in float32 of a precision with 8 bits or fewer, its weights without data.

    Args:
        core: As `rounded_core` made it.
        form: How its products are written.

    Raises:
        InputError: A scale does not fit its type; names the site.
    """
    made, add = copied(core), Nodes()
    precision, kind, name = form.precision, form.kind, form.precision.name
    for site, value in form.static_scales().items():
        constant(made, f"{site}.scale", np.float32(value))
    if form.as_input:
        scale_inputs(made, add, form.order, lambda source, out: _round(add, source, out, kind))
    if precision.family == "nvfp4":
        _fp4_constants(made)

    def source_of(source: str, site: str) -> str:
        if name == "nvfp4":
            return _fp4_source(add, source, f"{site}.scale", kind)
        if name not in LARGEST:
            return source
        if form.as_input:
            add("Mul", [source, f"{site}.before"], [f"{source}.before_exact"])
            source = _round(add, f"{source}.before_exact", f"{source}.before", kind)
        scale, low, back = f"{site}.scale", f"{source}.low", f"{source}.back"
        add("QuantizeLinear", [source, scale], [low], output_dtype=form.narrow)
        add("DequantizeLinear", [low, scale], [back])
        return back

    def product(linear: Linear, source: str) -> None:
        weight = _weight(made, add, linear.weight, precision, kind)
        if not form.as_input:
            add("MatMul", [source, weight], [linear.output])
            return
        unscaled, after = f"{linear.output}.unscaled", f"{form.sites[linear.weight]}.after"
        add("MatMul", [source, weight], [f"{unscaled}_exact"])
        _round(add, f"{unscaled}_exact", unscaled, kind)
        add("Mul", [unscaled, after], [linear.output])

    rewrite_products(made, form.sites, add, source_of, product, form.rotate, kind)
    replace_weights(made, form.sites, *weight_types(precision.family))
    if precision.family == "nvfp4":
        _as_bytes(made)
    if form.rotate:
        _cast_rotations(made, kind)
    return made


def _round(add: Nodes, source: str, out: str, kind: int) -> str:
    """Add the rounding of a tensor to a narrower type and back, and return what it is called."""
    from onnx import TensorProto

    add("Cast", [source], [f"{out}.narrow"], to=kind)
    add("Cast", [f"{out}.narrow"], [out], to=TensorProto.FLOAT)
    return out


def _weight(
    model: onnx.ModelProto, add: Nodes, weight: str, precision: Precision, kind: int
) -> str:
    """Add what makes a weight of its stored form, and return what it is called."""
    stored, scale, made = quantized_name(weight), scale_name(weight), f"{weight}.dequantized"
    exact = f"{weight}.exact"
    match precision.family:
        case "int8":
            add("DequantizeLinear", [stored, scale], [exact], axis=1)
        case "fp8":
            add("DequantizeLinear", [stored, scale], [exact])
        case "int4":
            add("Cast", [scale], [f"{scale}.float"], to=1)
            pair = [stored, f"{scale}.float"]
            add("DequantizeLinear", pair, [exact], axis=0, block_size=WEIGHT_GROUP)
        case "int4-int8":
            add("Cast", [scale], [f"{scale}.float"], to=1)
            add("DequantizeLinear", [stored, f"{scale}.float"], [exact], axis=1)
        case _:
            _fp4_weight(model, add, weight, exact, kind)
    if precision.name in LARGEST:
        return exact
    return _round(add, exact, made, kind)


def _fp4_constants(model: onnx.ModelProto) -> None:
    """Add the numbers that the rounding to E2M1 and its table need."""
    table = np.array([*_E2M1, *(-each for each in _E2M1)], np.float32)
    constant(model, "fp4_table", table)
    constant(model, "fp4_low", np.uint8(15))
    constant(model, "fp4_shift", np.uint8(4))
    constant(model, "fp4_axis", np.array([-1], np.int64))
    constant(model, "fp4_groups", np.array([0, 0, -1, FP4_GROUP], np.int64))
    for name, value in (("half", 0.5), ("one", 1.0), ("two", 2.0), ("four", 4.0), ("six", 6.0)):
        constant(model, f"fp4_{name}", np.float32(value))


def _fp4_weight(model: onnx.ModelProto, add: Nodes, weight: str, out: str, kind: int) -> None:
    """Add the numbers of packed E2M1, two a byte, times the scales of their groups."""
    (shape,) = [each.dims for each in model.graph.initializer if each.name == weight]
    outputs, inputs = shape
    stored, scale = quantized_name(weight), scale_name(weight)
    for name, value in (
        ("whole", [inputs, outputs]),
        ("grouped", [inputs // FP4_GROUP, FP4_GROUP, outputs]),
        ("steps_shape", [inputs // FP4_GROUP, 1, outputs]),
    ):
        constant(model, f"{weight}.{name}", np.array(value, np.int64))
    for name, kind_of, inputs_of in (
        ("first", "BitwiseAnd", [stored, "fp4_low"]),
        ("second", "BitShift", [stored, "fp4_shift"]),
    ):
        attributes = {"direction": "RIGHT"} if kind_of == "BitShift" else {}
        add(kind_of, inputs_of, [f"{weight}.{name}"], **attributes)
        add("Unsqueeze", [f"{weight}.{name}", "fp4_axis"], [f"{weight}.{name}_apart"])
    both = [f"{weight}.first_apart", f"{weight}.second_apart"]
    add("Concat", both, [f"{weight}.pairs"], axis=-1)
    add("Cast", [f"{weight}.pairs"], [f"{weight}.codes"], to=6)
    add("Gather", ["fp4_table", f"{weight}.codes"], [f"{weight}.numbers"])
    add("Reshape", [f"{weight}.numbers", f"{weight}.grouped"], [f"{weight}.groups"])
    add("DequantizeLinear", [scale, global_scale_name(weight)], [f"{weight}.wide_scale"])
    _round(add, f"{weight}.wide_scale", f"{weight}.steps_flat", kind)
    add("Reshape", [f"{weight}.steps_flat", f"{weight}.steps_shape"], [f"{weight}.steps"])
    add("Mul", [f"{weight}.groups", f"{weight}.steps"], [f"{weight}.products"])
    add("Reshape", [f"{weight}.products", f"{weight}.whole"], [out])


def _fp4_source(add: Nodes, source: str, scale: str, kind: int) -> str:
    """Add the rounding of activations [B, L, K] to nvfp4, groups of 16 by their largest magnitude.

    E2M1 has steps of 1/2 below 2, of 1 below 4 and of 2 below 6; ties go to the even code, as
    Round's go to the even whole number.
    """
    for kind_of, inputs, end, attributes in (
        ("Reshape", [source, "fp4_groups"], "grouped", {}),
        ("Abs", [f"{source}.grouped"], "magnitude", {}),
        ("ReduceMax", [f"{source}.magnitude", "fp4_axis"], "largest", {"keepdims": 1}),
        ("Div", [f"{source}.largest", "fp4_six"], "sixth", {}),
        ("Div", [f"{source}.sixth", scale], "scale_exact", {}),
        ("Cast", [f"{source}.scale_exact"], "scale_low", {"to": 17}),
        ("Cast", [f"{source}.scale_low"], "scale_back", {"to": 1}),
        ("Mul", [f"{source}.scale_back", scale], "step_exact", {}),
        ("Cast", [f"{source}.step_exact"], "is_step", {"to": 9}),
        ("Where", [f"{source}.is_step", f"{source}.step_exact", "fp4_one"], "divisor", {}),
        ("Div", [f"{source}.magnitude", f"{source}.divisor"], "steps", {}),
        ("Mul", [f"{source}.steps", "fp4_two"], "halves", {}),
        ("Round", [f"{source}.halves"], "halves_whole", {}),
        ("Mul", [f"{source}.halves_whole", "fp4_half"], "below_two", {}),
        ("Round", [f"{source}.steps"], "below_four", {}),
        ("Mul", [f"{source}.steps", "fp4_half"], "pairs", {}),
        ("Round", [f"{source}.pairs"], "pairs_whole", {}),
        ("Mul", [f"{source}.pairs_whole", "fp4_two"], "wide", {}),
        ("Min", [f"{source}.wide", "fp4_six"], "below_six", {}),
        ("Less", [f"{source}.steps", "fp4_two"], "is_two", {}),
        ("Less", [f"{source}.steps", "fp4_four"], "is_four", {}),
        ("Where", [f"{source}.is_four", f"{source}.below_four", f"{source}.below_six"], "up", {}),
        ("Where", [f"{source}.is_two", f"{source}.below_two", f"{source}.up"], "number", {}),
        ("Sign", [f"{source}.grouped"], "sign", {}),
        ("Mul", [f"{source}.number", f"{source}.sign"], "signed", {}),
    ):
        add(kind_of, inputs, [f"{source}.{end}"], **attributes)
    _round(add, f"{source}.step_exact", f"{source}.step", kind)
    add("Mul", [f"{source}.signed", f"{source}.step"], [f"{source}.product"])
    add("Shape", [source], [f"{source}.shape"])
    add("Reshape", [f"{source}.product", f"{source}.shape"], [f"{source}.back"])
    return f"{source}.back"


def _as_bytes(model: onnx.ModelProto) -> None:
    """Give packed E2M1, which no ONNX Runtime reads, the type of its bytes."""
    from onnx import TensorProto

    for each in model.graph.initializer:
        if each.data_type == TensorProto.FLOAT4E2M1:
            each.data_type = TensorProto.UINT8
            inputs, outputs = each.dims
            del each.dims[:]
            each.dims.extend([inputs * outputs // 2])


def _cast_rotations(model: onnx.ModelProto, kind: int) -> None:
    """Cast the rotations, stored in the type of the rest, where they enter."""
    from onnx import TensorProto, helper

    names = {each.name for each in model.graph.initializer if each.name.startswith("rotation")}
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = f"{name}.float" if name in names else name
    for name in sorted(names):
        node = helper.make_node("Cast", [name], [f"{name}.float"], to=TensorProto.FLOAT)
        model.graph.node.insert(0, node)
