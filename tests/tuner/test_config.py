"""What a tune is asked for: checked once, and the same command has the same identity."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engines.errors import InputError
from tuner.config import MODES, TuneConfig

CONFIG = TuneConfig(export=Path("EXPORT"), output=Path("BUNDLE"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mean_bits": 0.0}, "mean_bits > 0"),
        ({"memory_mib": float("inf")}, "memory_mib > 0"),
        ({"timeout_s": -1.0}, "timeout_s > 0"),
        ({"latency_ms": 1.0, "latency_share": 0.5}, "not both"),
        ({"max_loss": float("nan")}, "max_loss >= 0"),
        ({"objective": "beauty"}, "latency, quality, memory, got 'beauty'"),
        ({"proxy": "luck"}, "kl, influence, flips, moves, rollout, got 'luck'"),
        ({"mode": "lazy"}, "quick, default, extensive, got 'lazy'"),
        ({"trials": 0}, "trials >= 1"),
        ({"seed": -1}, "seed >= 0"),
        ({"precisions": ("int8", "int8")}, "named once, got int8, int8"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_name(
    change: dict[str, object], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        replace(CONFIG, **change)  # type: ignore[arg-type]


def test_a_target_has_one_spelling() -> None:
    for target in ("rtx-sm120+sm89", "rtx-sm89+sm120"):
        assert replace(CONFIG, target=target).target == "rtx-sm89+sm120"
    with pytest.raises(InputError, match="unknown target"):
        replace(CONFIG, target="abacus")


@pytest.mark.parametrize("budget", ["mean_bits", "latency_ms", "latency_share", "memory_mib"])
def test_under_a_budget_quality_is_sought_else_latency(budget: str) -> None:
    assert CONFIG.goal == "latency"
    assert replace(CONFIG, **{budget: 1.0}).goal == "quality"  # type: ignore[arg-type]
    assert replace(CONFIG, **{budget: 1.0}, objective="memory").goal == "memory"  # type: ignore[arg-type]


def test_the_identity_is_of_contents_and_settings_not_of_paths() -> None:
    same = CONFIG.identity("export", "prompts")
    moved = replace(CONFIG, export=Path("E"), output=Path("B"))
    renamed = replace(moved, tasks=("mine=elsewhere.jsonl",))
    assert moved.identity("export", "prompts") == renamed.identity("export", "prompts") == same
    others = {
        CONFIG.identity("other", "prompts"),
        CONFIG.identity("export", "others"),
        replace(CONFIG, seed=1).identity("export", "prompts"),
        replace(CONFIG, mean_bits=4.0).identity("export", "prompts"),
        replace(CONFIG, mode="quick").identity("export", "prompts"),
        replace(CONFIG, proxy="flips").identity("export", "prompts"),
    }
    assert len(others | {same}) == 7


def test_a_mode_s_effort_is_followed() -> None:
    assert all(replace(CONFIG, mode=mode).effort is MODES[mode] for mode in MODES)


def test_modes_spend_more_from_default_to_extensive() -> None:
    less, more = MODES["default"], MODES["extensive"]
    assert all(getattr(less, name) <= getattr(more, name) for name in less.__slots__)
