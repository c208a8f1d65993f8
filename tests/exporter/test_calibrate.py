"""Ranges of activations: the same for every batch, and one number a site and point."""

from __future__ import annotations

import dataclasses
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from engines.document import Document
from engines.errors import BackendError, InputError
from engines.model import ModelInfo
from engines.sampler import Request
from engines.schedule import SamplerConfig, Schedule, window_of
from exporter.calibrate import (
    Calibration,
    calibrate,
    calibration_from_document,
    read_calibration,
    window_scales,
)
from exporter.denoiser import Denoiser
from tests.tiny_export import random_denoiser, tiny_config


def info(denoiser: Denoiser) -> ModelInfo:
    config = denoiser.config
    return ModelInfo(
        name="tiny",
        architecture="llada",
        vocab=config.vocab,
        mask_id=config.mask_id,
        eos_id=0,
        max_length=config.max_length,
        digest="",
    )


def requests(count: int, steps: int = 4, seed: int = 0) -> list[Request]:
    rng = np.random.default_rng(seed)
    sampler = SamplerConfig(steps=steps, gen_length=8, block_length=8)
    return [
        Request(
            prompt=tuple(rng.integers(1, 30, rng.integers(1, 30)).tolist()),
            sampler=sampler,
            schedule=Schedule.uniform("fp32", 1),
            task="a" if i % 2 else "b",
        )
        for i in range(count)
    ]


def test_ranges_do_not_depend_on_the_batch(denoiser: Denoiser) -> None:
    asked = requests(7)
    one, three, all_ = (calibrate(denoiser, asked, info(denoiser), batch=b) for b in (1, 3, 32))
    np.testing.assert_allclose(one.absmax, all_.absmax, rtol=1e-4)
    np.testing.assert_allclose(three.absmax, all_.absmax, rtol=1e-4)
    assert one.progress == (0.0, 0.25, 0.5, 0.75)
    assert (one.n_prompts, one.tasks) == (7, ("b", "a"))
    assert len(one.sites) == 8


def test_memory_does_not_grow_with_the_prompts(denoiser: Denoiser) -> None:
    def peak(count: int) -> int:
        asked = requests(count)
        tracemalloc.start()
        calibrate(denoiser, asked, info(denoiser), batch=4)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    peak(4)
    assert peak(64) < 1.5 * peak(8) + 50_000


def calibration(points: tuple[float, ...], rows: list[list[float]]) -> Calibration:
    return Calibration(
        sites=("x", "y"),
        progress=points,
        absmax=np.array(rows, np.float32),
        n_prompts=1,
        tasks=("a",),
    )


def test_the_scale_of_a_window_covers_its_points() -> None:
    found = calibration((0.0, 0.25, 0.5, 0.75), [[1, 8], [2, 7], [3, 6], [4, 5]])
    scales = window_scales(found, 2, 1.0) * 127
    np.testing.assert_allclose(scales, [[2, 8], [4, 6]], rtol=1e-6)
    np.testing.assert_allclose(window_scales(found, 2, 0.5) * 254, scales, rtol=1e-6)
    np.testing.assert_allclose(window_scales(found, 1, 1.0) * 127, [[4, 8]], rtol=1e-6)


def test_an_edge_belongs_to_the_window_that_begins_there() -> None:
    thirds = calibration((0.0, 0.333333, 0.666667), [[1, 1], [2, 2], [3, 3]])
    np.testing.assert_allclose(window_scales(thirds, 3, 1.0)[:, 0] * 127, [1, 2, 3], rtol=1e-6)


@pytest.mark.parametrize("total", [12, 24, 30, 128])
def test_points_kept_to_six_decimals_lie_in_the_windows_of_their_tokens(total: int) -> None:
    points = tuple(round(done / total, 6) for done in range(total))
    found = calibration(points, [[float(each + 1)] * 2 for each in range(total)])
    for windows in range(1, total + 1):
        of = window_of(np.arange(total), total, windows)
        last = [int(np.flatnonzero(of == window)[-1]) + 1 for window in range(windows)]
        scales = window_scales(found, windows, 1.0)[:, 0] * 127
        np.testing.assert_allclose(scales, last, rtol=1e-5)


def test_a_window_without_a_point_is_an_error_that_names_it() -> None:
    with pytest.raises(InputError, match="window 1 of 4 is never reached"):
        window_scales(calibration((0.0, 0.5, 0.75), [[1, 1]] * 3), 4, 1.0)


def test_a_site_that_is_silent_in_a_window_gets_the_scale_of_the_others() -> None:
    scales = window_scales(calibration((0.0, 0.5), [[1, 0], [1, 3]]), 2, 1.0)
    assert scales[0, 1] == scales[1, 1] > 0


def test_a_site_that_is_always_silent_is_an_error_that_names_it() -> None:
    dead = random_denoiser(tiny_config())
    with torch.no_grad():
        dead.blocks[0].v_proj.weight.zero_()
    with pytest.raises(InputError, match=r"blocks\.0\.attn_out saw nothing but zeros"):
        calibrate(dead, requests(2), info(dead))


def test_a_model_that_gives_nan_is_an_error() -> None:
    bad = random_denoiser(tiny_config())
    with torch.no_grad():
        bad.norm.weight[3] = float("nan")
    with pytest.raises(BackendError, match="window"):
        calibrate(bad, requests(2), info(bad))


def test_no_prompt_is_an_error(denoiser: Denoiser) -> None:
    with pytest.raises(InputError, match="no calibration prompts"):
        calibrate(denoiser, [], info(denoiser))


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    found = calibration((0.0, 0.5), [[1.5, 2.25], [3.125, 4]])
    read = calibration_from_document(Document(found.to_json(), "x"))
    assert dataclasses.replace(read, absmax=found.absmax) == found
    np.testing.assert_array_equal(read.absmax, found.absmax)
    turned = dataclasses.replace(found, rotated=True).to_json()
    assert calibration_from_document(Document(turned, "x")).rotated
    older = {key: value for key, value in turned.items() if key != "rotated"}
    assert not calibration_from_document(Document(older, "x")).rotated
    (tmp_path / "c.json").write_text('{"sites": ["x"], "progress": [0.0]}')
    with pytest.raises(InputError, match="absmax"):
        read_calibration(tmp_path / "c.json")
    with pytest.raises(InputError, match="cannot read"):
        read_calibration(tmp_path / "nothing.json")


def test_rotated_ranges_are_those_of_rotated_activations(denoiser: Denoiser) -> None:
    asked = requests(5)
    plain, turned = (
        calibrate(denoiser, asked, info(denoiser), rotate=rotate) for rotate in (False, True)
    )
    assert (plain.rotated, turned.rotated) == (False, True)
    assert plain.progress == turned.progress
    # A block of n channels: the largest becomes at most sqrt(n) of itself, at least 1 / sqrt(n).
    for at, block in enumerate([32, 32, 32, 8] * 2):
        ratio = turned.absmax[:, at] / plain.absmax[:, at]
        assert (ratio < block**0.5 + 1e-3).all()
        assert (ratio > block**-0.5 - 1e-3).all()
        assert (np.abs(ratio - 1) > 1e-3).any()
