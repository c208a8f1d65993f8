"""The products of a graph, against the framework's own count and counts by hand."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch.utils.flop_counter import FlopCounterMode

from engines.errors import InputError
from engines.precision import EXECUTED, FULL_PRECISION, Precision
from exporter.checkpoint import read_checkpoint
from exporter.denoiser import Denoiser, DenoiserConfig
from exporter.folder import Export
from exporter.gemms import Pass, Product, pass_from_file, pass_from_graph
from exporter.graph import graph_from_config, with_tail
from tests.tiny_export import tiny_config

REFERENCE = Path(__file__).resolve().parents[2] / "calib_data" / "reference"
HALF = Precision("fp16", "fp16", 16, 16)
INT8, INT8_W = EXECUTED["int8"], Precision("int8-w", "int8", 8, 16)
SHAPES = [(1, 1, 1), (1, 9, 9), (3, 17, 5), (8, 40, 24), (2, 5, 7)]
KINDS: dict[str, dict[str, object]] = {
    "grouped": {},
    "tied": {"tied": True},
    "dream": {"qkv_bias": True, "shifted": True},
    "one block": {"layers": 1, "kv_heads": 4},
    "deep": {"layers": 3},
}


@functools.cache
def graph_of(kind: str, tail: str = "serve") -> onnx.ModelProto:
    return with_tail(_traced(tiny_config(**KINDS[kind])), tail)


def _traced(config: DenoiserConfig, kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    with torch.device("meta"):
        names = list(dict(Denoiser(config).named_parameters()))
    return graph_from_config(config, {name: name for name in names}, dict.fromkeys(names, kind))


def by_hand(config: DenoiserConfig, batch: int, length: int, asked: int) -> int:
    """Return the operations of a pass, from the sizes in the paper."""
    h, f, kv = config.hidden, config.ffn, config.kv_heads * config.head_width
    total = 0
    for block in range(config.layers):
        queries = batch * (length if block < config.layers - 1 else asked)
        total += 2 * batch * length * h * 2 * kv  # keys and values, everywhere
        total += 2 * queries * (2 * h * h + 3 * h * f)  # queries, output, gate, up, down
        total += 2 * 2 * queries * length * h  # scores and mixture
    return total + 2 * batch * asked * h * config.vocab


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_operations_are_those_that_the_framework_counts(
    kind: str, shape: tuple[int, int, int]
) -> None:
    batch, length, asked = shape
    config = tiny_config(**KINDS[kind])
    denoiser = Denoiser(config).eval()
    ids = torch.zeros((batch, length), dtype=torch.long)
    positions = torch.zeros((batch, asked), dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        denoiser(ids, torch.ones_like(ids, dtype=torch.bool), positions)
    work = pass_from_graph(graph_of(kind), *shape)
    assert work.operations == counter.get_total_flops() == by_hand(config, *shape)


def test_operations_of_the_reference_model_are_those_counted_by_hand() -> None:
    checkpoint = read_checkpoint(REFERENCE)
    graph = with_tail(_traced(checkpoint.config), "serve")
    assert pass_from_graph(graph, 8, 40, 24).operations == 469_237_760
    assert by_hand(checkpoint.config, 8, 40, 24) == 469_237_760


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_all_positions_until_the_last_block_gathers_and_asked_ones_after(
    kind: str, shape: tuple[int, int, int]
) -> None:
    batch, length, asked = shape
    config = tiny_config(**KINDS[kind])
    rows = {
        product.name: product.m for product in pass_from_graph(graph_of(kind), *shape).products
    }
    last = f"blocks.{config.layers - 1}."
    for name, m in rows.items():
        if name.endswith(".weight"):
            late = name.startswith(("head", "embed")) or (
                name.startswith(last) and "k_proj" not in name and "v_proj" not in name
            )
            assert m == batch * (asked if late else length), name


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_the_parameters_of_the_linear_layers_each_once(kind: str) -> None:
    denoiser = Denoiser(tiny_config(**KINDS[kind]))
    wanted = sum(m.weight.numel() for m in denoiser.modules() if isinstance(m, torch.nn.Linear))
    work = pass_from_graph(graph_of(kind), 2, 9, 4)
    assert sum(product.weights for product in work.products) == wanted
    for tail in ("serve", "trace"):
        assert pass_from_graph(graph_of(kind, tail), 2, 9, 4).products == work.products


def test_weights_of_another_type_change_nothing() -> None:
    half = with_tail(_traced(tiny_config(), TensorProto.BFLOAT16), "serve")
    full = pass_from_graph(graph_of("grouped"), 2, 9, 4)
    assert pass_from_graph(half, 2, 9, 4).products == full.products
    assert len(pass_from_graph(half, 2, 9, 4).groups) == len(full.groups)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("precision", [FULL_PRECISION, HALF, INT8, INT8_W])
def test_operations_and_bytes_grow_with_every_axis(axis: int, precision: Precision) -> None:
    def moved(work: Pass) -> float:
        between = sum(work.bytes_between(precision))
        return between + sum(call.bytes(precision) for call in work.calls(precision))

    shape = [3, 11, 5]
    found = []
    for size in (2, 3, 7, 20):
        shape[axis] = size
        found.append(pass_from_graph(graph_of("grouped"), *shape))
    for less, more in itertools.pairwise(found):
        assert less.operations < more.operations
        assert moved(less) < moved(more)


def test_bytes_are_those_of_each_operand_once() -> None:
    product = Product("w", "linear", 7, 32, 40, 1, 32 * 40, 7 * 32, 7 * 40, "x", quantized=True)
    assert product.operations == 2 * 7 * 32 * 40
    assert product.bytes(FULL_PRECISION) == 4 * (32 * 40 + 7 * 32 + 7 * 40)
    assert product.bytes(HALF) == 2 * (32 * 40 + 7 * 32 + 7 * 40)
    assert product.bytes(INT8_W) == 32 * 40 + 2 * (7 * 32 + 7 * 40)
    assert product.bytes(INT8) == 32 * 40 + 7 * 32 + 2 * 7 * 40
    assert product.bytes(Precision("nvfp4", "nvfp4", 4.5, 4.5)) == (
        4.5 / 8 * (32 * 40 + 7 * 32) + 2 * 7 * 40
    )


def test_attention_reads_queries_keys_and_values_once_and_never_writes_its_scores() -> None:
    config, (batch, length, asked) = tiny_config(), (3, 17, 5)
    work = pass_from_graph(graph_of("grouped"), batch, length, asked)
    scores, mixture = [p for p in work.products if p.kind in ("scores", "mixture")][-2:]
    width = config.head_width
    assert (scores.m, scores.k, scores.n) == (asked, width, length)
    assert (mixture.m, mixture.k, mixture.n) == (asked, length, width)
    assert scores.count == mixture.count == batch * config.heads
    keys = batch * length * config.kv_heads * width  # fewer heads than queries have
    assert (scores.reads, scores.writes) == (batch * asked * config.hidden + keys, 0)
    assert (mixture.reads, mixture.writes) == (keys, batch * asked * config.hidden)


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_and_attention_stay_in_the_other_type(kind: str) -> None:
    work = pass_from_graph(graph_of(kind), 2, 9, 4)
    layers = tiny_config(**KINDS[kind]).layers
    quantized = [product for product in work.products if product.quantized]
    assert len(quantized) == 7 * layers
    assert all(product.name.startswith("blocks.") for product in quantized)
    for product in work.products:
        if not product.quantized:
            assert product.bytes(INT8) == product.bytes(HALF)


@pytest.mark.parametrize("precision", [FULL_PRECISION, HALF, INT8, INT8_W])
def test_every_product_is_in_one_call_and_calls_move_no_more_than_products(
    precision: Precision,
) -> None:
    work = pass_from_graph(graph_of("deep"), 2, 9, 4)
    calls = work.calls(precision)
    together = [product for call in calls for product in call.products]
    assert sorted(map(repr, together)) == sorted(map(repr, work.products))
    assert sum(call.operations for call in calls) == work.operations
    for call in calls:
        assert call.bytes(precision) <= sum(p.bytes(precision) for p in call.products)
        assert call.weight_bytes(precision) == sum(
            p.weight_bytes(precision) for p in call.products
        )


@pytest.mark.parametrize(
    ("precision", "kernels"), [(FULL_PRECISION, 12), (HALF, 12), (INT8, 12), (INT8_W, 15)]
)
def test_a_block_has_as_many_kernels_as_in_plans(precision: Precision, kernels: int) -> None:
    def count(kind: str) -> int:
        work = pass_from_graph(graph_of(kind), 2, 9, 4)
        return len(work.groups) + len(work.calls(precision))

    assert count("deep") - count("grouped") == kernels


def test_what_is_rounded_is_written_rounded_and_nothing_else_changes_between() -> None:
    work = pass_from_graph(graph_of("grouped"), 2, 9, 4)
    rounded = {p.source: p.reads for p in work.products if p.quantized}
    saved = sum(work.bytes_between(HALF)) - sum(work.bytes_between(INT8))
    assert saved == sum(rounded.values())
    assert work.bytes_between(INT8_W) == work.bytes_between(HALF)


def test_a_residual_sum_and_its_norm_are_one_group_that_moves_four_tensors_and_a_gain() -> None:
    work = pass_from_graph(graph_of("grouped"), 2, 9, 4)
    group = next(g for g in work.groups if g.operators == ("Add", "RMSNormalization"))
    hidden = tiny_config().hidden
    assert group.floats == 4 * 2 * 9 * hidden + hidden
    assert group.others == 0


def test_a_gather_reads_the_rows_it_takes_not_the_whole_table() -> None:
    few = pass_from_graph(graph_of("grouped"), 1, 1, 1).groups[0]
    assert few.operators[0] == "Gather"
    assert few.floats < tiny_config().vocab * tiny_config().hidden


def test_no_weight_is_read(exported: Export, tmp_path: Path) -> None:
    alone = tmp_path / "alone.onnx"
    shutil.copy(exported.path("fp32.serve"), alone)
    work = pass_from_file(alone, 2, 9, 4)
    assert work.operations == pass_from_graph(graph_of("grouped"), 2, 9, 4).operations


def test_a_product_of_two_activations_outside_attention_is_counted() -> None:
    info = helper.make_tensor_value_info
    batch = ["batch", "length", 4]
    nodes = [
        helper.make_node("Transpose", ["ids"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["ids", "t"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [info("ids", TensorProto.FLOAT, batch)],
        [info("y", TensorProto.FLOAT, ["batch", "length", "length"])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    (product,) = pass_from_graph(model, 3, 7, 1).products
    assert (product.count, product.m, product.k, product.n) == (3, 7, 4, 7)
    assert (product.weights, product.reads, product.writes) == (0, 2 * 3 * 7 * 4, 3 * 7 * 7)


def _loop(model: onnx.ModelProto) -> None:
    transpose = next(node for node in model.graph.node if node.op_type == "Transpose")
    transpose.input[0] = transpose.output[0]


def _reversed(model: onnx.ModelProto) -> None:
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _weight(model: onnx.ModelProto, dims: list[int]) -> None:
    weight = next(i for i in model.graph.initializer if i.name == "blocks.0.q_proj.weight")
    weight.dims[:] = dims


def _heads(model: onnx.ModelProto, heads: int) -> None:
    node = next(node for node in model.graph.node if node.op_type == "Attention")
    for attribute in node.attribute:
        attribute.i = heads


def _axis(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "rows"


def _shapeless(model: onnx.ModelProto) -> None:
    model.graph.input[2].type.tensor_type.ClearField("shape")


def _unknown(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        if node.op_type == "RMSNormalization":
            node.op_type, node.domain = "Mystery", "elsewhere"


@pytest.mark.parametrize(
    "damage",
    [
        _loop,
        _reversed,
        lambda m: _weight(m, [32, 31]),
        lambda m: _weight(m, [2**62, 2**62]),
        lambda m: _weight(m, [0, 0]),
        lambda m: _weight(m, [-32, 32]),
        lambda m: _weight(m, []),
        lambda m: _heads(m, 0),
        lambda m: _heads(m, 7),
        lambda m: _heads(m, -4),
        _axis,
        _shapeless,
        _unknown,
        lambda m: m.graph.ClearField("node"),
        lambda m: m.graph.ClearField("input"),
        lambda m: m.graph.ClearField("initializer"),
        lambda m: m.ClearField("opset_import"),
        lambda m: m.Clear(),
    ],
)
def test_a_damaged_graph_is_an_error_of_the_user_that_says_to_export_again(
    damage: Callable[[onnx.ModelProto], None],
) -> None:
    model = onnx.ModelProto.FromString(graph_of("grouped").SerializeToString())
    damage(model)
    with pytest.raises(InputError, match=r"; (export again|give)"):
        pass_from_graph(model, 2, 9, 4)


@pytest.mark.parametrize("damage", [_loop, _reversed])
def test_a_graph_out_of_order_is_refused_before_anybody_walks_it(
    damage: Callable[[onnx.ModelProto], None],
) -> None:
    model = onnx.ModelProto.FromString(graph_of("grouped").SerializeToString())
    damage(model)
    with pytest.raises(InputError, match="is read before it is made"):
        pass_from_graph(model, 2, 9, 4)


def test_no_cut_or_flipped_byte_of_a_file_gives_another_kind_of_error(tmp_path: Path) -> None:
    whole = graph_of("one block").SerializeToString()
    file = tmp_path / "x.onnx"
    for step in range(0, len(whole), max(1, len(whole) // 150)):
        flipped = bytearray(whole)
        flipped[step] ^= 1 << (step % 8)
        for damaged in (whole[:step], bytes(flipped)):
            file.write_bytes(damaged)
            try:
                pass_from_file(file, 2, 9, 4)
            except InputError as error:
                assert len(str(error)) < 600


def test_a_file_that_is_no_graph_or_far_too_large_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.onnx"
    file.write_bytes(b"not a graph" * 9)
    with pytest.raises(InputError, match="is no ONNX graph"):
        pass_from_file(file, 1, 1, 1)
    with file.open("wb") as stream:
        stream.truncate(1 << 27)
    with pytest.raises(InputError, match="more than 64 MiB"):
        pass_from_file(file, 1, 1, 1)


@pytest.mark.parametrize("shape", [(0, 1, 1), (1, -1, 1), (1, 1, 2**21)])
def test_a_size_out_of_range_is_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match="must be from 1 to"):
        pass_from_graph(graph_of("grouped"), *shape)
