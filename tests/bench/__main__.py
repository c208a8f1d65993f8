"""Print figures, one JSON object a line: `python -m tests.bench [FIGURE]...`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial

from tests.bench import allocation, generate, large, profiling, searching, tuning
from tests.bench.figure import Figure

FIGURES: dict[str, Callable[[], Figure]] = {
    "generate_speedup": partial(generate.speedup, "generate_speedup", 8),
    "generate_speedup_b1": partial(generate.speedup, "generate_speedup_b1", 1),
    "mixed_over_best_uniform": generate.mixed_over_best_uniform,
    "runtime_overhead": generate.runtime_overhead,
    "full_precision_generations": generate.full_precision_generations,
    "allocate_16x4": allocation.allocate_16x4,
    "allocate_64x6": partial(allocation.optimum_64x6, "allocate_64x6", 0.0),
    "allocate_64x6_switch": partial(
        allocation.optimum_64x6, "allocate_64x6_switch", allocation.SWITCH_SHARE
    ),
    "allocate_64x6_front": partial(allocation.front_64x6, "allocate_64x6_front", 0.0),
    "allocate_64x6_front_switch": partial(
        allocation.front_64x6, "allocate_64x6_front_switch", allocation.SWITCH_SHARE
    ),
    "profile_passes": profiling.profile_passes,
    "profile_wall": profiling.profile_wall,
    "search_evaluations": partial(searching.search_evaluations, "search_evaluations", "full"),
    **{
        f"search_evaluations_{other}": partial(
            searching.search_evaluations, f"search_evaluations_{other}", other
        )
        for other in ("random", "fast", "mixed")
    },
    "search_overhead": tuning.search_overhead,
    "rebuild_count": tuning.rebuild_count,
    "plan_rss_multiple": large.plan_rss_multiple,
    "plan_disk_multiple": large.plan_disk_multiple,
    "bundle_disk_multiple": large.bundle_disk_multiple,
}


def main(argv: list[str]) -> int:
    """Print the figures named, or all, and return the exit code."""
    unknown = [name for name in argv if name not in FIGURES]
    if unknown:
        print(f"unknown figure {unknown[0]!r}; figures are {', '.join(FIGURES)}", file=sys.stderr)
        return 2
    # stdout is for the figures alone: what a native solver prints goes to stderr.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        for name in argv or FIGURES:
            print(FIGURES[name]().line(), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
