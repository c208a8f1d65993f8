"""Gates: the baseline against what the framework computed, and the first look at engines."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engines.backend import Floats, Ids, Mask
from engines.errors import BackendError, InputError
from engines.files import digest_file
from exporter.folder import REFERENCE, Export, Recipe, read_export
from exporter.parity import engine_of
from exporter.reference import read_reference
from exporter.requantize import requantize
from tuner.gate import baseline_said, check_baseline, first_look, refused


class Altered:
    """An engine whose logits a function changes."""

    def __init__(self, engine: Any, change: Callable[[Floats], Floats]) -> None:
        self.engine, self.change, self.precision = engine, change, engine.precision

    def logits(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Floats:
        return self.change(self.engine.logits(ids, mask, positions, progress))

    def serve(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Any:
        return self.engine.serve(ids, mask, positions, progress)


@pytest.fixture(scope="module")
def full(exported: Export) -> Any:
    return engine_of(exported, "fp32.trace")


def test_full_precision_gives_what_the_framework_gave(exported: Export, full: Any) -> None:
    found = check_baseline(exported, full)
    assert found is not None
    assert found.agreement == 1.0
    assert found.max_error <= 1e-4 * max(found.largest, 1.0)
    assert found.distances.cos < 1e-6
    assert found.positions > 0
    said = baseline_said(found.to_json())
    assert "computes what the framework did" in said
    assert f"of {found.positions} positions" in said


@pytest.mark.parametrize("change", [lambda x: 1.01 * x, lambda x: x[..., ::-1], lambda x: -x])
def test_an_engine_that_computes_something_else_ends_the_tune_with_the_mend(
    exported: Export, full: Any, change: Callable[[Floats], Floats]
) -> None:
    with pytest.raises(BackendError, match=r"differs from the framework .* or export again"):
        check_baseline(exported, Altered(full, change))


def test_an_engine_that_gives_nan_ends_the_tune(exported: Export, full: Any) -> None:
    with pytest.raises(BackendError, match="not finite"):
        check_baseline(exported, Altered(full, lambda x: x * np.float32(np.nan)))


def test_an_export_made_before_says_that_it_was_not_checked(exported: Export, full: Any) -> None:
    files = {name: entry for name, entry in exported.files.items() if name != REFERENCE}
    assert check_baseline(replace(exported, files=files), full) is None
    assert "export again to have it checked" in baseline_said(None)


def test_the_reference_is_small_and_goes_along_with_another_recipe(
    exported: Export, tmp_path: Path
) -> None:
    assert exported.files[REFERENCE].bytes < 5 << 20
    other = read_export(requantize(exported.folder, tmp_path / "other", Recipe(windows=2)))
    assert other.files[REFERENCE] == exported.files[REFERENCE]
    assert check_baseline(other, engine_of(other, "fp32.trace")) is not None


def wrong_shape(tensors: dict[str, Any]) -> None:
    tensors["0.logits"] = tensors["0.logits"][..., :-1].copy()


def wrong_kind(tensors: dict[str, Any]) -> None:
    tensors["0.ids"] = tensors["0.ids"].astype(np.int32)


def strange_id(tensors: dict[str, Any]) -> None:
    tensors["0.ids"][0, 0] = 10**6


def outside(tensors: dict[str, Any]) -> None:
    tensors["0.positions"][0, 0] = -1


def with_nan(tensors: dict[str, Any]) -> None:
    tensors["1.logits"][0, 0, 0] = np.nan


def too_far(tensors: dict[str, Any]) -> None:
    tensors["0.progress"][0] = 1.0


def one_too_many(tensors: dict[str, Any]) -> None:
    tensors["stranger"] = np.zeros(3, np.float32)


def one_too_few(tensors: dict[str, Any]) -> None:
    del tensors["0.mask"]


@pytest.mark.parametrize(
    "damage",
    [wrong_shape, wrong_kind, strange_id, outside, with_nan, too_far, one_too_many, one_too_few],
)
def test_a_damaged_reference_is_refused_by_name(
    exported: Export, tmp_path: Path, damage: Callable[[dict[str, Any]], None]
) -> None:
    tensors = {name: tensor.copy() for name, tensor in load_file(path_of(exported)).items()}
    damage(tensors)
    save_file(tensors, str(tmp_path / REFERENCE))
    odd = replace(exported, folder=tmp_path)
    with pytest.raises(InputError, match=r"reference\.safetensors.* is damaged: .*; export again"):
        read_reference(odd)


@pytest.mark.parametrize("content", [b"", b"no tensors at all", b"\xff" * 64])
def test_a_file_that_is_none_is_refused(exported: Export, tmp_path: Path, content: bytes) -> None:
    (tmp_path / REFERENCE).write_bytes(content)
    with pytest.raises(InputError, match="is damaged"):
        read_reference(replace(exported, folder=tmp_path))


def test_one_changed_logit_is_found(exported: Export, full: Any, tmp_path: Path) -> None:
    tensors = {name: tensor.copy() for name, tensor in load_file(path_of(exported)).items()}
    tensors["0.logits"][0, 0, 1] += 1.0
    save_file(tensors, str(tmp_path / REFERENCE))
    files = {**exported.files, REFERENCE: digest_file(tmp_path / REFERENCE)}
    with pytest.raises(BackendError, match="differs from the framework"):
        check_baseline(replace(exported, folder=tmp_path, files=files), full)
    shutil.rmtree(tmp_path)


def path_of(export: Export) -> str:
    return str(export.folder / REFERENCE)


def test_the_first_look_tells_how_far_engines_are(exported: Export, full: Any) -> None:
    states = read_reference(exported)
    assert states is not None
    mask_id = exported.model.mask_id
    engines = {
        "same": full,
        "near": Altered(full, lambda x: x + np.float32(1e-2)),
        "far": Altered(full, lambda x: x[..., ::-1].copy()),
        "nan": Altered(full, lambda x: np.where(x > x.max() - 1e-6, np.float32(np.nan), x)),
    }
    found = first_look(states, full, engines, mask_id)
    assert found["same"].lInf == 0.0
    assert found["near"].lInf == pytest.approx(1e-2, rel=1e-2)
    assert found["same"].cos < found["near"].cos + 1e-9 < found["far"].cos
    assert not found["nan"].finite
    plain = {name: each.to_json() for name, each in found.items()}
    assert refused({"same": plain["same"]}, {"cos": 0.5}) is None
    assert refused({"same": plain["same"], "far": plain["far"]}, {"cos": 0.0001}) == (
        f"far: cos {found['far'].cos:.3g} is above 0.0001 at the first look"
    )
    assert "not finite" in str(refused({"nan": plain["nan"]}, {}))
    assert refused({"near": plain["near"]}, {"l1": 0.009, "cos": 2.0}) is not None
