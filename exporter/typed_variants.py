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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from engines.manifest import Graph
from engines.precision import FULL_PRECISION, Precision
from exporter.calibrate import Calibration, window_scales
from exporter.folder import Recipe
from exporter.graph import TAILS, with_tail
from exporter.graph_writer import GraphWriter
from exporter.quantize import Rounding, round_to_nearest
from exporter.simulation import rounded_core, simulation_graph
from exporter.typed import LARGEST, Form, bare, typed_graph
from exporter.typed_weights import typed_items
from exporter.variants import Core, check_calibration, check_kept, stored_family
from exporter.weights import Stored

if TYPE_CHECKING:
    import onnx

# Families of which nothing is quantized.
WHOLE_FAMILIES = ("fp16", "bf16")

# Families whose weights TensorRT fuses into its products also where they are inputs.
_BARE = ("fp16", "bf16", "int8", "fp8")


def rest_of(precision: Precision) -> str:
    """Return the type of what a precision does not quantize, by safetensors' name."""
    return {"fp32": "F32", "bf16": "BF16"}.get(precision.name, "F16")


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
            stored = stored_family(family, items, folder, families)
        for precision in members:
            for name, form in _forms(precision, rest, sites, calibration, recipe).items():
                core, simulated = cores[rest].graph, rounded[rest]
                if not whole:
                    core, simulated = typed_graph(core, form), simulation_graph(simulated, form)
                _write(writer, name, form, recipe.windows, stored, core, simulated)
    return writer.graphs, writer.family_bytes()


def _forms(
    precision: Precision,
    rest: str,
    sites: Mapping[str, str],
    calibration: Calibration,
    recipe: Recipe,
) -> dict[str, Form]:
    """Return the forms that a precision's graphs are written in, by what their ids begin with."""
    name = precision.name
    form = Form(
        precision=precision,
        rest=rest,
        sites=sites,
        order=calibration.sites,
        rotate=recipe.method.rotated,
    )
    if name == "nvfp4":
        return {name: replace(form, scales=window_scales(calibration, 1, recipe.clip, 1.0))}
    if name not in LARGEST:
        return {name: form}
    scales = window_scales(calibration, recipe.windows, recipe.clip, LARGEST[name])
    one = replace(form, scales=scales)
    if not precision.has_static_scales:
        return {name: one}
    return {name: replace(one, as_input=True), f"{name}.all": one}


def _write(
    writer: GraphWriter,
    stem: str,
    form: Form,
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
        made = {f"{stem}.{tail}": with_tail(graph, tail)}
        if form.precision.family in _BARE:
            made[f"{stem}.bare.{tail}"] = bare(with_tail(graph, tail))
        made[f"{stem}.sim.{tail}"] = with_tail(simulated, tail)
        for name, each in made.items():
            writer.write(name, each, stored, form.precision, everywhere, table)
