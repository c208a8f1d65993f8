"""Figures of the search: evaluations to 98 % of the best hypervolume of a space measured once.

Every strategy runs in the tuner's own loop, on `search_table.json`; an evaluation is a trial.  The
volume is of cost, loss and memory below uniform full precision's cost, the loss that is allowed,
and a tenth more than the most memory.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.bench.figure import Figure, median_interval
from tests.bench.search_space import Table
from tests.tuner.hypervolume import Progress, volume_of
from tuner.search import search
from tuner.space import Candidate
from tuner.study import open_study
from tuner.trials import TrialLog, TrialResult

SEEDS = 20
SHARE = 0.98


@dataclass(frozen=True)
class Field:
    """A measured space with its mark.

    Attributes:
        table: What each candidate comes to.
        every: All of it.
        reference: Where volumes end: cost, loss, memory.
        best: The volume of everything.
    """

    table: Table
    every: Sequence[TrialResult]
    reference: tuple[float, float, float]
    best: float


@cache
def field() -> Field:
    """Return the committed space."""
    table = Table.read()
    names = [knob.name for knob in table.space]
    every = [
        table.evaluate(Candidate(tuple(zip(names, values, strict=True))))
        for values in itertools.product(*(knob.choices for knob in table.space))
    ]
    full = table.evaluate(every[0].candidate.changed(schedule="uniform-fp32"))
    most = max(each.memory_mib for each in every if each.feasible)
    reference = (full.cost, table.max_loss, 1.1 * most)
    return Field(table, every, reference, volume_of(every, reference))


@dataclass(frozen=True)
class Reached:
    """Where a strategy came.

    Attributes:
        evaluations: To the mark, or until it was through.
        share: Of the best volume.
    """

    evaluations: int
    share: float

    @property
    def there(self) -> bool:
        """Whether it reached the mark."""
        return self.share >= SHARE


class _Mark(Exception):
    """The mark is reached."""


def walked(strategy: str, seed: int) -> Reached:
    """Return where a strategy of the tuner comes on the space."""
    known = field()
    progress, count = Progress(known.reference), 0

    def evaluate(candidate: Candidate, number: int, before: Sequence[TrialResult]) -> TrialResult:
        nonlocal count
        result, count = known.table.evaluate(candidate, number), count + 1
        if progress.add(result) >= SHARE * known.best:
            raise _Mark
        return result

    with tempfile.TemporaryDirectory() as folder:
        study, log = open_study(Path(folder), None), TrialLog(Path(folder) / "trials.jsonl")
        with contextlib.suppress(_Mark):
            search(known.table.space, evaluate, log, study, len(known.every), seed, strategy)
    return Reached(count, progress.volume / known.best)


def shuffled(seed: int) -> Reached:
    """Return where `full` comes when its order is shuffled."""
    known = field()
    order = list(known.every)
    random.Random(seed).shuffle(order)
    progress = Progress(known.reference)
    for count, result in enumerate(order, start=1):
        if progress.add(result) >= SHARE * known.best:
            return Reached(count, progress.volume / known.best)
    raise AssertionError("everything reaches the mark")


@cache
def ours() -> tuple[int, ...]:
    """Return the evaluations of our search with each seed."""
    found = [walked("tpe", seed) for seed in range(SEEDS)]
    assert all(each.there for each in found), found
    return tuple(each.evaluations for each in found)


def search_evaluations(name: str, other: str) -> Figure:
    """Return the evaluations that our search needs, beside another strategy's.

    Args:
        name: Of the figure.
        other: "full" (in shuffled order), "random", "fast" or "mixed"; the last two walk one way.
    """
    if other == "full":
        found = [shuffled(seed) for seed in range(SEEDS)]
    elif other == "random":
        found = [walked("random", seed) for seed in range(SEEDS)]
    else:
        found = [walked(other, 0)]
    there = all(each.there for each in found)
    median = statistics.median(each.evaluations for each in found)
    against = f"{other}, median of {len(found)}"
    if not there:
        least = statistics.median(each.share for each in found)
        against = f"{other} never: it is through after {median:g} with {least:.2f} of the volume"
    return Figure(
        name=name,
        value=float(statistics.median(ours())),
        unit=f"evaluations to {SHARE:.0%} of the hypervolume of {len(field().every):,} candidates",
        against=against,
        reference=float(median) if there else None,
        spread=median_interval(ours()),
        n=SEEDS,
    )
