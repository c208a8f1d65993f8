"""From one EXPORT folder to another recipe's: other windows, another clip, other blocks in fp32.

Begins at the graphs and the calibration that are there, and needs no torch.  Weights are never
rounded in another way: integers are the source's, and where the source has none, in blocks that
it keeps in fp32, they can be made only by rounding to the nearest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from platform import python_version

import numpy as np
from numpy.typing import NDArray

from engines import __version__
from engines.errors import InputError
from engines.files import digest_file, place_file, whole_folder
from engines.precision import FULL_PRECISION
from engines.sampler import Pass
from engines.targets import target_from_name
from exporter.calibrate import read_calibration
from exporter.folder import (
    CALIBRATION,
    EXPORT,
    REFERENCE,
    TOKENIZER,
    WEIGHTS,
    Export,
    Recipe,
    is_export,
    read_export,
    write_export,
)
from exporter.parity import engine_of, smoke, states_from_requests
from exporter.quantize import Rounded, round_to_nearest
from exporter.requests import check_windows, random_requests
from exporter.typed_variants import WHOLE_FAMILIES, write_typed_variants
from exporter.variants import Core, stored_weights, write_variants
from exporter.weights import Stored, read_header

Say = Callable[[str], None]


def requantize(source: Path, out: Path, recipe: Recipe, say: Say = lambda text: None) -> Path:
    """Write the EXPORT folder of another recipe beside one, and return `out`.

    Weights are hard-linked where the recipe leaves them as they are.  One that is there already
    with the same recipe of the same source is returned untouched.

    Args:
        source: An export.
        out: The new folder.
        recipe: Windows, clip, and blocks that stay in fp32; the quantizer is the source's.
        say: Told what is being done.

    Raises:
        InputError: The source is no whole export, the recipe does not fit it, or it needs weights
            to be rounded by another quantizer or with activations that are not there any more.
        BackendError: A new graph cannot run, or gives nonsense.
    """
    import onnx

    before = read_export(source)
    for name, task in before.tasks.items():
        check_windows(name, task.sampler, recipe.windows)
    _check_quantizer(before, recipe)
    request = sha256_of([before.request, asdict(recipe)])
    if is_export(out) and read_export(out).request == request:
        return out
    calibration = read_calibration(source / CALIBRATION)
    with whole_folder(out, force=False, is_ours=is_export, kind="export") as folder:
        full = before.graphs[f"{FULL_PRECISION.name}.trace"]
        same_weights = recipe.keep == before.recipe.keep
        families: dict[str, Path] = {}
        integers: dict[str, dict[str, Stored]] = {}
        for family in {precision.family for precision in before.precisions.values()}:
            path = f"{WEIGHTS}/{family}.safetensors"
            if path not in before.files:  # the checkpoint's own
                continue
            if same_weights or family in WHOLE_FAMILIES:
                families[family] = folder / path
                place_file(source / path, families[family])
            else:
                integers[family] = read_header(source / path)
        for path in full.weights:
            place_file(source / path, folder / path)
        for path in before.files:
            if path.startswith(f"{TOKENIZER}/") or path in (CALIBRATION, REFERENCE):
                place_file(source / path, folder / path)
        tensors = stored_weights(folder, full.weights)
        precisions = list(before.precisions.values())
        rounding = _refuse_to_round if recipe.method.calibrated else round_to_nearest
        ahead = target_from_name(before.target).ahead
        cores = {
            rest: Core.of(
                onnx.load(str(before.path(f"{name}.trace")), load_external_data=False),
                tensors,
                before.model.architecture,
            )
            for rest, name in {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}.items()
            if name in before.precisions and (ahead or rest == "F32")
        }
        write = write_typed_variants if ahead else write_variants
        graphs, sizes = write(
            cores, precisions, calibration, recipe, folder, families, say, rounding, integers
        )
        made = replace(
            before,
            folder=folder,
            families=sizes,
            graphs=graphs,
            recipe=recipe,
            environment={**before.environment, **environment()},
            request=request,
        )
        requests = random_requests(made.model, made.sampler, made.shape.prompt[1])
        engine = engine_of(made, f"{FULL_PRECISION.name}.serve")
        finish(made, states_from_requests(requests, engine, made.model), say)
    return out


def _check_quantizer(before: Export, recipe: Recipe) -> None:
    """Check that every integer a recipe wants can be had without the model and its activations.

    Raises:
        InputError: One cannot.
    """
    if recipe.quantizer != before.recipe.quantizer:
        raise InputError(
            f"{before.folder} was rounded by {before.recipe.quantizer} and cannot be turned into "
            f"{recipe.quantizer}; export again with --quantizer {recipe.quantizer}"
        )
    lost = sorted(set(before.recipe.keep) - set(recipe.keep))
    if lost and recipe.method.calibrated:
        raise InputError(
            f"{before.folder} keeps block {lost[0]} in fp32, and {recipe.quantizer} needs "
            f"activations to round it; export again without keeping it"
        )


def _refuse_to_round(
    name: str, site: str, weight: NDArray[np.float32], bits: int, by_channel: bool
) -> Rounded:
    """Stand in for a rounding that needs activations."""
    raise InputError(f"the weights of the source lack the integers of {name}; export again")


def finish(made: Export, states: Sequence[Pass], say: Say) -> Export:
    """Run every new graph once, write export.json, and return what it says."""
    say(f"running {len(made.graphs)} graphs")
    parity = {**made.parity, "precisions": smoke(made, states)}
    files = {
        path.relative_to(made.folder).as_posix(): digest_file(path)
        for path in sorted(made.folder.rglob("*"))
        if path.is_file() and path.name != EXPORT
    }
    made = replace(made, parity=parity, files=files)
    write_export(made)
    read_export(made.folder)  # what the reader refuses must never get its final name
    return made


def environment(*more: str) -> dict[str, object]:
    """Return the versions that a graph depends on."""
    packages = ("numpy", "onnx", "onnxruntime", *more)
    return {
        "cadenza": __version__,
        "python": python_version(),
        **{name: metadata.version(name) for name in packages},
    }


def sha256_of(value: object) -> str:
    """Return the digest of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
