"""`cadenza inspect EXPORT --gemms`: the products of a pass, and the roofs they lie under."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.files import regular_file
from engines.gpus import GPUS, Gpu, format_from_precision, gpu_from_name
from engines.precision import EXECUTED, FULL_PRECISION, Precision
from engines.terminal import command_parser, emit, emit_json, run_command, size, table
from exporter.folder import EXPORT, Export, read_export
from exporter.gemms import Pass, Product, pass_from_file
from tuner.roofline import HALF, INT8, WEIGHT_ONLY, Predicted, pays, predict, side

_EXAMPLES = """\
examples:
  cadenza inspect EXPORT --gemms
  cadenza inspect EXPORT --gemms --gpu 'RTX 4090' --batch 1 --length 512
  cadenza inspect EXPORT --gemms --gpu t4 --json | python -m json.tool

Nothing is run: shapes come from the full-precision graph, a GPU's rates from published documents,
and latencies are predicted, not measured.
"""

# Further precisions that a GPU's user may build, told beside those of the export.
_FURTHER = (HALF, WEIGHT_ONLY, INT8, EXECUTED["fp8"])


@dataclass(frozen=True, slots=True)
class Row:
    """Products of one shape.

    Attributes:
        product: One of them; they differ in their names alone.
        layers: How many there are.
    """

    product: Product
    layers: int


def main(argv: Sequence[str]) -> int:
    """Run `argv`, inspect and its arguments with `--gemms`, and return the exit code."""
    if not argv or argv[0] != "inspect":
        raise ValueError(f"the command is inspect, got {list(argv)}")
    return run_command(_parser(), _gemms, argv[1:])


def rows_from_pass(work: Pass) -> list[Row]:
    """Return the products of a pass by their shapes, in the order of the graph."""
    counts: dict[tuple[object, ...], list[Product]] = {}
    for each in work.products:
        key = (each.kind, each.k, each.n, each.m, each.count, each.reads, each.quantized)
        counts.setdefault(key, []).append(each)
    return [Row(products[0], len(products)) for products in counts.values()]


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "inspect",
        "Show the matrix products of one pass of an export by shape: how many, their operations "
        "and bytes, and under which roof of a GPU they lie, arithmetic or memory.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add("path", metavar="EXPORT", type=Path, help="what cadenza export wrote")
    add("--gemms", action="store_true", required=True, help="show products, not the folder")
    names = ", ".join(gpu.name for gpu in GPUS)
    add("--gpu", metavar="NAME", help=f"predict for this GPU: {names}")
    add("--batch", metavar="B", type=int, help="rows (default: as the export declares)")
    add(
        "--length",
        metavar="L",
        type=int,
        help="tokens of a row, prompt and answer (default: as the export declares)",
    )
    add(
        "--asked",
        metavar="M",
        type=int,
        help="positions of a row whose tokens are asked for (default: a block)",
    )
    add("--json", action="store_true", help="as one JSON object on stdout")
    return parser


def _gemms(args: argparse.Namespace) -> int:
    gpu = None if args.gpu is None else gpu_from_name(args.gpu)
    folder: Path = args.path.parent if args.path.name == EXPORT else args.path
    export = read_export(folder)
    graph = f"{FULL_PRECISION.name}.serve"
    export.path(graph)  # or the error that says what to export
    file = regular_file(export.folder, export.graphs[graph].file)
    sampler, shape = export.sampler, export.shape
    length = shape.prompt[1] + sampler.gen_length if args.length is None else args.length
    asked = min(sampler.block_length, length) if args.asked is None else args.asked
    batch = shape.batch[1] if args.batch is None else args.batch
    work = pass_from_file(file, batch, length, asked)
    precisions = _precisions(export, gpu)
    predicted = [] if gpu is None else [predict(work, gpu, each) for each in precisions]
    if args.json:
        emit_json(_plain(export, work, precisions, gpu, predicted))
    else:
        emit(_told(export, work, precisions, gpu, predicted))
    return 0


def _precisions(export: Export, gpu: Gpu | None) -> list[Precision]:
    """Return what to tell of: the export's executed precisions, and what else the GPU takes."""
    own = [each for each in export.precisions.values() if not each.simulated]
    if gpu is None:
        return own
    names = {each.name for each in own}
    both = [*own, *(each for each in _FURTHER if each.name not in names)]
    return [each for each in both if gpu.peak(format_from_precision(each)) is not None]


def _told(
    export: Export,
    work: Pass,
    precisions: Sequence[Precision],
    gpu: Gpu | None,
    predicted: Sequence[Predicted],
) -> str:
    """Return the tables for people."""
    rows = rows_from_pass(work)
    header = ("product", "M", "K", "N", "each", "layers", "operations")
    lines = [(*_shape(row), *(_moved(row, each, gpu) for each in precisions)) for row in rows]
    parts = [
        f"one pass of {export.folder} at batch {work.batch}, {work.length} tokens, {work.asked} "
        f"asked: {work.operations / 1e9:.4g} G operations in {len(work.products)} products, "
        f"{len(work.groups)} kernels between them",
        table((*header, *(each.name for each in precisions)), lines),
        "At each precision: bytes of all these layers, operations a byte"
        + ("." if gpu is None else f", and the roof of {gpu.name} that they lie under."),
    ]
    left_out = [each.name for each in export.precisions.values() if each.simulated]
    if left_out:
        parts.append(f"Simulated precisions compute in fp32: {', '.join(left_out)} left out.")
    if gpu is not None:
        parts += _predictions(work, gpu, predicted)
    return "\n\n".join(parts)


def _shape(row: Row) -> tuple[str | int, ...]:
    product = row.product
    kind = f"{product.kind}, quantized" if product.quantized else product.kind
    operations = f"{row.layers * product.operations / 1e6:.4g} M"
    return (kind, product.m, product.k, product.n, product.count, row.layers, operations)


def _moved(row: Row, precision: Precision, gpu: Gpu | None) -> str:
    moved = size(round(row.layers * row.product.bytes(precision)))
    roof = "" if gpu is None else f" {side(row.product, gpu, precision)}"
    return f"{moved} {row.product.intensity(precision):.3g}{roof}"


def _predictions(work: Pass, gpu: Gpu, predicted: Sequence[Predicted]) -> list[str]:
    rows = [
        (
            each.precision,
            each.latency_ms,
            each.compute_ms,
            each.memory_ms,
            each.launch_ms,
            each.kernels,
            f"{each.bound}, {100 * each.shares[each.bound]:.0f} %",
        )
        for each in predicted
    ]
    header = ("precision", "ms", "arithmetic", "memory", "launches", "kernels", "most of it")
    derived = f"; {', '.join(gpu.derived)} derived" if gpu.derived else ""
    return [
        f"predicted on {gpu.name}, not measured (rates: {gpu.source}{derived})\n"
        + table(header, rows),
        pays(work, gpu),
    ]


def _plain(
    export: Export,
    work: Pass,
    precisions: Sequence[Precision],
    gpu: Gpu | None,
    predicted: Sequence[Predicted],
) -> dict[str, object]:
    """Return the same as plain data."""
    return {
        "kind": "gemms",
        "path": str(export.folder),
        "batch": work.batch,
        "length": work.length,
        "asked": work.asked,
        "operations": work.operations,
        "groups": len(work.groups),
        "products": [
            {
                "kind": row.product.kind,
                "m": row.product.m,
                "k": row.product.k,
                "n": row.product.n,
                "each": row.product.count,
                "layers": row.layers,
                "quantized": row.product.quantized,
                "operations": row.layers * row.product.operations,
                "precisions": {
                    each.name: {
                        "weight_bytes": row.layers * row.product.weight_bytes(each),
                        "activation_bytes": row.layers * row.product.activation_bytes(each),
                        "intensity": row.product.intensity(each),
                        "bound": None if gpu is None else side(row.product, gpu, each),
                    }
                    for each in precisions
                },
            }
            for row in rows_from_pass(work)
        ],
        "gpu": None if gpu is None else {"name": gpu.name, "source": gpu.source},
        "predicted": [each.to_json() for each in predicted],
        "pays": None if gpu is None else pays(work, gpu),
    }
