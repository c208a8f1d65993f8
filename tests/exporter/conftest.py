"""What the exporter's tests share: each graph is traced once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

from exporter import graph
from exporter.denoiser import DenoiserConfig
from exporter.export import export
from exporter.folder import Export, Recipe, read_export
from tests.tiny_export import small_export


@pytest.fixture(scope="session", autouse=True)
def _each_shape_is_traced_once() -> Iterator[None]:
    """Keep traced graphs by their sizes: tracing is most of an export's time."""
    traced = functools.cache(graph._traced)

    def copied(config: DenoiserConfig, rest: str) -> onnx.ModelProto:
        return onnx.ModelProto.FromString(traced(config, rest).SerializeToString())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "_traced", copied)
        yield


@pytest.fixture(scope="session")
def rotated_export(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Return the shared checkpoint's export by gptq-hadamard; not to be written into."""
    out = tmp_path_factory.mktemp("rotated") / "EXPORT"
    recipe = Recipe(windows=3, quantizer="gptq-hadamard")
    precisions = ("int8", "w4a4", "w16a16")
    asked = small_export(checkpoint, out, recipe=recipe, precisions=precisions, states=40)
    return read_export(export(asked), verify=True)
