"""The graphs of TensorRT's precisions, and beside each the one that ONNX Runtime runs for it.

    fp16.serve            what TensorRT builds, its weights constants of the engine
    fp16.bare.serve       likewise, its matrices inputs: engines of a family share one allocation
    fp16.sim.serve        in float32, rounded as the others round (`exporter.simulation`)
    int8.serve            static activation scales of each window as an input
    int8.all.serve        one set of them, constants

`fp32` is the core graph itself, for both.  Needs no torch, once the core graphs are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engines.manifest import Graph
from engines.precision import FULL_PRECISION, Precision
from exporter.calibrate import Calibration, window_scales
from exporter.folder import WEIGHTS, Recipe
from exporter.graph import TAILS, with_tail
from exporter.graph_writer import GraphWriter
from exporter.quantize import Rounding, check_family, round_to_nearest
from exporter.simulation import rounded_core, simulation_graph
from exporter.typed import LARGEST, bare, typed_graph
from exporter.typed_weights import typed_items
from exporter.variants import Core, check_calibration, check_kept
from exporter.weights import Stored, read_header, write_family

if TYPE_CHECKING:
    import onnx

# Families of which nothing is quantized.
WHOLE_FAMILIES = ("fp16", "bf16")

# Families whose weights TensorRT fuses into its products also where they are inputs.
_BARE = ("fp16", "bf16", "int8", "fp8")


def rest_of(precision: Precision) -> str:
    """Return the type of what a precision does not quantize, by safetensors' name."""
    return {"fp32": "F32", "bf16": "BF16"}.get(precision.name, "F16")


@dataclass(frozen=True)
class _Form:
    """One set of scales of a precision: its graphs' ids begin so."""

    name: str
    scales: NDArray[np.float32] | None
    as_input: bool = False


def write_typed_variants(
    cores: Mapping[str, Core],
    precisions: Sequence[Precision],
    calibration: Calibration,
    recipe: Recipe,
    folder: Path,
    families: Mapping[str, Path],
    say: Callable[[str], None],
    rounding: Rounding = round_to_nearest,
    made: Mapping[str, Mapping[str, Stored]] | None = None,
) -> tuple[dict[str, Graph], dict[str, int]]:
    """Write all graphs and the weights that they need, and return them and the families' bytes.

    Args:
        cores: What they are made from, by the type of the rest; the weights of each are the
            checkpoint's own.
        precisions: Which ones; full precision among them.
        calibration: Ranges of activations, for static scales.
        recipe: Windows, clip, and blocks that are not quantized.
        folder: Written into; the checkpoint's weights are there.
        families: Weight files in the folder that are there already, by family.
        say: Told what is being written.
        rounding: How weights become integers, where they are not yet.
        made: Tensors of another file of a family, by family: what is quantized there is taken.

    Raises:
        InputError: As `exporter.variants.write_variants`; or a weight does not fit a precision.
    """
    full = cores["F32"]
    check_kept(recipe.keep, len({block for block, _ in full.sites.values()}))
    check_calibration(calibration, full, recipe)
    rotate = recipe.method.rotated
    sites = {name: site for name, (block, site) in full.sites.items() if block not in recipe.keep}
    rounded = {rest: rounded_core(core.graph, rest) for rest, core in cores.items()}
    writer = GraphWriter(folder)
    for family in dict.fromkeys(precision.family for precision in precisions):
        members = [precision for precision in precisions if precision.family == family]
        say(f"{', '.join(precision.name for precision in members)}: weights and graphs")
        if family == FULL_PRECISION.family:
            writer.both_tails(full.graph, full.tensors, FULL_PRECISION, recipe.windows)
            continue
        rest, whole = rest_of(members[0]), family in WHOLE_FAMILIES
        stored = full.tensors
        if not whole or any(each.kind != rest for each in stored.values()):
            quantized = {} if whole else sites
            before = (made or {}).get(family, {})
            items = typed_items(
                full.tensors, quantized, family, rest, rounding, rotate and not whole, before
            )
            file = families.get(family)
            if file is None:
                file = folder / WEIGHTS / f"{family}.safetensors"
                write_family(file, items)
            stored = read_header(file)
            check_family(stored, items, str(file))
        for precision in members:
            for form in _forms(precision, calibration, recipe):
                core, simulated = cores[rest].graph, rounded[rest]
                if not whole:
                    order = calibration.sites
                    how = (sites, precision, rest, order, form.scales, form.as_input, rotate)
                    core = typed_graph(core, *how)
                    simulated = simulation_graph(simulated, *how)
                _write(writer, form, precision, recipe.windows, stored, core, simulated)
    return writer.graphs, writer.family_bytes()


def _forms(precision: Precision, calibration: Calibration, recipe: Recipe) -> list[_Form]:
    """Return the sets of scales that a precision's graphs are written for."""
    name = precision.name
    if name == "nvfp4":
        largest = window_scales(calibration, 1, recipe.clip, 1.0)
        return [_Form(name, largest)]
    if name not in LARGEST:
        return [_Form(name, None)]
    scales = window_scales(calibration, recipe.windows, recipe.clip, LARGEST[name])
    if not precision.has_static_scales:
        return [_Form(name, scales)]
    return [_Form(name, scales, as_input=True), _Form(f"{name}.all", scales)]


def _write(
    writer: GraphWriter,
    form: _Form,
    precision: Precision,
    windows: int,
    stored: Mapping[str, Stored],
    graph: onnx.ModelProto,
    simulated: onnx.ModelProto,
) -> None:
    """Write the graphs of a form, each with both tails."""
    table = None
    if form.as_input:
        assert form.scales is not None
        table = tuple(tuple(float(value) for value in row) for row in form.scales)
    everywhere = tuple(range(windows))
    for tail in TAILS:
        made = {f"{form.name}.{tail}": with_tail(graph, tail)}
        if precision.family in _BARE:
            made[f"{form.name}.bare.{tail}"] = bare(with_tail(graph, tail))
        made[f"{form.name}.sim.{tail}"] = with_tail(simulated, tail)
        for name, each in made.items():
            writer.write(name, each, stored, precision, everywhere, table)
