"""Exports that a command is given: whole, for its target, and of one checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engines.errors import InputError
from engines.precision import FULL_PRECISION, Precision, precision_from_name
from engines.targets import refusal, target_from_name
from exporter.folder import Export, read_export
from tuner.config import TuneConfig


def export_for(folder: Path, target: str) -> Export:
    """Return an export, every byte checked.

    Raises:
        InputError: It is damaged, or for another target.
    """
    export = read_export(folder, verify=True)
    # What is exported for one target of TensorRT is for all of them.
    both_ahead = all(target_from_name(each).ahead for each in (target, export.target))
    if target != export.target and not both_ahead:
        raise InputError(
            f"the export is for target {export.target!r}, asked was {target!r}; export again "
            f"with --target {target}"
        )
    return export


def exports_of(first: Export, others: Sequence[Path], target: str) -> dict[str, Export]:
    """Return the exports given, by quantizer: of one checkpoint, alike in all but the rounding.

    Args:
        first: The first one given.
        others: Folders of the rest.
        target: Where the engines run.

    Raises:
        InputError: One is damaged, of another checkpoint, or rounded like one before it.
    """
    found = {first.recipe.quantizer: first}
    for folder in others:
        other = export_for(folder, target)
        differs = [
            name
            for name, ours, theirs in (
                ("model", first.model, other.model),
                ("weights", _full_weights(first), _full_weights(other)),
                ("tasks", first.tasks, other.tasks),
                ("shape", first.shape, other.shape),
                ("precisions", first.precisions, other.precisions),
                ("windows", first.windows, other.windows),
            )
            if ours != theirs
        ]
        if differs:
            raise InputError(
                f"{str(folder)!r} differs from {str(first.folder)!r} in {', '.join(differs)}; "
                f"give exports of one checkpoint that differ in --quantizer alone"
            )
        if other.recipe.quantizer in found:
            raise InputError(
                f"{str(folder)!r} is rounded by {other.recipe.quantizer} like an export before "
                f"it; give each quantizer once"
            )
        found[other.recipe.quantizer] = other
    return found


def _full_weights(export: Export) -> dict[str, str]:
    """Return the digest of each file that holds full precision's weights."""
    graph = export.graphs[f"{FULL_PRECISION.name}.serve"]
    return {path: export.files[path].sha256 for path in graph.weights}


def precisions_of(names: Sequence[str], export: Export) -> list[Precision]:
    """Return the named precisions of an export, which must have full precision too.

    Raises:
        InputError: A name is unknown, or not in the export.
    """
    missing = [name for name in (*names, FULL_PRECISION.name) if name not in export.precisions]
    if missing:
        try:
            precision_from_name(missing[0])
        except ValueError as error:
            raise InputError(f"{error}") from error
        raise InputError(
            f"the export has no precision {', '.join(missing)}, only "
            f"{', '.join(export.precisions)}; export again with --precision {missing[0]}"
        )
    return [export.precisions[name] for name in names]


def own_tasks(export: Export) -> tuple[str, ...]:
    """Return the built-in tasks that the export was calibrated on."""
    files = [name for name, task in export.tasks.items() if task.source != "builtin"]
    if files:
        raise InputError(
            f"the export was calibrated on prompts of your own for {', '.join(files)}; name them "
            f"again, for instance --task {files[0]}=FILE.jsonl or --task harness:TASK"
        )
    return tuple(export.tasks)


def candidates_of(config: TuneConfig, export: Export) -> tuple[Precision, ...]:
    """Return the precisions that compete, most bits first.

    Raises:
        InputError: The export or the target lacks one, or some are simulated and some are not.
    """
    target = target_from_name(config.target)
    names = config.precisions or tuple(
        name
        for name, precision in export.precisions.items()
        if not precision.simulated and refusal(target, name) is None
    )
    chosen = precisions_of(names, export)
    for name in names:
        if (why := refusal(target, name)) is not None:
            raise InputError(f"{why}; mend --precision, or choose another --target")
    if len({precision.simulated for precision in chosen}) > 1:
        raise InputError(
            f"simulated and executed precisions cannot compete, got {', '.join(names)}; name only "
            f"one kind with --precision"
        )
    if chosen[0].simulated and (config.latency_ms or config.latency_share):
        raise InputError("simulated precisions have no latency; budget them with --mean-bits")
    return tuple(sorted(chosen, key=lambda each: (-each.bits, each.name)))
