"""The engine inspector's JSON: products by their types; what is not spelled out is unknown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.audit import mismatch
from engines.errors import InputError
from engines.inspector import audit_from_inspector, products_from_inspector


def tensor(kind: str, *dims: int, key: str = "Format/Datatype") -> dict[str, Any]:
    return {"Name": "t", "Location": "Device", "Dimensions": list(dims), key: kind}


def layer(
    kind: str, tactic: str, reads: list[Any], writes: list[Any], node: str
) -> dict[str, Any]:
    return {
        "Name": f"{node}_myl0_7",
        "LayerType": kind,
        "Inputs": reads,
        "Outputs": writes,
        "TacticName": tactic,
        "StreamId": 0,
        "Metadata": f"[ONNX Layer: {node}][ONNX Layer: {node}/Add]",
    }


HALF = layer(
    "gemm",
    "sm80_xmma_gemm_f16f16_f16f16_f16_nn_n_tilesize32x32x64_stage6_warpsize2x2x1_tensor16x8x16",
    [tensor("Half", -1, -1, 1024)],
    [tensor("Half", -1, -1, 256)],
    "half",
)
INT8 = layer(
    "gemm",
    "sm80_xmma_gemm_i8i8_i8i32_f32_tn_n_tilesize64x64x64_stage4_tensor16x8x32",
    [tensor("Int8", 1, 40, 64)],
    [tensor("Half", 1, 40, 32)],
    "int8",
)
FP8 = layer(
    "gemm",
    "sm89_xmma_gemm_e4m3e4m3_e4m3f32_f32_tn_n_tilesize64x64x64",
    [tensor("FP8", 40, 64, key="DataType")],
    [tensor("Half", 40, 8, key="DataType")],
    "fp8",
)
TWO_INPUTS = layer(
    "MatrixMultiply",
    "",
    [tensor("Row major linear FP16 format", 10, 4), tensor("Row major linear FP16 format", 4, 6)],
    [tensor("Row major linear FP16 format", 10, 6)],
    "both",
)
ALONE = layer("gemm", "0x1234", [tensor("Int8", 4, 8)], [tensor("Half", 4, 16)], "alone")
OTHERS = [
    layer("kgen", "__myl_AddCast_0xf2", [tensor("Half", 4)], [tensor("Half", 4)], "kgen"),
    layer("kgen", "_gemm_mha_v2_0xab", [tensor("Half", 4)], [tensor("Half", 4)], "attention"),
    layer("Reformat", "", [tensor("Half", 4)], [tensor("Int8", 4)], "reformat"),
]


def text(*layers: object) -> str:
    return json.dumps({"Layers": list(layers), "I/O Tensors": [{"Name": "ids"}]})


def test_types_are_those_of_the_kernel_s_name_else_of_the_inputs_else_unknown() -> None:
    found = products_from_inspector(text(HALF, *OTHERS, INT8, FP8, TWO_INPUTS, ALONE))
    assert [product.types for product in found] == [
        ("half", "half"),
        ("int8", "int8"),
        ("fp8_e4m3", "fp8_e4m3"),
        ("half", "half"),
        ("int8", "unknown"),
    ]
    assert [product.elements for product in found] == [1024 * 256, 64 * 32, 64 * 8, 24, 128]
    assert found[0].layers == ("half", "half/Add")


def test_an_audit_counts_what_is_as_asked_and_names_the_rest() -> None:
    audit = audit_from_inspector(text(HALF, INT8, ALONE), "11.4.0.106", 89, "int8", 77)
    assert audit is not None
    assert audit.source == "inspector"
    assert audit.products == {"half x half": 1, "int8 x int8": 1, "int8 x unknown": 1}
    assert audit.elements == 64 * 32
    assert audit.share == pytest.approx(64 * 32 / (1024 * 256 + 64 * 32 + 128))
    assert (audit.sm, audit.scratch_bytes, audit.weight_bytes) == ("sm89", 77, None)
    why = mismatch(audit, "int8", 10**6)
    assert why is not None
    assert "half + half/Add" in why
    assert mismatch(audit, "int8", 64 * 32) is None


def test_a_plan_without_details_is_unknown_not_guessed() -> None:
    audit = audit_from_inspector(text("MatMul_3_myl0_1", "Cast_4"), "1.7.1.116", 89, "fp16", 0)
    assert audit is not None
    assert audit.products == {"unknown x unknown": 1}
    assert audit.elements == 0


def test_types_that_vary_with_the_shape_are_unknown() -> None:
    varying = tensor("N/A due to dynamic shapes", -1, 8)
    (found,) = products_from_inspector(
        text(layer("gemm", "", [varying, varying], [varying], "varying"))
    )
    assert found.types == ("unknown", "unknown")


@pytest.mark.parametrize("version", ["9.3.0", "12.0.0", "2.0", "", "x", "\u0661\u0661.1"])
def test_an_unknown_version_is_not_read(version: str) -> None:
    assert audit_from_inspector(text(HALF), version, 89, "fp16", 0) is None


@pytest.mark.parametrize(
    "given",
    [
        "",
        "[]",
        "{}",
        '{"Layers": 3}',
        '{"Layers": [3]}',
        '{"Layers": [{"LayerType": "gemm", "Inputs": 3}]}',
        '{"Layers": [{"LayerType": "gemm", "Inputs": [{"Dimensions": ["x"]}]}]}',
        '{"Layers": [{"LayerType": "gemm", "Inputs": [{"Dimensions": [-2]}]}]}',
    ],
)
def test_what_is_no_such_json_is_refused(given: str) -> None:
    with pytest.raises(InputError):
        products_from_inspector(given)
