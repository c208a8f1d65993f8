"""From a denoiser to an ONNX graph: traced once on the meta device, ended by one of two tails.

The trace never sees a weight: it runs on shapes alone, so its time and memory depend on the number
of blocks and not on their size.  Initializers of the graph carry the names of the checkpoint's
tensors and no data; `exporter.weights` binds them to byte ranges of files.

Linear layers stay as `MatMul(x, Transpose(weight))`: the weight keeps the checkpoint's [out, in]
layout, so that its bytes can be used where they are, and every backend folds the transpose when it
loads.  Passes over the graph find them by the names of their weights (`linears`), never by the
places or names of nodes.

Operators are ONNX's own of opset 23 (RMSNormalization, RotaryEmbedding, Attention): each is one
kernel in ONNX Runtime, whose CPU provider wants a mask with one row a query.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engines.model import (
    ASKED,
    BATCH,
    ENTROPY,
    IDS,
    LENGTH,
    LOGITS,
    MASK,
    POSITIONS,
    PROBABILITY,
    TOKENS,
)
from exporter.weights import ONNX_TYPES

if TYPE_CHECKING:
    import onnx

    from exporter.denoiser import DenoiserConfig

OPSET = 23
TAILS = ("serve", "trace")

# Largest constant, in elements, that is folded into a graph; graphs are kilobytes.
_FOLD_LIMIT = 256


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear layer of a graph.

    Attributes:
        weight: Name of the weight's initializer.
        matmul: Index of the MatMul among the graph's nodes.
        source: Name of the tensor that is multiplied.
        output: Name of the product.
    """

    weight: str
    matmul: int
    source: str
    output: str


def graph_from_config(
    config: DenoiserConfig, keys: Mapping[str, str], types: Mapping[str, int], rest: str = "F32"
) -> onnx.ModelProto:
    """Return the graph of a denoiser with the trace tail, its weights without data.

    Inputs ids, mask, positions and output logits have the names and dimensions of
    `engines.model`.  A weight that is not stored in the type of the rest is cast where it enters.
    Rotary angles, the sums of norms and of the softmax, and logits are float32 whatever it is.

    Args:
        config: Sizes of the denoiser.
        keys: From names of the denoiser's parameters to names in the checkpoint.
        types: ONNX type of each tensor of the checkpoint, by its name there.
        rest: Type of activations and of what is computed with them, by safetensors' name: F32,
            F16 or BF16.
    """
    model = _traced(config, rest)
    names = {
        name: keys[name] for name in (i.name for i in model.graph.initializer) if name in keys
    }
    _rename(model, names)
    _fill_frequencies(model, config)
    _set_types(model, {key: types[key] for key in names.values()}, ONNX_TYPES[rest])
    model.producer_name, model.producer_version = "cadenza", ""
    return model


def with_tail(model: onnx.ModelProto, tail: str) -> onnx.ModelProto:
    """Return a copy that ends in a tail: `trace` gives logits, `serve` what a sampler reads.

    Raises:
        ValueError: The tail is neither.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    if tail not in TAILS:
        raise ValueError(f"tail must be one of {', '.join(TAILS)}, got {tail!r}")
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    if tail == "trace":
        return copy
    axis = numpy_helper.from_array(np.array([-1], np.int64), "tail_axis")
    copy.graph.initializer.append(axis)
    one_value: dict[str, Any] = {"axis": -1, "keepdims": 0, "select_last_index": 0}
    for kind, inputs, output, attributes in (
        ("ArgMax", [LOGITS], TOKENS, one_value),
        ("LogSoftmax", [LOGITS], "tail_log_p", {"axis": -1}),
        ("ReduceMax", ["tail_log_p", "tail_axis"], "tail_top", {"keepdims": 0}),
        ("Exp", ["tail_top"], PROBABILITY, {}),
        ("Exp", ["tail_log_p"], "tail_p", {}),
        ("Mul", ["tail_p", "tail_log_p"], "tail_terms", {}),
        ("ReduceSum", ["tail_terms", "tail_axis"], "tail_sum", {"keepdims": 0}),
        ("Neg", ["tail_sum"], ENTROPY, {}),
    ):
        node = helper.make_node(kind, inputs, [output], f"make {output}", None, None, **attributes)
        copy.graph.node.append(node)
    del copy.graph.output[:]
    copy.graph.output.extend(
        helper.make_tensor_value_info(name, kind, [BATCH, ASKED])
        for name, kind in (
            (TOKENS, TensorProto.INT64),
            (PROBABILITY, TensorProto.FLOAT),
            (ENTROPY, TensorProto.FLOAT),
        )
    )
    return copy


def linears(model: onnx.ModelProto) -> list[Linear]:
    """Return the linear layers in the order of the graph: MatMuls whose right side is a weight.

    The weight may pass a Transpose and a Cast on its way.
    """
    made_by = {name: node for node in model.graph.node for name in node.output}
    weights = {initializer.name for initializer in model.graph.initializer}
    found = []
    for index, node in enumerate(model.graph.node):
        if node.op_type != "MatMul":
            continue
        name = node.input[1]
        while name in made_by and made_by[name].op_type in ("Transpose", "Cast"):
            name = made_by[name].input[0]
        if name in weights:
            found.append(Linear(name, index, node.input[0], node.output[0]))
    return found


def _traced(config: DenoiserConfig, rest: str) -> onnx.ModelProto:
    """Return the optimized graph; initializers have the denoiser's names and no data."""
    import onnx_ir
    import torch
    from onnxscript import optimizer

    from exporter.denoiser import Denoiser

    with torch.device("meta"):
        denoiser = Denoiser(config).eval()
        for parameter in denoiser.parameters():  # and not the rotary frequencies
            parameter.data = parameter.data.to(
                {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[rest]
            )
        ids = torch.zeros((2, 5), dtype=torch.long)
        positions = torch.zeros((2, 3), dtype=torch.long)
        example = (ids, torch.ones((2, 5), dtype=torch.bool), positions)
    batch, length, asked = (torch.export.Dim(name) for name in (BATCH, LENGTH, ASKED))
    with _quiet():
        program = torch.onnx.export(
            denoiser,
            example,
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=(
                {0: batch, 1: length},
                {0: batch, 1: length},
                {0: batch, 1: asked},
            ),
            input_names=[IDS, MASK, POSITIONS],
            output_names=[LOGITS],
            optimize=False,
            verbose=False,
        )
    assert program is not None
    model = program.model
    # Weights stand as inputs while constants are folded: they have no data that could be folded.
    weights = list(model.graph.initializers.values())
    for value in weights:
        del model.graph.initializers[str(value.name)]
        value.const_value = None
        model.graph.inputs.append(value)
    with _quiet():
        optimizer.optimize(
            model, input_size_limit=_FOLD_LIMIT * 8, output_size_limit=_FOLD_LIMIT * 8
        )
    proto: onnx.ModelProto = onnx_ir.serde.serialize_model(model)
    _inputs_to_initializers(proto, {str(value.name) for value in weights})
    # Where each node came from in the Python source: a third of the file, and paths of a machine.
    del proto.metadata_props[:]
    del proto.graph.metadata_props[:]
    del proto.graph.value_info[:]
    for node in proto.graph.node:
        del node.metadata_props[:]
        node.ClearField("doc_string")
    return proto


def _inputs_to_initializers(model: onnx.ModelProto, names: set[str]) -> None:
    """Turn the named inputs, as far as a node reads them, into initializers without data."""
    from onnx import TensorProto

    read = {name for node in model.graph.node for name in node.input}
    for value in [value for value in model.graph.input if value.name in names]:
        model.graph.input.remove(value)
        if value.name in read:
            kind = value.type.tensor_type
            dims = [dim.dim_value for dim in kind.shape.dim]
            model.graph.initializer.append(
                TensorProto(name=value.name, data_type=kind.elem_type, dims=dims)
            )


def _rename(model: onnx.ModelProto, names: Mapping[str, str]) -> None:
    for initializer in model.graph.initializer:
        initializer.name = names.get(initializer.name, initializer.name)
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = names.get(name, name)


def _fill_frequencies(model: onnx.ModelProto, config: DenoiserConfig) -> None:
    """Give the rotary frequencies, computed and not stored, their few numbers."""
    from exporter.denoiser import rotary_frequencies

    values = rotary_frequencies(config).numpy().astype(np.float32)
    for initializer in model.graph.initializer:
        if initializer.name == "frequencies":
            initializer.raw_data = values.tobytes()


def _set_types(model: onnx.ModelProto, types: Mapping[str, int], rest: int) -> None:
    """Set the stored type of each weight, with a Cast behind those that are not of the rest's."""
    from onnx import helper

    casts = {}
    for initializer in model.graph.initializer:
        kind = types.get(initializer.name, rest)
        if initializer.name in types and kind != rest:
            initializer.data_type = kind
            casts[initializer.name] = f"{initializer.name}.cast"
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = casts.get(name, name)
    for at, (name, cast) in enumerate(casts.items()):
        node = helper.make_node("Cast", [name], [cast], name=f"make {cast}", to=rest)
        model.graph.node.insert(at, node)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's remarks on its own working; errors still raise."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
