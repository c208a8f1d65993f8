"""Latency of a candidate's engines by window, held against full precision in the same rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engines.backend import Backend
from engines.build import Cache, digest_json
from engines.machine import state
from engines.measure import measure, measure_switch, ratio
from engines.model import ModelInfo
from engines.noise import drift
from engines.precision import FULL_PRECISION
from engines.schedule import SamplerConfig, fixed_steps_like
from tuner.latencies import Latencies
from tuner.space import Candidate
from tuner.stopwatch import MEASURE
from tuner.workshop import Workshop

# The lane of full precision with the default options.
_ANCHOR = "anchor"


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a pass at the declared shape, for one sampler.

    By threshold they are of fixed steps of the same lengths: a pass costs the same.

    Attributes:
        by_window: Of each precision in each window [W].
        spread: Ends of the 95 % interval of each precision's pass, as shares of its median; of
            the ratio to full precision in the same rounds, so the machine's drift is not in it.
        anchor_ms: Of full precision with the default options in the same rounds.
        switch_ms: Of a change of engine at a window's edge; 0 where not told from none.
        drift: By what factor the machine was slower in these rounds than in the default's.
        within: By what factor it was slower in the last of these rounds than in the first; None
            where that cannot be told from noise.
    """

    by_window: dict[str, list[float]]
    spread: dict[str, tuple[float, float]]
    anchor_ms: float
    switch_ms: float
    drift: float = 1.0
    within: float | None = None


def timed_passes(
    lanes: Mapping[str, Backend],
    keys: Mapping[str, str],
    switching: Sequence[str],
    anchor: str,
    sampler: SamplerConfig,
    windows: int,
    shape: tuple[int, int],
    model: ModelInfo,
    repeats: int,
    seed: int,
    cache: Cache,
) -> dict[str, Any]:
    """Return milliseconds of a pass of engines, measured in turns, or found in the cache.

    Keys are `pass` {lane: ms}, `by_window` {lane: [ms] [W]}, `ratio` {lane: [median, low, high]}
    to the anchor by round, `switch`, ms of a change, `drift` within the rounds, and `machine`, its
    state before.

    Args:
        lanes: Engines by a name.
        keys: Digest of each one's content.
        switching: Names between which a switch is timed.
        anchor: The lane that others are held against.
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
        "anchor": anchor,
        "sampler": sampler.to_json(),
        "shape": [windows, *shape],
        "repeats": repeats,
        "seed": seed,
    }
    key = digest_json(asked)
    kept: dict[str, Any] | None = cache.get("passes", key)
    if kept is None:
        before = state()
        where = (windows, *shape, model)
        found = measure(lanes, sampler, *where, repeats=repeats, seed=seed)
        others = {name: lanes[name] for name in switching}
        switch = measure_switch(others, sampler, *where, repeats=repeats, seed=seed)
        held = found.of(anchor)
        kept = {
            "pass": {row.precision: row.latency_ms for row in found.rows},
            "by_window": {row.precision: list(row.by_window) for row in found.rows},
            "ratio": {
                row.precision: [each.median, each.low, each.high]
                for row in found.rows
                for each in (ratio(row, held, seed),)
            },
            "switch": switch,
            "drift": asdict(drift(held.rounds, seed)),
            "machine": before,
        }
        cache.put("passes", key, kept)
    return kept


def given_timing(latencies: Latencies, candidate: Candidate, windows: int) -> Timing:
    """Return latencies that were given, of plans with their weights as a candidate has them.

    They are the same in every window [W], and nothing is corrected.
    """
    passes = latencies.passes(candidate.weights)
    return Timing(
        by_window={name: [each.median] * windows for name, each in passes.items()},
        spread={
            name: (each.low / each.median, each.high / each.median)
            for name, each in passes.items()
        },
        anchor_ms=passes[FULL_PRECISION.name].median,
        switch_ms=latencies.switch_ms,
    )


def time_candidate(shop: Workshop, candidate: Candidate, sampler: SamplerConfig) -> Timing | None:
    """Return a candidate's latencies, corrected for the machine's drift; None if there are none.

    Full precision with the default options runs in the same rounds; by how much it was slower
    than in the rounds of the default candidate, everything else is taken to have been.

    Args:
        shop: Has the engines.
        candidate: What is timed; its schedule does not matter.
        sampler: By threshold, fixed steps of the same lengths are timed: a pass costs the same.
    """
    if not shop.bench.timed:
        return None
    if shop.bench.latencies is not None:
        return given_timing(shop.bench.latencies, candidate, candidate.windows)
    fixed = fixed_steps_like(sampler, candidate.windows)
    engines = shop.engines(candidate)
    anchor = shop.engines(shop.default).fleet
    shape = shop.bench.export.shape
    lanes: dict[str, Backend] = dict(engines.fleet.engines)
    lanes[_ANCHOR] = anchor.engines[FULL_PRECISION.name]
    with shop.watch(MEASURE):
        kept = timed_passes(
            lanes,
            {**engines.fleet.keys, _ANCHOR: anchor.keys[FULL_PRECISION.name]},
            tuple(engines.fleet.engines),
            _ANCHOR,
            fixed,
            candidate.windows,
            (shape.batch[1], shape.prompt[1]),
            engines.folder.model,
            shop.bench.effort.repeats,
            shop.bench.config.seed,
            shop.bench.cache,
        )
    anchored = kept["pass"][_ANCHOR]
    first = anchored
    if candidate.setting != shop.default.setting:
        reference = time_candidate(shop, shop.default, sampler)
        assert reference is not None, "simulated precisions are not timed"
        first = reference.anchor_ms
    drifted = anchored / first
    # Rounds are paired: the ratio to full precision in the same round stands where load comes and
    # goes, a quotient of two medians does not.
    scale = {
        name: kept["ratio"][name][0] * first / ms
        for name, ms in kept["pass"].items()
        if name != _ANCHOR
    }
    return Timing(
        by_window={
            name: [value * scale[name] for value in values]
            for name, values in kept["by_window"].items()
            if name != _ANCHOR
        },
        spread={
            name: (min(1.0, low / median), max(1.0, high / median))
            for name, (median, low, high) in kept["ratio"].items()
            if name != _ANCHOR
        },
        anchor_ms=first,
        switch_ms=kept["switch"] / drifted,
        drift=drifted,
        within=kept["drift"]["ratio"] if kept["drift"]["found"] else None,
    )
