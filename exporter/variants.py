"""The graphs of every precision from one: the core graph of a checkpoint, and its weights.

A *family* of weights is stored once, in a file that holds all that its graphs need; precisions and
windows add graphs of some kilobytes.  Needs no torch: export and every later recipe come through
here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engines.errors import InputError
from engines.manifest import Graph
from engines.precision import FULL_PRECISION, Precision
from exporter.calibrate import Calibration, window_scales
from exporter.folder import WEIGHTS, Recipe
from exporter.graph import linears, with_tail
from exporter.graph_writer import GraphWriter
from exporter.names import linear_from_key
from exporter.quantize import Rounding, check_family, quantized_items, round_to_nearest
from exporter.rewrite import int8_graph, simulated_graph
from exporter.weights import Item, Stored, read_header, write_family

if TYPE_CHECKING:
    import onnx


# A site's range below it has no scale that a float could divide by.
_SMALLEST_RANGE = 1e-30


@dataclass(frozen=True, kw_only=True)
class Core:
    """A checkpoint as a graph and the place of its weights.

    Attributes:
        graph: The graph with the trace tail.
        tensors: Where its weights lie, inside the folder that is written, by name.
        sites: (block, site) of each weight that can be quantized, by name.
    """

    graph: onnx.ModelProto
    tensors: Mapping[str, Stored]
    sites: Mapping[str, tuple[int, str]]

    @classmethod
    def of(cls, graph: onnx.ModelProto, tensors: Mapping[str, Stored], architecture: str) -> Core:
        """Return the core of a graph; weights are recognized by their names."""
        found = {
            linear.weight: linear_from_key(architecture, linear.weight)
            for linear in linears(graph)
        }
        return cls(
            graph=graph,
            tensors=tensors,
            sites={name: place for name, place in found.items() if place is not None},
        )


def stored_weights(folder: Path, files: Sequence[str]) -> dict[str, Stored]:
    """Return where every tensor of some weight files of a folder lies.

    Args:
        folder: The export.
        files: The checkpoint's own, in which names are unique: families have tensors of the same
            names.

    Raises:
        InputError: A file is damaged.
    """
    tensors: dict[str, Stored] = {}
    for file in files:
        tensors |= read_header(folder / file)
    return tensors


def check_kept(keep: Sequence[int], blocks: int) -> None:
    """Check that the blocks that stay in fp32 are there.

    Raises:
        InputError: One is not.
    """
    if keep and max(keep) >= blocks:
        raise InputError(
            f"block {max(keep)} cannot be kept, there are {blocks} blocks; name one below that"
        )


def stored_family(
    family: str, items: Sequence[Item], folder: Path, families: Mapping[str, Path]
) -> dict[str, Stored]:
    """Return where a family's tensors lie; its file is written where it is not there already.

    Args:
        family: Its name.
        items: What its file must hold.
        folder: Written into.
        families: Files in the folder that are there already, by family.

    Raises:
        InputError: A file that is there does not hold the items.
    """
    file = families.get(family)
    if file is None:
        file = folder / WEIGHTS / f"{family}.safetensors"
        write_family(file, items)
    stored = read_header(file)
    check_family(stored, items, str(file))
    return stored


def write_variants(
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
        cores: What they are made from, under "F32".
        precisions: Which ones.
        calibration: Ranges of activations, for int8.
        recipe: Windows, clip, and blocks that stay in fp32.
        folder: Written into; the core's own weights are there.
        families: Weight files in the folder that are there already, by family.
        say: Told what is being written.
        rounding: How weights become integers, where they are not yet.
        made: Tensors of another file of a family, by family: their integers are taken.

    Raises:
        InputError: The recipe keeps a block that is not there, a window was never calibrated, or
            a family's file or the calibration is not of this model and recipe.
    """
    core = cores["F32"]
    check_kept(recipe.keep, len({block for block, _ in core.sites.values()}))
    check_calibration(calibration, core, recipe)
    rotate = recipe.method.rotated
    sites = {name: site for name, (block, site) in core.sites.items() if block not in recipe.keep}
    writer = GraphWriter(folder)
    for family in dict.fromkeys(precision.family for precision in precisions):
        members = [precision for precision in precisions if precision.family == family]
        say(f"{', '.join(precision.name for precision in members)}: weights and graphs")
        if family == FULL_PRECISION.family:
            stored = dict(core.tensors)
        else:
            bits, before = int(members[0].weight_bits), (made or {}).get(family, {})
            items = quantized_items(core.tensors, sites, bits, family, rounding, rotate, before)
            stored = stored_family(family, items, folder, families)
        for precision in members:
            if precision == FULL_PRECISION:
                writer.both_tails(core.graph, stored, precision, recipe.windows)
            elif precision.simulated:
                graph = simulated_graph(core.graph, sites, precision, recipe.clip, rotate)
                writer.both_tails(graph, stored, precision, recipe.windows)
            else:
                scales = window_scales(calibration, recipe.windows, recipe.clip)
                order = calibration.sites
                _write_int8(writer, core, sites, order, scales, stored, precision, rotate)
    return writer.graphs, writer.family_bytes()


def check_calibration(calibration: Calibration, core: Core, recipe: Recipe) -> None:
    """Check that the ranges are of the sites that are rounded, as they are rounded.

    Raises:
        InputError: They are not.
    """
    missing = sorted({site for _, site in core.sites.values()} - set(calibration.sites))
    if missing:
        raise InputError(f"the calibration lacks the site {missing[0]}; export again")
    silent = calibration.absmax.max(0) < _SMALLEST_RANGE
    if silent.any():
        site = calibration.sites[int(silent.argmax())]
        raise InputError(f"the calibration has no range for the site {site}; export again")
    rotated = "rotated" if calibration.rotated else "plain"
    if calibration.rotated != recipe.method.rotated:
        raise InputError(
            f"the calibration has the ranges of {rotated} activations, which {recipe.quantizer} "
            f"does not round; export again with --quantizer {recipe.quantizer}"
        )


def _write_int8(
    writer: GraphWriter,
    core: Core,
    sites: Mapping[str, str],
    order: Sequence[str],
    scales: NDArray[np.float32],
    stored: Mapping[str, Stored],
    precision: Precision,
    rotate: bool,
) -> None:
    """Write the graph whose scales are an input, one for each window, and one for them all."""
    windows = len(scales)
    table = tuple(tuple(float(value) for value in row) for row in scales)
    shared = int8_graph(core.graph, sites, order, None, rotate)
    writer.both_tails(shared, stored, precision, windows, scales=table)
    for window, row in enumerate(scales):
        graph = int8_graph(core.graph, sites, order, row, rotate)
        name = f"{precision.name}.w{window}.serve"
        writer.write(name, with_tail(graph, "serve"), stored, precision, (window,))
    everywhere = int8_graph(core.graph, sites, order, scales.max(0), rotate)
    writer.both_tails(everywhere, stored, precision, windows, name=f"{precision.name}.all")
