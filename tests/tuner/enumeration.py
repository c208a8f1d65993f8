"""Allocation problems drawn at random; of small ones, every schedule."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tuner.allocate import Budget, Costs

SLACK = 1 + 1e-9
CLOSE = 1e-9


@dataclass
class Enumeration:
    """Every schedule of a small problem, by the definitions and nothing else."""

    gain: np.ndarray
    costs: Costs

    def __post_init__(self) -> None:
        windows, count = self.gain.shape
        self.all = np.array(list(itertools.product(range(count), repeat=windows)))
        rows = np.arange(windows)
        passes = self.costs.passes
        self.switches = (self.all[:, 1:] != self.all[:, :-1]).sum(1)
        self.bits = (passes * self.costs.bits[self.all]).sum(1) / passes.sum()
        pass_ms = np.broadcast_to(np.asarray(self.costs.latency_ms), self.gain.shape)
        self.ms = (passes * pass_ms[rows, self.all]).sum(1) + self.costs.switch_ms * self.switches
        self.gains = self.gain[rows, self.all].sum(1)
        sets: dict[frozenset[int], float] = {}
        memory = []
        for schedule in self.all:
            used = frozenset(schedule.tolist())
            if used not in sets:
                families = {self.costs.families[p] for p in used}
                sets[used] = (
                    sum(self.costs.family_mib.get(family, 0.0) for family in families)
                    + sum(self.costs.alone_mib[p] for p in used)
                    + self.costs.activation_mib
                )
            memory.append(sets[used])
        self.mib = np.array(memory)

    def fits(self, budget: Budget) -> np.ndarray:
        good = np.ones(len(self.all), bool)
        for bound, spent in (
            (budget.mean_bits, self.bits),
            (budget.latency_ms, self.ms),
            (budget.memory_mib, self.mib),
        ):
            if bound is not None:
                good &= spent <= bound * SLACK  # NaN is not
        return good

    def most(self, budget: Budget) -> float | None:
        gains = self.gains[self.fits(budget)]
        return float(gains.max()) if len(gains) else None

    def reference(self, budget: Budget) -> set[tuple[int, ...]]:
        good = np.flatnonzero(self.fits(budget))
        uniform = [i for i in good if self.switches[i] == 0]
        if uniform:
            ms = np.nan_to_num(self.ms, nan=np.inf)
            best = min(uniform, key=lambda i: (-self.bits[i], ms[i]))
            same = [i for i in uniform if (self.bits[i], ms[i]) == (self.bits[best], ms[best])]
            return {tuple(self.all[i]) for i in same}
        fewest = self.switches[good].min()
        return {tuple(self.all[i]) for i in good if self.switches[i] == fewest}

    def nearest(self, budget: Budget) -> dict[str, float | None]:
        least: dict[str, float | None] = {}
        for name, spent in (
            ("mean_bits", self.bits),
            ("latency_ms", self.ms),
            ("memory_mib", self.mib),
        ):
            if getattr(budget, name) is not None:
                values = spent[self.fits(replace(budget, **{name: None}))]
                values = values[~np.isnan(values)]
                least[name] = float(values.min()) if len(values) else None
        return least

    def front(self, budget: Budget) -> list[tuple[float, float, float]]:
        good = self.fits(Budget(memory_mib=budget.memory_mib))
        if budget.latency_ms is not None:
            good &= ~np.isnan(self.ms)
        ms = np.nan_to_num(self.ms, nan=np.inf)
        # Rounded, for the same numbers summed in another order must not count as different.
        table = np.round(np.stack((self.bits, ms, -self.gains), axis=1)[good], 9)
        points = [tuple(row) for row in np.unique(table, axis=0).tolist()]
        kept: list[tuple[float, float, float]] = []
        for bits, slow, lost in points:
            if not any(m <= slow and n <= lost for _, m, n in kept):  # those came first
                kept.append((bits, slow, lost))
        return [(b, m, -n) for b, m, n in kept]


def draw(rng: np.random.Generator, windows: int = 5, count: int = 4) -> tuple[np.ndarray, Costs]:
    """A random problem: some with ties, switch costs, families, unknowns, and odd passes."""
    windows, count = int(rng.integers(1, windows + 1)), int(rng.integers(1, count + 1))
    coarse = rng.random() < 0.5

    def numbers(*shape: int) -> np.ndarray:
        if coarse:
            return rng.integers(1, 5, shape).astype(float)
        return rng.uniform(0.2, 4.0, shape)

    gain = numbers(windows, count) - (2.0 if rng.random() < 0.5 else 0.0)
    if rng.random() < 0.5:
        gain = np.sort(gain, axis=1)
    if rng.random() < 0.1:
        gain = np.zeros_like(gain)
    latency = numbers(windows, count) if rng.random() < 0.3 else numbers(count)
    if rng.random() < 0.15:
        latency = np.where(rng.random(latency.shape) < 0.3, np.nan, latency)
    passes = [np.ones(windows), np.full(windows, 2.0), numbers(windows)][rng.integers(3)]
    if rng.random() < 0.1 and windows > 1:
        passes[0] = 0.0
    simulated = bool(rng.random() < 0.05)
    costs = Costs(
        simulated=(simulated,) * count,
        names=tuple("abcd"[:count]),
        bits=numbers(count),
        passes=passes,
        latency_ms=latency,
        families=tuple(rng.choice(["u", "v"], count).tolist()),
        family_mib={"u": 2.0, "v": 3.0},
        alone_mib=np.where(rng.random(count) < 0.1, np.nan, rng.integers(0, 3, count)),
        activation_mib=1.0,
        switch_ms=[0.0, 0.3, 1.0][rng.integers(3)],
    )
    return gain, costs


def draw_budget(rng: np.random.Generator, all_: Enumeration) -> Budget:
    """Budgets inside the range of what schedules spend, a few below it."""

    def bound(spent: np.ndarray, share: float) -> float | None:
        spent = spent[~np.isnan(spent)]
        if rng.random() > share or not len(spent):
            return None
        low, high = float(spent.min()), float(spent.max())
        if rng.random() < 0.4:
            return float(rng.choice(spent))  # exactly what some schedule spends
        return max(0.01, float(rng.uniform(low - 0.1 * (high - low) - 0.01, high)))

    return Budget(bound(all_.bits, 0.8), bound(all_.ms, 0.7), bound(all_.mib, 0.4))


def problems(seed: int, number: int, **sizes: int) -> Iterator[tuple[Enumeration, Budget]]:
    rng = np.random.default_rng(seed)
    for _ in range(number):
        every = Enumeration(*draw(rng, **sizes))
        yield every, draw_budget(rng, every)


def large(
    windows: int, count: int, seed: int, switch_ms: float = 0.0, passes: np.ndarray | None = None
) -> tuple[np.ndarray, Costs, Budget]:
    """A problem of many windows, for which no enumeration is possible."""
    rng = np.random.default_rng(seed)
    gain = np.sort(rng.gamma(1.0, 1.0, (windows, count)), axis=1)
    latency = np.sort(rng.uniform(1.0, 5.0, count))
    each = np.full(windows, 2.0) if passes is None else passes
    costs = Costs(
        names=tuple(f"p{index}" for index in range(count)),
        bits=np.array([3.0, 4.0, 6.0, 8.0, 16.0, 32.0])[:count],
        passes=each,
        latency_ms=latency,
        families=tuple("uuvvww"[:count]),
        family_mib={"u": 10.0, "v": 20.0, "w": 40.0},
        switch_ms=switch_ms,
    )
    slow, fast = latency.max() * each.sum(), latency.min() * each.sum()
    return (
        gain,
        costs,
        Budget(0.5 * float(costs.bits[1] + costs.bits[-2]), fast + 0.4 * (slow - fast), 75.0),
    )


def realistic(
    windows: int, count: int, seed: int, switch_share: float = 0.0
) -> tuple[np.ndarray, Costs, Budget]:
    """A large problem as profiles look: gains that fall off in bits, windows orders apart.

    Equal passes, one latency a precision, three budgets that all bind or nearly so; a switch
    costs `switch_share` of the mean pass.
    """
    rng = np.random.default_rng(seed)
    bits = np.array([2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0])
    bits = bits[:count] if count > 4 else np.array([4.0, 8.0, 16.0, 32.0])[:count]
    fall = rng.uniform(0.2, 0.6, (windows, 1)) * rng.uniform(0.7, 1.3, (windows, count))
    left = -np.sort(-np.exp(-fall * np.arange(count)), axis=1)  # of the divergence
    gain = rng.lognormal(0.0, 2.0, (windows, 1)) * (left[:, :1] - left)
    latency = np.sort(rng.uniform(1.0, 4.0, count))
    families = tuple(f"f{index // 2}" for index in range(count))
    sizes = {name: 10.0 * (1 + index) for index, name in enumerate(dict.fromkeys(families))}
    costs = Costs(
        names=tuple(f"p{index}" for index in range(count)),
        bits=bits,
        passes=np.full(windows, 2.0),
        latency_ms=latency,
        families=families,
        family_mib=sizes,
        switch_ms=switch_share * float(latency.mean()),
    )
    least, most = 2.0 * windows * latency.min(), 2.0 * windows * latency.max()
    budget = Budget(
        float(bits[0] + 0.4 * (bits[-1] - bits[0])),
        float(least + 0.45 * (most - least)),
        sum(sizes.values()) - 10.5,
    )
    return gain, costs, budget
