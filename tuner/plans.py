"""The plans of what ships: built for the target, each from its own graph, and read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.options import INPUT
from engines.plans import built_plan, engine_entry, profile_of, read_back
from engines.trt import BuildRequest
from exporter.folder import Export
from exporter.typed import quantized_elements
from tuner.contest import Contest
from tuner.space import Candidate
from tuner.stopwatch import BUILD


@dataclass(frozen=True)
class Plan:
    """A plan that ships.

    Attributes:
        graph: Id of the graph it was built from.
        file: Where it lies now.
        entry: Of the manifest's engines; `file` there is its place in the bundle.
    """

    graph: str
    file: Path
    entry: Mapping[str, Any]


def plans_of(contest: Contest, candidate: Candidate, names: Sequence[str]) -> dict[str, Plan]:
    """Return the plan of each precision, built where the cache has none.

    Raises:
        BackendError: TensorRT refuses one.
        MissingExtra: The module that builds them is not installed.
    """
    bench, folder = contest.bench, contest.shop.engines(candidate).folder
    target = bench.config.target
    digests = {path: entry.sha256 for path, entry in folder.files.items()}
    found = {}
    with contest.shop.watch(BUILD):
        for name in names:
            graph = plan_graph(folder, name, candidate.scales, candidate.weights)
            request = BuildRequest(
                graph=folder.path(graph),
                target=target,
                profile=profile_of(
                    folder.shape,
                    [task.sampler.gen_length for task in folder.tasks.values()],
                    folder.model.max_length,
                    folder.graphs[graph].scales,
                ),
            )
            bench.say(f"building {name} for {target}")
            plan = built_plan(
                request, bench.cache, contest.shop.built, digests, bench.config.child_limit_s
            )
            built = read_back(
                plan,
                name,
                quantized_elements(request.graph),
                bench.config.allow_precision_mismatch,
                bench.say,
            )
            found[name] = Plan(graph, plan.file, engine_entry(request, graph, name, built))
    return found


def plan_graph(folder: Export, name: str, scales: str, weights: str = INPUT) -> str:
    """Return the id of the graph that TensorRT builds.

    Args:
        folder: Has the graphs.
        name: Of the precision.
        scales: "shared" or "window", of the recipe.
        weights: "input": its weights are inputs, where they fuse so; or "constant".
    """
    static = folder.precisions[name].has_static_scales and scales == "shared"
    stem = f"{name}.all" if static else name
    bare = f"{stem}.bare.serve"
    return bare if weights == INPUT and bare in folder.graphs else f"{stem}.serve"
