"""A knob that is given one value has it from the first trial on, and in what ships."""

from __future__ import annotations

import json

import pytest

from tests.tuner.tuning import Tuner

pytestmark = pytest.mark.usefixtures("every_knob")


def test_scales_pinned_to_windows_ship_as_scales_by_window(tuner: Tuner) -> None:
    asked = ("--precision", "int8", "--max-loss", "100", "--set", "space.scales=window")
    dry = tuner(*asked, "--dry-run")
    assert "pinned: scales window" in dry.out
    found = tuner(*asked)
    assert found.code == 0, found.err
    manifest = json.loads((found.bundle / "manifest.json").read_text())
    assert manifest["tune"]["candidate"]["scales"] == "window"
    engine = manifest["engines"]["int8.cpu"]
    assert engine["graph"] == "int8.serve"
    assert len(manifest["graphs"]["int8.serve"]["scales"]) > 1
    search = json.loads((found.bundle.parent / "BUNDLE.tune/search.json").read_text())
    knob = next(each for each in search["space"] if each["name"] == "scales")
    assert knob["choices"] == ["window"]
    assert "scales: window  # --set" in tuner(*asked, "--print-config").out


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("space.scales=each", "knob 'scales' has shared, window"),
        ("space.windows=99", "windows <="),
        ("space.threads=-1", "0 <= threads"),
        ("space.schedule=spend-100", "cannot be pinned"),
        ("space.weights=constant", "no knob 'weights'"),
    ],
)
def test_what_cannot_be_pinned_is_refused_before_anything_is_built(
    tuner: Tuner, asked: str, says: str
) -> None:
    found = tuner("--set", asked, "--dry-run")
    assert found.code == 2
    assert says in found.err
