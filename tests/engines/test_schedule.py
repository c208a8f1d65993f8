"""Laws of sampler settings and of the passes in a window."""

from __future__ import annotations

import hashlib
import json

import pytest

from engines.manifest import schedule_digest
from engines.schedule import SamplerConfig, Schedule, fixed_steps_like, passes_by_window


def test_steps_that_are_not_given_are_what_the_rule_needs() -> None:
    assert SamplerConfig().steps == 12
    by_threshold = SamplerConfig(rule="threshold", threshold=0.9, gen_length=32, block_length=8)
    assert by_threshold.steps == 32
    assert by_threshold == SamplerConfig(
        steps=32, rule="threshold", threshold=0.9, gen_length=32, block_length=8
    )
    assert by_threshold.commits == (1,) * 32


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 0}, "steps >= 1 must hold, got 0"),
        ({"rule": "random"}, "one of low_confidence, threshold, got 'random'"),
        ({"threshold": 0.9}, "threshold must be None with the rule 'low_confidence', got 0.9"),
        ({"rule": "threshold"}, "0 < threshold <= 1 must hold, got threshold=None"),
        ({"rule": "threshold", "threshold": 0.0}, "got threshold=0.0"),
        ({"rule": "threshold", "threshold": 1.01}, "got threshold=1.01"),
        ({"rule": "threshold", "threshold": float("nan")}, "got threshold=nan"),
        ({"rule": "threshold", "threshold": 0.9, "steps": 12}, "steps=12, gen_length=24"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_the_values(
    settings: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        SamplerConfig(**settings)  # type: ignore[arg-type]


def test_digests_of_fixed_steps_are_those_of_bundles_without_a_threshold() -> None:
    plain = {
        "schedule": ["fp32", "int8"],
        "sampler": {"block_length": 24, "gen_length": 24, "rule": "low_confidence", "steps": 12},
        "target": "cpu",
    }
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    schedule = Schedule(("fp32", "int8"))
    before = hashlib.sha256(text.encode()).hexdigest()
    assert schedule_digest(schedule, SamplerConfig(), "cpu") == before
    digests = {
        schedule_digest(schedule, SamplerConfig(rule="threshold", threshold=t), "cpu")
        for t in (0.5, 0.9, 1.0)
    }
    assert len({before, *digests}) == 4


def test_passes_by_threshold_are_not_known_beforehand() -> None:
    with pytest.raises(ValueError, match="expected_passes of traces"):
        passes_by_window(SamplerConfig(rule="threshold", threshold=0.9), 6)


@pytest.mark.parametrize(("gen", "block"), [(24, 24), (24, 8), (12, 6), (7, 7), (96, 32)])
def test_what_is_timed_in_place_of_a_threshold_has_passes_in_every_window(
    gen: int, block: int
) -> None:
    sampler = SamplerConfig(rule="threshold", threshold=0.9, gen_length=gen, block_length=block)
    for windows in range(1, gen + 1):
        fixed = fixed_steps_like(sampler, windows)
        assert (fixed.rule, fixed.gen_length, fixed.block_length) == ("low_confidence", gen, block)
        least = min(passes_by_window(fixed, windows))
        assert least >= 2 or (least == 1 and fixed.steps == gen)
        assert fixed_steps_like(fixed, windows) == fixed
    with pytest.raises(ValueError, match="1 <= windows <= steps must hold"):
        fixed_steps_like(sampler, gen + 1)
