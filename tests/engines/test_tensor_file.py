"""Headers of safetensors files: those of the real package are read, hostile ones refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from engines.errors import BundleError
from engines.tensor_file import tensors_of


def test_what_the_package_wrote_is_read_byte_for_byte(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    made: dict[str, np.ndarray[Any, Any]] = {
        "a": rng.normal(size=(3, 5)).astype(np.float16),
        "b.weight": rng.integers(-128, 127, (7, 2)).astype(np.int8),
        "c": np.float32([1.5]),
    }
    file = tmp_path / "w.safetensors"
    save_file(made, file, metadata={"any": "thing"})
    found, data = tensors_of(file), file.read_bytes()
    assert set(found) == set(made)
    for name, each in found.items():
        assert each.shape == made[name].shape
        assert data[each.begin : each.end] == made[name].tobytes()
    assert {name: each.type for name, each in found.items()} == {
        "a": "F16",
        "b.weight": "I8",
        "c": "F32",
    }


def written(file: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return file


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F16", "shape": [2, 2], "data_offsets": [0, 8]} | changes


@pytest.mark.parametrize(
    ("header", "data", "length"),
    [
        (b"", b"", None),
        (b"{}", b"", 1 << 40),
        (b"{]", b"", None),
        (b"\xff\xfe", b"", None),
        (b"[]", b"", None),
        ({"w": entry()}, b"\0" * 7, None),
        ({"w": entry()}, b"\0" * 9, None),
        ({"w": entry(data_offsets=[0, 7])}, b"\0" * 7, None),
        ({"w": entry(data_offsets=[1, 9])}, b"\0" * 9, None),
        ({"w": entry(data_offsets=[8, 0])}, b"\0" * 8, None),
        ({"w": entry(data_offsets=[-8, 0])}, b"\0" * 8, None),
        ({"w": entry(data_offsets=[0])}, b"\0" * 8, None),
        ({"w": entry(shape=[2, -2])}, b"\0" * 8, None),
        ({"w": entry(shape=[1] * 9)}, b"\0" * 2, None),
        ({"w": entry(shape=None)}, b"\0" * 8, None),
        ({"v": entry(), "w": entry()}, b"\0" * 8, None),
        ({"v": entry(), "w": entry(data_offsets=[4, 12])}, b"\0" * 12, None),
    ],
)
def test_a_hostile_file_is_refused(
    tmp_path: Path, header: object, data: bytes, length: int | None
) -> None:
    with pytest.raises(BundleError):
        tensors_of(written(tmp_path / "w.safetensors", header, data, length))


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot read"):
        tensors_of(tmp_path / "none.safetensors")
    (tmp_path / "short").write_bytes(b"\1\0")
    with pytest.raises(BundleError, match="no safetensors file"):
        tensors_of(tmp_path / "short")
