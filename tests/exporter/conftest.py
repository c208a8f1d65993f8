"""A checkpoint of random weights, and its export, made once for all tests of this folder."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
import torch

from exporter import graph
from exporter.checkpoint import save_checkpoint
from exporter.denoiser import Denoiser, DenoiserConfig
from exporter.export import ExportConfig, export
from exporter.folder import Export, Recipe, read_export
from exporter.train import vocabulary

TASKS = ("edit", "close")


def tiny_config(**changes: object) -> DenoiserConfig:
    """Return sizes with grouped keys and a feed-forward width that is no multiple of 32."""
    sizes: dict[str, object] = {
        "hidden": 32,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "ffn": 40,
        "vocab": 64,
        "mask_id": len(vocabulary()) - 1,
        "max_length": 64,
        "rope_theta": 10000.0,
    }
    return DenoiserConfig(**(sizes | changes))  # type: ignore[arg-type]


def random_denoiser(config: DenoiserConfig, seed: int = 0) -> Denoiser:
    """Return a denoiser whose logits are spread enough that its answers vary."""
    torch.manual_seed(seed)
    denoiser = Denoiser(config)
    with torch.no_grad():
        for parameter in denoiser.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.4)
            else:
                parameter.uniform_(0.5, 1.5)
    return denoiser.eval().requires_grad_(False)


@pytest.fixture(scope="session", autouse=True)
def _each_shape_is_traced_once() -> Iterator[None]:
    """Keep traced graphs by their sizes: tracing is most of an export's time."""
    traced = functools.cache(graph._traced)

    def copied(config: DenoiserConfig) -> onnx.ModelProto:
        return onnx.ModelProto.FromString(traced(config).SerializeToString())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "_traced", copied)
        yield


@pytest.fixture(scope="session")
def denoiser() -> Denoiser:
    return random_denoiser(tiny_config())


@pytest.fixture(scope="session")
def checkpoint(denoiser: Denoiser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    save_checkpoint(denoiser, vocabulary(), folder)
    return folder


def small_export(model: Path, out: Path, **changes: object) -> ExportConfig:
    """Return what an export that takes little is asked for."""
    asked: dict[str, object] = {
        "precisions": ("fp32", "int8", "w4a4", "w8a8", "w16a16"),
        "recipe": Recipe(windows=3),
        "tasks": TASKS,
        "prompts": 3,
    }
    return ExportConfig(model=model, out=out, **(asked | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Export:
    out = tmp_path_factory.mktemp("exported") / "EXPORT"
    return read_export(export(small_export(checkpoint, out)), verify=True)
