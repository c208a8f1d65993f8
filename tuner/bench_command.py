"""`cadenza bench`: what a bundle does at each batch, or how long an export's passes take."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.build import open_cache
from engines.document import document_from_text
from engines.errors import CadenzaError, InputError
from engines.manifest import MANIFEST
from engines.overview import EXPORT
from engines.targets import target_from_name
from engines.terminal import (
    can_show,
    command_parser,
    emit,
    emit_json,
    legend,
    plain,
    run_command,
    strip,
    table,
)
from tuner import bench_bundle, bench_export
from tuner.bench_bundle import SHIPS
from tuner.bench_config import BenchConfig, ranges_from_text
from tuner.folder import write_json
from tuner.latencies import FORMAT

_EXAMPLES = """\
examples:
  cadenza bench BUNDLE
  cadenza bench BUNDLE --task edit --shape batch=1:8:16 --seconds 20
  cadenza bench BUNDLE --input prompts.jsonl --json > speed.json
  cadenza bench EXPORT --target rtx-sm89 --output latencies.json
  cadenza tune EXPORT --target rtx-sm89 --latencies latencies.json -o BUNDLE

Of a bundle, for each task and each batch (powers of two up to the most declared): answer tokens a
second (all committed ones), how long a sequence takes (p50, p95, p99), passes, and peak memory, of
the schedule that ships and of each uniform schedule of the bundle's engines, all measured in turns
in one run; memory in a process of its own for each.  Intervals are 95 %.  A quantile is told where
the sample is large enough to have it: a p95 takes 72 generations, a p99 368.  The fastest uniform
schedule is that whatever its quality; cadenza eval tells quality.  An interrupted bench goes on
where it was; a finished one measures anew.

Of an export: milliseconds of a pass of each precision at the export's best shape.  This is the
file that cadenza tune --latencies reads, for targets of TensorRT (rtx-*, trt): build and measure
on the machine with the GPU, tune anywhere.  For cpu and cuda it is for reading alone, for tune
times those itself and takes no file.
"""

Json = dict[str, Any]

_HEADER = (
    *("batch", "schedule", "tokens/s", "95 %", "p50 ms", "95 %", "p95 ms", "p99 ms"),
    *("passes", "MiB", "ships/this", "95 %"),
)


def main(argv: Sequence[str]) -> int:
    """Run `argv`, bench and its arguments, and return the exit code."""
    if not argv or argv[0] != "bench":
        raise ValueError(f"the command is bench, got {list(argv)}")
    return run_command(_parser(), _bench, argv[1:])


def _parser() -> argparse.ArgumentParser:
    defaults = BenchConfig(path=Path())
    parser = command_parser(
        "bench",
        "Measure a bundle's throughput, latency and memory at each batch, or the latency of a "
        "pass of every precision of an export.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add("path", metavar="BUNDLE|EXPORT", type=Path, help="what cadenza tune or export wrote")
    add("--target", metavar="T", help="where to run (default: cpu, or the folder's own)")
    add(
        "--shape",
        metavar="batch=MIN:OPT:MAX,prompt=MIN:OPT:MAX",
        help="batches from MIN to MAX, prompts of OPT tokens (default: as declared); of an "
        "export OPT of both",
    )
    add("--batch", metavar="N", type=int, action="append", help="only this batch; repeat")
    add("--task", metavar="T", action="append", help="only this task; repeat (default: all)")
    add(
        "--input",
        metavar="FILE.jsonl",
        type=Path,
        help='prompts in place of random tokens, a line each: {"prompt": ..., "task": ...}; the '
        "task is optional",
    )
    add(
        "--seconds",
        metavar="S",
        type=float,
        default=defaults.seconds,
        help="about how long each measurement takes, at least 9 rounds (default: %(default)s)",
    )
    add("--repeats", metavar="N", type=int, help="rounds, whatever they take (default: S decides)")
    add(
        "--threads",
        metavar="N",
        type=int,
        default=defaults.threads,
        help="threads of a pass (default: as the bundle says; of an export every core)",
    )
    add("--seed", metavar="N", type=int, default=defaults.seed, help="(default: %(default)s)")
    add("--cache", metavar="DIR", type=Path, help="folder of engines and measurements")
    add("-o", "--output", metavar="FILE.json", type=Path, help="write what --json prints there")
    add("--force", action="store_true", help="replace a file at the output")
    add("--json", action="store_true", help="as one JSON object on stdout")
    return parser


def _bench(args: argparse.Namespace) -> int:
    config = _config(args)
    is_export = _is_export(config.path)
    if args.output is not None:
        _check_output(args.output, args.force)
    cache = open_cache(args.cache, os.environ)
    try:
        if is_export:
            target = target_from_name(config.target or _own_target(config.path))
            found = bench_export.bench_export(config, target, cache, _say)
            told = _export_table(found)
        else:
            found = bench_bundle.bench_bundle(config, cache, _say)
            told = _bundle_tables(found, not can_show(sys.stdout, "▁█"))
    except KeyboardInterrupt:
        if not is_export:
            _say("what was finished is kept; the same command goes on from there")
        raise
    if args.output is not None:
        try:
            write_json(args.output, found)
        except OSError as error:
            raise InputError(
                f"cannot write {str(args.output)!r}: {error.strerror}; choose another --output"
            ) from error
    if args.json:
        emit_json(found)
        return 0
    emit(told)
    if is_export and target.ahead:
        file = "FILE" if args.output is None else args.output
        how = " (write it with --output FILE)" if args.output is None else ""
        emit(
            f"next: cadenza tune {config.path} --target {target.name} --latencies {file} -o BUNDLE"
            f"{how}"
        )
    return 0


def _config(args: argparse.Namespace) -> BenchConfig:
    ranges = {} if args.shape is None else ranges_from_text(args.shape)
    try:
        return BenchConfig(
            path=args.path.parent if args.path.name in (MANIFEST, EXPORT) else args.path,
            target=args.target,
            batch=ranges.get("batch"),
            prompt=ranges.get("prompt"),
            batches=tuple(args.batch or ()),
            tasks=tuple(args.task or ()),
            input=args.input,
            seconds=args.seconds,
            repeats=args.repeats,
            threads=args.threads,
            seed=args.seed,
        )
    except ValueError as error:
        raise InputError(f"{error}; see cadenza bench --help") from error


def _is_export(folder: Path) -> bool:
    """Return whether a folder holds an export, else a bundle.

    Raises:
        InputError: It holds neither.
    """
    if (folder / MANIFEST).exists():
        return False
    if not (folder / EXPORT).exists():
        raise InputError(
            f"{str(folder)!r} is neither a bundle (no {MANIFEST}) nor an export (no {EXPORT}); "
            f"give what cadenza tune or cadenza export wrote"
        )
    return True


def _own_target(folder: Path) -> str:
    from exporter.folder import read_export

    return read_export(folder).target


def _check_output(file: Path, force: bool) -> None:
    """Check before anything is measured that a file may be written.

    Raises:
        InputError: It may not.
    """
    if not os.path.lexists(file):  # of a name that is too long too
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(prefix=f".{file.name[:100]}.", dir=file.parent):
                file.exists()  # a name that is too long fails here
        except (OSError, ValueError) as error:
            says = getattr(error, "strerror", None) or error
            raise InputError(
                f"cannot write {str(file)!r}: {says}; choose another --output"
            ) from error
        return
    if not file.is_file():
        raise InputError(f"{str(file)!r} is not a file; choose another --output")
    if not force:
        raise InputError(
            f"{str(file)!r} is there already; give --force to replace it, or choose another "
            f"--output"
        )
    try:
        top = document_from_text(file.read_text(encoding="utf-8"), str(file))
        ours = top["format"].text() in (FORMAT, bench_bundle.FORMAT)
    except (CadenzaError, OSError, UnicodeDecodeError):
        ours = False
    if not ours:
        raise InputError(
            f"{str(file)!r} was not written by cadenza bench, so it is left as it is; choose "
            f"another --output"
        )


def _bundle_tables(found: Json, ascii_: bool) -> str:
    """Return what a bundle does for people: a table for each kind of task."""
    tasks: Mapping[str, Json] = found["tasks"]
    parts = [
        f"{plain(found['path'])} on {found['target']}, {plain(found['device'])}; "
        + (
            f"prompts of {found['prompt']} tokens"
            if found["input"] is None
            else f"prompts of {plain(found['input'])}"
        )
    ]
    small: dict[str, int] = {}
    for first in dict.fromkeys(task["measured_with"] for task in tasks.values()):
        alike = [name for name, task in tasks.items() if task["measured_with"] == first]
        lanes = tasks[first]["batches"][0]["lanes"]
        bits = {
            lane["schedule"][0]: lane["mean_bits"]
            for lane in lanes
            if len(set(lane["schedule"])) == 1
        }
        names = tasks[first]["schedule"]
        shown = strip(names, bits, ascii_) if set(names) <= set(bits) else " ".join(names)
        parts.append(
            f"{', '.join(alike)}: ships {shown}   {legend(bits, ascii_)}\n"
            + table(
                _HEADER,
                [
                    _cells(row, lane, small)
                    for row in tasks[first]["batches"]
                    for lane in row["lanes"]
                ],
            )
        )
        parts.append("\n".join(_against(row) for row in tasks[first]["batches"]))
    if small:
        needed = ", ".join(f"{name} {count}" for name, count in sorted(small.items()))
        parts.append(
            f"- too few generations to tell ({needed} are needed); raise --seconds or --repeats"
        )
    return "\n\n".join(parts)


def _cells(row: Json, lane: Json, small: dict[str, int]) -> tuple[object, ...]:
    quantiles = lane["latency_ms"]
    for name, each in quantiles.items():
        if each["value"] is None:
            small[name] = each["needed"]
    speed, middle, over = lane["tokens_per_s"], quantiles["p50"], lane["ships_over_this"]
    return (
        row["batch"],
        _named(row, lane),
        speed["median"],
        _ends(speed),
        middle["value"],
        _ends(middle),
        quantiles["p95"]["value"],
        quantiles["p99"]["value"],
        lane["passes"],
        lane["peak_mib"],
        over["median"],
        _ends(over),
    )


def _named(row: Json, lane: Json) -> str:
    label: str = lane["label"]
    return f"{label} *" if label == row["best_uniform"] else label


def _ends(each: Json) -> str:
    return "-" if each["low"] is None else f"{each['low']:.4g} - {each['high']:.4g}"


def _against(row: Json) -> str:
    """Return how what ships compares with the fastest uniform schedule (*) at a batch."""
    best, ratio = row["best_uniform"], row["ships_over_best_uniform"]
    start = f"batch {row['batch']}, {row['rounds']} rounds: "
    if best == SHIPS:
        return f"{start}what ships is the fastest uniform schedule (*)"
    told = "" if ratio["told_apart"] else ", not told apart"
    return f"{start}ships / {best} (*) {ratio['median']:.3f} ({_ends(ratio)}){told}"


def _export_table(found: Json) -> str:
    shape = found["shape"]
    rows = [
        (
            row["precision"],
            row.get("weights"),
            row["latency_ms"],
            f"{row['low']:.4g} - {row['high']:.4g}",
            row["n"],
        )
        for row in found["rows"]
    ]
    return "\n".join(
        (
            f"a pass on {found['target']}, {plain(found['device'])}: a batch of {shape['batch']}, "
            f"prompts of {shape['prompt']} and answers of {shape['answer']} tokens",
            table(("precision", "weights", "ms", "95 %", "n"), rows),
            f"a change of engine takes {found['switch_ms']:.4g} ms"
            if found["switch_ms"]
            else "a change of engine is not told from none",
        )
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
