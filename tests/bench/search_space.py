"""The measured space of `search_table.json`: what a candidate comes to, by the tuner's rules."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engines.build import digest_json
from engines.schedule import SamplerConfig, Schedule, passes_by_window
from tuner.choice import Priced
from tuner.costs import Budget, Costs
from tuner.rule import schedule_of
from tuner.space import ALL, SCHEDULE, SHARES, SPEND, UNIFORM, Candidate, Knob, Value
from tuner.trials import TrialResult

TABLE = Path(__file__).parent / "search_table.json"

_RECIPE = ("quantizer", "windows", "clip", "keep", "scales")


def space_of_table(
    recipes: Mapping[str, Sequence[Value]],
    options: Mapping[str, Sequence[Value]],
    precisions: Sequence[str],
) -> list[Knob]:
    """Return the knobs of a table: those of the tuner, with these choices."""
    own = f"{SPEND}{SHARES[0]}"
    rules = (own, *(f"{UNIFORM}{p}" for p in precisions), *(f"{SPEND}{s}" for s in SHARES[1:]))
    return [
        *(Knob(name, tuple(each), "recipe", name) for name, each in recipes.items()),
        Knob("precisions", (ALL,), "schedule", "precisions"),
        Knob(SCHEDULE, rules, "schedule", SCHEDULE),
        *(Knob(name, tuple(each), "backend", name) for name, each in options.items()),
    ]


def recipe_id(candidate: Candidate) -> str:
    """Return the name of a candidate's recipe."""
    return "/".join(str(candidate[name]) for name in _RECIPE)


@dataclass
class Table:
    """A space measured once.

    Attributes:
        plain: The document.
        space: Its knobs.
        max_loss: Points that a task may lose: the constraint of a replayed search.
    """

    plain: Mapping[str, Any]
    space: list[Knob]
    max_loss: float = 10.0
    _priced: dict[tuple[str, str, str], Priced] = field(default_factory=dict)
    _schedules: dict[tuple[str, str, str, str], Schedule] = field(default_factory=dict)
    _results: dict[Candidate, TrialResult] = field(default_factory=dict)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Table:
        """Return the table of a document."""
        space = [
            Knob(each["name"], tuple(each["choices"]), each["kind"], each["name"])
            for each in plain["space"]
        ]
        return cls(plain, space)

    @classmethod
    def read(cls, file: Path = TABLE) -> Table:
        """Return the committed table."""
        return cls.from_json(json.loads(file.read_text(encoding="utf-8")))

    def schedule(self, candidate: Candidate, task: str) -> Schedule:
        """Return the schedule that a candidate's rule gives a task."""
        key = (recipe_id(candidate), _options_id(candidate), task, candidate.schedule)
        if key not in self._schedules:
            priced = self.priced(candidate, task)
            self._schedules[key] = schedule_of(candidate.schedule, priced, {})
        return self._schedules[key]

    def priced(self, candidate: Candidate, task: str) -> Priced:
        """Return gains and costs of a task with a candidate's engines."""
        key = (recipe_id(candidate), _options_id(candidate), task)
        if key not in self._priced:
            recipe, options = self.plain["recipes"][key[0]], key[1]
            precisions = self.plain["precisions"]
            engines = [
                self.plain["full_engine"] if each["name"] == "fp32" else recipe["engine"]
                for each in precisions
            ]
            anchor = self.plain["anchor_ms"]
            latency = [anchor * self.plain["latency"][key][options][0] for key in engines]
            sampler = SamplerConfig(**_sampler(self.plain["tasks"][task]))
            self._priced[key] = Priced(
                np.array(recipe["gain"][task]),
                Costs(
                    names=tuple(each["name"] for each in precisions),
                    bits=np.array([each["bits"] for each in precisions], np.float64),
                    passes=np.array(passes_by_window(sampler, candidate.windows), np.float64),
                    latency_ms=np.array(latency),
                    families=tuple(each["family"] for each in precisions),
                    family_mib=recipe["family_mib"],
                    switch_ms=self.plain["switch_ms"][options],
                ),
                Budget(None, None, None),
            )
        return self._priced[key]

    def evaluate(
        self, candidate: Candidate, number: int = 0, before: Sequence[TrialResult] = ()
    ) -> TrialResult:
        """Return what a candidate was measured to come to."""
        if candidate not in self._results:
            costs, losses, used = [], {}, set()
            for task in self.plain["tasks"]:
                schedule, priced = self.schedule(candidate, task), self.priced(candidate, task)
                costs.append(priced.cost(schedule))
                rows = self.plain["loss"][recipe_id(candidate)][task]
                losses[task] = rows["/".join(schedule.precisions)]
                used |= set(schedule.precisions)
            self._results[candidate] = TrialResult(
                number=0,
                candidate=candidate,
                cost=float(np.mean(costs)),
                loss=max(losses.values()),
                memory_mib=priced.memory(used) or 0.0,
                violations={name: loss - self.max_loss for name, loss in losses.items()},
            )
        found = self._results[candidate]
        return TrialResult(
            number=number,
            candidate=candidate,
            cost=found.cost,
            loss=found.loss,
            memory_mib=found.memory_mib,
            violations=found.violations,
        )


def schedules_wanted(table: Table) -> dict[str, dict[str, list[Schedule]]]:
    """Return every schedule that a candidate of the table runs, by recipe and task."""
    found: dict[str, dict[str, dict[Schedule, None]]] = {}
    for values in itertools.product(*(knob.choices for knob in table.space)):
        names = (knob.name for knob in table.space)
        candidate = Candidate(tuple(zip(names, values, strict=True)))
        for task in table.plain["tasks"]:
            rows = found.setdefault(recipe_id(candidate), {}).setdefault(task, {})
            rows[table.schedule(candidate, task)] = None
    return {
        recipe: {task: list(rows) for task, rows in tasks.items()}
        for recipe, tasks in found.items()
    }


def _options_id(candidate: Candidate) -> str:
    return digest_json(candidate.options)[:12]


def _sampler(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in plain.items() if value is not None}
