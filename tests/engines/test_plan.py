"""What plans say of themselves: real ones, damaged ones, and what was built in them."""

from __future__ import annotations

import random
import struct
from functools import cache
from pathlib import Path

import pytest

from engines.audit import Audit, audits, mismatch
from engines.errors import InputError
from engines.plan import HEADER_BYTES, Plan, plan_from_bytes, plan_from_file
from tests.engines.precision_graphs import precision_graph

pytest.importorskip("tensorrt_rtx_bindings", reason="pip install 'cadenza[tensorrt-rtx]'")

WIDE = (16, 512, 512)
ALL = ("fp32", "fp16", "bf16", "int8", "int8-w", "fp8", "fp8-w", "int4-w", "nvfp4")


@cache
def built(precision: str, sms: tuple[int, ...] = (120,)) -> bytes:
    """Return a plan of one wide product."""
    from engines.targets import Target
    from engines.trt import BuildRequest, build_plan

    name = "rtx-" + "+".join(f"sm{sm}" for sm in sms)
    assert Target(name, "tensorrt-rtx", sms)
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        graph = Path(folder) / "graph.onnx"
        graph.write_bytes(precision_graph(precision, WIDE))
        request = BuildRequest(graph=graph, target=name, profile={})
        return bytes(build_plan(request, lambda line: None))


def audit_of(precision: str, asked: str) -> Audit:
    (found,) = audits(plan_from_bytes(built(precision)), asked)
    return found


@pytest.mark.parametrize("precision", ALL)
def test_a_wide_product_is_found_in_the_precision_that_was_asked_for(precision: str) -> None:
    found = audit_of(precision, precision)
    assert found.elements == 512 * 512
    assert found.share == 1.0
    assert found.otherwise == ()
    assert mismatch(found, precision, 512 * 512) is None
    assert found.source == "plan"


@pytest.mark.parametrize(
    ("precision", "asked"),
    [
        ("fp16", "int8"),
        ("fp16", "int8-w"),
        ("int8", "fp8"),
        ("int8-w", "int8"),
        ("int8", "int4-int8"),
        ("int8", "int8-w"),
        ("fp8", "int8"),
        ("fp8-w", "fp8"),
        ("int4-w", "nvfp4"),
        ("fp32", "fp16"),
    ],
)
def test_another_precision_is_a_mismatch_that_names_the_layer(precision: str, asked: str) -> None:
    found = audit_of(precision, asked)
    said = mismatch(found, asked, 512 * 512)
    assert said is not None
    assert f"{asked} was asked for on sm120, but only 0 of 262,144 weights" in said
    assert "node_of_y" in said.partition("otherwise: ")[2]


def test_weights_in_a_plan_are_counted() -> None:
    for precision, least in (("fp16", 2 * 512 * 512), ("int8", 512 * 512)):
        found = audit_of(precision, precision).weight_bytes
        assert found is not None
        assert least <= found < 1.1 * least


def test_a_plan_for_several_sms_has_a_program_for_them() -> None:
    plan = plan_from_bytes(built("fp8", (89, 120)))
    assert plan.sms == (89, 120)
    assert [program.sms for program in plan.programs] == [("sm89", "sm120")]


def test_a_file_and_its_bytes_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "a.plan"
    file.write_bytes(built("int8"))
    assert plan_from_file(file) == plan_from_bytes(built("int8"))
    assert plan_from_file(file).version[:2] == (1, 7)


def test_of_another_version_the_header_alone_is_read() -> None:
    data = bytearray(built("fp16"))
    data[24:28] = bytes((9, 9, 0, 0))
    plan = plan_from_bytes(bytes(data))
    assert plan.programs == ()
    assert plan.weight_bytes is None
    assert plan.sms == (120,)
    assert plan.why == "programs of version 9.9.0.0 were never read"


def test_what_is_no_whole_plan_is_refused(tmp_path: Path) -> None:
    whole = built("fp16")
    for data in (b"", b"vtrt", whole[:-1], whole + b"\0", b"\0" + whole[1:], whole[:HEADER_BYTES]):
        with pytest.raises(InputError, match="rebuild it"):
            plan_from_bytes(data)
        file = tmp_path / "bad.plan"
        file.write_bytes(data)
        with pytest.raises(InputError, match="rebuild it"):
            plan_from_file(file)
    with pytest.raises(InputError, match="cannot read the plan"):
        plan_from_file(tmp_path / "nowhere.plan")
    with pytest.raises(InputError, match="cannot read the plan"):
        plan_from_file(tmp_path)


def test_damage_gives_another_reading_or_a_refusal_and_never_another_error() -> None:
    whole = built("int8")
    begin = whole.find(b"header {\n  version")
    rng = random.Random(3)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 20)):
            place = rng.choice((rng.randrange(64), begin + rng.randrange(20_000)))
            data[min(place, len(data) - 1)] = rng.choice((0, 10, 34, 123, 125, 255))
        try:
            plan = plan_from_bytes(bytes(data))
        except InputError:
            continue
        assert isinstance(plan, Plan)
        for found in audits(plan, "int8"):
            assert 0.0 <= found.share <= 1.0


def test_a_text_made_to_be_slow_is_read_in_linear_time() -> None:
    hostile = [
        b"tensor={" * 400_000,
        b"  fully_connected={ input={" + b'"a" ' * 300_000 + b"}\n",
        b'  tensor={ name="' + b"x" * 2_000_000 + b"\n",
        b"  region = { name=devmem size=" + b"9" * 1_000_000 + b"\n",
        b"header {\n  version" * 100_000,
        b"\n" * 4_000_000,
        b"\n tensor={ name=" * 200_000,
        b'  fully_connected={ input={"a"} layers="' + b"[ONNX Layer: " * 200_000 + b'"\n',
    ]
    for text in hostile:
        body = b"header {\n  version accelerators={sm89 }\n" + text
        data = b"vtrt" + bytes(12) + struct.pack("<Q", 64 + len(body)) + bytes((1, 7, 1, 1))
        data += bytes(4) + struct.pack("<I", 8) + bytes(28) + body
        assert plan_from_bytes(data).sms == (89,)
