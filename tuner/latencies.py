"""Latencies of engines that do not run here: from a file measured elsewhere, or predicted.

    {"format": "cadenza-latencies/1", "source": "measured", "device": "NVIDIA L4",
     "target": "rtx-sm89", "shape": {"batch": 8, "prompt": 16, "answer": 24},
     "passes": {"fp16": {"ms": 1.9, "low": 1.88, "high": 1.93}, ...}, "switch_ms": 0.0}

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
from engines.precision import FULL_PRECISION, Precision
from engines.targets import target_from_name
from exporter.folder import Export
from exporter.gemms import pass_from_file
from tuner.config import TuneConfig
from tuner.roofline import BANDWIDTH_SHARE, COMPUTE_SHARE, LAUNCH_US, predict

FORMAT = "cadenza-latencies/1"
SOURCES = ("measured", "predicted")


@dataclass(frozen=True, kw_only=True)
class Latencies:
    """Milliseconds of a pass at each precision, at one shape.

    Attributes:
        source: "measured", on the device, or "predicted" for it.
        device: Whose they are.
        target: For which the engines were built.
        shape: Rows of the batch, tokens of a prompt, tokens of an answer.
        passes: Milliseconds of a pass by precision, with 95 % intervals; equal ends where they are
            predicted.
        switch_ms: Of a change of engine.
        how: Whatever else explains them: versions, peaks, efficiencies.
    """

    source: str
    device: str
    target: str
    shape: tuple[int, int, int]
    passes: Mapping[str, Interval]
    switch_ms: float = 0.0
    how: Mapping[str, Any] = field(default_factory=dict)

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
            "device": self.device,
            "target": self.target,
            "shape": {"batch": batch, "prompt": prompt, "answer": answer},
            "passes": {
                name: {"ms": each.median, "low": each.low, "high": each.high}
                for name, each in self.passes.items()
            },
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


def given_latencies(
    config: TuneConfig, export: Export, precisions: Sequence[Precision]
) -> Latencies | None:
    """Return the latencies of engines that do not run here; None where they do, or none are asked.

    Args:
        config: What is asked for.
        export: Whose engines they are of.
        precisions: The candidates.

    Raises:
        InputError: The file is at fault, or there is none and one is needed.
    """
    if not target_from_name(config.target).ahead:
        if config.latencies is not None or config.gpu is not None:
            raise InputError(
                f"target {config.target} is timed here; leave --latencies and --gpu out, or name "
                f"the target that they are of"
            )
        return None
    wanted = dict.fromkeys((*precisions, FULL_PRECISION))
    if config.latencies is not None:
        return latencies_from_file(config.latencies, export, [each.name for each in wanted])
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
        passes={
            name: Interval(each.latency_ms, each.latency_ms, each.latency_ms)
            for name, each in found.items()
        },
        how={
            "roofline": {"compute": COMPUTE_SHARE, "bandwidth": BANDWIDTH_SHARE},
            "launch_us": LAUNCH_US,
            "peaks_from": gpu.source,
        },
    )


def latencies_from_file(file: Path, export: Export, names: Sequence[str]) -> Latencies:
    """Return the latencies of a file.

    Args:
        file: As `cadenza bench` writes it.
        export: Whose engines they are of.
        names: Precisions that must be there.

    Raises:
        InputError: It cannot be read, is damaged, is of another shape, or lacks a precision.
    """
    text = text_from_file(file, str(file), "the latencies that cadenza bench wrote")
    found = _latencies(document_from_text(text, str(file)))
    wanted = shape_of(export)
    if found.shape != wanted:
        raise InputError(
            f"{str(file)!r} was measured at {_said(found.shape)}, the export is for "
            f"{_said(wanted)}; measure this export, or export with that --shape"
        )
    missing = [name for name in names if name not in found.passes]
    if missing:
        raise InputError(
            f"{str(file)!r} has no latency of {', '.join(missing)}, only of "
            f"{', '.join(found.passes)}; measure them too, or leave them out with --precision"
        )
    return found


def _latencies(top: Document) -> Latencies:
    if top["format"].text() != FORMAT:
        top["format"].fail(f"is not {FORMAT!r}; measure again with this version")
    source = top["source"].text()
    if source not in SOURCES:
        top["source"].fail(f"must be {' or '.join(SOURCES)}; mend it")
    shape = top["shape"]
    switch, how = top.get("switch_ms"), top.get("how")
    switch_ms = switch.number() if switch else 0.0
    if switch and switch_ms < 0.0:
        switch.fail(f"must be at least 0, got {switch_ms:g}; mend it")
    return Latencies(
        source=source,
        device=top["device"].name(),
        target=top["target"].name(),
        shape=(
            shape["batch"].integer(1),
            shape["prompt"].integer(1),
            shape["answer"].integer(1),
        ),
        passes={name: _interval(each) for name, each in top["passes"].items()},
        switch_ms=switch_ms,
        how=how.mapping() if how else {},
    )


def _interval(each: Document) -> Interval:
    low, middle, high = (each[name].number() for name in ("low", "ms", "high"))
    if not 0.0 < low <= middle <= high:
        each.fail(f"0 < low <= ms <= high must hold, got {low}, {middle}, {high}; measure again")
    return Interval(middle, low, high)


def _said(shape: tuple[int, int, int]) -> str:
    batch, prompt, answer = shape
    return f"a batch of {batch}, prompts of {prompt} and answers of {answer} tokens"
