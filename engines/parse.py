"""Plain data of a manifest or an export into values, checked against itself.

Everything is hostile until it has been through here: types, ranges, paths, and that every name
leads somewhere.  Whether the files are what the manifest says is `engines.bundle`'s.  Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from engines.buckets import Buckets, unfit
from engines.document import Document
from engines.errors import InputError
from engines.files import FileEntry, relative_path
from engines.manifest import (
    DEFAULT_TASK,
    FEATURES,
    FORMAT,
    GOLDEN,
    MANIFEST,
    TAILS,
    TOKENIZER,
    BundleTask,
    Engine,
    Graph,
    Manifest,
    Shape,
    Tuned,
)
from engines.model import ModelInfo
from engines.precision import Precision
from engines.schedule import SamplerConfig, Schedule

_SAME_MAJOR = re.compile(r"cadenza-bundle/1(\.\d{1,6})?")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def manifest_from_document(top: Document) -> Manifest:
    """Return the manifest that plain data holds.

    Raises:
        BundleError: (the document's error) Another format or version, a key that is missing or
            of another type, a name that leads nowhere, a path that leaves the folder.
    """
    form = top["format"].text()
    if not _SAME_MAJOR.fullmatch(form):
        top["format"].fail(
            f"is {form[:40]!r}, this version reads {FORMAT!r}; install the version of Cadenza "
            f"that wrote it, or tune again"
        )
    for name in top["requires"].entries():
        if name.text() not in FEATURES:
            name.fail(f"the feature {name.text()[:40]!r} is unknown; install a newer Cadenza")
    manifest = Manifest(
        model=model_from_document(top["model"]),
        sampler=sampler_from_document(top["sampler"]),
        targets=tuple(target.name() for target in top["targets"].entries()),
        shape=shape_from_document(top["shape"]),
        buckets=_buckets(top.get("buckets")),
        precisions=precisions_from_document(top["precisions"]),
        families={name: family["bytes"].integer() for name, family in top["families"].items()},
        graphs={name: graph_from_document(graph) for name, graph in top["graphs"].items()},
        engines={name: _engine(engine) for name, engine in top["engines"].items()},
        tasks={name: _task(task) for name, task in top["tasks"].items()},
        environment=top["environment"].mapping(),
        degraded=top["degraded"].flag(),
        files=files_from_document(top["files"]),
        raw=top.mapping(),
    )
    _check_names(manifest, top)
    return manifest


def model_from_document(model: Document) -> ModelInfo:
    """Return the model's identity."""
    try:
        return ModelInfo(
            name=model["name"].name(),
            architecture=model["architecture"].name(),
            vocab=model["vocab"].integer(1),
            mask_id=model["mask_id"].integer(),
            eos_id=model["eos_id"].integer(),
            max_length=model["max_length"].integer(1),
            digest=model["digest"].name(),
        )
    except ValueError as error:
        model.fail(f"{error}; make the file again")


def sampler_from_document(sampler: Document) -> SamplerConfig:
    """Return sampler settings."""
    threshold = sampler.get("threshold")
    try:
        return SamplerConfig(
            steps=sampler["steps"].integer(1),
            gen_length=sampler["gen_length"].integer(1),
            block_length=sampler["block_length"].integer(1),
            rule=sampler["rule"].name(),
            threshold=None if threshold is None else threshold.number(),
        )
    except ValueError as error:
        sampler.fail(f"{error}; mend it")


def shape_from_document(shape: Document) -> Shape:
    """Return the declared ranges of batch and prompt."""
    found: dict[str, tuple[int, int, int]] = {}
    for name in ("batch", "prompt"):
        sizes = [size.integer(1) for size in shape[name].entries()]
        if len(sizes) != 3:
            shape[name].fail(f"must be [min, opt, max], got {len(sizes)} numbers; mend it")
        found[name] = (sizes[0], sizes[1], sizes[2])
    try:
        return Shape(**found)
    except ValueError as error:
        shape.fail(f"{error}; mend it")


def _buckets(buckets: Document | None) -> Buckets | None:
    if buckets is None:
        return None
    parts = {
        name: tuple(each.integer(1) for each in buckets[name].entries())
        for name in ("lengths", "batches", "asked")
    }
    try:
        return Buckets(**parts)
    except ValueError as error:
        buckets.fail(f"{error}; tune again")


def precisions_from_document(precisions: Document) -> dict[str, Precision]:
    """Return the precisions by name."""
    found: dict[str, Precision] = {}
    for entry in precisions.entries():
        simulated = entry.get("simulated")
        precision = Precision(
            name=entry["name"].name(),
            family=entry["family"].name(),
            weight_bits=entry["weight_bits"].number(),
            bits=entry["bits"].number(),
            simulated=simulated is not None and simulated.flag(),
        )
        if precision.name in found:
            entry.fail(f"the precision {precision.name!r} is given twice; remove one")
        found[precision.name] = precision
    return found


def files_from_document(files: Document) -> dict[str, FileEntry]:
    """Return sha256 and size by path; every path stays inside the folder by its spelling."""
    found: dict[str, FileEntry] = {}
    for path, entry in files.items():
        _path(Document(path, files.where, files.error))
        found[path] = FileEntry(_sha256(entry["sha256"]), entry["bytes"].integer())
    return found


def graph_from_document(graph: Document) -> Graph:
    """Return a graph's entry."""
    tail = graph["tail"].text()
    if tail not in TAILS:
        graph["tail"].fail(f"must be one of {', '.join(TAILS)}, got {tail[:40]!r}; mend it")
    scales = graph.get("scales")
    rows = None
    if scales is not None:
        rows = tuple(tuple(s.number() for s in row.entries()) for row in scales.entries())
        if len({len(row) for row in rows}) != 1 or not all(s > 0 for row in rows for s in row):
            scales.fail("must be positive numbers, as many in each window; export again")
    return Graph(
        file=_path(graph["file"]),
        tail=tail,
        precision=graph["precision"].name(),
        windows=tuple(window.integer() for window in graph["windows"].entries()),
        weights=tuple(_path(path) for path in graph["weights"].entries()),
        scales=rows,
    )


def _engine(engine: Document) -> Engine:
    options, built = engine.get("options"), engine.get("built")
    return Engine(
        file=_path(engine["file"]),
        graph=engine["graph"].name(),
        precision=engine["precision"].name(),
        target=engine["target"].name(),
        sha256=_sha256(engine["sha256"]),
        bytes=engine["bytes"].integer(),
        built=built.mapping() if built else {},
        options=options.mapping() if options else {},
    )


def _task(task: Document) -> BundleTask:
    says = task.get("says")
    return BundleTask(
        windows=task["windows"].integer(1),
        sampler=sampler_from_document(task["sampler"]),
        says=says.text() if says else "",
        targets={name: _tuned(tuned) for name, tuned in task["targets"].items()},
    )


def _tuned(tuned: Document) -> Tuned:
    parts = {}
    for key in ("budgets", "measured", "predicted"):
        part = tuned.get(key)
        parts[key] = part.mapping() if part else {}
    names = tuple(name.name() for name in tuned["schedule"].entries())
    if not names:
        tuned["schedule"].fail("is empty; name a precision for each window")
    return Tuned(schedule=Schedule(names), **parts)


def _path(path: Document) -> str:
    try:
        return relative_path(path.text())
    except InputError as error:
        raise path.error(f"{path.where}: {error}") from error


def _sha256(digest: Document) -> str:
    if not _SHA256.fullmatch(digest.text()):
        digest.fail("must be 64 hexadecimal digits in lower case; make the file again")
    return digest.text()


def _check_names(manifest: Manifest, top: Document) -> None:
    """Check that every name in the manifest leads somewhere, and to one thing."""
    files, targets = manifest.files, manifest.targets
    if not targets or len(set(targets)) != len(targets):
        top["targets"].fail("must name each target once, and one at least; tune again")
    for path in (TOKENIZER, GOLDEN):
        if path not in files:
            top["files"].fail(f"{path!r} is not listed; tune again")
    if MANIFEST in files:
        top["files"].fail(f"lists {MANIFEST!r} itself; take it out")
    for name, graph in manifest.graphs.items():
        where = top["graphs"][name]
        _known(where["precision"], graph.precision, manifest.precisions)
        _known(where["file"], graph.file, files)
        for path in graph.weights:
            _known(where["weights"], path, files)
    serving = set()
    for name, engine in manifest.engines.items():
        where = top["engines"][name]
        _known(where["graph"], engine.graph, manifest.graphs)
        _known(where["target"], engine.target, targets)
        _known(where["file"], engine.file, files)
        graph = manifest.graphs[engine.graph]
        if engine.precision != graph.precision:
            where.fail(f"is {engine.precision!r}, its graph is {graph.precision!r}; rebuild it")
        if FileEntry(engine.sha256, engine.bytes) != files[engine.file]:
            where.fail("its sha256 and bytes are not those under 'files'; rebuild it")
        key = (engine.target, engine.precision, graph.tail)
        if key in serving:
            where.fail(f"is a second engine for {' '.join(key)}; remove one")
        serving.add(key)
    if DEFAULT_TASK not in manifest.tasks:
        top["tasks"].fail(f"there is no {DEFAULT_TASK!r}; tune again")
    if manifest.buckets is not None:
        answers = [task.sampler.gen_length for task in manifest.tasks.values()]
        longest = manifest.model.max_length
        why = unfit(manifest.buckets, manifest.shape, answers, longest)
        if why is not None:
            top["buckets"].fail(f"{why}; tune again")
    for name, task in manifest.tasks.items():
        _check_task(manifest, task, top["tasks"][name])


def _check_task(manifest: Manifest, task: BundleTask, where: Document) -> None:
    if set(task.targets) != set(manifest.targets):
        where["targets"].fail(f"must be {', '.join(manifest.targets)}, each once; tune again")
    if task.windows > task.sampler.steps:
        where["windows"].fail(f"more windows than steps, {task.sampler.steps}; use fewer windows")
    for target, tuned in task.targets.items():
        place = where["targets"][target]["schedule"]
        if tuned.schedule.windows != task.windows:
            place.fail(
                f"has {tuned.schedule.windows} windows, 'windows' is {task.windows}; name one "
                f"precision for each window"
            )
        for name in tuned.schedule.precisions:
            _known(place, name, manifest.serving(target))


def _known(where: Document, name: str, known: Collection[str]) -> None:
    if name not in known:
        there = ", ".join(sorted(known)[:12]) or "none"
        where.fail(f"{name!r} is not there; known are {there}; mend the name or make it again")
