"""The tiny bundle with a real plan of one more target, built here; its schedule is fp32 alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines.build import BuildLog, Cache
from engines.bundle import Bundle, write_bundle
from engines.manifest import Shape
from engines.plans import built_plan, engine_entry, profile_of, read_back
from engines.trt import BuildRequest
from tests.engines.tiny_bundle import SAMPLER, tiny_files, tiny_manifest
from tests.engines.tiny_graph import MODEL


def write_plan_bundle(out: Path, scratch: Path, target: str) -> Bundle:
    """Write the bundle and return it."""
    files, manifest = tiny_files(scratch / "files"), tiny_manifest()
    shape = Shape(tuple(manifest["shape"]["batch"]), tuple(manifest["shape"]["prompt"]))
    request = BuildRequest(
        graph=files["fp32.serve.onnx"],
        target=target,
        profile=profile_of(shape, [SAMPLER.gen_length], MODEL.max_length),
    )
    plan = built_plan(request, Cache(scratch / "cache"), BuildLog())
    built: dict[str, Any] = read_back(plan, "fp32", 0, True, lambda text: None)
    entry = engine_entry(request, "fp32.serve", "fp32", built)
    manifest["engines"][f"fp32.{target}"] = entry
    manifest["targets"].append(target)
    for task in manifest["tasks"].values():
        task["targets"][target] = {"schedule": ["fp32"] * task["windows"]}
    return write_bundle(out, manifest, {**files, entry["file"]: plan.file}, [])
