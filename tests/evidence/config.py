"""What `make evaluate` runs: checkpoint, tasks, quantizers, schedules, and how many prompts.

Two sizes of the same study: the full one, whose figures RESULTS.md states, and a quick one that
runs in CI to show that every part works; its figures mean nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Activation bits of the headline rows, and of the rows with six levels, all over 4-bit weights.
LEVELS = ("w4a3", "w4a4", "w4a6", "w4a8")
SIX_LEVELS = ("w4a3", "w4a4", "w4a5", "w4a6", "w4a7", "w4a8")
BASE, HIGH = "w4a4", "w4a8"
# The regime of the paper's Table 4.
EIGHT_LEVELS = ("w8a4", "w8a8", "w8a16")
EIGHT_BASE = "w8a8"


@dataclass(frozen=True, kw_only=True)
class EvidenceConfig:
    """One study.

    Attributes:
        model: The checkpoint's folder.
        factor: Outliers are planted with this factor in `channels` channels; 0 for none.
        channels: Of each site of each block.
        target: Where the engines run.
        tasks: Specs as `--task` takes them.
        quantizers: That the headline rows are made with.
        main: The quantizer of the further experiments.
        windows: W of the headline rows.
        other_windows: W of the experiment on the number of windows; multiples of each other.
        mean_bits: The budget of the headline rows.
        budgets: Of the curve from which "bits at uniform quality" is read.
        calibration: Prompts a task whose traces give the sensitivity.
        tuning: Prompts a task for everything that is chosen by measuring.
        test: Prompts a task of the headline rows.
        rest: The first of these, for permutations and the rest.
        permutations: Of the same bits.
        resamples: Calibrations drawn again, for regret and false verdicts.
        sizes: Calibration prompts of the experiment on their number.
        subsets: Random subsets of each size.
        threshold: Of the confidence rule.
        repeats: Rounds in which engines are timed.
        seed: Of everything drawn.
    """

    model: Path = ROOT / "calib_data" / "reference"
    factor: float = 4.0
    channels: int = 4
    target: str = "cpu"
    tasks: tuple[str, ...] = ("edit", "rename", "chain", "most", "close")
    quantizers: tuple[str, ...] = ("rtn", "gptq", "gptq-hadamard")
    main: str = "gptq-hadamard"
    windows: int = 6
    other_windows: tuple[int, ...] = (3, 12)
    mean_bits: float = 4.0
    budgets: tuple[float, ...] = (3.25, 3.5, 3.75)
    calibration: int = 256
    tuning: int = 192
    test: int = 1000
    rest: int = 300
    permutations: int = 16
    resamples: int = 20
    sizes: tuple[int, ...] = (8, 16, 32, 64, 128)
    subsets: int = 3
    threshold: float = 0.9
    repeats: int = 15
    seed: int = 0

    @property
    def precisions(self) -> tuple[str, ...]:
        """What is exported."""
        return ("fp32", "int8", *SIX_LEVELS, *EIGHT_LEVELS)


FULL = EvidenceConfig()
QUICK = EvidenceConfig(
    tasks=("edit", "close"),
    quantizers=("rtn", "gptq-hadamard"),
    other_windows=(3,),
    budgets=(3.5,),
    calibration=12,
    tuning=8,
    test=16,
    rest=8,
    permutations=2,
    resamples=3,
    sizes=(4,),
    subsets=2,
    repeats=3,
)
