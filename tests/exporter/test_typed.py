"""Graphs for TensorRT and those that stand in for them: one product, and a whole denoiser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from engines.errors import InputError
from engines.manifest import Shape
from engines.options import OrtOptions
from engines.ort import OrtBackend
from engines.precision import precision_from_name
from exporter.export import export
from exporter.folder import Export, Recipe, read_export
from exporter.parity import engine_of
from exporter.quantize import quantized_name
from exporter.simulation import rounded_core, simulation_graph
from exporter.typed import LARGEST, Form, bare, typed_graph
from exporter.typed_variants import rest_of
from exporter.typed_weights import typed_items
from exporter.weights import Stored, bind, write_family
from tests.tiny_export import small_export

QUANTIZED = ("int8", "int8-w", "fp8", "fp8-w", "int4-w", "int4-int8", "nvfp4")
INPUTS, OUTPUTS = 64, 48
SHAPE = Shape((1, 2, 4), (1, 8, 40))


def one_product(rest: int) -> onnx.ModelProto:
    """Return x [b, l, in] float32 -> 16 bits -> MatMul(Transpose(w)) -> y [b, l, out] float32."""
    weight = TensorProto(name="w", data_type=rest, dims=[OUTPUTS, INPUTS])
    nodes = [
        helper.make_node("Cast", ["x"], ["narrow"], to=rest),
        helper.make_node("Transpose", ["w"], ["turned"]),
        helper.make_node("MatMul", ["narrow", "turned"], ["product"]),
        helper.make_node("Cast", ["product"], ["y"], to=TensorProto.FLOAT),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "one",
        [value("x", TensorProto.FLOAT, ["batch", "length", INPUTS])],
        [value("y", TensorProto.FLOAT, ["batch", "length", OUTPUTS])],
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


@pytest.fixture
def weight() -> NDArray[np.float32]:
    """Return a weight whose outputs differ in size."""
    rng = np.random.default_rng(5)
    drawn = rng.normal(size=(OUTPUTS, INPUTS)) * np.geomspace(0.01, 0.3, OUTPUTS)[:, None]
    return drawn.astype(np.float32)


@pytest.fixture
def x() -> NDArray[np.float32]:
    drawn = np.random.default_rng(6).normal(size=(3, 5, INPUTS))
    return drawn.astype(np.float16).astype(np.float32)


def stored(weight: NDArray[np.float32], folder: Path) -> dict[str, Stored]:
    from exporter.weights import Item

    return write_family(
        folder / "model.safetensors", [Item("w", "F32", weight.shape, lambda: weight)]
    )


def both(
    name: str,
    weight: NDArray[np.float32],
    x: NDArray[np.float32],
    folder: Path,
    as_input: bool = False,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return y of the graph for TensorRT, by ONNX's reference, and of the one that stands in."""
    precision = precision_from_name(name)
    rest = rest_of(precision)
    made = folder / "weights" / f"{name}.safetensors"
    made.parent.mkdir()
    items = typed_items(stored(weight, folder), {"w": "site"}, precision.family, rest)
    family = write_family(made, items)
    core = one_product(TensorProto.FLOAT16)
    largest = float(np.abs(x).max())
    windows = np.array([[0.6 * largest], [largest]], np.float32)
    scales = windows / np.float32(LARGEST.get(name, 1.0))
    form = Form(
        precision=precision,
        rest=rest,
        sites={"w": "site"},
        order=("site",),
        scales=scales,
        as_input=as_input,
    )
    feed = {"x": x}
    if as_input:
        feed["scales"] = scales[[0, 1, 1]][:, None, :]
    found = []
    for kind, graph in (
        ("typed", typed_graph(core, form)),
        ("sim", simulation_graph(rounded_core(core, rest), form)),
    ):
        bind(graph, family)
        file = folder / f"{kind}.onnx"
        file.write_bytes(graph.SerializeToString())
        if kind == "typed" and name != "nvfp4":  # the reference lacks TensorRT's operator
            found.append(ReferenceEvaluator(str(file)).run(None, feed)[0])
        elif kind == "sim":
            found.append(run_exactly(file, feed))
    return found[0], found[-1]


def run_exactly(file: Path, feed: dict[str, NDArray[np.float32]]) -> NDArray[np.float32]:
    from engines.ort import _onnxruntime, _session_options

    runtime = _onnxruntime("cpu")
    options = _session_options(runtime, precision_from_name("fp32"), OrtOptions(exact=True))
    out: NDArray[np.float32] = runtime.InferenceSession(str(file), options).run(None, feed)[0]
    return out


@pytest.mark.parametrize(
    ("name", "as_input"),
    [(name, False) for name in QUANTIZED if name != "nvfp4"] + [("int8", True), ("fp8", True)],
)
def test_what_stands_in_computes_what_onnx_says_of_the_graph_for_tensorrt(
    name: str,
    as_input: bool,
    weight: NDArray[np.float32],
    x: NDArray[np.float32],
    tmp_path: Path,
) -> None:
    wanted, got = both(name, weight, x, tmp_path, as_input)
    exact = x @ weight.T
    cost = np.abs(wanted - exact).mean()
    assert 0.003 < cost / np.abs(exact).mean() < 0.3, "it is quantized, and not to nothing"
    # Sums of 16-bit numbers differ in their last digits.
    assert np.abs(got - wanted).max() < 0.01 * np.abs(wanted).max()
    assert np.abs(got - wanted).mean() < 0.1 * cost


def test_scales_of_a_row_are_those_of_its_window(
    weight: NDArray[np.float32], x: NDArray[np.float32], tmp_path: Path
) -> None:
    _, rows = both("int8", weight, x, tmp_path, as_input=True)
    (tmp_path / "whole").mkdir()
    _, one = both("int8", weight, x, tmp_path / "whole")
    # Constants are the largest window's, the second's: rows 1 and 2 have it, row 0 has not.
    np.testing.assert_allclose(rows[1:], one[1:], atol=0.01 * np.abs(one).max())
    assert np.abs(rows[0] - one[0]).mean() > 0.02 * np.abs(one).mean()


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nvfp4(values: NDArray[np.float32], whole: np.float32) -> NDArray[np.float64]:
    """Return values [.., n] rounded to NVFP4 by its definition: groups of 16, E4M3 scales."""
    import ml_dtypes

    groups = values.reshape(*values.shape[:-1], -1, 16).astype(np.float64)
    largest = np.abs(groups).max(-1, keepdims=True)
    scale = (largest / 6 / whole).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * whole
    steps = np.abs(groups) / np.where(scale > 0, scale, 1)
    nearest = E2M1[np.abs(steps[..., None] - E2M1).argmin(-1)]
    return (np.sign(groups) * nearest * scale).reshape(values.shape)


def test_what_stands_in_for_nvfp4_rounds_both_sides_by_its_definition(
    weight: NDArray[np.float32], x: NDArray[np.float32], tmp_path: Path
) -> None:
    _, got = both("nvfp4", weight, x, tmp_path)
    whole = np.float32(np.abs(x).max() / (6 * 448))
    own = np.float32(np.abs(weight).max() / (6 * 448))
    wanted = nvfp4(x, whole) @ nvfp4(weight, own).T
    exact = x @ weight.T
    cost = np.abs(wanted - exact).mean()
    assert cost > 0.03 * np.abs(exact).mean()
    assert np.abs(got - wanted).mean() < 0.05 * cost


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_weight_comes_back_within_half_a_step(
    name: str, weight: NDArray[np.float32], tmp_path: Path
) -> None:
    family = precision_from_name(name).family
    items = {
        each.name: each.make()
        for each in typed_items(stored(weight, tmp_path), {"w": "site"}, family, "F16")
    }
    data, scale = items[quantized_name("w")], items["w.scale"]
    largest = np.abs(weight).max()
    if family == "fp8":
        import ml_dtypes

        back = data.view(ml_dtypes.float8_e4m3fn).astype(np.float32).T * scale
        assert (np.abs(back - weight) <= np.abs(weight) / 16 + largest / 448 / 512).all()
        return
    if family == "int8":
        back = data.T * scale[:, None]
        assert (np.abs(back - weight) <= 0.5001 * scale[:, None]).all()
        return
    nibbles = np.stack([data & 15, data >> 4], -1).reshape(INPUTS, OUTPUTS)
    if family == "nvfp4":
        own = np.float32(largest / (6 * 448))
        numbers = np.concatenate([E2M1, -E2M1])[nibbles]
        import ml_dtypes

        steps = scale.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * own
        back = numbers * np.repeat(steps, 16, axis=0)
        np.testing.assert_allclose(back.T, nvfp4(weight, own), atol=1e-6)
        return
    integers = ((nibbles.astype(np.int8) ^ 8) - 8).astype(np.float32)
    spread = np.repeat(scale, 32, axis=0) if family == "int4" else scale[None]
    back = integers * spread.astype(np.float32)
    assert (np.abs(back - weight.T) <= 0.51 * spread.astype(np.float32)).all()


def test_a_value_beyond_16_bits_is_found_and_named(tmp_path: Path) -> None:
    tensors = stored(np.full((2, 32), 7e4, np.float32), tmp_path)
    (item,) = typed_items(tensors, {}, "fp16", "F16")
    with pytest.raises(InputError, match=r"^w holds 70000, .* largest number of float16 is 65504"):
        item.make()
    (kept,) = typed_items(tensors, {}, "bf16", "BF16")
    assert np.isfinite(kept.make().astype(np.float32)).all()


def test_a_weight_that_no_group_divides_is_refused_by_name(tmp_path: Path) -> None:
    weight = np.ones((4, 40), np.float32)
    with pytest.raises(InputError, match="w has 40 inputs and 4 outputs, but int4 wants"):
        typed_items(stored(weight, tmp_path), {"w": "site"}, "int4", "F16")


def test_a_scale_that_16_bits_cannot_hold_is_refused_by_its_site() -> None:
    form = Form(
        precision=precision_from_name("int4-int8"),
        rest="F16",
        sites={},
        order=("attn",),
        scales=np.full((1, 1), 1e-9, np.float32),
    )
    with pytest.raises(InputError, match="activations at attn have the scale 0"):
        form.static_scales()


@pytest.mark.parametrize("name", ["int4-int8", "int8-w", "nvfp4"])
def test_scales_are_an_input_of_static_precisions_alone(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} takes no scales as an input"):
        Form(
            precision=precision_from_name(name),
            rest="F16",
            sites={},
            order=("attn",),
            scales=np.ones((1, 1), np.float32),
            as_input=True,
        )


def test_a_bare_graph_takes_its_matrices_as_inputs_and_keeps_vectors() -> None:
    core = one_product(TensorProto.FLOAT16)
    form = Form(
        precision=precision_from_name("int8"),
        rest="F16",
        sites={"w": "site"},
        order=("site",),
        scales=np.ones((1, 1), np.float32),
    )
    graph = typed_graph(core, form)
    made = bare(graph)
    inputs = {
        each.name: [d.dim_value for d in each.type.tensor_type.shape.dim]
        for each in made.graph.input
    }
    assert inputs["w.quantized"] == [INPUTS, OUTPUTS]
    left = {each.name for each in made.graph.initializer}
    assert left == {"w.scale", "site.scale"}
    assert {each.name for each in graph.graph.initializer} == left | {"w.quantized"}


@pytest.fixture(scope="module")
def ahead(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Return the shared checkpoint's export for TensorRT; not to be written into."""
    out = tmp_path_factory.mktemp("ahead") / "EXPORT"
    config = small_export(
        checkpoint,
        out,
        target="rtx-sm89",
        precisions=("fp16", "bf16", "int8", "int8-w", "fp8", "fp8-w", "int4-int8"),
        shape=SHAPE,
    )
    return read_export(export(config), verify=True)


def test_an_export_for_tensorrt_has_each_graph_and_what_stands_in_for_it(ahead: Export) -> None:
    for name in ahead.precisions:
        if name == "fp32":
            continue
        stems = [name, f"{name}.all"] if ahead.precisions[name].has_static_scales else [name]
        for stem in stems:
            for tail in ("serve", "trace"):
                assert {f"{stem}.{tail}", f"{stem}.sim.{tail}"} <= set(ahead.graphs)
    assert "int8.bare.serve" in ahead.graphs
    assert "int4-int8.bare.serve" not in ahead.graphs
    assert ahead.graphs["int8.bare.serve"].weights == ahead.graphs["int8-w.bare.serve"].weights
    assert set(ahead.families) == {"fp32", "fp16", "bf16", "int8", "fp8", "int4-int8"}


def test_what_stands_in_differs_from_full_precision_as_its_bits_do(ahead: Export) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 40, (4, 20))
    given = (ids, np.ones(ids.shape, bool), np.tile(np.arange(8), (4, 1)), np.zeros(4, "f4"))
    full = engine_of(ahead, "fp32.trace").logits(*given)
    mask = ahead.model.mask_id

    def cost(graph: str) -> float:
        found = engine_of(ahead, graph).logits(*given)
        return float(np.abs(np.delete(found - full, mask, -1)).mean())

    fp16, bf16 = cost("fp16.sim.trace"), cost("bf16.sim.trace")
    assert 0 < fp16 < bf16 < cost("fp8-w.sim.trace")
    assert fp16 < cost("int8-w.sim.trace") < cost("int8.all.sim.trace")
    shared, own = cost("int8.all.sim.trace"), cost("int8.sim.trace")
    assert shared != own


def test_whole_graphs_agree_with_onnx_s_reference(ahead: Export) -> None:
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 40, (2, 12))
    given = {
        "ids": ids,
        "mask": np.ones(ids.shape, bool),
        "positions": np.tile(np.arange(6), (2, 1)),
    }
    for name in ("fp16", "int8-w", "fp8-w"):
        wanted = ReferenceEvaluator(str(ahead.path(f"{name}.trace"))).run(None, given)[0]
        engine = engine_of(ahead, f"{name}.sim.trace")
        assert isinstance(engine, OrtBackend)
        got = engine.logits(*given.values(), np.zeros(2, "f4"))  # type: ignore[arg-type]
        both_ = [np.delete(each, ahead.model.mask_id, -1) for each in (wanted, got)]
        full = engine_of(ahead, "fp32.trace").logits(*given.values(), np.zeros(2, "f4"))  # type: ignore[arg-type]
        spread = np.abs(full).std()
        assert np.abs(both_[0] - both_[1]).mean() < 0.02 * spread, name


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"target": "rtx-sm89", "shape": None}, "rtx-sm89 needs shape"),
        ({"target": "rtx-sm75", "precisions": ("fp8",)}, "sm75 lacks fp8"),
        ({"target": "cpu", "precisions": ("fp8",)}, "fp8 is not built for cpu"),
        ({"target": "rtx-sm89", "precisions": ("w4a4",)}, "w4a4 is simulated"),
        ({"target": "rtx-sm89", "precisions": ("int4-w",)}, "int4 wants multiples of 32"),
        ({"target": "rtx-sm88"}, "has no 'sm88'"),
    ],
)
def test_what_a_target_cannot_have_is_refused(
    asked: dict[str, object], says: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises((InputError, ValueError), match=says):
        export(small_export(checkpoint, tmp_path / "E", **({"shape": SHAPE} | asked)))
    assert not (tmp_path / "E").exists()


def test_another_recipe_of_an_export_for_tensorrt_needs_no_torch_and_keeps_its_integers(
    ahead: Export, tmp_path: Path
) -> None:
    from exporter.requantize import requantize

    made = read_export(requantize(ahead.folder, tmp_path / "R", Recipe(windows=2, keep=(1,))))
    assert made.windows == 2
    assert len(made.graphs["fp8.serve"].scales or ()) == 2
    model = onnx.load(str(made.path("int8.all.serve")), load_external_data=False)
    kept = {each.name for each in model.graph.initializer}
    assert "model.transformer.blocks.1.q_proj.weight" in kept
    assert "model.transformer.blocks.0.q_proj.weight" not in kept
    again = onnx.load(str(made.path("fp16.serve")), load_external_data=False)
    same = onnx.load(str(ahead.path("fp16.serve")), load_external_data=False)
    assert [node.op_type for node in again.graph.node] == [
        node.op_type for node in same.graph.node
    ]
