"""Which candidate is tried next: the sweeps of the field, and random draws.  Pure.

    fast     the defaults, then one knob changed at a time
    full     every candidate, the last knob turning fastest
    mixed    fast, then every combination of the values that were positive on their own
    random   without replacement

Each is a function of the space, the results so far and a seed, so a search that was broken off
goes on from its log alone.  No product of knobs is ever made: spaces may have millions of points.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from tuner.best import cheaper
from tuner.space import Candidate, Knob, default_candidate, size
from tuner.trials import TrialResult

SWEEPS = ("fast", "full", "mixed", "random")
STRATEGIES = ("tpe", *SWEEPS)

# Knobs that `mixed` combines at most: those whose best value is cheapest.
MOST_POSITIVE = 10

# Draws of `random` before it looks for what is left.
_DRAWS = 64


def proposed(
    strategy: str,
    space: Sequence[Knob],
    results: Sequence[TrialResult],
    taken: Collection[Candidate],
    seed: int,
) -> Candidate | None:
    """Return the next candidate of a sweep, or None when it is through.

    Args:
        strategy: One of SWEEPS.
        space: The knobs.
        results: Finished trials.
        taken: Candidates that are finished, or run elsewhere.
        seed: Of this one draw.

    Raises:
        ValueError: Unknown strategy.
    """
    if strategy == "random":
        return drawn(space, taken, seed)
    walks = {
        "fast": lambda: single_changes(space),
        "full": lambda: every(space),
        "mixed": lambda: _mixed(space, results),
    }
    if strategy not in walks:
        raise ValueError(f"strategy is one of {', '.join(STRATEGIES)}, got {strategy!r}")
    return next((each for each in walks[strategy]() if each not in taken), None)


def single_changes(space: Sequence[Knob]) -> Iterator[Candidate]:
    """Yield the defaults, then each candidate that differs from them in one knob."""
    default = default_candidate(space)
    yield default
    for knob in space:
        for choice in knob.choices[1:]:
            yield default.changed(**{knob.name: choice})


def every(space: Sequence[Knob]) -> Iterator[Candidate]:
    """Yield every candidate, the defaults first, the last knob turning fastest."""
    return (candidate_at(space, index) for index in range(size(space)))


def candidate_at(space: Sequence[Knob], index: int) -> Candidate:
    """Return a candidate by its number among all: digits in the mixed radix of the choices."""
    chosen = []
    for knob in reversed(space):
        index, digit = divmod(index, len(knob.choices))
        chosen.append((knob.name, knob.choices[digit]))
    return Candidate(tuple(reversed(chosen)))


def drawn(space: Sequence[Knob], taken: Collection[Candidate], seed: int) -> Candidate | None:
    """Return a candidate that is not taken, each as likely as another, or None."""
    rng, count = random.Random(seed), size(space)
    for _ in range(_DRAWS):
        found = candidate_at(space, rng.randrange(count))
        if found not in taken:
            return found
    # Few are left: the first one from a random place on.
    start = rng.randrange(count)
    for step in range(count):
        found = candidate_at(space, (start + step) % count)
        if found not in taken:
            return found
    return None


def _mixed(space: Sequence[Knob], results: Sequence[TrialResult]) -> Iterator[Candidate]:
    """Yield single changes, then combinations of the positive ones, the rest at their defaults.

    Combinations wait until every single change has a result: what is positive is known then.
    """
    singles = list(single_changes(space))
    yield from singles
    by_candidate = {result.candidate: result for result in results}
    if all(each in by_candidate for each in singles):
        yield from every(_positive(space, by_candidate[singles[0]], by_candidate))


def _positive(
    space: Sequence[Knob],
    default: TrialResult,
    by_candidate: dict[Candidate, TrialResult],
) -> list[Knob]:
    """Return the knobs with their default and the values that were positive on their own.

    Positive is a value whose trial met every constraint and was cheaper than the default's beyond
    noise.  Of more than MOST_POSITIVE such knobs, those with the cheapest value are taken.
    """
    gains: dict[str, list[TrialResult]] = {}
    for knob in space:
        tried = (
            by_candidate[default.candidate.changed(**{knob.name: choice})]
            for choice in knob.choices[1:]
        )
        positive = [each for each in tried if each.feasible and cheaper(each, default)]
        if positive:
            gains[knob.name] = positive
    best = sorted(gains, key=lambda name: min(each.cost for each in gains[name]))
    kept = set(best[:MOST_POSITIVE])
    return [
        replace(
            knob,
            choices=(
                knob.choices[0],
                *(each.candidate[knob.name] for each in gains[knob.name]),
            )
            if knob.name in kept
            else knob.choices[:1],
        )
        for knob in space
    ]
