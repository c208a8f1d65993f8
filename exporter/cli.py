"""`cadenza export`: a checkpoint to checked ONNX graphs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from engines.errors import InputError
from engines.manifest import Shape
from engines.precision import EXECUTED
from engines.targets import TARGETS
from engines.terminal import command_parser, emit, emit_json, run_command, size
from exporter.export import AHEAD_PRECISIONS, PRECISIONS, ExportConfig, export
from exporter.folder import QUANTIZERS, Export, Recipe, read_export
from exporter.requests import SETTINGS

_EXAMPLES = """\
examples:
  cadenza export calib_data/reference -o EXPORT
  cadenza export MODEL -o EXPORT --precision fp32 --precision int8 --windows 4
  cadenza export MODEL -o EXPORT --task mine=prompts.jsonl --task-set mine.steps=16
  cadenza export MODEL -o EXPORT --precision w4a4 --quantizer gptq-hadamard
  cadenza export MODEL -o EXPORT --threshold 0.9 --task-set chain.steps=12
  cadenza export MODEL -o EXPORT --task harness:gsm8k --task harness:paper
  cadenza export MODEL -o EXPORT --shape batch=1:8:32,prompt=1:64:256 --copy

Calibration prompts may have any lengths: they are padded, and padding is never counted.  A prompt
file has one JSON object a line: {"id": ..., "prompt": ..., "answer": optional, "split": optional}.
The same command again changes nothing; another one onto the same folder wants --force.
"""


def main(argv: Sequence[str]) -> int:
    """Run `argv`, the command's name and its arguments, and return the exit code."""
    if not argv or argv[0] != "export":
        raise ValueError(f"the command is export, got {list(argv)}")
    return run_command(_parser(), _export, argv[1:])


def _parser() -> argparse.ArgumentParser:
    defaults = ExportConfig(model=Path(), out=Path())
    recipe = defaults.recipe
    parser = command_parser(
        "export",
        "Export a LLaDA or Dream checkpoint to ONNX graphs: fp32, int8 with scales for each "
        "window of denoising, and simulated precisions; held against the framework.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", type=Path, help="the checkpoint's folder; it is only read")
    add("-o", "--output", metavar="EXPORT", type=Path, required=True, help="the folder to write")
    add(
        "--target",
        action="append",
        metavar="T",
        help=f"where the graphs are to run: {', '.join(TARGETS)}, or several SMs as "
        f"rtx-sm89+sm120 (default: {defaults.target})",
    )
    add(
        "--precision",
        action="append",
        metavar="P",
        help="repeat, or separate by commas; for cpu fp32, int8, or simulated wXaY with X one of "
        f"4, 8, 16 and Y from 2 to 16 (default: {','.join(PRECISIONS)}); for TensorRT "
        f"{', '.join(EXECUTED)}, as far as the target takes them (default: of "
        f"{','.join(AHEAD_PRECISIONS)}); fp32 is always there",
    )
    add(
        "--quantizer",
        metavar="Q",
        default=recipe.quantizer,
        help="how weights are rounded: "
        + "; ".join(f"{each.name}, {each.says}" for each in QUANTIZERS)
        + f" (default: {recipe.quantizer})",
    )
    add(
        "--shape",
        metavar="batch=MIN:OPT:MAX,prompt=MIN:OPT:MAX",
        help="ranges of rows and of prompt tokens (default: batch=1:8:64 and what the model's "
        "length allows; TensorRT must be told)",
    )
    add("--copy", action="store_true", help="copy the checkpoint's weights, not hard-link them")
    add(
        "--windows",
        metavar="W",
        type=int,
        default=recipe.windows,
        help=f"equal parts of progress with scales of their own (default: {recipe.windows})",
    )
    add("--steps", metavar="T", type=int, help="denoising steps (default: each task's own)")
    add("--gen-length", metavar="G", type=int, help="tokens of an answer (default: the task's)")
    add("--block-length", metavar="N", type=int, help="tokens a block (default: the task's)")
    add(
        "--threshold",
        metavar="TAU",
        type=float,
        help="in place of fixed steps: each pass commits every token at least this probable, and "
        "always the most probable one; above 0, at most 1",
    )
    add(
        "--task",
        action="append",
        metavar="TASK",
        help="calibrate on it: a built-in task, NAME=FILE.jsonl, or harness:TASK of "
        "lm-evaluation-harness; repeat (default: every built-in task)",
    )
    add(
        "--task-set",
        action="append",
        metavar="NAME.KEY=N",
        help=f"{', '.join(SETTINGS[:-1])} or {SETTINGS[-1]} of one task; repeat",
    )
    add(
        "--prompts-per-task",
        metavar="N",
        type=int,
        default=defaults.prompts,
        help=f"calibration prompts of each task (default: {defaults.prompts})",
    )
    add("--seed", type=int, default=defaults.seed, help="of the built-in prompts (default: 0)")
    add("--force", action="store_true", help="replace an export that another command made")
    add("--json", action="store_true", help="print what was exported as JSON on stdout")
    return parser


def _export(args: argparse.Namespace) -> int:
    names = [name for value in args.precision or () for name in value.split(",")]
    targets = list(dict.fromkeys(args.target or ("cpu",)))
    if len(targets) > 1:
        raise InputError(
            f"one --target an export, got {', '.join(targets)}; the graphs of cpu and cuda are "
            f"the same, and so are those of trt and every rtx-*: name the one that takes most"
        )
    chosen = {key: getattr(args, key) for key in SETTINGS}
    try:
        config = ExportConfig(
            model=args.model,
            out=args.output,
            precisions=tuple(names),
            target=targets[0],
            recipe=Recipe(windows=args.windows, quantizer=args.quantizer),
            shape=None if args.shape is None else _shape(args.shape),
            tasks=tuple(args.task or ()),
            settings={key: value for key, value in chosen.items() if value is not None},
            task_settings=_task_settings(args.task_set or ()),
            prompts=args.prompts_per_task,
            seed=args.seed,
            copy=args.copy,
            force=args.force,
        )
    except ValueError as error:
        raise InputError(f"{error}; see cadenza export --help") from error
    folder = export(config, say=lambda text: print(text, file=sys.stderr, flush=True))
    made = read_export(folder)
    if args.json:
        emit_json(_summary(made))
    else:
        emit(_closing(made))
    return 0


def _shape(text: str) -> Shape:
    """Return the shape that `batch=1:8:64,prompt=1:16:40` names."""
    found: dict[str, tuple[int, ...]] = {}
    for part in text.split(","):
        name, _, numbers = part.partition("=")
        try:
            found[name] = tuple(int(number) for number in numbers.split(":"))
        except ValueError:
            found[name] = ()
    if set(found) != {"batch", "prompt"} or any(len(sizes) != 3 for sizes in found.values()):
        raise InputError(
            f"--shape is batch=MIN:OPT:MAX,prompt=MIN:OPT:MAX, got {text!r}; for instance "
            f"batch=1:8:64,prompt=1:16:40"
        )
    batch, prompt = found["batch"], found["prompt"]
    return Shape((batch[0], batch[1], batch[2]), (prompt[0], prompt[1], prompt[2]))


def _task_settings(given: Sequence[str]) -> dict[str, dict[str, int | float]]:
    """Return the settings by task that `NAME.steps=6` and the like name."""
    found: dict[str, dict[str, int | float]] = {}
    for text in given:
        left, _, value = text.partition("=")
        name, _, key = left.rpartition(".")
        key = key.replace("-", "_")
        number = _number(value, whole=key != "threshold")
        if not name or key not in SETTINGS or number is None:
            raise InputError(
                f"--task-set is NAME.KEY=N with KEY one of {', '.join(SETTINGS)}, got {text!r}; "
                f"for instance edit.steps=8 or edit.threshold=0.9"
            )
        found.setdefault(name, {})[key] = number
    return found


def _number(text: str, whole: bool) -> int | float | None:
    """Return the number that a text is, or None."""
    if whole:
        return int(text) if text.isdecimal() else None
    try:
        return float(text)
    except ValueError:
        return None


def _summary(made: Export) -> dict[str, object]:
    return {
        "export": str(made.folder),
        "model": made.model.name,
        "precisions": list(made.precisions),
        "windows": made.windows,
        "graphs": sorted(made.graphs),
        "families": dict(made.families),
        "parity": dict(made.parity),
    }


def _closing(made: Export) -> str:
    weights = ", ".join(f"{name} {size(count)}" for name, count in made.families.items())
    return (
        f"{made.folder}: {len(made.graphs)} graphs of {', '.join(made.precisions)} for "
        f"{made.windows} windows; weights {weights}\n"
        f"next: cadenza tune {made.folder} -o BUNDLE"
    )
