"""Latencies of engines that do not run here: from a file measured elsewhere, or predicted.

    {"format": "cadenza-latencies/1", "source": "measured", "device": "NVIDIA L4",
     "target": "rtx-sm89", "shape": {"batch": 8, "prompt": 16, "answer": 24},
     "rows": [{"precision": "fp16", "weights": "input", "latency_ms": 1.9, "low": 1.88,
               "high": 1.93, "n": 240}, ...], "switch_ms": 0.01, "how": {}}

A row without `weights` holds for a plan as it is built by default: its weights are inputs where
they fuse so.  Where they are left out, `source` is `measured`, `switch_ms` 0, `format` this one.

A latency has a shape: it must be the best one of the export.  Whatever comes out of it says
whether it was measured, and on what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines.document import Document, document_from_text, text_from_file
from engines.errors import InputError
from engines.gpus import Gpu, gpu_from_name, typical
from engines.noise import Interval
from engines.options import INPUT, WEIGHTS
from engines.precision import EXECUTED, FULL_PRECISION, Precision
from engines.targets import Target, refusal, target_from_name
from engines.trt_run import cannot_run
from exporter.folder import Export
from exporter.gemms import pass_from_file
from tuner.config import TuneConfig
from tuner.roofline import BANDWIDTH_SHARE, COMPUTE_SHARE, LAUNCH_US, predict

FORMAT = "cadenza-latencies/1"
SOURCES = ("measured", "predicted")

# A pass that takes longer than a day is none.
_LONGEST_MS = 86_400_000.0

# Rows of a file at most: each precision is there twice at most.
_MOST_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Milliseconds of a pass of one engine.

    Attributes:
        precision: Its name.
        ms: Median and 95 % interval; equal ends where they are predicted.
        weights: One of WEIGHTS; None: as plans are built by default.
        n: Passes that were timed; None where they are predicted.
    """

    precision: str
    ms: Interval
    weights: str | None = None
    n: int | None = None

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.precision + ("" if self.weights is None else f" with weights {self.weights}")

    def to_json(self) -> dict[str, Any]:
        """Return the row as a file has it."""
        return {
            "precision": self.precision,
            **({} if self.weights is None else {"weights": self.weights}),
            "latency_ms": self.ms.median,
            "low": self.ms.low,
            "high": self.ms.high,
            **({} if self.n is None else {"n": self.n}),
        }


@dataclass(frozen=True, kw_only=True)
class Latencies:
    """Milliseconds of a pass at each precision, at one shape.

    Attributes:
        source: "measured", on the device, or "predicted" for it.
        device: Whose they are.
        target: For which the engines were built.
        shape: Rows of the batch, tokens of a prompt, tokens of an answer.
        rows: Of each precision, and of each way to give it its weights that is told apart.
        switch_ms: Of a change of engine.
        how: Whatever else explains them: versions, peaks, efficiencies.
    """

    source: str
    device: str
    target: str
    shape: tuple[int, int, int]
    rows: tuple[Row, ...]
    switch_ms: float = 0.0
    how: Mapping[str, Any] = field(default_factory=dict)

    def passes(self, weights: str = INPUT) -> dict[str, Interval]:
        """Return the milliseconds of a pass by precision.

        Args:
            weights: How plans are given their weights; of a precision that has no row of its own
                for that, what holds by default; of one that has just the other, that.
        """
        found: dict[str, Interval] = {}
        for wanted in (weights, None, *WEIGHTS):
            for row in self.rows:
                if row.weights == wanted:
                    found.setdefault(row.precision, row.ms)
        return found

    def tells(self, name: str, weights: str) -> bool:
        """Return whether there is a row for a precision that is given its weights so."""
        usual = (weights, None) if weights == INPUT else (weights,)
        return any(row.precision == name and row.weights in usual for row in self.rows)

    @property
    def says(self) -> str:
        """Where they come from, in a few words."""
        return latency_source(self.source, self.device)

    def to_json(self) -> dict[str, Any]:
        """Return the content of a file."""
        batch, prompt, answer = self.shape
        return {
            "format": FORMAT,
            "source": self.source,
            "target": self.target,
            "device": self.device,
            "shape": {"batch": batch, "prompt": prompt, "answer": answer},
            "rows": [row.to_json() for row in self.rows],
            "switch_ms": self.switch_ms,
            "how": dict(self.how),
        }


def latency_source(source: str, device: str) -> str:
    """Return where latencies come from, in a few words: one of SOURCES, and whose they are."""
    return f"{source} {'on' if source == 'measured' else 'for'} {device}"


def shape_of(export: Export) -> tuple[int, int, int]:
    """Return the shape at which an export's engines are timed: rows, prompt and answer tokens."""
    answer = max(task.sampler.gen_length for task in export.tasks.values())
    return export.shape.batch[1], export.shape.prompt[1], answer


def elsewhere(target: Target) -> str | None:
    """Return why a target's plans do not run and are not timed here, a sentence; None if they are.

    Everything is held against full precision, so that must be among them.

    Args:
        target: One of TensorRT.
    """
    return cannot_run(target) or refusal(target, FULL_PRECISION.name)


def given_latencies(
    config: TuneConfig, export: Export, precisions: Sequence[Precision], here: bool
) -> Latencies | None:
    """Return the latencies of engines that do not run here; None where they do, or none are asked.

    Args:
        config: What is asked for.
        export: Whose engines they are of.
        precisions: The candidates.
        here: Whether the target's engines are timed on this machine.

    Raises:
        InputError: The file is at fault, or there is none and one is needed, or one that is not.
    """
    if here:
        if config.latencies is not None or config.gpu is not None:
            raise InputError(
                f"target {config.target} is timed here; leave --latencies and --gpu out, or name "
                f"the target that they are of"
            )
        return None
    wanted = dict.fromkeys((*precisions, FULL_PRECISION))
    if config.latencies is not None:
        names = [each.name for each in wanted]
        return latencies_from_file(config.latencies, export, names, config.target)
    sms = target_from_name(config.target).sms
    if config.gpu is None and not sms:
        raise InputError(
            f"nothing says which GPU {config.target} is; name it with --gpu, or give --latencies "
            f"FILE, measured on it"
        )
    gpu = gpu_from_name(config.gpu) if config.gpu is not None else typical(sms[0])
    return predicted_latencies(export, gpu, config.target, list(wanted))


def predicted_latencies(
    export: Export, gpu: Gpu, target: str, precisions: Sequence[Precision]
) -> Latencies:
    """Return what a roofline says of the passes at an export's best shape.

    Raises:
        InputError: The GPU lacks a precision's format.
    """
    batch, prompt, answer = shape_of(export)
    length = min(prompt + answer, export.model.max_length)
    graph = export.path(f"{FULL_PRECISION.name}.serve")
    work = pass_from_file(graph, batch, length, answer)
    found = {each.name: predict(work, gpu, each) for each in precisions}
    return Latencies(
        source="predicted",
        device=gpu.name,
        target=target,
        shape=(batch, prompt, answer),
        rows=tuple(
            Row(
                precision=name,
                ms=Interval(each.latency_ms, each.latency_ms, each.latency_ms),
            )
            for name, each in found.items()
        ),
        how={
            "roofline": {"compute": COMPUTE_SHARE, "bandwidth": BANDWIDTH_SHARE},
            "launch_us": LAUNCH_US,
            "peaks_from": gpu.source,
        },
    )


def latencies_from_file(
    file: Path, export: Export, names: Sequence[str], target: str
) -> Latencies:
    """Return the latencies of a file.

    Args:
        file: As `cadenza bench` writes it.
        export: Whose engines they are of.
        names: Precisions that must be there.
        target: For which engines are built now.

    Raises:
        InputError: It cannot be read, is damaged, is of another shape or GPU, or lacks a
            precision.
    """
    text = text_from_file(file, str(file), "the latencies that cadenza bench wrote")
    found = _latencies(document_from_text(text, str(file)))
    ours, theirs = target_from_name(target), target_from_name(found.target)
    if ours != theirs and not set(ours.sms) & set(theirs.sms):
        raise InputError(
            f"{str(file)!r} is of {theirs.name}, engines are built for {ours.name}; measure on "
            f"that GPU, or name the other --target"
        )
    wanted = shape_of(export)
    if found.shape != wanted:
        raise InputError(
            f"{str(file)!r} was measured at {_said(found.shape)}, the export is for "
            f"{_said(wanted)}; measure this export, or export with that --shape"
        )
    missing = [name for name in names if name not in found.passes()]
    if missing:
        raise InputError(
            f"{str(file)!r} has no latency of {', '.join(missing)}, only of "
            f"{', '.join(row.label for row in found.rows)}; measure them too, or leave them out "
            f"with --precision"
        )
    return found


def _latencies(top: Document) -> Latencies:
    said = top.get("format")
    if said is not None and said.text() != FORMAT:
        said.fail(f"is not {FORMAT!r}; measure again with this version")
    given, switch, how = top.get("source"), top.get("switch_ms"), top.get("how")
    source = given.text() if given else SOURCES[0]
    if given and source not in SOURCES:
        given.fail(f"must be {' or '.join(SOURCES)}; mend it")
    target = top["target"].name()
    try:
        target = target_from_name(target).name
    except InputError as error:
        raise InputError(f"{top['target'].where}: {error}") from error
    shape = top["shape"]
    switch_ms = switch.number() if switch else 0.0
    if switch and not 0.0 <= switch_ms <= _LONGEST_MS:
        switch.fail(f"must be at least 0 and at most {_LONGEST_MS:g}, got {switch_ms:g}; mend it")
    entries = top["rows"].entries()
    if not 1 <= len(entries) <= _MOST_ROWS:
        top["rows"].fail(f"must be 1 to {_MOST_ROWS} rows, got {len(entries)}; measure again")
    rows: dict[tuple[str, str], Row] = {}
    for each in entries:
        row = _row(each, source)
        key = row.precision, row.weights or INPUT  # as is usual, where a precision has both
        if key in rows:
            each.fail(f"{row.label} stands there twice; keep one")
        rows[key] = row
    return Latencies(
        source=source,
        device=top["device"].name(),
        target=target,
        shape=(
            shape["batch"].integer(1),
            shape["prompt"].integer(1),
            shape["answer"].integer(1),
        ),
        rows=tuple(rows.values()),
        switch_ms=switch_ms,
        how=how.mapping() if how else {},
    )


def _row(each: Document, source: str) -> Row:
    name = each["precision"].name()
    if name not in EXECUTED:
        each["precision"].fail(f"is none of {', '.join(EXECUTED)}; leave the row out")
    given, n = each.get("weights"), each.get("n")
    weights = given.text() if given else None
    if given and weights not in WEIGHTS:
        given.fail(f"must be {' or '.join(WEIGHTS)}, or absent; mend it")
    low, middle, high = (each[key].number() for key in ("low", "latency_ms", "high"))
    if not 0.0 < low <= middle <= high <= _LONGEST_MS:
        each.fail(
            f"0 < low <= latency_ms <= high <= {_LONGEST_MS:g} must hold, got {low:g}, "
            f"{middle:g}, {high:g}; measure again"
        )
    if n is None and source == SOURCES[0]:
        each.fail("what was measured needs 'n', the passes that were timed; measure again")
    count = None if n is None else n.integer(1)
    return Row(precision=name, ms=Interval(middle, low, high), weights=weights, n=count)


def _said(shape: tuple[int, int, int]) -> str:
    batch, prompt, answer = shape
    return f"a batch of {batch}, prompts of {prompt} and answers of {answer} tokens"
