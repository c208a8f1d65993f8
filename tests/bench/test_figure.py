from __future__ import annotations

import json

import numpy as np
import pytest

from tests.bench import figure


def test_a_line_holds_exactly_the_agreed_keys_and_the_ratio() -> None:
    seconds = np.array([1.0, 2.0, 3.0])
    one = figure.speed_figure("x", "torch", "tokens/s", 12.0, seconds, 2 * seconds)
    line = json.loads(one.line())
    assert list(line) == [
        *("figure", "value", "unit", "against", "reference", "ratio", "spread", "n")
    ]
    assert line["value"] == 6.0
    assert line["ratio"] == 2.0
    assert line["spread"][0] <= 6.0 <= line["spread"][1]


def test_runs_are_interleaved_and_who_goes_first_rotates() -> None:
    order: list[tuple[str, int]] = []
    runs = {name: (lambda number, name=name: order.append((name, number))) for name in "ab"}
    seconds = figure.seconds_of(runs, rounds=2, clock=iter(range(100)).__next__)
    assert order == [("b", 0), ("a", 0), ("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    assert seconds["a"].tolist() == [1.0, 1.0]


def test_a_figure_that_is_not_a_number_is_refused() -> None:
    one = figure.Figure(
        name="x", value=np.nan, unit="", against="", reference=None, spread=(0, 0), n=1
    )
    with pytest.raises(ValueError, match="Out of range"):
        one.line()
