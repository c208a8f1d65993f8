"""What each tensor of a plan is bound to: the pass's arrays, the outputs, or a stored weight.

Names, types and shapes are those of `engines.model`; whatever else a plan reads must be a tensor
of the family's file, of the same type and shape.  Pure: tensors come in as values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engines.buckets import Bucket
from engines.errors import BackendError, BundleError
from engines.model import ENTROPY, IDS, LOGITS, MASK, POSITIONS, PROBABILITY, SCALES, TOKENS
from engines.tensor_file import Range

# TensorRT's types of what a pass reads and writes, by the tensor's name.
_INPUTS = {IDS: "INT64", MASK: "BOOL", POSITIONS: "INT64"}
_OUTPUTS = {
    "serve": {TOKENS: "INT64", PROBABILITY: "FLOAT", ENTROPY: "FLOAT"},
    "trace": {LOGITS: "FLOAT"},
}
SIZES = {"INT64": 8, "FLOAT": 4, "BOOL": 1}

# TensorRT's name of each type that a weight is stored in.
_STORED = {"F32": "FLOAT", "F16": "HALF", "BF16": "BF16", "I8": "INT8", "F8_E4M3": "FP8"}

# TensorRT asks that what is bound begins at a multiple of this.
ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that a plan reads or writes; extents of -1 are the pass's."""

    name: str
    read: bool
    type: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of a file that a plan reads."""

    file: Path
    range: Range


@dataclass(frozen=True, kw_only=True)
class Bindings:
    """What a plan's tensors are bound to.

    Attributes:
        inputs: Type of each array of a pass, by its name.
        outputs: Type of each array that comes back, in the tail's order.
        weights: The stored tensor of each other input.
        sites: Width of the input `scales`; 0 where there is none.
        vocab: Width of the logits; 0 for the serve tail.
    """

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    weights: Mapping[str, Weight]
    sites: int
    vocab: int

    def shapes(self, bucket: Bucket) -> dict[str, tuple[int, ...]]:
        """Return the shape of every input and output of a pass in a bucket."""
        places = (bucket.rows, bucket.asked)
        every = {
            IDS: (bucket.rows, bucket.length),
            MASK: (bucket.rows, bucket.length),
            POSITIONS: places,
            SCALES: (bucket.rows, 1, self.sites),
            LOGITS: (*places, self.vocab),
        }
        names = (*self.inputs, *self.outputs)
        return {name: every.get(name, places) for name in names}

    def sizes(self, bucket: Bucket) -> dict[str, int]:
        """Return the bytes of every input and output of a pass in a bucket."""
        types = {**self.inputs, **self.outputs}
        return {
            name: math.prod(shape) * SIZES[types[name]]
            for name, shape in self.shapes(bucket).items()
        }


def bindings_of(
    plan: str,
    tensors: tuple[Tensor, ...],
    tail: str,
    sites: int,
    stored: Mapping[Path, Mapping[str, Range]],
) -> Bindings:
    """Return what a plan's tensors are bound to.

    Args:
        plan: Its name, for messages.
        tensors: All that it reads and writes.
        tail: "serve" or "trace".
        sites: Width of the static scales that were given; 0 for none.
        stored: What each of the family's files holds.

    Raises:
        BackendError: The plan is not of this kind.
        BundleError: A weight is nowhere, twice, or of another type or shape.
    """
    expected = dict(_INPUTS)
    if sites:
        expected[SCALES] = "FLOAT"
    reads = {each.name: each for each in tensors if each.read}
    writes = {each.name: each for each in tensors if not each.read}
    inputs = {name: reads[name].type for name in expected if name in reads}
    for what, got, want in (
        ("inputs", inputs, expected),
        ("outputs", {name: each.type for name, each in writes.items()}, _OUTPUTS[tail]),
    ):
        if got != want:
            raise BackendError(
                f"{plan}: {what} of a {tail} plan are {_said(want)}, this one has {_said(got)}; "
                f"export again with this version of Cadenza"
            )
    width = reads[SCALES].shape[-1] if sites else 0
    if width not in (sites, -1):
        raise BackendError(
            f"{plan} takes {width} activation scales, {sites} were given; export again"
        )
    vocab = writes[LOGITS].shape[-1] if tail == "trace" else 0
    if tail == "trace" and vocab < 1:
        raise BackendError(f"{plan}: the width of its logits is not fixed; export again")
    return Bindings(
        inputs=expected,
        outputs=_OUTPUTS[tail],
        weights={
            name: _weight(plan, each, stored)
            for name, each in reads.items()
            if name not in expected
        },
        sites=sites,
        vocab=vocab,
    )


def placed(weights: Mapping[str, Weight]) -> tuple[dict[str, int], int]:
    """Return where each weight begins in one allocation, and its bytes."""
    places, at = {}, 0
    for name, weight in weights.items():
        places[name] = at
        size = weight.range.end - weight.range.begin
        at += -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
    return places, at


def _weight(plan: str, tensor: Tensor, stored: Mapping[Path, Mapping[str, Range]]) -> Weight:
    found = [(file, held[tensor.name]) for file, held in stored.items() if tensor.name in held]
    names = ", ".join(file.name for file in stored) or "no file"
    if len(found) != 1:
        raise BundleError(
            f"{plan} reads the weight {tensor.name!r}, which stands {len(found)} times in "
            f"{names}; rebuild the bundle"
        )
    file, range_ = found[0]
    if _STORED.get(range_.type) != tensor.type or range_.shape != tensor.shape:
        raise BundleError(
            f"{plan} reads {tensor.name!r} as {tensor.type} {list(tensor.shape)}, {file.name} has "
            f"{range_.type} {list(range_.shape)}; rebuild the bundle"
        )
    return Weight(file, range_)


def _said(types: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in types.items()) or "none"
