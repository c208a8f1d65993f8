"""Engines of a tune that are plans, built and run on this machine's GPU: no stand-ins.

    graph with each tail -> plan, from the cache or a child -> read back -> loaded on one device

Not executed: no machine of the project's has a GPU.  What is loaded, with what, and how answers
are put together is tested with a loader that is given; `tests/tuner/test_plan_engines.py` has a
test that runs where a GPU is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engines.backend import Backend, Floats, Ids, Mask, Served
from engines.buckets import Buckets, buckets_of
from engines.build import BuildLog, digest_json
from engines.plans import BuiltPlan, built_plan, profile_of, read_back
from engines.precision import Precision
from engines.trt import BuildRequest, TrtOptions
from engines.trt_run import Device, PlanBackend
from exporter.folder import Export
from exporter.typed import quantized_elements
from tuner.evaluate import Fleet
from tuner.plan_knobs import plan_graph, shares
from tuner.space import Candidate
from tuner.workbench import Workbench

_SERVE, _TRACE = ".serve", ".trace"


class Plans(Backend, Protocol):
    """A loaded engine of plans."""

    @property
    def built(self) -> Mapping[str, int]:
        """Products by the types of their operands."""

    def close(self) -> None:
        """Let go of the plans."""


class Loader(Protocol):
    """What loads plans: `engines.trt_run.PlanBackend.load`."""

    def __call__(
        self,
        *,
        serve: Path | None,
        trace: Path | None,
        precision: Precision,
        scales: NDArray[np.float32] | None,
        weights: Sequence[Path],
        device: Device,
        buckets: Buckets,
        pad_id: int,
    ) -> Plans:
        """Return a loaded engine."""


@dataclass(frozen=True)
class PlanFleet:
    """The loaded plans of a candidate.

    Attributes:
        fleet: By the name of the precision; full precision is always there.
        graphs: Id of the graph of each precision's serve plan.
        built: Types of each precision's products, as read back.
        close: Lets go of them.
    """

    fleet: Fleet
    graphs: Mapping[str, str]
    built: Mapping[str, Mapping[str, int]]
    close: Callable[[], None]


class Split:
    """A backend over one that takes no more than some rows a pass: more are run in parts.

    Evaluations batch more prompts than serving does; a plan takes what its profile allows.
    """

    def __init__(self, whole: Plans, most: int) -> None:
        """`most`: rows of a pass, at least 1."""
        self.precision, self.built = whole.precision, whole.built
        self._whole, self._most = whole, most

    def serve(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Served:
        parts = [self._whole.serve(*part) for part in self._parts(ids, mask, positions, progress)]
        if len(parts) == 1:
            return parts[0]
        return Served(
            tokens=np.concatenate([part.tokens for part in parts]),
            probability=np.concatenate([part.probability for part in parts]),
            entropy=np.concatenate([part.entropy for part in parts]),
        )

    def logits(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Floats:
        parts = [self._whole.logits(*part) for part in self._parts(ids, mask, positions, progress)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _parts(
        self, ids: Ids, mask: Mask, positions: Ids, progress: Floats
    ) -> list[tuple[Ids, Mask, Ids, Floats]]:
        starts = range(0, max(1, len(ids)), self._most)
        cuts = [slice(start, start + self._most) for start in starts]
        return [(ids[cut], mask[cut], positions[cut], progress[cut]) for cut in cuts]


def plan_request(folder: Export, graph: str, target: str, options: TrtOptions) -> BuildRequest:
    """Return what a plan of an export's graph is built from."""
    return BuildRequest(
        graph=folder.path(graph),
        target=target,
        profile=profile_of(
            folder.shape,
            [task.sampler.gen_length for task in folder.tasks.values()],
            folder.model.max_length,
            folder.graphs[graph].scales,
        ),
        options=options,
    )


def plan_fleet(
    bench: Workbench,
    folder: Export,
    candidate: Candidate,
    options: TrtOptions,
    device: Device,
    log: BuildLog,
    load: Loader = PlanBackend.load,
) -> PlanFleet:
    """Return a candidate's engines: its plans, built where the cache has none, and loaded.

    Args:
        bench: Target, precisions, and the cache.
        folder: The export of the candidate's recipe.
        candidate: Says how scales and weights are given.
        options: How plans are built.
        device: Where they run; it outlives them.
        log: Counts what was built and what was found.
        load: Loads the plans of a precision.

    Raises:
        BackendError: TensorRT refuses one, builds something else, or cannot load it.
        MissingExtra: The module that builds them is not installed.
    """
    names = sorted({each.name for each in bench.shown_precisions})
    answers = [task.sampler.gen_length for task in folder.tasks.values()]
    buckets = buckets_of(folder.shape, answers, folder.model.max_length)
    loaded: dict[str, Plans] = {}
    keys: dict[str, str] = {}
    graphs: dict[str, str] = {}
    for name in names:
        graphs[name] = plan_graph(folder, name, candidate.scales, candidate.weights)
        entry = folder.graphs[graphs[name]]
        serve, trace = _built(bench, folder, graphs[name], options, log)
        given = entry.weights if shares(folder, name, candidate.weights) else ()
        table = entry.scales
        keys[name] = digest_json(
            {
                "plans": [serve.sha256, trace.sha256],
                "weights": {path: folder.files[path].sha256 for path in given},
                "scales": None if table is None else [list(row) for row in table],
                "device": [device.name, device.version],
            }
        )
        loaded[name] = load(
            serve=serve.file,
            trace=trace.file,
            precision=folder.precisions[name],
            scales=None if table is None else np.array(table, np.float32),
            weights=[folder.folder / path for path in given],
            device=device,
            buckets=buckets,
            pad_id=folder.model.eos_id,
        )

    def close() -> None:
        for each in loaded.values():
            each.close()

    engines = {name: Split(each, folder.shape.batch[2]) for name, each in loaded.items()}
    built = {name: each.built for name, each in loaded.items()}
    return PlanFleet(Fleet(engines, keys, folder.model), graphs, built, close)


def _built(
    bench: Workbench, folder: Export, graph: str, options: TrtOptions, log: BuildLog
) -> tuple[BuiltPlan, BuiltPlan]:
    """Return a graph's plans of both tails; what was built was read back."""
    digests = {path: entry.sha256 for path, entry in folder.files.items()}
    found: list[BuiltPlan] = []
    for each in (graph, graph.removesuffix(_SERVE) + _TRACE):
        request = plan_request(folder, each, bench.config.target, options)
        found.append(built_plan(request, bench.cache, log, digests, bench.config.child_limit_s))
    name = folder.graphs[graph].precision
    allowed = bench.config.allow_precision_mismatch
    read_back(found[0], name, quantized_elements(folder.path(graph)), allowed, bench.say)
    return found[0], found[1]
