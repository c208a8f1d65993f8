"""A tiny denoiser as an ONNX file, with the tensor names of `engines.model`, and its numpy twin.

Embedding, plus the mean embedding of the attended canvas, times the LM head.  Enough to see ids,
mask, positions and scales arrive where they should.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from engines.model import ModelInfo

VOCAB, MASK_ID, EOS_ID, HIDDEN = 19, 18, 17, 8
MODEL = ModelInfo(
    name="tiny",
    architecture="llada",
    vocab=VOCAB,
    mask_id=MASK_ID,
    eos_id=EOS_ID,
    max_length=64,
    digest="0" * 64,
)


@dataclass(frozen=True)
class Weights:
    """Embedding [V, H], mixing [H, H] and head [H, V]."""

    embed: NDArray[np.float32]
    mix: NDArray[np.float32]
    head: NDArray[np.float32]

    @classmethod
    def random(cls, seed: int = 0) -> Weights:
        rng = np.random.default_rng(seed)
        shapes = ((VOCAB, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, VOCAB))
        return cls(*(rng.normal(size=shape).astype(np.float32) for shape in shapes))

    def logits(
        self, ids: NDArray[np.int64], mask: NDArray[np.bool_], positions: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Return logits [B, M, V] as the graph computes them."""
        embedded = self.embed[ids]
        seen = mask[..., None].astype(np.float32)
        context = (embedded * seen).sum(1, keepdims=True) / seen.sum(1, keepdims=True)
        asked = np.take_along_axis(embedded + context, positions[..., None], axis=1)
        out = (asked @ self.mix) @ self.head
        out[..., MASK_ID] = -1e9
        return out


def tiny_graph(
    path: Path,
    tail: str,
    weights: Weights,
    *,
    kind: str = "float",
    sites: int = 0,
    poison: bool = False,
) -> Path:
    """Write a graph and return its path.

    Args:
        path: Where.
        tail: "serve" or "trace".
        weights: What it computes with.
        kind: "float", or "qdq": the mixing GEMM in 8-bit Q/DQ.
        sites: Width of the input `scales`; 0 for none.  The first scale multiplies the logits.
        poison: Whether the probability is NaN.
    """
    inputs = [
        helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "length"]),
        helper.make_tensor_value_info("mask", TensorProto.BOOL, ["batch", "length"]),
        helper.make_tensor_value_info("positions", TensorProto.INT64, ["batch", "asked"]),
    ]
    if sites:
        inputs.append(
            helper.make_tensor_value_info("scales", TensorProto.FLOAT, ["batch", 1, sites])
        )
    floor = np.zeros(VOCAB, np.float32)
    floor[MASK_ID] = -1e9
    constants: dict[str, NDArray[np.generic]] = {
        "embed": weights.embed,
        "head": weights.head,
        "floor": floor,
        "last": np.array([2], np.int64),
        "one": np.array([1], np.int64),
        "zero": np.array([0], np.int64),
    }
    node = helper.make_node
    nodes = [
        node("Gather", ["embed", "ids"], ["embedded"]),
        node("Cast", ["mask"], ["mask_float"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["mask_float", "last"], ["seen"]),
        node("Mul", ["embedded", "seen"], ["kept"]),
        node("ReduceSum", ["kept", "one"], ["total"], keepdims=1),
        node("ReduceSum", ["seen", "one"], ["count"], keepdims=1),
        node("Div", ["total", "count"], ["context"]),
        node("Add", ["embedded", "context"], ["mixed"]),
        node("Unsqueeze", ["positions", "last"], ["places"]),
        node("Expand", ["places", "wide"], ["index"]),
        node("GatherElements", ["mixed", "index"], ["asked"], axis=1),
        node("MatMul", ["hidden", "head"], ["raw"]),
        node("Add", ["raw", "floor"], ["unscaled" if sites else "logits"]),
    ]
    constants["wide"] = np.array([1, 1, HIDDEN], np.int64)
    if kind == "qdq":
        scale = np.abs(weights.mix).max(0) / 127
        constants |= {
            "a_scale": np.float32(0.05)[()],
            "a_zero": np.int8(0),
            "w_scale": scale.astype(np.float32),
            "w_zero": np.zeros(HIDDEN, np.int8),
            "w": np.round(weights.mix / scale).astype(np.int8),
        }
        before = [
            node("QuantizeLinear", ["asked", "a_scale", "a_zero"], ["a_int"]),
            node("DequantizeLinear", ["a_int", "a_scale", "a_zero"], ["a"]),
            node("DequantizeLinear", ["w", "w_scale", "w_zero"], ["mix"], axis=1),
            node("MatMul", ["a", "mix"], ["hidden"]),
        ]
    else:
        constants["mix"] = weights.mix
        before = [node("MatMul", ["asked", "mix"], ["hidden"])]
    nodes[11:11] = before
    if sites:
        constants["first"] = np.array([0], np.int64)
        nodes += [
            node("Gather", ["scales", "first"], ["scale"], axis=2),
            node("Mul", ["unscaled", "scale"], ["logits"]),
        ]
    outputs = [
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "asked", VOCAB])
    ]
    if tail == "serve":
        nodes += [
            node("ArgMax", ["logits"], ["tokens"], axis=-1, keepdims=0),
            node("LogSoftmax", ["logits"], ["log_p"], axis=-1),
            node("Exp", ["log_p"], ["p"]),
            node("ReduceMax", ["p", "last"], ["healthy"], keepdims=0),
            node("Mul", ["p", "log_p"], ["parts"]),
            node("ReduceSum", ["parts", "last"], ["negative"], keepdims=0),
            node("Neg", ["negative"], ["entropy"]),
            node("Mul", ["healthy", "factor"], ["probability"]),
        ]
        constants["factor"] = np.float32(np.nan if poison else 1.0)[()]
        outputs = [
            helper.make_tensor_value_info("tokens", TensorProto.INT64, ["batch", "asked"]),
            helper.make_tensor_value_info("probability", TensorProto.FLOAT, ["batch", "asked"]),
            helper.make_tensor_value_info("entropy", TensorProto.FLOAT, ["batch", "asked"]),
        ]
    graph = helper.make_graph(
        nodes,
        "tiny",
        inputs,
        outputs,
        [numpy_helper.from_array(np.asarray(a), name) for name, a in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    path.write_bytes(model.SerializeToString())
    return path
