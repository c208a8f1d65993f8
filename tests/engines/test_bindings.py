"""What a plan's tensors are bound to: arrays of a pass, outputs, weights; all else is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from engines.bindings import ALIGNMENT, Bindings, Tensor, bindings_of, placed
from engines.buckets import Bucket
from engines.errors import BackendError, BundleError
from engines.tensor_file import Range

FILE, OTHER = Path("int8.safetensors"), Path("fp16.safetensors")
HELD = {"w": Range("I8", (4, 6), 100, 124), "v": Range("F16", (3,), 124, 130)}
TENSORS = (
    Tensor("ids", True, "INT64", (-1, -1)),
    Tensor("mask", True, "BOOL", (-1, -1)),
    Tensor("positions", True, "INT64", (-1, -1)),
    Tensor("w", True, "INT8", (4, 6)),
    Tensor("v", True, "HALF", (3,)),
    Tensor("tokens", False, "INT64", (-1, -1)),
    Tensor("probability", False, "FLOAT", (-1, -1)),
    Tensor("entropy", False, "FLOAT", (-1, -1)),
)
SCALES = Tensor("scales", True, "FLOAT", (-1, 1, 9))
TRACE = (*TENSORS[:5], Tensor("logits", False, "FLOAT", (-1, -1, 19)))


def bound(tensors: tuple[Tensor, ...], tail: str = "serve", sites: int = 0) -> Bindings:
    return bindings_of("p.plan", tensors, tail, sites, {FILE: HELD})


def test_every_tensor_of_a_plan_is_bound_once() -> None:
    for tensors, tail, sites in (
        (TENSORS, "serve", 0),
        ((*TENSORS, SCALES), "serve", 9),
        (TRACE, "trace", 0),
    ):
        found = bound(tensors, tail, sites)
        names = [*found.inputs, *found.outputs, *found.weights]
        assert sorted(names) == sorted(each.name for each in tensors)
        assert {name: each.range for name, each in found.weights.items()} == HELD


def test_shapes_and_bytes_are_those_of_the_bucket() -> None:
    serve = bound((*TENSORS, SCALES), sites=9)
    bucket = Bucket(rows=2, length=40, asked=5)
    assert serve.shapes(bucket) == {
        "ids": (2, 40),
        "mask": (2, 40),
        "positions": (2, 5),
        "scales": (2, 1, 9),
        "tokens": (2, 5),
        "probability": (2, 5),
        "entropy": (2, 5),
    }
    assert serve.sizes(bucket) == {
        "ids": 640,
        "mask": 80,
        "positions": 80,
        "scales": 72,
        "tokens": 80,
        "probability": 40,
        "entropy": 40,
    }
    trace = bound(TRACE, "trace")
    assert trace.sizes(bucket)["logits"] == 4 * math.prod(trace.shapes(bucket)["logits"]) == 760


def test_weights_begin_aligned_and_do_not_overlap() -> None:
    weights = bound(TENSORS).weights
    places, size = placed(weights)
    ends = [
        at + weights[name].range.end - weights[name].range.begin for name, at in places.items()
    ]
    assert all(at % ALIGNMENT == 0 for at in places.values())
    assert all(end <= at for end, at in zip(ends, [*list(places.values())[1:], size], strict=True))


@pytest.mark.parametrize(
    ("tensors", "tail", "sites"),
    [
        (TENSORS[1:], "serve", 0),
        (TENSORS[:-1], "serve", 0),
        (TENSORS, "trace", 0),
        (TENSORS, "serve", 9),
        ((*TENSORS, SCALES), "serve", 8),
        ((replace(TENSORS[0], type="INT32"), *TENSORS[1:]), "serve", 0),
        ((*TENSORS[:-1], replace(TENSORS[-1], type="HALF")), "serve", 0),
        ((*TENSORS, Tensor("more", False, "FLOAT", (-1,))), "serve", 0),
        ((*TRACE[:-1], replace(TRACE[-1], shape=(-1, -1, -1))), "trace", 0),
    ],
)
def test_a_plan_of_another_kind_is_refused(
    tensors: tuple[Tensor, ...], tail: str, sites: int
) -> None:
    with pytest.raises(BackendError, match="export again"):
        bound(tensors, tail, sites)


@pytest.mark.parametrize(
    ("weight", "says"),
    [
        (Tensor("x", True, "INT8", (4, 6)), "stands 0 times"),
        (Tensor("w", True, "HALF", (4, 6)), "as HALF"),
        (Tensor("w", True, "INT8", (6, 4)), r"as INT8 \[6, 4\]"),
        (Tensor("w", True, "INT8", (4, -1)), r"as INT8 \[4, -1\]"),
    ],
)
def test_a_weight_that_is_not_as_stored_is_refused(weight: Tensor, says: str) -> None:
    with pytest.raises(BundleError, match=says):
        bound((*TENSORS[:3], weight, *TENSORS[5:]))


def test_scales_nobody_gave_are_no_weight() -> None:
    with pytest.raises(BundleError, match="'scales'"):
        bound((*TENSORS, SCALES))


def test_a_weight_in_two_files_is_refused() -> None:
    with pytest.raises(BundleError, match="stands 2 times"):
        bindings_of("p.plan", TENSORS, "serve", 0, {FILE: HELD, OTHER: HELD})
