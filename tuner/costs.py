"""What schedules cost, and the budgets that they are held to: bits, milliseconds, MiB.

    bits     mean over the expected passes
    ms       of all expected passes of a sequence, and of the switches between windows
    MiB      each family of weights in use once + what each precision adds + activations

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]
Indices = NDArray[np.intp]

# A budget is met when it is exceeded by no more than this share of it.
SLACK = 1e-9
BUDGETS = ("mean_bits", "latency_ms", "memory_mib")


@dataclass(frozen=True, kw_only=True, eq=False)
class Costs:
    """What W windows at each of P precisions cost.  NaN (or None) stands for "not known".

    Attributes:
        names: Of the precisions, all different [P].
        bits: Of an activation [P], positive.
        passes: Expected passes in each window [W], not all 0.
        latency_ms: Of a pass [P], or by window [W, P]; positive.  Of simulated precisions it is
            disregarded: they never carry a latency claim.
        families: The stored weights that each precision uses [P]; by default each its own.
        family_mib: Memory of each family's weights; absent ones take none.
        alone_mib: What each precision adds to its family [P]; by default nothing.
        activation_mib: The largest activation memory.
        switch_ms: Added whenever a window's precision differs from the one before.
        simulated: Whether each precision is [P]; by default none.
    """

    names: tuple[str, ...]
    bits: Reals
    passes: Reals
    latency_ms: Reals | None = None
    families: tuple[str, ...] = ()
    family_mib: Mapping[str, float] = field(default_factory=dict)
    alone_mib: Reals | None = None
    activation_mib: float = 0.0
    switch_ms: float = 0.0
    simulated: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        names = tuple(self.names)
        count = len(names)
        if not count or len(set(names)) < count:
            raise ValueError(f"names of precisions must be given and differ, got {names}")
        families = tuple(self.families) or names
        simulated = tuple(bool(flag) for flag in self.simulated) or (False,) * count
        for label, entries in (("families", families), ("simulated", simulated)):
            if len(entries) != count:
                raise ValueError(
                    f"{label} must have an entry for each of {count} precisions, got {entries}"
                )
        _refuse_a_mixture(names, simulated)
        passes = _checked("passes", self.passes, (np.size(self.passes),))
        if not passes.sum() > 0:
            raise ValueError(f"passes must sum to more than 0, got {passes}")
        latency = np.full(count, np.nan) if self.latency_ms is None else self.latency_ms
        shape = (len(passes), count) if np.ndim(latency) == 2 else (count,)
        latency = _checked("latency_ms", latency, shape, above=True, unknown=True)
        alone = np.zeros(count) if self.alone_mib is None else self.alone_mib
        sizes = {"activation_mib": self.activation_mib, "switch_ms": self.switch_ms}
        sizes |= {f"family_mib of {name!r}": size for name, size in self.family_mib.items()}
        for label, size in sizes.items():
            if not 0 <= size < 1e300:
                raise ValueError(f"{label} must be finite and at least 0, got {size}")
        values = {
            "names": names,
            "bits": _checked("bits", self.bits, (count,), above=True),
            "passes": passes,
            "latency_ms": np.full(shape, np.nan) if any(simulated) else latency,
            "families": families,
            "family_mib": dict(self.family_mib),
            "alone_mib": _checked("alone_mib", alone, (count,), unknown=True),
            "simulated": simulated,
        }
        for label, value in values.items():
            object.__setattr__(self, label, value)
        with np.errstate(over="ignore"):
            largest = max(self.window_bits.sum(), np.nansum(np.abs(self.window_ms)))
        if not np.isfinite(largest):
            raise ValueError("bits or latency_ms, times passes, are too large to be summed")

    @cached_property
    def _all_passes(self) -> float:
        return math.fsum(self.passes.tolist())

    @cached_property
    def window_bits(self) -> Reals:
        """Bits of all passes of each window at each precision [W, P]."""
        return np.multiply.outer(self.passes, self.bits)

    @cached_property
    def window_ms(self) -> Reals:
        """Milliseconds of all passes of each window at each precision [W, P]; NaN not known."""
        pass_ms = np.broadcast_to(
            cast(Reals, self.latency_ms), (len(self.passes), len(self.names))
        )
        return self.passes[:, None] * pass_ms

    def only(self, indices: Sequence[int]) -> Costs:
        """Return the costs of some of the precisions."""
        kept = list(indices)
        return Costs(
            names=tuple(self.names[index] for index in kept),
            bits=self.bits[kept],
            passes=self.passes,
            latency_ms=None if self.latency_ms is None else self.latency_ms[..., kept],
            families=tuple(self.families[index] for index in kept),
            family_mib=self.family_mib,
            alone_mib=None if self.alone_mib is None else self.alone_mib[kept],
            activation_mib=self.activation_mib,
            switch_ms=self.switch_ms,
            simulated=tuple(self.simulated[index] for index in kept),
        )

    def bits_of(self, schedule: Indices) -> float:
        """Return the mean bits of a schedule [W], indices of `names`."""
        if (schedule == schedule[0]).all():
            return float(self.bits[schedule[0]])
        return math.fsum((self.passes * self.bits[schedule]).tolist()) / self._all_passes

    def latency_of(self, schedule: Indices) -> float | None:
        """Return the milliseconds of a sequence under a schedule [W], or None if not known."""
        spent = self.window_ms[np.arange(len(schedule)), schedule]
        switches = np.count_nonzero(schedule[1:] != schedule[:-1])
        total = math.fsum(spent.tolist()) + self.switch_ms * float(switches)
        return None if math.isnan(total) else total

    def memory_of(self, used: Indices) -> float | None:
        """Return the MiB of the precisions in use (a schedule will do), or None if not known."""
        mine = sorted(set(used.tolist()))
        families = sorted({self.families[index] for index in mine})
        total = math.fsum(
            (
                self.activation_mib,
                *(self.family_mib.get(family, 0.0) for family in families),
                *(float(cast(Reals, self.alone_mib)[index]) for index in mine),
            )
        )
        return None if math.isnan(total) else total

    def within(self, schedule: Indices, budget: Budget) -> bool:
        """Return whether a schedule [W] meets every budget; what is not known meets none."""
        spent = (
            (budget.mean_bits, self.bits_of),
            (budget.latency_ms, self.latency_of),
            (budget.memory_mib, self.memory_of),
        )
        for bound, cost_of in spent:
            if bound is not None:
                cost = cost_of(schedule)
                if cost is None or cost > bound * (1.0 + SLACK):
                    return False
        return True

    def point(self, schedule: Indices, gain: Reals) -> Point:
        """Return a schedule [W] with what it costs and gains by a table [W, P]."""
        indices = tuple(schedule.tolist())
        return Point(
            schedule=tuple(self.names[index] for index in indices),
            indices=indices,
            mean_bits=self.bits_of(schedule),
            latency_ms=self.latency_of(schedule),
            memory_mib=self.memory_of(schedule),
            gain=math.fsum(gain[np.arange(len(schedule)), schedule].tolist()),
        )


def _refuse_a_mixture(names: tuple[str, ...], simulated: tuple[bool, ...]) -> None:
    """Raise when simulated and executed precisions are to compete."""
    executed = [name for name, flag in zip(names, simulated, strict=True) if not flag]
    if any(simulated) and executed:
        others = [name for name in names if name not in executed]
        raise ValueError(
            f"simulated and executed precisions cannot compete, for a simulated one has bits but "
            f"no latency: name only {', '.join(executed)}, or only {', '.join(others)}"
        )


def _checked(
    name: str, values: object, shape: tuple[int, ...], above: bool = False, unknown: bool = False
) -> Reals:
    """Return a read-only copy of finite, non-negative values; `above` 0, NaN where `unknown`."""
    array = np.array(values, dtype=np.float64)
    if array.shape != shape or not array.size:
        raise ValueError(f"{name} must have the shape {shape}, got {array.shape}")
    good = np.isfinite(array) & ((array > 0) if above else (array >= 0))
    if unknown:
        good |= np.isnan(array)
    if not good.all():
        raise ValueError(
            f"{name} must be finite and {'positive' if above else 'at least 0'}, got "
            f"{array[~good][0]} at {np.argwhere(~good)[0].tolist()}"
        )
    if not np.nansum(array) < 1e300:
        raise ValueError(f"{name} is too large to be summed, got up to {np.nanmax(array)}")
    array.setflags(write=False)
    return array


@dataclass(frozen=True, slots=True)
class Budget:
    """Upper bounds; None where there is none.

    Attributes:
        mean_bits: Of an activation, over the expected passes.
        latency_ms: Of a sequence: all its expected passes, and switches.
        memory_mib: Of weights and activations.
    """

    mean_bits: float | None = None
    latency_ms: float | None = None
    memory_mib: float | None = None

    def __post_init__(self) -> None:
        for name in BUDGETS:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, or None, got {value}")


@dataclass(frozen=True, slots=True)
class Point:
    """A schedule and what it costs and gains.

    Attributes:
        schedule: Name of the precision of each window [W].
        indices: The same, as indices of `Costs.names` [W].
        mean_bits: Of an activation, over the expected passes.
        latency_ms: Of a sequence; None where a precision's latency is not known.
        memory_mib: None where a precision's memory is not known.
        gain: Over the base, nats.
    """

    schedule: tuple[str, ...]
    indices: tuple[int, ...]
    mean_bits: float
    latency_ms: float | None
    memory_mib: float | None
    gain: float

    @property
    def uniform(self) -> bool:
        """Whether every window runs the same precision."""
        return len(set(self.indices)) == 1

    def to_json(self) -> dict[str, object]:
        """Return the point as `cadenza allocate --json` prints it."""
        return {
            "mean_bits": self.mean_bits,
            "latency_ms": self.latency_ms,
            "memory_mib": self.memory_mib,
            "gain": self.gain,
            "schedule": list(self.schedule),
        }
