"""Latency of a candidate's engines by window, held against full precision in the same rounds."""

from __future__ import annotations

from dataclasses import dataclass

from engines.backend import Backend
from engines.build import digest_json
from engines.measure import measure, measure_switch
from engines.precision import FULL_PRECISION
from engines.schedule import SamplerConfig, fixed_steps_like
from tuner.space import Candidate
from tuner.workshop import Workshop


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a pass at the declared shape, for one sampler.

    By threshold they are of fixed steps of the same lengths: a pass costs the same.

    Attributes:
        by_window: Of each precision in each window [W].
        anchor_ms: Of full precision with the default options in the same rounds.
        switch_ms: Of a change of engine at a window's edge; 0 where not told from none.
    """

    by_window: dict[str, list[float]]
    anchor_ms: float
    switch_ms: float


def time_candidate(shop: Workshop, candidate: Candidate, sampler: SamplerConfig) -> Timing | None:
    """Return a candidate's latencies, corrected for the machine's drift; None if simulated.

    Full precision with the default options runs in the same rounds; by how much it was slower
    than in the rounds of the default candidate, everything else is taken to have been.

    Args:
        shop: Has the engines.
        candidate: What is timed.
        sampler: By threshold, fixed steps of the same lengths are timed: a pass costs the same.
    """
    if shop.bench.simulated:
        return None
    fixed = fixed_steps_like(sampler, candidate.windows)
    engines = shop.engines(candidate)
    anchor = shop.engines(shop.default).fleet
    shape = shop.bench.export.shape
    lanes: dict[str, Backend] = dict(engines.fleet.engines)
    lanes["anchor"] = anchor.engines[FULL_PRECISION.name]
    repeats, seed = shop.bench.effort.repeats, shop.bench.config.seed
    where = (candidate.windows, shape.batch[1], shape.prompt[1], engines.folder.model)
    key = digest_json(
        {
            "engines": dict(engines.fleet.keys),
            "anchor": anchor.keys[FULL_PRECISION.name],
            "sampler": fixed.to_json(),
            "shape": where[:3],
            "repeats": repeats,
            "seed": seed,
        }
    )
    kept = shop.bench.cache.get("latency", key)
    if kept is None:
        found = measure(lanes, fixed, *where, repeats=repeats, seed=seed)
        switch = measure_switch(engines.fleet.engines, fixed, *where, repeats=repeats, seed=seed)
        kept = {
            "by_window": {row.precision: list(row.by_window) for row in found.rows},
            "anchor": found.of("anchor").latency_ms,
            "switch": switch,
        }
        shop.bench.cache.put("latency", key, kept)
    first = kept["anchor"]
    if candidate != shop.default:
        reference = time_candidate(shop, shop.default, sampler)
        assert reference is not None, "simulated precisions are not timed"
        first = reference.anchor_ms
    drift = kept["anchor"] / first
    return Timing(
        by_window={
            name: [value / drift for value in values]
            for name, values in kept["by_window"].items()
            if name != "anchor"
        },
        anchor_ms=first,
        switch_ms=kept["switch"] / drift,
    )
