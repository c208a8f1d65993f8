"""A real bundle of a few kilobytes: two ONNX engines, a tokenizer, two tasks, golden answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from engines.bundle import Bundle, Golden, write_bundle
from engines.manifest import TOKENIZER
from engines.precision import EXECUTED
from engines.runtime import Runtime
from engines.schedule import SamplerConfig
from tests.engines.tiny_graph import EOS_ID, MASK_ID, MODEL, Weights, tiny_graph

SAMPLER = SamplerConfig(steps=6, gen_length=12, block_length=6)
SCHEDULES = {"default": ("int8", "int8", "fp32"), "edit": ("fp32", "int8", "fp32")}
PROMPTS = ("abc", "deed", "hello", "lo0", "a", "1010101", "noon", "b1")
LONGEST_PROMPT, LARGEST_BATCH = 20, 4


def tiny_tokenizer(file: Path) -> Path:
    """Write a tokenizer of single characters and return its path."""
    tokens = [*"abcdefghijklmno01", "<eos>", "<mask>"]
    assert tokens.index("<eos>") == EOS_ID
    assert tokens.index("<mask>") == MASK_ID
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>", "<mask>"])
    file.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(file))
    return file


def external_graph(file: Path, tail: str, weights: str, **kind: Any) -> Path:
    """Write a tiny graph with its weights beside it and return its path."""
    file.parent.mkdir(parents=True, exist_ok=True)
    (file.parent / weights).parent.mkdir(exist_ok=True)
    model = onnx.load(tiny_graph(file, tail, Weights.random(), **kind))
    (file.parent / weights).unlink(missing_ok=True)
    onnx.save_model(model, file, save_as_external_data=True, location=weights, size_threshold=100)
    return file


def tiny_files(folder: Path) -> dict[str, Path]:
    """Write what a bundle is made of into a folder; returns path in the bundle to file."""
    external_graph(folder / "fp32.serve.onnx", "serve", "weights/fp32.bin")
    external_graph(folder / "fp32.trace.onnx", "trace", "weights/fp32.trace.bin")
    external_graph(folder / "int8.serve.onnx", "serve", "weights/int8.bin", kind="qdq", sites=2)
    tiny_tokenizer(folder / TOKENIZER)
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path for path in found}


def tiny_manifest() -> dict[str, Any]:
    """Return what `write_bundle` is told."""
    engine: dict[str, Any] = {
        "target": "cpu",
        "built": {"MatMul(float)": 2},
        "options": {"threads": 1},
    }
    scales = np.linspace(0.5, 1.5, 6).reshape(3, 2).tolist()
    graphs: dict[str, dict[str, Any]] = {
        "fp32.serve": {"file": "fp32.serve.onnx", "tail": "serve", "precision": "fp32"},
        "fp32.trace": {"file": "fp32.trace.onnx", "tail": "trace", "precision": "fp32"},
        "int8.serve": {
            "file": "int8.serve.onnx",
            "tail": "serve",
            "precision": "int8",
            "scales": scales,
        },
    }
    return {
        "cadenza": "0",
        "model": asdict(MODEL),
        "sampler": asdict(SAMPLER),
        "targets": ["cpu"],
        "shape": {"batch": [1, 2, LARGEST_BATCH], "prompt": [1, 4, LONGEST_PROMPT]},
        "precisions": [asdict(EXECUTED[name]) for name in ("fp32", "int8")],
        "families": {"fp32": {"bytes": 1472}, "int8": {"bytes": 1300}},
        "graphs": {name: {**graph, "windows": [0, 1, 2]} for name, graph in graphs.items()},
        "engines": {
            f"{name}.cpu": {
                "file": graph["file"],
                "graph": name,
                "precision": graph["precision"],
                **engine,
            }
            for name, graph in graphs.items()
        },
        "tasks": {
            name: {
                "windows": 3,
                "sampler": asdict(SAMPLER),
                "says": f"what {name} says",
                "targets": {
                    "cpu": {
                        "schedule": list(schedule),
                        "budgets": {"mean_bits": 16, "latency_ms": None},
                        "measured": {"latency_ms": [1.0, 0.9, 1.1]},
                        "predicted": {"gain": 0.25},
                    }
                },
            }
            for name, schedule in SCHEDULES.items()
        },
        "environment": {"onnxruntime": "1", "device": "a processor"},
        "degraded": False,
    }


def golden_of(runtime: Runtime) -> list[Golden]:
    """Return golden answers made by a runtime, each prompt alone."""
    found = []
    for number, prompt in enumerate(PROMPTS):
        task = tuple(SCHEDULES)[number % 2]
        (answer,) = runtime.generate(prompt, task=task, batch=1)
        digest = runtime.bundle.manifest.schedule_digest(task, runtime.target)
        found.append(
            Golden(
                id=f"g{number}",
                task=task,
                prompt=prompt,
                ids=answer.ids,
                full_precision_ids=answer.ids,
                schedule_digest=digest,
            )
        )
    return found


def write_tiny_bundle(out: Path, scratch: Path) -> Bundle:
    """Write the bundle and return it."""
    files = tiny_files(scratch / "files")
    first = write_bundle(scratch / "first", tiny_manifest(), files, [])
    golden = golden_of(Runtime.load(first.folder))
    return write_bundle(out, tiny_manifest(), files, golden)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return manifest.json as plain data."""
    plain: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return plain


def edit_manifest(folder: Path, manifest: object) -> None:
    """Put plain data into manifest.json."""
    text = manifest if isinstance(manifest, str) else json.dumps(manifest)
    (folder / "manifest.json").write_text(text, encoding="utf-8")


CPU = ("tasks", "edit", "targets", "cpu")
FP32 = ("graphs", "fp32.serve")
ENGINE = ("engines", "fp32.serve.cpu")
Edit = Callable[[dict[str, Any]], object]


def edited(folder: Path, edit: Edit) -> Path:
    """Change the manifest of a bundle and return its folder."""
    manifest = read_manifest(folder)
    edit(manifest)
    edit_manifest(folder, manifest)
    return folder


def relist(folder: Path, path: str) -> None:
    """List a file as it now is."""
    data = (folder / path).read_bytes()
    entry = {"sha256": sha256(data).hexdigest(), "bytes": len(data)}

    def edit(manifest: dict[str, Any]) -> None:
        manifest["files"][path] = entry
        for engine in manifest["engines"].values():
            if engine["file"] == path:
                engine.update(entry)

    edited(folder, edit)


def drop(*keys: str) -> Edit:
    """Return the edit that takes a key out."""

    def edit(manifest: dict[str, Any]) -> None:
        place: Any = manifest
        for key in keys[:-1]:
            place = place[key]
        del place[keys[-1]]

    return edit


def put(value: object, *keys: Any) -> Edit:
    """Return the edit that puts a value at a place."""

    def edit(manifest: dict[str, Any]) -> None:
        place: Any = manifest
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value

    return edit
