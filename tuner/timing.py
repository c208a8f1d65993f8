"""Latency of a candidate's engines by window, held against full precision in the same rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.backend import Backend
from engines.build import Cache, digest_json
from engines.measure import measure, measure_switch
from engines.model import ModelInfo
from engines.precision import FULL_PRECISION
from engines.schedule import SamplerConfig, fixed_steps_like
from tuner.space import Candidate
from tuner.workshop import Workshop

# The lane of full precision with the default options.
_ANCHOR = "anchor"


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


def timed_passes(
    lanes: Mapping[str, Backend],
    keys: Mapping[str, str],
    switching: Sequence[str],
    sampler: SamplerConfig,
    windows: int,
    shape: tuple[int, int],
    model: ModelInfo,
    repeats: int,
    seed: int,
    cache: Cache,
) -> dict[str, Any]:
    """Return milliseconds of a pass of engines, measured in turns, or found in the cache.

    Keys are `pass` {lane: ms}, `by_window` {lane: [ms] [W]} and `switch`, ms of a change.

    Args:
        lanes: Engines by a name.
        keys: Digest of each one's content.
        switching: Names between which a switch is timed.
        sampler: Of fixed steps.
        windows: W.
        shape: Rows of the batch, and tokens of each prompt.
        model: The engines'.
        repeats: Measured generations of each.
        seed: Of prompts and order.
        cache: Where timings are kept.
    """
    asked = {
        "engines": [[name, keys[name]] for name in lanes],
        "switching": list(switching),
        "sampler": sampler.to_json(),
        "shape": [windows, *shape],
        "repeats": repeats,
        "seed": seed,
    }
    key = digest_json(asked)
    kept: dict[str, Any] | None = cache.get("passes", key)
    if kept is None:
        where = (windows, *shape, model)
        found = measure(lanes, sampler, *where, repeats=repeats, seed=seed)
        others = {name: lanes[name] for name in switching}
        switch = measure_switch(others, sampler, *where, repeats=repeats, seed=seed)
        kept = {
            "pass": {row.precision: row.latency_ms for row in found.rows},
            "by_window": {row.precision: list(row.by_window) for row in found.rows},
            "switch": switch,
        }
        cache.put("passes", key, kept)
    return kept


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
    lanes[_ANCHOR] = anchor.engines[FULL_PRECISION.name]
    repeats, seed = shop.bench.effort.repeats, shop.bench.config.seed
    kept = timed_passes(
        lanes,
        {**engines.fleet.keys, _ANCHOR: anchor.keys[FULL_PRECISION.name]},
        tuple(engines.fleet.engines),
        fixed,
        candidate.windows,
        (shape.batch[1], shape.prompt[1]),
        engines.folder.model,
        repeats,
        seed,
        shop.bench.cache,
    )
    anchored = kept["pass"][_ANCHOR]
    first = anchored
    if candidate != shop.default:
        reference = time_candidate(shop, shop.default, sampler)
        assert reference is not None, "simulated precisions are not timed"
        first = reference.anchor_ms
    drift = anchored / first
    return Timing(
        by_window={
            name: [value / drift for value in values]
            for name, values in kept["by_window"].items()
            if name != _ANCHOR
        },
        anchor_ms=first,
        switch_ms=kept["switch"] / drift,
    )
