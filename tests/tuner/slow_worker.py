"""The worker of `tuner.worker`; the last stage misses its latency, or falls, for some settings."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tuner import finish, settle
from tuner.choice import Choice
from tuner.contest import Contest
from tuner.space import Candidate
from tuner.worker import serve

Handler = Callable[[Any, Callable[[str], None]], Any]


def serve_all_late(given: Mapping[str, Any]) -> Handler:
    """Return a handler to which every schedule takes half as long again as it may."""
    settle.overshoot = lambda *_: 1.5
    return serve(given)


def serve_first_late(given: Mapping[str, Any]) -> Handler:
    """Return a handler to which the first setting alone is late."""
    seen: list[Candidate] = []

    def overshoot(contest: Contest, candidate: Candidate, choices: Mapping[str, Choice]) -> float:
        seen.append(candidate)
        return 1.5 if candidate == seen[0] else 1.0

    settle.overshoot = overshoot
    return serve(given)


def serve_first_dead(given: Mapping[str, Any]) -> Handler:
    """Return a handler that falls when it judges the first setting."""
    whole, mark = finish.judge, Path(given["work"]) / "fallen"

    def judge(contest: Contest, candidate: Candidate, choices: Mapping[str, Choice]) -> Any:
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGSEGV)
        return whole(contest, candidate, choices)

    finish.judge = judge
    return serve(given)
