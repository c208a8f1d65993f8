"""Made-up spaces whose every candidate has a known result, for the tests of searches."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tuner.space import ALL, SCHEDULE, Candidate, Knob
from tuner.trials import TrialResult

_SCHEDULES = (
    "spend-100",
    "uniform-fp32",
    "uniform-int8",
    *(f"spend-{k}" for k in range(90, 0, -20)),
)

SMALL = (
    Knob("quantizer", ("rtn",), "recipe", "quantizer"),
    Knob("windows", (6, 3, 4), "recipe", "windows"),
    Knob("clip", (1.0, 0.9), "recipe", "clip"),
    Knob("keep", (0, 1, 2), "recipe", "blocks"),
    Knob("scales", ("shared",), "recipe", "scales"),
    Knob("precisions", (ALL,), "schedule", "precisions"),
    Knob(SCHEDULE, ("spend-100", "uniform-int8"), "schedule", "schedule"),
    Knob("threads", (0, 1), "backend", "threads"),
)


def large() -> tuple[Knob, ...]:
    """Return a space of 18,432 candidates, like a real one."""
    return (
        Knob("quantizer", ("rtn", "gptq"), "recipe", "quantizer"),
        Knob("windows", (6, 3, 4), "recipe", "windows"),
        Knob("clip", (1.0, 0.9, 0.8, 0.7), "recipe", "clip"),
        Knob("keep", (0, 1, 2), "recipe", "blocks"),
        Knob("scales", ("shared", "window"), "recipe", "scales"),
        Knob("precisions", (ALL,), "schedule", "precisions"),
        Knob(SCHEDULE, _SCHEDULES, "schedule", "schedule"),
        Knob("threads", (0, 1), "backend", "threads"),
        Knob("graph_optimization", ("all", "extended"), "backend", "graph"),
        Knob("spinning", (False, True), "backend", "spinning"),
        Knob("arena", (True, False), "backend", "arena"),
    )


@dataclass
class Landscape:
    """Results of a space: options multiply the cost, loss and memory belong to the recipe.

    Attributes:
        space: The knobs.
        seed: Of the landscape.
    """

    space: tuple[Knob, ...]
    seed: int
    seen: list[Candidate] = field(default_factory=list)

    def __call__(
        self, candidate: Candidate, number: int = 0, before: Sequence[TrialResult] = ()
    ) -> TrialResult:
        """Return what a candidate comes to, and remember that it was asked."""
        self.seen.append(candidate)
        return self.result(candidate, number)

    def result(self, candidate: Candidate, number: int = 0) -> TrialResult:
        """Return what a candidate comes to."""
        share = self._share(candidate)
        cost = 60.0 - 25.0 * (1.0 - share)
        cost *= 1.0 + 0.04 * candidate.keep * (1.0 - share)
        for name, value in candidate.options.items():
            cost *= 1.0 + 0.12 * self._noise("option", name, value)
        recipe = [candidate[name] for name in ("quantizer", "windows", "clip", "keep", "scales")]
        cost *= 1.0 + 0.01 * self._noise("cost", *recipe, candidate.schedule)
        harm = sum(
            2.5 * (1.0 + self._noise("harm", place, each)) for place, each in enumerate(recipe)
        )
        harm *= 1.0 + 0.5 * self._noise("pair", recipe[0], recipe[2])
        loss = harm * (1.0 - share) ** 1.5 - 1.0 - candidate.keep
        loss += 0.3 * self._noise("loss", *recipe, candidate.schedule)
        memory = 3.0 * (share > 0.0) + 1.2 * (share < 1.0) * (1.0 + 0.4 * candidate.keep)
        return TrialResult(
            number=number,
            candidate=candidate,
            cost=cost,
            low=0.99 * cost,
            high=1.01 * cost,
            loss=max(0.0, loss),
            memory_mib=memory,
            violations={"loss": max(0.0, loss) - 12.0},
        )

    def everything(self) -> list[TrialResult]:
        """Return all results of the space."""
        names = [knob.name for knob in self.space]
        return [
            self.result(Candidate(tuple(zip(names, values, strict=True))))
            for values in itertools.product(*(knob.choices for knob in self.space))
        ]

    def _share(self, candidate: Candidate) -> float:
        """Return how much of the work a schedule gives to full precision."""
        rule = candidate.schedule
        if rule.startswith("uniform"):
            return float(rule == "uniform-fp32")
        return float(rule.removeprefix("spend-")) / 100.0

    def _noise(self, *parts: object) -> float:
        """Return a number from -1 to 1 that belongs to the parts."""
        digest = hashlib.sha256(repr((self.seed, *parts)).encode()).digest()
        return float(np.frombuffer(digest[:4], np.uint32)[0]) / 2**31 - 1.0
