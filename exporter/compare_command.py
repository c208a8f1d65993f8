"""`cadenza compare`: the first layer of a graph whose output differs, across runners."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from engines.errors import CadenzaError, InputError
from engines.terminal import command_parser, emit, emit_json, run_command, table
from exporter.compare import Row, first_difference, largest_jump
from exporter.compare_pairs import CompareConfig, Compared, compare

_EXAMPLES = """\
examples:
  cadenza compare EXPORT
  cadenza compare EXPORT --precision int8 --window 5 --all
  cadenza compare EXPORT --precision fp8 --runner ort --json | python -m json.tool
  cadenza compare EXPORT --runner tensorrt          on a machine with a GPU

Each layer runs alone, given what the other graph's layer was given, so that the layer named is
where the error is made; `run` is the error of the whole run.  A layer differs where it is off by
more than its arithmetic explains: rounding to its type, a sum of K products in another order, and
the step of what it is quantized to; NaN and infinity always.  Exit code 1 where one does.
Marked as outputs, tensors keep kernels from being fused, so the logits are compared without, too.
TensorRT's layers are not run alone: theirs is the error of the whole run.
"""


def main(argv: Sequence[str]) -> int:
    """Run `argv`, the command's name and its arguments, and return the exit code."""
    if not argv or argv[0] != "compare":
        raise ValueError(f"the command is compare, got {list(argv)}")
    return run_command(_parser(), _compare, argv[1:])


def _parser() -> argparse.ArgumentParser:
    defaults = CompareConfig(export=Path())
    parser = command_parser(
        "compare",
        "Run the graphs of an export on real denoising states across runners, layer by layer, and "
        "name the first layer whose output differs: quantized against full precision, rewritten "
        "against as it stands, what TensorRT builds against what stands in for it.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add("path", metavar="EXPORT", type=Path, help="what cadenza export wrote")
    add("--precision", action="append", metavar="P", help="only these; repeat, or use commas")
    add(
        "--runner",
        action="append",
        metavar="R",
        help="ort, ONNX Runtime; simulation, the graphs that stand in for TensorRT's, rewritten "
        "against as they stand; tensorrt, against those on a GPU (default: all that can run here)",
    )
    add("--window", metavar="W", type=int, help="only rows of this window, counted from 0")
    add(
        "--tolerance",
        metavar="R",
        type=float,
        help="relative, of every layer (default: what its arithmetic explains)",
    )
    add(
        "--limit",
        metavar="N",
        type=int,
        default=defaults.limit,
        help=f"denoising states (default: {defaults.limit})",
    )
    add(
        "--seed",
        metavar="S",
        type=int,
        help="random states in place of the export's own; activations may saturate there, where "
        "scales were calibrated on real ones",
    )
    add("--all", action="store_true", help="show every layer")
    add("--json", action="store_true", help="as one JSON object on stdout")
    return parser


def _compare(args: argparse.Namespace) -> int:
    try:
        config = CompareConfig(
            export=args.path,
            precisions=_names(args.precision),
            runners=_names(args.runner),
            window=args.window,
            tolerance=args.tolerance,
            limit=args.limit,
            seed=args.seed,
        )
    except ValueError as error:
        raise InputError(f"{error}; see cadenza compare --help") from error
    found = compare(config, lambda text: print(text, file=sys.stderr, flush=True))
    if args.json:
        emit_json({"kind": "compare", "export": str(args.path), "pairs": list(map(_plain, found))})
    else:
        emit("\n\n".join(_told(each, args.all) for each in found))
    rows = [row for each in found if each.answer is not None for row in each.answer.rows]
    return CadenzaError.exit_code if first_difference(rows) is not None else 0


def _names(given: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for value in given or () for name in value.split(",")))


def _told(each: Compared, every: bool) -> str:
    """Return what to say of a pair to people."""
    if each.answer is None:
        return f"{each.says}: not compared: {each.why}"
    rows = each.answer.rows
    first, jump = first_difference(rows), largest_jump(rows)
    many = sum(row.differs for row in rows)
    parts = []
    if first is None:
        parts.append(f"{each.says}: all {len(rows)} layers agree, {each.answer.states} states")
    else:
        parts.append(f"{each.says}: {many} of {len(rows)} layers differ; the first:")
        parts.append("  " + _layer(first))
    if jump is not None and jump is not first:
        parts.append("  most is added by " + _layer(jump))
    outputs = each.answer.outputs
    parts.append(
        f"  logits, nothing marked: relative {outputs.relative:.3g}, cosine {outputs.cosine:.6f}"
    )
    if every:
        header = ("layer", "place", "absolute", "relative", "cosine", "allowed", "run", "")
        lines = [
            (
                f"{row.layer.node} ({row.layer.op})",
                row.layer.place,
                row.alone.absolute,
                row.alone.relative,
                f"{row.alone.cosine:.6f}",
                row.tolerance,
                row.run,
                "differs" if row.differs else "",
            )
            for row in rows
        ]
        parts.append(table(header, lines))
    return "\n".join(parts)


def _layer(row: Row) -> str:
    layer, found = row.layer, row.alone
    weight = f", {layer.weight}" if layer.weight else ""
    return (
        f"{layer.place}: {layer.op} {layer.node!r} makes {layer.tensor!r}{weight}: absolute "
        f"{found.absolute:.3g}, relative {found.relative:.3g} where {row.tolerance:.3g} is "
        f"explained, cosine {found.cosine:.6f}; the whole run until there {row.run:.3g}"
    )


def _plain(each: Compared) -> dict[str, object]:
    """Return a pair as plain data; what is no number is null."""
    rows = () if each.answer is None else each.answer.rows
    first, jump = first_difference(rows), largest_jump(rows)
    return {
        "precision": each.precision,
        "pair": each.says,
        "compared": each.answer is not None,
        "why_not": each.why or None,
        "agrees": each.answer is not None and first is None,
        "states": 0 if each.answer is None else each.answer.states,
        "first": None if first is None else _plain_row(first),
        "most": None if jump is None else _plain_row(jump),
        "outputs": None if each.answer is None else _numbers(asdict(each.answer.outputs)),
        "layers": [_plain_row(row) for row in rows],
    }


def _plain_row(row: Row) -> dict[str, object]:
    return {
        **asdict(row.layer),
        **_numbers(asdict(row.alone)),
        **_numbers({"run": row.run, "tolerance": row.tolerance}),
        "differs": row.differs,
    }


def _numbers(given: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in given.items()}
