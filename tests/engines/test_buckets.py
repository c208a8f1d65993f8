"""Buckets: padding changes no answer, and the smallest that holds a pass is taken."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.buckets import MOST_BUCKETS, Bucket, Buckets, buckets_of, padded, rows_of, unfit
from engines.bundle import read_bundle
from engines.errors import BackendError, BundleError
from engines.manifest import Shape
from engines.ort import OrtBackend
from engines.plans import profile_of
from engines.precision import FULL_PRECISION
from tests.engines.tiny_bundle import LARGEST_BATCH, edited, put, write_tiny_bundle
from tests.engines.tiny_graph import EOS_ID, VOCAB, Weights, tiny_graph

BUCKETS = Buckets(lengths=(8, 24), batches=(1, 4), asked=(3, 12))


def test_the_smallest_bucket_that_holds_a_pass_is_taken() -> None:
    for rows, length, asked in product((1, 2, 4), (1, 8, 9, 24), (1, 3, 4, 12)):
        found = BUCKETS.fit(rows, length, asked)
        holding = [
            each
            for each in BUCKETS.every()
            if each.rows >= rows and each.length >= length and each.asked >= asked
        ]
        assert found == min(holding, key=lambda each: (each.rows, each.length, each.asked))


@pytest.mark.parametrize("asked", [(5, 8, 3), (4, 25, 3), (4, 8, 13)])
def test_a_pass_above_the_largest_bucket_is_refused(asked: tuple[int, int, int]) -> None:
    with pytest.raises(BackendError, match="above the largest bucket"):
        BUCKETS.fit(*asked)


def test_a_padded_pass_gives_the_answers_of_the_pass_itself(tmp_path: Path) -> None:
    graph = tiny_graph(tmp_path / "g.onnx", "trace", Weights.random())
    engine = OrtBackend.load(None, graph, FULL_PRECISION)
    rng = np.random.default_rng(0)
    for rows, length, asked in ((1, 5, 2), (3, 8, 3), (4, 20, 7), (2, 24, 12)):
        ids = rng.integers(0, VOCAB - 1, (rows, length))
        mask = np.arange(length) < rng.integers(1, length + 1, (rows, 1))
        positions = rng.integers(0, length, (rows, asked))
        bucket = BUCKETS.fit(rows, length, asked)
        wide = padded(bucket, ids, mask, positions, EOS_ID)
        assert [each.shape for each in wide] == [
            (bucket.rows, bucket.length),
            (bucket.rows, bucket.length),
            (bucket.rows, bucket.asked),
        ]
        assert (wide[0][:, length:] == EOS_ID).all()
        assert not wide[1][:, length:].any()
        assert wide[1].any(axis=1).all(), "a row that attends to nothing would give no number"
        alone = engine.logits(ids, mask, positions, np.zeros(rows, np.float32))
        among = engine.logits(*wide, np.zeros(bucket.rows, np.float32))
        assert np.isfinite(among).all()
        np.testing.assert_allclose(among[:rows, :asked], alone, rtol=1e-5, atol=1e-5)


def test_added_rows_are_the_first_again() -> None:
    assert rows_of(Bucket(4, 8, 3), 2).tolist() == [0, 1, 0, 0]
    assert rows_of(Bucket(2, 8, 3), 2).tolist() == [0, 1]


SHAPES = [
    (Shape((1, 4, 8), (1, 16, 40)), (24,), 64),
    (Shape((1, 1, 1), (1, 1, 1)), (1,), 8),
    (Shape((2, 4, 16), (100, 500, 4000)), (32, 128), 2048),
    (Shape((1, 2, 4), (1, 4, 20)), (12,), 64),
]


@pytest.mark.parametrize(("shape", "answers", "longest"), SHAPES)
def test_buckets_lie_in_the_profile_and_hold_every_request(
    shape: Shape, answers: tuple[int, ...], longest: int
) -> None:
    buckets = buckets_of(shape, answers, longest)
    assert unfit(buckets, shape, answers, longest) is None
    extents = profile_of(shape, answers, longest)
    (least, _, most), (fewest, _, greatest) = extents["ids"], extents["positions"]
    for bucket in buckets.every():
        canvas, places = (bucket.rows, bucket.length), (bucket.rows, bucket.asked)
        assert all(a <= b <= c for a, b, c in zip(least, canvas, most, strict=True))
        assert all(a <= b <= c for a, b, c in zip(fewest, places, greatest, strict=True))
    largest = buckets.every()[0]
    top = min(shape.prompt[2] + max(answers), longest)
    assert largest == Bucket(shape.batch[2], top, max(answers))
    assert Buckets(**{k: tuple(v) for k, v in buckets.to_json().items()}) == buckets


@pytest.mark.parametrize(
    "values", [(), (0, 1), (2, 1), (1, 1), tuple(range(1, 66))], ids=lambda v: str(len(v))
)
def test_values_that_are_no_ascending_list_are_refused(values: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        Buckets(lengths=values, batches=(1,), asked=(1,))


def test_more_buckets_than_graphs_could_be_held_for_are_refused() -> None:
    many = tuple(range(1, 33))
    assert len(many) ** 2 == MOST_BUCKETS
    Buckets(lengths=many, batches=many, asked=(1,))
    with pytest.raises(ValueError, match="1024 at most"):
        Buckets(lengths=many, batches=many, asked=(1, 2))


GOOD: dict[str, Any] = {"lengths": [16, 32], "batches": [1, LARGEST_BATCH], "asked": [3, 12]}


def test_a_bundle_s_buckets_are_read(tmp_path: Path) -> None:
    folder = write_tiny_bundle(tmp_path / "B", tmp_path).folder
    assert read_bundle(folder).manifest.buckets is None
    found = read_bundle(edited(folder, put(GOOD, "buckets"))).manifest.buckets
    assert found is not None
    assert found.to_json() == GOOD


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": [16]},  # holds not the longest request
        {"lengths": [12, 32]},  # below the profile
        {"lengths": [16, 33]},
        {"batches": [1]},
        {"batches": [4, 4]},
        {"batches": []},
        {"asked": [0, 12]},
        {"asked": [12, 3]},
        {"asked": [12.0]},
        {"asked": 12},
        {"asked": None},
        {"lengths": [2**60]},
        {"lengths": list(range(13, 90))},
    ],
    ids=str,
)
def test_a_bundle_with_hostile_buckets_is_refused(
    tmp_path: Path, change: dict[str, object]
) -> None:
    folder = write_tiny_bundle(tmp_path / "B", tmp_path).folder
    with pytest.raises(BundleError, match="buckets"):
        read_bundle(edited(folder, put(GOOD | change, "buckets")))
