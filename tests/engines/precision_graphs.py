"""One product y = x @ w of each executed precision as an ONNX graph, and TensorRT-RTX's verdict.

What stays unquantized is fp16.  Weights are random; only types and shapes matter here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper

SMALL, FUSED = (16, 64, 64), (64, 512, 512)  # rows of x, rows and columns of w
INT4_BLOCK, FP4_BLOCK = 32, 16
HALF = TensorProto.FLOAT16


@dataclass
class _Graph:
    """Nodes and constants of a graph that is being written."""

    rows: int
    inner: int
    columns: int
    kind: int = HALF
    nodes: list[NodeProto] = field(default_factory=list)
    constants: list[TensorProto] = field(default_factory=list)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def node(self, op: str, inputs: Sequence[str], outputs: Sequence[str], **given: Any) -> None:
        self.nodes.append(helper.make_node(op, inputs, outputs, **given))

    def raw(self, name: str, kind: int, dims: Sequence[int], data: bytes) -> None:
        self.constants.append(helper.make_tensor(name, kind, dims, data, raw=True))

    def filled(self, name: str, kind: int, dims: Sequence[int], value: float) -> None:
        self.constants.append(helper.make_tensor(name, kind, dims, [value] * int(np.prod(dims))))

    def weight(self, kind: int, bits: int = 8, most: int = 256) -> None:
        size = self.inner * self.columns * bits // 8
        data = self.rng.integers(0, most, size, np.uint8).tobytes()
        self.raw("w", kind, [self.inner, self.columns], data)


def _float(graph: _Graph, kind: int) -> None:
    graph.kind = kind
    graph.filled("w", kind, [graph.inner, graph.columns], 0.5)
    graph.node("MatMul", ["x", "w"], ["y"])


def _rounded_activations(graph: _Graph, kind: int) -> str:
    graph.filled("x_scale", HALF, [], 0.02)
    graph.node("QuantizeLinear", ["x", "x_scale"], ["x_q"], output_dtype=kind)
    graph.node("DequantizeLinear", ["x_q", "x_scale"], ["x_dq"])
    return "x_dq"


def _eight_bits(graph: _Graph, kind: int, activations: bool) -> None:
    """Int8 with a scale a column, or fp8 with one scale."""
    columns = [graph.columns] if kind == TensorProto.INT8 else []
    # 126 and below: no NaN among the fp8 codes.
    graph.weight(kind, most=126)
    graph.filled("w_scale", HALF, columns, 0.01)
    graph.node("DequantizeLinear", ["w", "w_scale"], ["w_dq"], **({"axis": 1} if columns else {}))
    source = _rounded_activations(graph, kind) if activations else "x"
    graph.node("MatMul", [source, "w_dq"], ["y"])


def _int4(graph: _Graph, activations: bool) -> None:
    graph.weight(TensorProto.INT4, bits=4)
    graph.filled("w_scale", HALF, [graph.inner // INT4_BLOCK, graph.columns], 0.01)
    graph.node("DequantizeLinear", ["w", "w_scale"], ["w_dq"], axis=0, block_size=INT4_BLOCK)
    source = _rounded_activations(graph, TensorProto.INT8) if activations else "x"
    graph.node("MatMul", [source, "w_dq"], ["y"])


def _nvfp4(graph: _Graph) -> None:
    graph.weight(TensorProto.FLOAT4E2M1, bits=4)
    blocks = [graph.inner // FP4_BLOCK, graph.columns]
    graph.filled("w_scale", TensorProto.FLOAT8E4M3FN, blocks, 1.0)
    for side, axis in (("w", 0), ("x", -1)):
        graph.filled(f"{side}_global", TensorProto.FLOAT, [], 0.01)
        if side == "x":
            graph.node(
                "TRT_FP4DynamicQuantize",
                ["x", "x_global"],
                ["x_q", "x_scale"],
                domain="trt",
                axis=axis,
                block_size=FP4_BLOCK,
                scale_type=TensorProto.FLOAT8E4M3FN,
            )
        graph.node("DequantizeLinear", [f"{side}_scale", f"{side}_global"], [f"{side}_wide"])
        graph.node("Cast", [f"{side}_wide"], [f"{side}_half"], to=HALF)
        quantized = "w" if side == "w" else "x_q"
        graph.node(
            "DequantizeLinear",
            [quantized, f"{side}_half"],
            [f"{side}_dq"],
            axis=axis,
            block_size=FP4_BLOCK,
        )
    graph.node("MatMul", ["x_dq", "w_dq"], ["y"])


_WRITE: dict[str, Callable[[_Graph], None]] = {
    "fp32": lambda graph: _float(graph, TensorProto.FLOAT),
    "fp16": lambda graph: _float(graph, HALF),
    "bf16": lambda graph: _float(graph, TensorProto.BFLOAT16),
    "int8": lambda graph: _eight_bits(graph, TensorProto.INT8, True),
    "fp8": lambda graph: _eight_bits(graph, TensorProto.FLOAT8E4M3FN, True),
    "int8-w": lambda graph: _eight_bits(graph, TensorProto.INT8, False),
    "fp8-w": lambda graph: _eight_bits(graph, TensorProto.FLOAT8E4M3FN, False),
    "int4-w": lambda graph: _int4(graph, False),
    "int4-int8": lambda graph: _int4(graph, True),
    "nvfp4": _nvfp4,
}


def precision_graph(precision: str, shape: tuple[int, int, int] = SMALL) -> bytes:
    """Return the model of one product in a precision, serialized; shape as `SMALL`."""
    graph = _Graph(*shape)
    _WRITE[precision](graph)
    made = helper.make_graph(
        graph.nodes,
        "product",
        [helper.make_tensor_value_info("x", graph.kind, [graph.rows, graph.inner])],
        [helper.make_tensor_value_info("y", graph.kind, [graph.rows, graph.columns])],
        graph.constants,
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("trt", 1)]
    model: onnx.ModelProto = helper.make_model(made, opset_imports=opsets, ir_version=11)
    return model.SerializeToString()


@dataclass(frozen=True)
class Verdict:
    """What the builder said: the plan's bytes, 0 where it refused, and its errors."""

    plan_bytes: int
    errors: tuple[str, ...]

    @property
    def built(self) -> bool:
        return self.plan_bytes > 0


def build(model: bytes, sms: Sequence[int]) -> Verdict:
    """Return what TensorRT-RTX says of a model for some SMs; its parser must take the model."""
    import tensorrt_rtx_bindings as trt

    class Listener(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(message)

    logger = Listener()
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(model), logger.errors
    config = builder.create_builder_config()
    config.num_compute_capabilities = len(sms)
    for place, sm in enumerate(sms):
        assert config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), place)
    plan = builder.build_serialized_network(network, config)
    return Verdict(0 if plan is None else plan.nbytes, tuple(logger.errors))
