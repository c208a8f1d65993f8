"""The closing table: what ships, beside what it is compared with, and why."""

from __future__ import annotations

import json

from engines.precision import EXECUTED, precision_from_name
from engines.schedule import Schedule
from tuner.closing_table import Measured, Verdict, closing_table, verdict_json

MIXED = Measured(
    label="ships",
    schedule=Schedule(("int8", "fp32", "int8")),
    mean_bits=16.0,
    ms=(12.34, 12.0, 13.0),
    accuracy=(0.9, 0.85, 0.95),
    agreement=(1.0, 0.9, 1.0),
    n=100,
)
FULL = Measured(
    label="uniform fp32",
    schedule=Schedule.uniform("fp32", 3),
    mean_bits=32.0,
    ms=None,
    accuracy=None,
    agreement=(1.0, 0.9, 1.0),
    n=100,
)
VERDICT = Verdict(
    task="edit", shipped=MIXED, others=(FULL,), reason="because", loss=(0.1, -0.5, 0.9)
)
PRECISIONS = (EXECUTED["fp32"], EXECUTED["int8"], precision_from_name("w4a4"))


def test_the_task_is_named_once_and_what_ships_stands_first() -> None:
    header, first, second, *rest = closing_table([VERDICT], PRECISIONS).splitlines()
    assert header.split()[:3] == ["task", "schedule", "windows"]
    assert first.startswith("edit  ships ")
    assert "16.00  12.3 [12.0, 13.0]  90.0 [85.0, 95.0]  100.0 [90.0, 100.0]" in first
    assert second.startswith("      uniform fp32 ")
    assert rest[-1] == "edit: because"


def test_what_is_not_known_is_a_dash() -> None:
    second = closing_table([VERDICT], PRECISIONS).splitlines()[2]
    assert second.split()[4:6] == ["-", "-"]


def test_every_bar_is_in_the_legend_and_ascii_has_no_blocks() -> None:
    text = closing_table([VERDICT], PRECISIONS)
    legend = text.splitlines()[4]
    assert [part.split()[1] for part in legend.split("  ")] == ["fp32", "int8", "w4a4"]
    bars = text.splitlines()[1].split()[2]
    assert len(bars) == 3
    assert set(bars) <= set(legend)
    assert closing_table([VERDICT], PRECISIONS, ascii_=True).isascii()


def test_a_verdict_s_json_says_all_that_was_measured() -> None:
    found = json.loads(json.dumps(verdict_json(VERDICT)))
    assert found["shipped"]["schedule"] == ["int8", "fp32", "int8"]
    assert found["shipped"]["latency_ms"] == [12.34, 12.0, 13.0]
    assert found["compared"][0]["latency_ms"] is None
    assert found["compared"][0]["accuracy"] is None
    assert found["quality_shown_to"] == found["loss"][2] == 0.9


def test_milliseconds_that_were_not_measured_here_are_told_as_such() -> None:
    assert "No engine was timed here" not in closing_table([VERDICT], PRECISIONS)
    text = closing_table([VERDICT], PRECISIONS, latency_from="predicted for NVIDIA L4")
    assert "No engine was timed here: milliseconds are predicted for NVIDIA L4." in text
