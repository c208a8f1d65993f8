from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engines.document import document_from_text
from engines.errors import InputError
from engines.schedule import SamplerConfig
from tuner.allocate import Budget, allocate
from tuner.gain import TaskSensitivity
from tuner.sensitivity_file import Sensitivity, TaskTable


def content() -> dict[str, Any]:
    def precision(name: str, family: str, bits: float, ms: float | None) -> dict[str, Any]:
        return {
            "name": name,
            "family": family,
            "weight_bits": 8,
            "bits": bits,
            "simulated": ms is None,
            "latency_ms": ms,
            "memory_mib": None if ms is None else 1.0,
        }

    return {
        "format": "cadenza-sensitivity/1",
        "precisions": [
            precision("int8", "int8", 8, 1.0),
            precision("fp32", "fp32", 32, 3.0),
            precision("w4a4", "w4", 4, None),
        ],
        "families": {"int8": 10.0, "fp32": 40.0, "w4": 5.0},
        "activation_mib": 2.0,
        "base": "int8",
        "shape": {"batch": 8, "prompt": 16},
        "switch_ms": 0.1,
        "windows": 2,
        "tasks": {
            "sort": {
                "steps": 12,
                "gen_length": 24,
                "block_length": 24,
                "sampler": "low_confidence",
                "passes": [6, 6],
                "latency_ms": [[1.0, 3.0, None], [1.1, 3.1, None]],
                "kl": [[0.5, 0.0, 2.0], [0.1, 0.0, 1.0]],
                "influence": [2.0, 1.0],
                "gain": [[0.0, 1.0, -3.0], [0.0, 0.1, -0.9]],
                "n_prompts": 256,
                "colour": "blue",
            }
        },
        "note": {"kept": [1, 2]},
    }


def read(value: dict[str, Any]) -> Sensitivity:
    return Sensitivity.from_json(document_from_text(json.dumps(value), "s.json"))


def test_a_table_survives_reading_and_writing_unknown_keys_too() -> None:
    once = read(content()).to_json()
    assert once == content()
    assert read(json.loads(json.dumps(once))).to_json() == once


def test_families_and_activations_may_be_absent_then_they_take_none() -> None:
    value = content()
    del value["families"], value["activation_mib"]
    table = read(value)
    costs = table.costs("sort", ("int8", "fp32"))
    assert costs.memory_of(np.array([0, 1])) == 2.0


def test_a_table_can_be_allocated() -> None:
    table = read(content())
    names = table.candidates()
    assert names == ("int8", "fp32")
    answer = allocate(table.gain("sort", names), table.costs("sort", names), Budget(mean_bits=20))
    assert answer.schedule == ("fp32", "int8")
    assert answer.latency_ms == pytest.approx(6 * 3.0 + 6 * 1.1 + 0.1)
    assert answer.memory_mib == pytest.approx(54.0)
    assert table.costs("sort", ("w4a4",)).latency_of(np.array([0, 0])) is None


def test_simulated_precisions_compete_only_when_named_and_never_with_executed_ones() -> None:
    table = read(content())
    assert table.candidates(["w4a4"]) == ("w4a4",)
    with pytest.raises(InputError, match=r"cannot compete.*leave out int8"):
        table.candidates(["w4a4", "int8"])
    with pytest.raises(InputError, match="no precision 'fp8'"):
        table.candidates(["fp8"])
    with pytest.raises(InputError, match="once"):
        table.candidates(["int8", "int8"])
    value = content()
    value["precisions"], value["base"] = value["precisions"][2:], "w4a4"
    for key in ("kl", "gain"):
        value["tasks"]["sort"][key] = [[0.0], [0.0]]
    value["tasks"]["sort"]["latency_ms"] = None
    with pytest.raises(InputError, match="only when named; add --precision w4a4"):
        read(value).candidates()


def put(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(value: Any) -> None:
        for key in path[:-1]:
            value = value[key]
        value[path[-1]] = to

    return change


TASK = ("tasks", "sort")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (put("format", to="cadenza-sensitivity/2"), "format"),
        (put("precisions", to=[]), "names must be given"),
        (put("precisions", 1, "name", to="int8"), "must be given and differ"),
        (put("precisions", 1, "bits", to=0), "bits: must be positive"),
        (put("precisions", 1, "latency_ms", to=-1.0), "latency_ms: must be positive"),
        (put("base", to="fp8"), "'fp8' is none of int8"),
        (put("tasks", to={}), "no tasks"),
        (put("windows", to=3), "3 windows"),
        (put(*TASK, "passes", to=[6, -1]), "passes: 1: must be at least 0, got -1"),
        (put(*TASK, "passes", to=[0, 0]), "more than 0"),
        (put(*TASK, "passes", to=[6]), "passes: must have an entry"),
        (put(*TASK, "gain", 0, to=[1.0, 2.0]), "gain: 0: must have an entry for each of 3"),
        (put(*TASK, "gain", 0, 1, to=None), "gain: 0: 1: must be a finite number"),
        (put(*TASK, "gain", 0, 1, to=1e308), "finite number"),
        (put(*TASK, "latency_ms", to=[[1.0]]), "latency_ms: must have 2 rows"),
        (put(*TASK, "kl", to="much"), "kl: must be a list"),
        (put(*TASK, "steps", to=1.5), "steps: must be an integer"),
        (put("families", "int8", to=-1), "families: int8: must be at least 0"),
        (put("switch_ms", to=-1), "switch_ms: must be at least 0"),
        (put("switch_ms", to=1e61), "switch_ms: must be at most 1e\\+60"),
        (put("switch_ms", to=1e-61), "switch_ms: must be 0 or at least 1e-60"),
        (put("precisions", 0, "latency_ms", to=5e-324), "latency_ms: must be 0 or at least"),
        (put("precisions", 0, "family", to="x"), "family: 'x' is none of the families, int8"),
        (put("precisions", 0, "simulated", to=1), "true or false"),
    ],
)
def test_a_bad_table_gets_a_sentence_that_names_the_place(
    change: Callable[[dict[str, Any]], None], says: str
) -> None:
    value = content()
    change(value)
    with pytest.raises(InputError, match=says) as caught:
        read(value)
    assert str(caught.value).startswith("s.json")


@pytest.mark.parametrize(
    "path",
    [("precisions",), ("base",), ("windows",), ("tasks",), ("switch_ms",), ("format",)]
    + [(*TASK, key) for key in ("passes", "gain", "kl", "influence", "steps", "n_prompts")]
    + [("precisions", 0, key) for key in ("name", "family", "bits", "simulated")],
)
def test_a_missing_key_is_named(path: tuple[Any, ...]) -> None:
    value = content()
    inner: Any = value
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    with pytest.raises(InputError, match=f"the key '{path[-1]}' is missing"):
        read(value)


def test_what_was_measured_goes_into_the_file_with_its_intervals() -> None:
    table = np.array([[0.0, 1.0], [0.0, 2.0]])
    found = TaskSensitivity(
        precisions=("int8", "fp32"),
        base="int8",
        best="fp32",
        proxy="kl",
        kl=table,
        kl_low=table,
        kl_high=table,
        influence=np.ones(2),
        influence_low=np.ones(2),
        influence_high=np.ones(2),
        gain=table,
        gain_low=table - 0.1,
        gain_high=table + 0.1,
        raw_gain=table - 0.5,
        flips=table,
        moves=None,
        alike=((True, False), (False, True)),
        n_prompts=7,
        rows=99,
    )
    value = copy.deepcopy(content())
    value["precisions"].pop()
    base = {key: entry for key, entry in value.items() if key != "tasks"} | {
        "tasks": {
            "sort": {
                **value["tasks"]["sort"],
                "kl": table.tolist(),
                "gain": table.tolist(),
                "latency_ms": None,
            }
        }
    }
    whole = read(base)
    task = TaskTable.of(found, SamplerConfig(), np.array([6.0, 6.0]))
    written = Sensitivity(
        **{**{k: getattr(whole, k) for k in whole.__dataclass_fields__}, "tasks": {"sort": task}}
    ).to_json()
    again = read(json.loads(json.dumps(written))).tasks["sort"]
    assert again.n_prompts == 7
    assert again.extra["gain_low"] == (table - 0.1).tolist()
    assert again.extra["raw_gain"] == (table - 0.5).tolist()
    assert again.extra["alike"] == [[True, False], [False, True]]
    assert again.extra["proxy"] == "kl"
    assert set(again.extra) & {"kl", "precisions", "base"} == set()
