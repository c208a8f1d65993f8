"""A search on the backend with given latencies, as a process that may be killed.

`python -m tests.tuner.given_latencies FOLDER [TRIALS]` prints the finished trials and the final
choice.  Engines are `FakeBackend`s; time is their own, so equal walks give equal results.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engines.backend import FakeBackend, Floats, Ids, Mask
from engines.measure import measure
from engines.model import ModelInfo
from engines.precision import precision_from_name
from engines.schedule import SamplerConfig
from tests.tuner.spaces import SMALL, Landscape
from tuner.best import best_trial
from tuner.folder import TRIALS, tune_folder
from tuner.search import search
from tuner.space import Candidate
from tuner.study import open_study
from tuner.trials import TrialLog, TrialResult

MODEL = ModelInfo(
    name="fake", architecture="llada", vocab=9, mask_id=4, eos_id=8, max_length=99, digest="0" * 64
)
SAMPLER = SamplerConfig(steps=4, gen_length=8, block_length=8)
LAND = Landscape(SMALL, 0)


class Clock:
    """Seconds that pass in engines alone."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


def evaluate(candidate: Candidate, number: int, before: Sequence[TrialResult]) -> TrialResult:
    """Return a trial whose cost is measured on a fake engine."""
    clock, known = Clock(), LAND.result(candidate, number)

    def logits(ids: Ids, mask: Mask, positions: Ids) -> Floats:
        return np.zeros((*positions.shape, MODEL.vocab), np.float32)

    engine = FakeBackend(precision_from_name("int8"), logits, known.cost, clock.sleep)
    where = (1, 2, 3, MODEL)
    found = measure({"int8": engine}, SAMPLER, *where, repeats=4, clock=clock).of("int8")
    return TrialResult(
        number=number,
        candidate=candidate,
        cost=found.latency_ms,
        low=found.low,
        high=found.high,
        loss=known.loss,
        memory_mib=known.memory_mib,
        violations=known.violations,
    )


def main() -> None:
    """Search, and print what was found."""
    folder, trials = Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 40
    with tune_folder(folder / "BUNDLE", "given latencies", force=False) as work:
        log = TrialLog(work / TRIALS)
        results = search(SMALL, evaluate, log, open_study(work, None), trials, 7)
    for result in results:
        print(result.to_json())
    print("ships", best_trial(results, "latency").to_json())


if __name__ == "__main__":
    main()
