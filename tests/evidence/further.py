"""The part of RESULTS.md on 8 bits, fewer prompts, windows, other samplers and int8 scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.evidence.wording import number, points, table


def further(found: Mapping[str, Any]) -> str:
    """Return the part."""
    parts = [
        f"## Further experiments ({found['quantizer']})\n",
        "### Levels 4, 8, 16 at 8.00 bits, 8-bit weights\n",
    ]
    eight = found["eight_bits"]
    rows = [
        [
            task,
            "".join({"w8a4": "4", "w8a8": "8", "w8a16": "F"}[name] for name in each["schedule"]),
            f"{each['full']:.1f}",
            f"{each['uniform']:.1f}",
            f"{each['random']:.1f}",
            f"{each['dp']:.1f}",
            points(each["dp_minus_uniform"]),
        ]
        for task, each in eight["tasks"].items()
    ]
    parts.append(
        table(
            ["task", "schedule (F: 16)", "full", "uniform", "permuted", "DP", "DP - uniform"], rows
        )
    )
    parts.append(
        f"Over all tasks: DP - uniform {points(eight['dp_minus_uniform'])}, DP - permuted "
        f"{points(eight['dp_minus_random'])}.\n"
    )
    parts.append("### Number of calibration prompts\n")
    parts.append(
        table(
            ["prompts", "r with all", "least r", "accuracy against all prompts"],
            [
                [
                    size,
                    number(each["pearson"]),
                    number(each["pearson_least"]),
                    points(each["minus_all_prompts"]),
                ]
                for size, each in found["calibration_sizes"].items()
            ],
        )
    )
    parts.append("![](results/calibration.svg)\n")
    parts.append("### Number of windows\n")
    parts.append(
        table(
            ["windows", "DP - uniform", "DP - permuted"],
            [
                [windows, points(each["dp_minus_uniform"]), points(each["dp_minus_random"])]
                for windows, each in found["windows"].items()
            ],
        )
    )
    parts.append("### Other samplers: schedules found with the tasks' own, and found anew\n")
    samplers = {**found["tokens_a_step"], **found["threshold"]}
    parts.append(
        table(
            [
                "sampler",
                "first schedule - uniform",
                "- permuted",
                "own schedule - uniform",
                "first - own",
                "bits as run (first, own)",
                "passes",
            ],
            [
                [
                    name,
                    points(each["fixed_minus_uniform"]),
                    points(each["fixed_minus_random"]),
                    points(each["own_minus_uniform"]),
                    points(each["fixed_minus_own"]),
                    f"{each['bits_as_run']['fixed']:.2f}, {each['bits_as_run']['own']:.2f}",
                    f"{each['bits_as_run']['passes']:.1f}",
                ]
                for name, each in samplers.items()
            ],
        )
    )
    for name, gap in found["threshold_reverse"].items():
        parts.append(
            f"The reverse, schedules found under {name} and run with fixed steps: "
            f"{points(gap)} against uniform.\n"
        )
    scales = found["static_scales"]
    parts.append("### One static int8 scale set, or one a window\n")
    parts.append(
        table(
            ["task", "one set", "one a window"],
            [
                [task, f"{each['shared']:.1f}", f"{each['window']:.1f}"]
                for task, each in scales["tasks"].items()
            ],
        )
    )
    parts.append(f"One a window minus one set: {points(scales['window_minus_shared'])}.\n")
    parts.append("![](results/bits.svg)\n![](results/high_windows.svg)\n")
    return "\n".join(parts)
