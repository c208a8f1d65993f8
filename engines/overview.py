"""A bundle or an export folder in tables, for `cadenza inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from engines.bundle import Bundle
from engines.document import Document, document_from_text
from engines.errors import InputError
from engines.files import FileEntry, check_files, regular_file
from engines.manifest import Graph, Manifest, Shape
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
from engines.schedule import SamplerConfig, Schedule
from engines.terminal import legend, plain, size, strip, table

EXPORT = "export.json"


def bundle_overview(bundle: Bundle, ascii_: bool = False) -> str:
    """Return what a bundle holds, for people."""
    manifest = bundle.manifest
    head = _head(manifest.model, manifest.sampler, manifest.shape)
    made = {
        manifest.schedule_digest(task, target)
        for task in manifest.tasks
        for target in manifest.targets
    }
    current = sum(line.schedule_digest in made for line in bundle.golden)
    head += [
        ("targets", ", ".join(manifest.targets)),
        ("degraded", "yes, see the measured loss" if manifest.degraded else "no"),
        ("golden", f"{len(bundle.golden)} answers, {current} made by the schedules below"),
        ("digest", f"{bundle.digest} (of schedules and engines)"),
    ]
    parts = [f"bundle {bundle.folder}", _pairs(head)]
    for target in manifest.targets:
        parts += _schedules(manifest, target, ascii_)
    parts += [
        _titled("precisions", _precisions(manifest.precisions)),
        _titled("engines", _engines(manifest)),
        _titled(
            "weights, stored once a family",
            _families(manifest.families, manifest.graphs, manifest.precisions),
        ),
        _titled("environment", _pairs(_facts_by_key(manifest.environment))),
        _titled("files", _files(manifest.files)),
        "Digests of the files were not checked here; cadenza verify checks them.",
    ]
    return "\n\n".join(parts)


def export_from_folder(folder: Path) -> Document:
    """Return export.json of a folder as plain data, its paths and sizes checked.

    Raises:
        InputError: There is none, it is of another version, or a file is missing.
    """
    try:
        text = regular_file(folder, EXPORT).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InputError(f"cannot read {str(folder / EXPORT)!r}: {error}; export again") from error
    top = document_from_text(text, str(folder / EXPORT))
    if top["format"].text() != "cadenza-export/1":
        top["format"].fail("is not 'cadenza-export/1'; export again with this version of Cadenza")
    try:
        check_files(folder, files_from_document(top["files"]), digests=False)
    except InputError as error:
        raise InputError(
            f"the export {str(folder)!r} is damaged: {error}; export again"
        ) from error
    return top


def export_overview(top: Document, folder: Path) -> str:
    """Return what an export holds, for people."""
    precisions = precisions_from_document(top["precisions"])
    graphs = {name: graph_from_document(graph) for name, graph in top["graphs"].items()}
    families = {name: family["bytes"].integer() for name, family in top["families"].items()}
    head = _head(
        model_from_document(top["model"]),
        sampler_from_document(top["sampler"]),
        shape_from_document(top["shape"]),
    )
    head += [("target", top["target"].name()), ("windows", str(top["windows"].integer(1)))]
    files = files_from_document(top["files"])
    rows = [
        (
            name,
            graph.precision,
            graph.tail,
            _ranges(graph.windows),
            "an input" if graph.scales is not None else None,
            graph.file,
            size(files[graph.file].bytes) if graph.file in files else None,
            ", ".join(graph.weights),
        )
        for name, graph in graphs.items()
    ]
    tasks = [
        (name, *_settings(sampler_from_document(task["sampler"])), task["says"].text())
        for name, task in top["tasks"].items()
    ]
    header = ("graph", "precision", "tail", "windows", "scales", "file", "size", "weights")
    parts = [
        f"export {folder}",
        _pairs(head),
        _titled("tasks", table(("task", "steps", "tokens", "block", "says"), tasks)),
        _titled("precisions", _precisions(precisions)),
        _titled("graphs", table(header, rows)),
        _titled("weights, stored once a family", _families(families, graphs, precisions)),
    ]
    for key in ("recipe", "parity", "environment"):
        parts.append(_titled(key, _pairs(_facts_by_key(top[key].mapping()))))
    parts.append(_titled("files", _files(files)))
    return "\n\n".join(parts)


def _head(model: ModelInfo, sampler: SamplerConfig, shape: Shape) -> list[tuple[str, str]]:
    steps, tokens, block = _settings(sampler)
    return [
        (
            "model",
            f"{model.name} ({model.architecture}), vocabulary {model.vocab}, mask "
            f"{model.mask_id}, end {model.eos_id}, longest {model.max_length}",
        ),
        ("checkpoint", model.digest),
        ("sampler", f"{steps} steps, {tokens} tokens in blocks of {block}, {_rule(sampler)}"),
        (
            "shape",
            f"batch {_colons(shape.batch)}, prompt {_colons(shape.prompt)} (min:opt:max)",
        ),
    ]


def _schedules(manifest: Manifest, target: str, ascii_: bool) -> list[str]:
    """Return the schedules of a target as strips, then what is known of each."""
    bits = {name: manifest.precisions[name].bits for name in manifest.serving(target)}
    strips, known = [], []
    for name, task in manifest.tasks.items():
        tuned = task.targets[target]
        strips.append(
            (
                name,
                strip(tuned.schedule, bits, ascii_),
                _runs(tuned.schedule),
                *_settings(task.sampler),
                task.says,
            )
        )
        for what in ("budgets", "predicted", "measured"):
            # What it was compared with is a table of its own, for --json.
            facts = _facts({k: v for k, v in getattr(tuned, what).items() if not _is_table(v)})
            if facts:
                known.append((name, what, facts))
    header = ("task", "schedule", "windows", "steps", "tokens", "block", "says")
    parts = [_titled(f"schedules on {target}   {legend(bits, ascii_)}", table(header, strips))]
    if known:
        parts.append(
            _titled(f"asked, predicted and measured on {target}", table(("task", "", ""), known))
        )
    return parts


def _is_table(value: object) -> bool:
    """Return whether a value is a list of objects."""
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def _precisions(precisions: Mapping[str, Precision]) -> str:
    rows = [
        (p.name, p.family, p.weight_bits, p.bits, "simulated" if p.simulated else "executed")
        for p in precisions.values()
    ]
    return table(("precision", "family", "weight bits", "activation bits", ""), rows)


def _engines(manifest: Manifest) -> str:
    rows = []
    for name, engine in manifest.engines.items():
        graph = manifest.graphs[engine.graph]
        scales = None if graph.scales is None else f"{len(graph.scales)} x {len(graph.scales[0])}"
        rows.append(
            (
                name,
                engine.target,
                engine.precision,
                graph.tail,
                scales,
                engine.file,
                size(engine.bytes),
                _facts(engine.built),
                _facts(engine.options),
            )
        )
    header = (
        "engine",
        "target",
        "precision",
        "tail",
        "scales",
        "file",
        "size",
        "built",
        "options",
    )
    return table(header, rows)


def _families(
    families: Mapping[str, int], graphs: Mapping[str, Graph], precisions: Mapping[str, Precision]
) -> str:
    files: dict[str, set[str]] = {name: set() for name in families}
    for graph in graphs.values():
        family = precisions[graph.precision].family if graph.precision in precisions else ""
        files.setdefault(family, set()).update(graph.weights)
    rows = [
        (name, size(families.get(name, 0)), ", ".join(sorted(paths)) or None)
        for name, paths in files.items()
    ]
    return table(("family", "size", "files"), rows)


def _files(files: Mapping[str, FileEntry]) -> str:
    rows = [(path, size(entry.bytes), entry.sha256) for path, entry in files.items()]
    rows.append(("together", size(sum(entry.bytes for entry in files.values())), ""))
    return table(("file", "size", "sha256"), rows)


def _rule(sampler: SamplerConfig) -> str:
    known = sampler.threshold is not None
    return f"{sampler.rule} {sampler.threshold:g}" if known else sampler.rule


def _settings(sampler: SamplerConfig) -> tuple[int, int, int]:
    return sampler.steps, sampler.gen_length, sampler.block_length


def _runs(schedule: Schedule) -> str:
    """Return a schedule in words: 2 int8, 4 fp32."""
    return ", ".join(f"{len(list(run))} {name}" for name, run in groupby(schedule.precisions))


def _ranges(numbers: tuple[int, ...]) -> str:
    if len(numbers) > 1 and numbers == tuple(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))


def _colons(numbers: tuple[int, ...]) -> str:
    return ":".join(map(str, numbers))


def _facts(facts: Mapping[str, object]) -> str:
    """Return plain facts in a line; what is null is left out."""
    return ", ".join(f"{key} {_fact(value)}" for key, value in facts.items() if value is not None)


def _facts_by_key(facts: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return a line for each fact; a table of tables has one for each inner table."""
    lines = []
    for key, value in facts.items():
        if isinstance(value, Mapping) and all(isinstance(v, Mapping) for v in value.values()):
            lines += [(f"{key} {name}", fact) for name, fact in _facts_by_key(value)]
        else:
            lines.append((key, _facts(value) if isinstance(value, Mapping) else _fact(value)))
    return lines


def _fact(value: object) -> str:
    match value:
        case bool() | None:
            return {True: "yes", False: "no", None: "-"}[value]
        case float():
            return f"{value:.4g}"
        case Mapping():
            return f"({_facts(value)})"
        case list() | tuple():
            shown = ", ".join(map(_fact, value[:12]))
            return f"[{shown}{', ...' if len(value) > 12 else ''}]"
    return str(value)


def _pairs(pairs: list[tuple[str, str]]) -> str:
    widest = max((len(key) for key, _ in pairs), default=0)
    return "\n".join(f"{plain(key):{widest}}  {plain(value)}" for key, value in pairs)


def _titled(title: str, body: str) -> str:
    return f"{title}\n" + "\n".join(f"  {line}" for line in body.splitlines())
