"""What the exporter's tests share: each graph is traced once."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import onnx
import pytest

from exporter import graph
from exporter.denoiser import DenoiserConfig


@pytest.fixture(scope="session", autouse=True)
def _each_shape_is_traced_once() -> Iterator[None]:
    """Keep traced graphs by their sizes: tracing is most of an export's time."""
    traced = functools.cache(graph._traced)

    def copied(config: DenoiserConfig) -> onnx.ModelProto:
        return onnx.ModelProto.FromString(traced(config).SerializeToString())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "_traced", copied)
        yield
