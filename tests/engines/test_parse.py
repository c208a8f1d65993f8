"""Sampler settings of a manifest: every rule that is known, and nothing else."""

from __future__ import annotations

import pytest

from engines.document import Document
from engines.errors import BundleError
from engines.parse import sampler_from_document
from engines.schedule import SamplerConfig

FIXED = {"steps": 6, "gen_length": 12, "block_length": 6, "rule": "low_confidence"}
SURE = {**FIXED, "steps": 12, "rule": "threshold", "threshold": 0.9}


def read(plain: dict[str, object]) -> SamplerConfig:
    return sampler_from_document(Document(plain, "manifest.json: sampler", BundleError))


def test_a_manifest_from_before_thresholds_reads_as_before() -> None:
    fixed = SamplerConfig(steps=6, gen_length=12, block_length=6)
    assert read({**FIXED}) == read({**FIXED, "threshold": None}) == fixed
    assert fixed.to_json() == FIXED


def test_what_is_written_is_read() -> None:
    for threshold in (0.1, 0.9, 1.0):
        sampler = SamplerConfig(
            rule="threshold", threshold=threshold, gen_length=12, block_length=6
        )
        assert sampler.to_json() == {**SURE, "threshold": threshold}
        assert read(sampler.to_json()) == sampler
    assert read({**SURE, "threshold": 1}).to_json() == {**SURE, "threshold": 1.0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rule": "random"}, "one of low_confidence, threshold, got 'random'"),
        ({"rule": "low_confidence"}, "threshold must be None with the rule"),
        ({"threshold": None}, "got threshold=None"),
        ({"threshold": "0.9"}, "threshold: must be a finite number"),
        ({"threshold": True}, "threshold: must be a finite number"),
        ({"threshold": 0}, "0 < threshold <= 1 must hold, got threshold=0.0"),
        ({"threshold": -0.5}, "got threshold=-0.5"),
        ({"threshold": 1.1}, "got threshold=1.1"),
        ({"steps": 6}, "steps must be gen_length with the rule 'threshold'"),
        ({"steps": None}, "the key 'steps' is missing"),
    ],
)
def test_settings_at_fault_are_a_bundle_error_that_names_the_place(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(BundleError, match=words) as caught:
        read({**SURE, **changes})
    assert "manifest.json: sampler" in str(caught.value)
    assert str(caught.value).endswith(("mend it", "make the file again"))
