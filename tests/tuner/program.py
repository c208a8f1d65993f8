"""The allocation as an integer program, for a general solver (HiGHS, as scipy brings it).

    x[w, p]   1 where window w runs precision p           binary
    s[w]      1 where windows w and w + 1 differ          at least x[w + 1, p] - x[w, p]
    z[p]      1 where precision p is used at all          at least x[w, p]
    y[f]      1 where family f is stored                  at least z[p] of its precisions

Built from the definitions alone, so that it can contradict `tuner.allocate`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from scipy import optimize, sparse

from tuner.allocate import Budget, Costs


@dataclass(frozen=True)
class Program:
    """One integer program; a schedule costs `objective` and meets `constraints`."""

    objective: np.ndarray
    constraints: tuple[optimize.LinearConstraint, ...]
    integral: np.ndarray
    shape: tuple[int, int]

    @classmethod
    def of(cls, gain: np.ndarray, costs: Costs, budget: Budget) -> Program:
        windows, count = gain.shape
        size, steps = gain.size, windows - 1
        switching = costs.switch_ms > 0 and budget.latency_ms is not None
        families = sorted(set(costs.families))
        starts = np.cumsum([0, size, steps if switching else 0])
        switch_at, used_at = int(starts[1]), int(starts[2])
        stored_at = used_at + (count if budget.memory_mib is not None else 0)
        total = stored_at + (len(families) if budget.memory_mib is not None else 0)
        rows: list[tuple[list[int], list[float], float, float]] = [
            ([window * count + p for p in range(count)], [1.0] * count, 1.0, 1.0)
            for window in range(windows)
        ]
        everything = list(range(size))
        if budget.mean_bits is not None:
            most = budget.mean_bits * float(costs.passes.sum())
            rows.append((everything, costs.window_bits.ravel().tolist(), -np.inf, most))
        if budget.latency_ms is not None:
            at, spent = list(everything), costs.window_ms.ravel().tolist()
            if switching:
                at += range(switch_at, used_at)
                spent += [costs.switch_ms] * steps
            rows.append((at, spent, -np.inf, budget.latency_ms))
        if switching:
            for w, p in itertools.product(range(steps), range(count)):
                at = [(w + 1) * count + p, w * count + p, switch_at + w]
                rows.append((at, [1.0, -1.0, -1.0], -np.inf, 0.0))
        if budget.memory_mib is not None:
            for w, p in itertools.product(range(windows), range(count)):
                rows.append(([w * count + p, used_at + p], [1.0, -1.0], -np.inf, 0.0))
            for p, family in enumerate(costs.families):
                at = [used_at + p, stored_at + families.index(family)]
                rows.append((at, [1.0, -1.0], -np.inf, 0.0))
            sizes = [*np.asarray(costs.alone_mib).tolist()]
            sizes += [costs.family_mib.get(family, 0.0) for family in families]
            room = budget.memory_mib - costs.activation_mib
            rows.append((list(range(used_at, total)), sizes, -np.inf, room))
        matrix = sparse.lil_array((len(rows), total))
        for index, (at, values, _, _) in enumerate(rows):
            matrix[index, at] = values
        low, high = (np.array([row[part] for row in rows]) for part in (2, 3))
        objective = np.zeros(total)
        objective[:size] = -gain.ravel()
        integral = np.zeros(total)
        integral[:size] = 1
        return cls(
            objective,
            (optimize.LinearConstraint(sparse.csc_array(matrix), low, high),),
            integral,
            (windows, count),
        )

    def solve(self) -> tuple[float, np.ndarray] | None:
        """Return (greatest gain, schedule [W]), proven; None where there is none."""
        found = optimize.milp(
            self.objective,
            integrality=self.integral,
            bounds=optimize.Bounds(0, 1),
            constraints=self.constraints,
            options={"mip_rel_gap": 0.0},
        )
        if found.x is None:
            return None
        x = found.x[: self.shape[0] * self.shape[1]].reshape(self.shape)
        return -float(found.fun), x.argmax(axis=1)
