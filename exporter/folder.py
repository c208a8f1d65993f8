"""An EXPORT folder as values, read without torch or onnx.

export.json                what is below, and what made it
fp32.serve.onnx ...        graphs; GRAPH.TAIL.onnx, kilobytes each
weights/*.safetensors      the checkpoint's own files and one more for each quantized family
tokenizer/tokenizer.json
calibration.json           ranges of activations as they are rounded (rotated, if they are), from
                           which other recipes are made
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from engines.document import Document, document_from_text
from engines.errors import InputError
from engines.files import FileEntry, check_files
from engines.manifest import Graph, Shape
from engines.model import ModelInfo
from engines.parse import (
    files_from_document,
    graph_from_document,
    model_from_document,
    precisions_from_document,
    sampler_from_document,
    shape_from_document,
)
from engines.precision import Precision
from engines.schedule import SamplerConfig

FORMAT = "cadenza-export/1"
EXPORT, CALIBRATION = "export.json", "calibration.json"
REFERENCE = "reference.safetensors"
WEIGHTS, TOKENIZER = "weights", "tokenizer"


@dataclass(frozen=True, slots=True)
class Quantizer:
    """A way to make integers of weights.

    Attributes:
        name: What `--quantizer` calls it.
        says: What it does, in half a sentence.
        calibrated: Whether it looks at activations of denoising states.
        rotated: Whether activations and weights are rotated before they are rounded.
    """

    name: str
    says: str
    calibrated: bool
    rotated: bool


QUANTIZERS = (
    Quantizer("rtn", "each weight to the nearest", calibrated=False, rotated=False),
    Quantizer(
        "gptq",
        "in order, each error made good by the weights that follow, for the activations of "
        "denoising states",
        calibrated=True,
        rotated=False,
    ),
    Quantizer(
        "gptq-hadamard",
        "as gptq, after a rotation that spreads outliers of activations over many channels",
        calibrated=True,
        rotated=True,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All choices that decide the graphs of a checkpoint, apart from their precisions.

    Attributes:
        windows: Parts of progress with activation scales of their own.
        clip: Share of the largest activation that still fits; above it activations saturate.
        keep: Blocks that stay in fp32 in every quantized graph.
        quantizer: How weights are rounded: the name of one of `QUANTIZERS`.
    """

    windows: int = 6
    clip: float = 1.0
    keep: tuple[int, ...] = ()
    quantizer: str = QUANTIZERS[0].name

    def __post_init__(self) -> None:
        if self.windows < 1:
            raise ValueError(f"windows >= 1 must hold, got {self.windows}")
        if not 0.0 < self.clip <= 1.0:
            raise ValueError(f"0 < clip <= 1 must hold, got {self.clip}")
        names = [quantizer.name for quantizer in QUANTIZERS]
        if self.quantizer not in names:
            raise ValueError(
                f"quantizer must be one of {', '.join(names)}, got {self.quantizer!r}"
            )
        if tuple(sorted(set(self.keep))) != self.keep or min(self.keep, default=0) < 0:
            raise ValueError(f"keep must be ascending block numbers, got {self.keep}")

    @property
    def method(self) -> Quantizer:
        """What the quantizer is."""
        return next(each for each in QUANTIZERS if each.name == self.quantizer)


@dataclass(frozen=True, kw_only=True)
class ExportTask:
    """A task that the export was calibrated on."""

    sampler: SamplerConfig
    says: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Export:
    """Everything that export.json says.

    Attributes:
        folder: Where it lies.
        model: Identity of the model.
        sampler: Default settings.
        tasks: The tasks it was calibrated on.
        target: Where the graphs are meant to run.
        shape: Declared ranges of batch and prompt.
        precisions: By name.
        families: Bytes of stored weights by family.
        graphs: By id: `PRECISION.TAIL`, `int8.wN.serve` for the windows' own graphs and
            `int8.all.TAIL` for the one set of scales; those of TensorRT as
            `exporter.typed_variants` says.
        recipe: What decided the graphs.
        parity: How the graphs compared with the framework.
        environment: What made it.
        request: Digest of the command that made it; the same command again changes nothing.
        files: Every other file with sha256 and bytes.
    """

    folder: Path
    model: ModelInfo
    sampler: SamplerConfig
    tasks: Mapping[str, ExportTask]
    target: str
    shape: Shape
    precisions: Mapping[str, Precision]
    families: Mapping[str, int]
    graphs: Mapping[str, Graph]
    recipe: Recipe
    parity: Mapping[str, object]
    environment: Mapping[str, object]
    request: str
    files: Mapping[str, FileEntry] = field(default_factory=dict)

    @property
    def windows(self) -> int:
        """Windows with activation scales of their own."""
        return self.recipe.windows

    @property
    def tokenizer(self) -> Path:
        """The tokenizer's file."""
        return self.folder / TOKENIZER / "tokenizer.json"

    def path(self, graph: str) -> Path:
        """Return the file of a graph.

        Raises:
            InputError: There is no such graph; lists those there are.
        """
        if graph not in self.graphs:
            raise InputError(
                f"{self.folder} has no graph {graph!r}, only {', '.join(self.graphs)}; export "
                f"again with --precision {graph.partition('.')[0]}"
            )
        return self.folder / self.graphs[graph].file


def stands_in(graph: str) -> bool:
    """Return whether a graph stands in, in ONNX Runtime, for one that TensorRT builds."""
    return ".sim." in graph


def is_export(folder: Path) -> bool:
    """Return whether a folder looks like an export, whole or not."""
    return (folder / EXPORT).is_file()


def read_export(folder: Path, verify: bool = False) -> Export:
    """Return the export in a folder, every path and size checked.

    Args:
        folder: Where it lies.
        verify: Check the digest of every file too.

    Raises:
        InputError: It is no export, of another version, damaged, or names a path outside.
    """
    file = folder / EXPORT
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"{str(folder)!r} is no export: cannot read {EXPORT} ({error}); make one with: "
            f"cadenza export MODEL -o {folder}"
        ) from error
    export = _export_from_document(document_from_text(text, str(file)), folder)
    try:
        check_files(folder, export.files, digests=verify)
    except InputError as error:
        raise InputError(
            f"the export {str(folder)!r} is damaged: {error}; export again"
        ) from error
    return export


def write_export(export: Export) -> None:
    """Write export.json into the export's folder."""
    plain = {
        "format": FORMAT,
        "cadenza": export.environment.get("cadenza"),
        "model": asdict(export.model),
        "sampler": export.sampler.to_json(),
        "tasks": {
            name: {**asdict(task), "sampler": task.sampler.to_json()}
            for name, task in export.tasks.items()
        },
        "windows": export.windows,
        "target": export.target,
        "shape": asdict(export.shape),
        "precisions": [asdict(precision) for precision in export.precisions.values()],
        "families": {name: {"bytes": size} for name, size in export.families.items()},
        "graphs": {name: asdict(graph) for name, graph in export.graphs.items()},
        "recipe": asdict(export.recipe),
        "parity": dict(export.parity),
        "environment": dict(export.environment),
        "request": export.request,
        "files": {path: asdict(entry) for path, entry in export.files.items()},
    }
    text = json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False)
    (export.folder / EXPORT).write_text(text + "\n", encoding="utf-8")


def _export_from_document(top: Document, folder: Path) -> Export:
    if top["format"].text().partition(".")[0] != FORMAT:
        top["format"].fail(f"is not {FORMAT!r}; export again with this version of Cadenza")
    export = Export(
        folder=folder,
        model=model_from_document(top["model"]),
        sampler=sampler_from_document(top["sampler"]),
        tasks={
            name: ExportTask(
                sampler=sampler_from_document(task["sampler"]),
                says=task["says"].text(),
                source=task["source"].name(),
            )
            for name, task in top["tasks"].items()
        },
        target=top["target"].name(),
        shape=shape_from_document(top["shape"]),
        precisions=precisions_from_document(top["precisions"]),
        families={name: family["bytes"].integer() for name, family in top["families"].items()},
        graphs={name: graph_from_document(graph) for name, graph in top["graphs"].items()},
        recipe=_recipe(top["recipe"]),
        parity=top["parity"].mapping(),
        environment=top["environment"].mapping(),
        request=top["request"].name(),
        files=files_from_document(top["files"]),
    )
    for name, graph in export.graphs.items():
        for path in (graph.file, *graph.weights):
            if path not in export.files:
                top["graphs"][name].fail(f"{path!r} is not listed under 'files'; export again")
        if graph.precision not in export.precisions:
            top["graphs"][name].fail(
                f"has the unknown precision {graph.precision!r}; export again"
            )
    return export


def _recipe(recipe: Document) -> Recipe:
    try:
        return Recipe(
            windows=recipe["windows"].integer(1),
            clip=recipe["clip"].number(),
            keep=tuple(block.integer() for block in recipe["keep"].entries()),
            quantizer=recipe["quantizer"].name(),
        )
    except ValueError as error:
        recipe.fail(f"{error}; export again")
