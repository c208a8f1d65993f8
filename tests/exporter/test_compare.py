"""Which layers pair up, what they may differ by, and which one is told first."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from engines.errors import InputError
from engines.precision import precision_from_name
from exporter.compare import (
    Difference,
    Layer,
    Row,
    chunks,
    differs,
    first_difference,
    largest_jump,
    layers_of,
    noise,
    tolerance,
)
from exporter.cuts import alone, floats_of, pruned, without_repeated_types

Q_PROJ, FF_OUT = (
    "model.transformer.blocks.3.q_proj.weight",
    "model.transformer.blocks.3.ff_out.weight",
)


def layer(**changes: object) -> Layer:
    given: dict[str, object] = {
        "tensor": "y",
        "node": "make y",
        "op": "MatMul",
        "place": "blocks.3.attn_in",
        "weight": Q_PROJ,
        "inner": 64,
        "quantized": False,
        "rounds": False,
        "step": 0.0,
        "sources": ("x",),
    }
    return Layer(**(given | changes))  # type: ignore[arg-type]


def row(relative: float, differs: bool) -> Row:
    return Row(layer(), Difference(relative, relative, 1.0, 1.0), 0.0, 0.1, differs)


def chain() -> onnx.ModelProto:
    """Return ids -> x -> MatMul(q_proj) -> y -> Relu -> z -> MatMul(ff_out) -> out; a dead end."""
    nodes = [
        helper.make_node("Cast", ["ids"], ["x"], name="make x", to=TensorProto.FLOAT),
        helper.make_node("Transpose", [Q_PROJ], ["turned"], name="turn"),
        helper.make_node("MatMul", ["x", "turned"], ["y"], name="make y"),
        helper.make_node("Relu", ["y"], ["z"], name="make z"),
        helper.make_node("Neg", ["z"], ["dead"], name="make dead"),
        helper.make_node("MatMul", ["z", FF_OUT], ["out"], name="make out"),
    ]
    value = helper.make_tensor_value_info
    weights = [numpy_helper.from_array(np.eye(4, dtype=np.float32), n) for n in (Q_PROJ, FF_OUT)]
    graph = helper.make_graph(
        nodes,
        "chain",
        [value("ids", TensorProto.INT64, ["batch", 4])],
        [value("out", TensorProto.FLOAT, ["batch", 4])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


def test_only_tensors_that_an_input_decides_are_compared() -> None:
    assert list(floats_of(chain())) == ["x", "y", "z", "dead", "out"]


def test_a_graph_out_of_order_is_refused() -> None:
    model = chain()
    model.graph.node.append(model.graph.node[0])
    del model.graph.node[0]
    with pytest.raises(InputError, match="out of order"):
        floats_of(model)


def test_a_layer_has_the_block_and_site_of_its_weight_and_what_follows_lies_behind_it() -> None:
    found = layers_of(chain(), {"x", "y", "z", "out"}, "llada")
    assert [(each.tensor, each.place) for each in found] == [
        ("x", "before the blocks"),
        ("y", "blocks.3.attn_in"),
        ("z", "behind blocks.3.attn_in"),
        ("out", "blocks.3.ff_down"),
    ]
    assert [each.node for each in found] == ["make x", "make y", "make z", "make out"]
    assert found[1].weight == Q_PROJ
    assert found[1].sources == ("x",)


def test_what_only_one_graph_has_belongs_to_the_next_layer_that_both_have() -> None:
    found = layers_of(chain(), {"x", "out"}, "llada")
    assert [each.tensor for each in found] == ["x", "out"]
    assert found[1].sources == ("x",)


def test_a_layer_alone_computes_from_what_it_is_given_and_from_nothing_else() -> None:
    from onnx.reference import ReferenceEvaluator

    model = chain()
    made, own, given = alone(model, ["y", "out"], {"x", "y", "z", "out"}, floats_of(model))
    assert given == ("x", "z")
    feed = {"x": np.full((1, 4), 2, np.float32), "z": np.full((1, 4), 5, np.float32)}
    y, out = ReferenceEvaluator(made).run([own["y"], own["out"]], feed)
    assert (y == 2).all()
    assert (out == 5).all(), "and not the Relu of 2"


def test_a_pruned_graph_has_only_what_is_needed() -> None:
    made = pruned(chain(), ["y"])
    assert [node.name for node in made.graph.node] == ["make x", "turn", "make y"]
    assert [each.name for each in made.graph.initializer] == [Q_PROJ]


def test_only_the_type_that_is_the_scale_s_anyway_is_left_out() -> None:
    for kind, left in ((TensorProto.FLOAT16, 0), (TensorProto.FLOAT, 1)):
        node = helper.make_node("DequantizeLinear", ["q", "s"], ["y"], output_dtype=kind)
        scale = numpy_helper.from_array(np.float16(0.5), "s")
        model = helper.make_model(helper.make_graph([node], "one", [], [], [scale]))
        assert len(without_repeated_types(model).graph.node[0].attribute) == left


def test_chunks_hold_every_layer_once_in_order_and_no_more_than_they_may() -> None:
    rng = np.random.default_rng(1)
    layers = [layer(tensor=f"t{n}") for n in range(50)]
    sizes = {each.tensor: int(rng.integers(1, 40)) for each in layers}
    found = list(chunks(layers, sizes, 30))
    assert [each for part in found for each in part] == layers
    assert all(len(part) == 1 or sum(sizes[e.tensor] for e in part) <= 30 for part in found)


def test_the_first_difference_is_the_first_and_the_jump_the_largest() -> None:
    rows = [row(0.01, False), row(0.2, True), row(0.9, True)]
    assert first_difference(rows) is rows[1]
    assert largest_jump(rows) is rows[2]
    assert first_difference(rows[:1]) is None
    assert largest_jump([row(0.0, False)]) is None


@pytest.mark.parametrize("name", ["absolute", "relative", "largest"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_always_differs(name: str, value: float) -> None:
    sound = {"absolute": 0.0, "relative": 0.0, "cosine": 1.0, "largest": 1.0}
    assert not differs(Difference(**sound), 0.1)
    assert differs(Difference(**(sound | {name: value})), 1e9)
    assert not math.isfinite(
        getattr(Difference(**sound).worst(Difference(**(sound | {name: value}))), name)
    )


def test_one_element_far_off_differs_however_small_the_norm_of_all() -> None:
    assert differs(Difference(absolute=0.5, relative=0.001, cosine=1.0, largest=1.0), 0.01)
    assert not differs(
        Difference(absolute=0.5, relative=0.001, cosine=1.0, largest=1.0), 0.01, 0.5
    )


def test_a_tolerance_grows_with_the_sum_the_type_and_the_step() -> None:
    narrow, wide = tolerance(layer(), "F32", 8), tolerance(layer(inner=4096), "F32", 8)
    assert 0 < narrow < wide < tolerance(layer(), "F16", 8) < tolerance(layer(), "BF16", 8)
    both = layer(quantized=True, rounds=True)
    allowed = [noise(both, precision_from_name(n), 4.0) for n in ("w16a16", "w8a8", "w4a4")]
    assert allowed == sorted(allowed)
    assert tolerance(both, "F32", 8, precision_from_name("int8"), 4.0) > noise(
        both, precision_from_name("int8"), 4.0
    )


@pytest.mark.parametrize("name", ["int8", "w4a4", "w8a8", "int4-int8", "fp8"])
def test_noise_bounds_what_rounding_by_the_definition_costs(name: str) -> None:
    import ml_dtypes

    rng = np.random.default_rng(7)
    x, w = rng.normal(size=(64, 512)), rng.normal(size=(512, 96))
    precision = precision_from_name(name)
    bits = 8 if name == "int4-int8" else int(precision.bits)

    def rounded(values: np.ndarray, bits: int, axis: int | None) -> np.ndarray:
        most = np.abs(values).max(axis, keepdims=True)
        if name == "fp8":
            return (values / most * 448).astype(ml_dtypes.float8_e4m3fn).astype(float) * most / 448
        step = most / (2 ** (bits - 1) - 1)
        return np.round(values / step) * step

    exact = x @ w
    weights = rounded(w, int(precision.weight_bits), 0)
    if precision.simulated:
        weights = rounded(w.reshape(-1, 32, 96), int(precision.weight_bits), 1).reshape(w.shape)
    got = rounded(x, bits, 1 if precision.simulated else None) @ weights
    cost = np.linalg.norm(got - exact) / np.linalg.norm(exact)
    crest = np.abs(x).max() / np.sqrt((x**2).mean())
    allowed = noise(layer(quantized=True, rounds=True), precision, float(crest))
    assert cost < allowed < 10 * cost, "it is explained, and little more is"
