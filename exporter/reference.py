"""What the framework computed on a few denoising states, kept in an export.

An engine's first gate wherever it is built later: full precision must give these logits again,
with no framework at hand.  Few states, rows and positions, so that the file stays small whatever
the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.backend import Backend, Floats, Ids, Mask, Served, served_from_logits
from engines.errors import InputError, require
from engines.model import ModelInfo
from engines.precision import FULL_PRECISION, Precision
from engines.sampler import Pass
from exporter.folder import REFERENCE, Export

# Most bytes of logits, states and rows of a state.
_LARGEST, _STATES, _ROWS = 4 << 20, 8, 4

_KINDS = {
    "ids": np.int64,
    "mask": np.bool_,
    "positions": np.int64,
    "progress": np.float32,
    "logits": np.float32,
}


@dataclass(frozen=True)
class ReferenceState:
    """One pass and what it must give.

    Attributes:
        ids: The canvas [B, L].
        mask: True where a token is attended to [B, L].
        positions: Where logits were taken [B, M].
        progress: Fraction of the answer decided [B].
        logits: The framework's [B, M, V].
        step: Its number, for messages.
    """

    ids: Ids
    mask: Mask
    positions: Ids
    progress: Floats
    logits: Floats
    step: int = 0


class Recorded:
    """The framework as a `Backend` that knows some states alone, asked for in their order."""

    precision: Precision = FULL_PRECISION

    def __init__(self, states: Sequence[ReferenceState]) -> None:
        self._left = [state.logits for state in states]

    def logits(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Floats:
        return self._left.pop(0)

    def serve(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Served:
        return served_from_logits(self.logits(ids, mask, positions, progress))


def reference_of(states: Sequence[Pass], framework: Backend, vocab: int) -> list[ReferenceState]:
    """Return a few states, evenly spread, with the framework's logits.

    Args:
        states: Passes of whole denoisings.
        framework: The checkpoint's own code.
        vocab: Tokens of the vocabulary.
    """
    positions = max(1, _LARGEST // (4 * vocab))
    count = min(len(states), _STATES, positions)
    picked = np.unique(np.linspace(0, len(states) - 1, count).round().astype(int))
    found = []
    for index in picked.tolist():
        state = states[index]
        each = positions // count
        rows = min(len(state.ids), _ROWS, each)
        few = state.positions[:rows, : max(1, each // rows)]
        given = (state.ids[:rows], state.mask[:rows], few, state.progress[:rows])
        found.append(ReferenceState(*given, framework.logits(*given)))
    return found


def tensors_of(states: Sequence[ReferenceState]) -> dict[str, NDArray[Any]]:
    """Return the named tensors of a file."""
    return {
        f"{number}.{name}": np.ascontiguousarray(getattr(state, name), kind)
        for number, state in enumerate(states)
        for name, kind in _KINDS.items()
    }


def write_reference(states: Sequence[ReferenceState], file: Any) -> None:
    """Write states into a file of an export."""
    require("safetensors.numpy", "export", "exporting").save_file(tensors_of(states), str(file))


def read_reference(export: Export) -> list[ReferenceState] | None:
    """Return the states of an export, checked; None where it was made before there were any.

    Raises:
        InputError: The file is damaged.
    """
    if REFERENCE not in export.files:
        return None
    failure = require("safetensors", "tune", "tuning").SafetensorError
    file = export.folder / REFERENCE
    try:
        found = require("safetensors.numpy", "tune", "tuning").load_file(str(file))
        count = len(found) // len(_KINDS)
        states = [
            ReferenceState(
                **{name: _taken(found, f"{number}.{name}") for name in _KINDS}, step=number
            )
            for number in range(count)
        ]
        if not states or found:
            raise ValueError(f"{len(found)} tensors more than there are states")
        for state in states:
            _check(state, export.model)
    except (OSError, ValueError, KeyError, failure) as error:
        raise InputError(f"{str(file)!r} is damaged: {error}; export again") from error
    return states


def _taken(found: dict[str, NDArray[Any]], name: str) -> NDArray[Any]:
    tensor = found.pop(name)
    kind = _KINDS[name.partition(".")[2]]
    if tensor.dtype != kind:
        raise ValueError(f"{name} is of {tensor.dtype}, expected {np.dtype(kind)}")
    return tensor


def _check(state: ReferenceState, model: ModelInfo) -> None:
    """Check shapes and ranges.

    Raises:
        ValueError: They do not fit together, or the model.
    """
    if state.ids.ndim != 2 or state.positions.ndim != 2:
        raise ValueError(f"ids must be [B, L], positions [B, M], got {state.ids.shape}")
    rows, length = state.ids.shape
    many = state.positions.shape[1]
    wanted = {
        "mask": (rows, length),
        "positions": (rows, many),
        "progress": (rows,),
        "logits": (rows, many, model.vocab),
    }
    for name, shape in wanted.items():
        if getattr(state, name).shape != shape:
            raise ValueError(f"{name} must be {shape}, got {getattr(state, name).shape}")
    if not 0 < length <= model.max_length or not rows * many:
        raise ValueError(f"a canvas of {length} tokens does not fit the model")
    if state.ids.min() < 0 or state.ids.max() >= model.vocab:
        raise ValueError("an id is not of the vocabulary")
    if state.positions.min() < 0 or state.positions.max() >= length:
        raise ValueError("a position is outside the canvas")
    if not (state.progress.min() >= 0.0 and state.progress.max() < 1.0):
        raise ValueError("progress must be in [0, 1)")
    if not np.isfinite(state.logits).all():
        raise ValueError("a logit is not finite")
