"""A worker of a shared study, as a process: `python -m tests.tuner.study_worker FOLDER URL`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.tuner.spaces import SMALL, Landscape
from tuner.folder import TRIALS, tune_folder
from tuner.search import search
from tuner.space import Candidate
from tuner.study import open_study
from tuner.trials import TrialLog, TrialResult

# A worker whose heart is silent for so long is dead.
GRACE_S = 3


def main() -> None:
    """Search, and print what begins and ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("url")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--delay", type=float, default=0.2)
    parser.add_argument("--device", default="one")
    parser.add_argument("--strategy", default="tpe")
    args = parser.parse_args()
    land = Landscape(SMALL, 0)

    def evaluate(candidate: Candidate, number: int, before: Sequence[TrialResult]) -> TrialResult:
        print(f"begins {candidate.values}", flush=True)
        time.sleep(args.delay)
        print(f"ends {candidate.values}", flush=True)
        return replace(land.result(candidate, number), device=args.device)

    with tune_folder(args.folder / "BUNDLE", "the same command", force=False) as work:
        worker = work.parent.name
        study = open_study(work, args.url, "cadenza", worker, args.device, GRACE_S)
        found = search(
            SMALL, evaluate, TrialLog(work / TRIALS), study, args.trials, 1, args.strategy
        )
    for result in found:
        print(f"has {result.number} {result.device} {result.candidate.values}", flush=True)


if __name__ == "__main__":
    main()
