"""Weights on disk: what is written is what is read, byte ranges are where they are said to be."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from engines.errors import InputError
from exporter.weights import Item, floats, is_finite, mapped, read_header, write_family


def test_what_is_written_is_what_the_safetensors_library_reads(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "F32": rng.normal(size=(3, 5)).astype(np.float32),
        "I8": rng.integers(-127, 128, (7,)).astype(np.int8),
        "I16": rng.integers(-999, 999, (2, 2, 2)).astype(np.int16),
        "U8": np.zeros((0, 4), np.uint8),
    }
    items = [Item(kind, kind, a.shape, lambda a=a: a) for kind, a in arrays.items()]
    stored = write_family(tmp_path / "x.safetensors", items)
    read = load_file(tmp_path / "x.safetensors")
    for kind, array in arrays.items():
        np.testing.assert_array_equal(read[kind].numpy(), array)
        assert mapped(stored[kind]).tobytes() == array.tobytes()


def test_a_transposed_array_is_written_in_its_own_order(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.int8).reshape(2, 3).T
    write_family(tmp_path / "x.safetensors", [Item("a", "I8", (3, 2), lambda: array)])
    np.testing.assert_array_equal(load_file(tmp_path / "x.safetensors")["a"].numpy(), array)


def test_an_item_that_is_not_what_it_says_is_refused(tmp_path: Path) -> None:
    wrong = Item("a", "F32", (3,), lambda: np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="a: 8 bytes"):
        write_family(tmp_path / "x.safetensors", [wrong])
    with pytest.raises(ValueError, match="two tensors"):
        write_family(tmp_path / "y.safetensors", [wrong, wrong])


def test_a_file_that_is_there_is_never_written_over(tmp_path: Path) -> None:
    write_family(tmp_path / "x.safetensors", [])
    with pytest.raises(FileExistsError):
        write_family(tmp_path / "x.safetensors", [])


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_every_stored_float_is_read_as_torch_reads_it(kind: torch.dtype, tmp_path: Path) -> None:
    values = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).to(kind)
    save_file({"a": values}, tmp_path / "x.safetensors")
    stored = read_header(tmp_path / "x.safetensors")["a"]
    np.testing.assert_array_equal(floats(stored), values.float().numpy())
    assert is_finite(stored)


def test_items_make_their_bytes_one_after_the_other_and_none_before(tmp_path: Path) -> None:
    size = 1 << 20
    file = tmp_path / "x.safetensors"
    made: list[int] = []

    def make() -> NDArray[np.uint8]:
        made.append(file.stat().st_size // size)
        return np.zeros(size, np.uint8)

    items = [Item(f"a{number}", "U8", (size,), make) for number in range(4)]
    assert made == []
    write_family(file, items)
    assert made == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: data + b"\0", "bytes after its tensors"),
        (lambda data: (100_000).to_bytes(8, "little") + b"[" * 100_000, "not valid JSON"),
        (lambda data: data.replace(b'"b":', b'"a":'), "given twice"),
        (lambda data: data.replace(b"[2,3]", b"[6.0]"), "must be an integer"),
        (lambda data: data.replace(b"[24,40]", b"[16,32]"), "overlaps another tensor, or a gap"),
    ],
)
def test_a_file_that_says_other_than_it_holds_is_refused(
    tmp_path: Path, damage: Callable[[bytes], bytes], says: str
) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(2, 3), "b": torch.ones(4)}, file)
    assert set(read_header(file)) == {"a", "b"}
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(InputError, match=says):
        read_header(file)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="not a regular file"):
        read_header(tmp_path / "model.safetensors")
