"""Gates before anything costly: the baseline against the framework, engines against the baseline.

Full precision as built here must compute what the framework did when the checkpoint was exported,
or all that is compared with it is worth nothing.  A quantized engine is looked at first on a few
denoising states: one whose logits are far off, or not finite, answers no prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from engines.backend import Backend, Floats
from engines.distance import DISTANCES, Distances, distances
from exporter.folder import Export
from exporter.parity import GATE, State, check_parity, compare
from exporter.reference import Recorded, ReferenceState, read_reference

GATES = DISTANCES


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """How full precision as built here compares with the framework, at the same states.

    Attributes:
        distances: Of its logits.
        max_error: Largest difference of a logit.
        largest: Largest logit of the framework.
        agreement: Share of positions with the same most probable token.
        positions: Compared.
    """

    distances: Distances
    max_error: float
    largest: float
    agreement: float
    positions: int

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self) | {"distances": self.distances.to_json()}


def check_baseline(export: Export, engine: Backend) -> Baseline | None:
    """Return how full precision compares with the framework; None where an export cannot tell.

    Args:
        export: Has what the framework computed.
        engine: Full precision, as built here.

    Raises:
        BackendError: It does not compute what the framework does.
        InputError: What the export holds is damaged.
    """
    states = read_reference(export)
    if states is None:
        return None
    mask_id = export.model.mask_id
    parity = compare(states, Recorded(states), engine, mask_id)
    check_parity(
        parity,
        GATE,
        "nothing that is held against it would mean anything; tune with the onnxruntime that "
        f"the export was made with ({export.environment.get('onnxruntime', 'not recorded')}), or "
        "export again",
    )
    return Baseline(
        distances=distances(_pairs(states, engine, Recorded(states), mask_id)),
        max_error=parity.max_error,
        largest=parity.largest,
        agreement=parity.agreement,
        positions=parity.positions,
    )


def baseline_said(baseline: Mapping[str, Any] | None) -> str:
    """Return the line that tells of the baseline."""
    if baseline is None:
        return (
            "full precision was not checked against the framework: the export was made before it "
            "kept what that needs; export again to have it checked"
        )
    return (
        f"full precision computes what the framework did: largest difference "
        f"{baseline['max_error']:.2g} of logits up to {baseline['largest']:.3g}, same token at "
        f"{baseline['agreement']:.2%} of {baseline['positions']} positions"
    )


def first_look(
    states: Sequence[State], full: Backend, backends: Mapping[str, Backend], mask_id: int
) -> dict[str, Distances]:
    """Return the distances of each engine's logits from full precision's, by precision.

    The mask token's logit is left out: it is never predicted.

    Args:
        states: Passes in the middle of denoising.
        full: Full precision.
        backends: By the name of their precision.
        mask_id: Of the mask token.

    Raises:
        BackendError: An engine failed.
    """
    given = [(each.ids, each.mask, each.positions, each.progress) for each in states]
    kept = [
        ReferenceState(*each, full.logits(*each), state.step)
        for each, state in zip(given, states, strict=True)
    ]
    return {
        name: distances(_pairs(kept, backend, Recorded(kept), mask_id))
        for name, backend in backends.items()
    }


def refused(
    found: Mapping[str, Mapping[str, float | None]], gates: Mapping[str, float]
) -> str | None:
    """Return why engines are refused at the first look, or None.

    Args:
        found: Distances by precision and by name; None is an infinite one.
        gates: Largest distance that passes, by name.
    """
    for precision, values in found.items():
        if any(value is None for value in values.values()):
            return f"{precision} gives logits that are not finite"
        for name, limit in gates.items():
            value = values[name]
            if value is None or not value <= limit:
                return f"{precision}: {name} {value:.3g} is above {limit:g} at the first look"
    return None


def _pairs(
    states: Sequence[State], engine: Backend, reference: Backend, mask_id: int
) -> Iterator[tuple[Floats, Floats]]:
    """Yield the logits of both, a state at a time, without the mask token's."""
    for state in states:
        given = (state.ids, state.mask, state.positions, state.progress)
        ours, theirs = engine.logits(*given), reference.logits(*given)
        yield np.delete(ours, mask_id, axis=-1), np.delete(theirs, mask_id, axis=-1)
