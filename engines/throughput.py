"""Throughput of schedules at one batch, and how long a sequence takes: in turns, with intervals.

In each round every schedule answers the same batch of prompts once; the order follows a Williams
design, so that a machine that warms up or throttles slows all of them alike.  What is timed is a
whole batch as a user waits for it, engine and sampler, without the text's way to tokens and back.
All rows of a batch end together, so a round is one observation of latency, however many rows.

Intervals of medians and ratios resample rounds.  Those of quantiles are order statistics, which
assume nothing about the times but that rounds are alike; so a sample says by itself whether it is
large enough for a quantile, and of a few rounds there is no p99.

Pure but for the engines: the clock is an argument, no file is opened.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.backend import Backend
from engines.measure import balanced_orders
from engines.model import ModelInfo
from engines.noise import Drift, Interval, bootstrap_median, drift
from engines.sampler import Request, generate
from engines.schedule import SamplerConfig, Schedule

Prompts = Sequence[tuple[int, ...]]

# Quantiles of latency that are told, by their names.
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

# What a 95 % interval leaves out at each end.
_TAIL = 0.025

# Fewest measured rounds, whatever they cost.
FEWEST_ROUNDS = 9


@dataclass(frozen=True, slots=True)
class Quantile:
    """A quantile of a sample, with the order statistics that hold it in 95 % of all samples.

    Attributes:
        value: In the unit of the sample; None where the sample is too small to have it inside.
        low: Lower end of its interval, or None.
        high: Upper end, or None.
        n: Size of the sample.
        needed: From how many on there is a value.
    """

    value: float | None
    low: float | None
    high: float | None
    n: int
    needed: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What one schedule did at one batch.

    Attributes:
        schedule: The precision of each window.
        tokens_per_s: Committed tokens of all rows a second, end-of-sequence padding included.
        latency_ms: Of a sequence, by the names of `SHARES`, milliseconds.
        passes: Engine passes of an answer, mean.
        bits: Activation bits of an answer's passes, mean, as run.
        rounds: Milliseconds of each round [R], for paired comparison.
    """

    schedule: Schedule
    tokens_per_s: Interval
    latency_ms: Mapping[str, Quantile]
    passes: float
    bits: float
    rounds: tuple[float, ...]


@dataclass(frozen=True)
class Throughput:
    """What several schedules did at one batch, measured in turns.

    Attributes:
        batch: Rows that were denoised together.
        tokens: Answer tokens of a round.
        lanes: By label, in the order given.
        seed: Of the bootstrap.
    """

    batch: int
    tokens: int
    lanes: Mapping[str, Measured]
    seed: int

    def ratio(self, one: str, other: str) -> Interval:
        """Return a schedule's tokens a second over another's, paired by round."""
        paired = np.array(self.lanes[other].rounds) / np.array(self.lanes[one].rounds)
        return bootstrap_median(paired[:, None], np.random.default_rng(self.seed))

    def fastest(self, labels: Sequence[str]) -> str:
        """Return the label of most tokens a second; the first of equals."""
        return max(labels, key=lambda label: self.lanes[label].tokens_per_s.median)

    @property
    def drift(self) -> Drift:
        """How much slower the machine was in the last rounds than in the first."""
        every = np.sum([lane.rounds for lane in self.lanes.values()], axis=0)
        return drift(every.tolist(), self.seed)


def measure_throughput(
    schedules: Mapping[str, Schedule],
    engines: Mapping[str, Backend],
    sampler: SamplerConfig,
    batches: Sequence[Prompts],
    model: ModelInfo,
    seconds: float = 5.0,
    rounds: int | None = None,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
    seed: int = 0,
) -> Throughput:
    """Return throughput and latency of each schedule, measured in turns.

    Args:
        schedules: By a label.
        engines: The engine of each precision that a schedule uses.
        sampler: How the answers are denoised; by threshold the passes are those of the prompts.
        batches: Prompts of a round, as many rows each; round after round, from the first again.
        model: Special ids and vocabulary.
        seconds: About how long to measure, warm-up left out: how many rounds fit is decided by
            the last warm-up, before the first round.
        rounds: Exactly so many, whatever they take.
        warmup: Generations of each schedule before the first round, at least 1.
        clock: Seconds.
        seed: Of the bootstrap.

    Raises:
        InputError: A prompt does not fit the model.
        BackendError: An engine failed.
        ValueError: There is nothing to measure, batches differ in size, or a number is too small.
    """
    sizes = {len(prompts) for prompts in batches}
    if not schedules or len(sizes) != 1 or sizes == {0}:
        raise ValueError(f"need schedules and batches of one size, got {sorted(sizes)}")
    if warmup < 1 or (rounds is not None and rounds < 1) or not seconds >= 0.0:
        raise ValueError(
            f"warmup >= 1, rounds >= 1 and seconds >= 0 must hold, got {warmup=}, {rounds=}, "
            f"{seconds=}"
        )
    runs = [_requests(schedule, sampler, batches) for schedule in schedules.values()]
    warm = 0.0
    for _ in range(warmup):
        began = clock()
        for run in runs:
            generate(run[0], engines, model)
        warm = clock() - began
    count = rounds_in(seconds, warm, len(runs)) if rounds is None else rounds
    times: NDArray[np.float64] = np.zeros((len(runs), count))
    passes, bits = np.zeros_like(times), np.zeros_like(times)
    orders = balanced_orders(len(runs))
    for turn in range(count):
        for index in orders[turn % len(orders)]:
            requests = runs[index][turn % len(batches)]
            began = clock()
            made = generate(requests, engines, model, clock=clock)
            times[index, turn] = (clock() - began) * 1000.0
            passes[index, turn] = np.mean([each.passes for each in made])
            bits[index, turn] = np.mean([each.bits for each in made])
    (batch,) = sizes
    tokens = batch * sampler.gen_length
    return Throughput(
        batch=batch,
        tokens=tokens,
        lanes={
            label: Measured(
                schedule=schedule,
                tokens_per_s=bootstrap_median(
                    tokens / times[at][:, None] * 1000.0, np.random.default_rng(seed)
                ),
                latency_ms={name: quantile(times[at], share) for name, share in SHARES.items()},
                passes=float(passes[at].mean()),
                bits=float(np.average(bits[at], weights=passes[at])),
                rounds=tuple(times[at].tolist()),
            )
            for at, (label, schedule) in enumerate(schedules.items())
        },
        seed=seed,
    )


def rounds_in(seconds: float, a_round: float, schedules: int) -> int:
    """Return how many rounds to measure: whole Williams designs that fit, within two bounds.

    At least `FEWEST_ROUNDS`, at most as many as the highest of `SHARES` needs; of several
    schedules a multiple that gives each of them every place in the order.

    Args:
        seconds: That may be spent.
        a_round: Seconds of a round.
        schedules: How many there are.
    """
    most = max(map(samples_needed, SHARES.values()))
    fit = most if a_round * most <= seconds else int(seconds / a_round)
    design = len(balanced_orders(schedules))
    return -(-max(fit, FEWEST_ROUNDS) // design) * design


def samples_needed(share: float) -> int:
    """Return the smallest sample whose least and greatest value hold a quantile between them.

    In 95 % of samples: the chance that all of n values lie on one side of the quantile, share**n
    or (1 - share)**n, must be at most 2.5 % for each side.
    """
    n = max(1, math.floor(math.log(_TAIL) / math.log(max(share, 1.0 - share))))
    while max(share, 1.0 - share) ** n > _TAIL:
        n += 1
    return n


def quantile(sample: NDArray[np.float64] | Sequence[float], share: float) -> Quantile:
    """Return a quantile of a sample with its 95 % interval, or with None where it is too small.

    The interval's ends are the order statistics that leave at most 2.5 % of the binomial
    distribution of "how many values lie below the quantile" outside on each side.  Source: J. D.
    Gibbons, S. Chakraborti, Nonparametric Statistical Inference, confidence intervals of a
    population quantile.

    Args:
        sample: Values [N].
        share: Of the values that lie below it, in (0, 1).
    """
    if not 0.0 < share < 1.0:
        raise ValueError(f"0 < share < 1 must hold, got {share}")
    values = np.sort(np.asarray(sample, np.float64))
    n, needed = len(values), samples_needed(share)
    if n < needed:
        return Quantile(None, None, None, n, needed)
    below = np.cumsum([_binomial(n, k, share) for k in range(n + 1)])  # P(at most k below)
    low = int(np.searchsorted(below, _TAIL, side="right"))  # ranks, from 1
    high = int(np.searchsorted(below, 1.0 - _TAIL)) + 1
    ends = values[max(low, 1) - 1], values[min(high, n) - 1]
    return Quantile(float(np.quantile(values, share)), float(ends[0]), float(ends[1]), n, needed)


def canned_prompts(batch: int, length: int, model: ModelInfo, seed: int = 0) -> Prompts:
    """Return random prompts of one length, ids of the vocabulary, never the mask token."""
    ids = np.random.default_rng(seed).integers(0, model.vocab - 1, (batch, length))
    ids += ids >= model.mask_id
    return [tuple(row) for row in ids.tolist()]


def _requests(
    schedule: Schedule, sampler: SamplerConfig, batches: Sequence[Prompts]
) -> list[list[Request]]:
    return [
        [Request(prompt=ids, sampler=sampler, schedule=schedule, task="bench") for ids in prompts]
        for prompts in batches
    ]


def _binomial(n: int, k: int, share: float) -> float:
    """Return the chance of k of n; by logarithms, as the coefficients leave any float."""
    choose = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(choose + k * math.log(share) + (n - k) * math.log1p(-share))
