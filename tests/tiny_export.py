"""A checkpoint of random weights, small enough to be exported in a second."""

from __future__ import annotations

from pathlib import Path

import torch

from exporter.denoiser import Denoiser, DenoiserConfig
from exporter.export import ExportConfig
from exporter.folder import Recipe
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


def small_export(model: Path, out: Path, **changes: object) -> ExportConfig:
    """Return what an export that takes little is asked for."""
    asked: dict[str, object] = {
        "precisions": ("fp32", "int8", "w4a4", "w8a8", "w16a16"),
        "recipe": Recipe(windows=3),
        "tasks": TASKS,
        "prompts": 3,
    }
    return ExportConfig(model=model, out=out, **(asked | changes))  # type: ignore[arg-type]
