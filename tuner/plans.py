"""The plans of what ships: built for the target, each from its own graph, and read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.plans import built_plan, engine_entry, read_back
from exporter.typed import quantized_elements
from tuner.contest import Contest
from tuner.plan_engines import plan_request
from tuner.plan_knobs import plan_graph
from tuner.space import Candidate
from tuner.stopwatch import BUILD


@dataclass(frozen=True)
class Plan:
    """A plan that ships.

    Attributes:
        graph: Id of the graph it was built from.
        file: Where it lies now.
        entry: Of the manifest's engines; `file` there is its place in the bundle.
        timing: The timing cache that its build left, or None.
    """

    graph: str
    file: Path
    entry: Mapping[str, Any]
    timing: Path | None = None


def plans_of(contest: Contest, candidate: Candidate, names: Sequence[str]) -> dict[str, Plan]:
    """Return the plan of each precision, built where the cache has none.

    Raises:
        BackendError: TensorRT refuses one.
        MissingExtra: The module that builds them is not installed.
    """
    bench, engines = contest.bench, contest.shop.engines(candidate)
    folder = engines.folder
    target, options = bench.config.target, contest.shop.plan_options(candidate)
    digests = {path: entry.sha256 for path, entry in folder.files.items()}
    found = {}
    with contest.shop.watch(BUILD):
        for name in names:
            graph = plan_graph(folder, name, candidate.scales, candidate.weights)
            request = plan_request(folder, graph, target, options)
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
            if engines.device:
                built["executed"] = f"executed by this tune on {engines.device}"
            entry = engine_entry(request, graph, name, built)
            found[name] = Plan(graph, plan.file, entry, plan.timing)
    return found
