"""Seconds are counted once, for the kind of work that was done."""

from __future__ import annotations

import pytest

from tuner.stopwatch import Stopwatch


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_work_inside_other_work_counts_once() -> None:
    clock = Clock()
    watch = Stopwatch(clock=clock)
    with watch("measure"):
        clock.now += 1.0
        with watch("build"):
            clock.now += 10.0
            with watch("build"):
                clock.now += 100.0
        clock.now += 1000.0
    assert watch.spent == {"build": 110.0, "measure": 1001.0}
    before = dict(watch.spent)
    with pytest.raises(KeyError), watch("evaluate"):
        clock.now += 5.0
        raise KeyError
    assert watch.since(before) == {"build": 0.0, "measure": 0.0, "evaluate": 5.0}
    assert sum(watch.spent.values()) == clock.now
