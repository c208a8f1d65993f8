"""The gate between framework and graphs: the same states, the same numbers, or no export.

States are real ones: canvases in the middle of denoising, in ragged batches of all tasks.  A model
larger than memory would be compared block by block; that is not here yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engines.backend import Backend, Floats, Ids, Mask
from engines.errors import BackendError
from engines.model import ModelInfo
from engines.options import OrtOptions
from engines.ort import OrtBackend
from engines.precision import FULL_PRECISION
from engines.sampler import Pass, Request, generate
from engines.schedule import Schedule
from engines.targets import target_from_name
from exporter.folder import Export, stands_in
from exporter.reference import Recorded, ReferenceState

# Largest difference of a logit, as a share of the largest logit, that floating point explains.
GATE = 1e-4

# States that each graph is run on.
_SMOKE_STATES = 4


class State(Protocol):
    """What an engine is given in a pass: a `Pass`, or one that was kept."""

    @property
    def ids(self) -> Ids:
        """The canvas [B, L]."""

    @property
    def mask(self) -> Mask:
        """True where a token is attended to [B, L]."""

    @property
    def positions(self) -> Ids:
        """Where logits are wanted [B, M]."""

    @property
    def progress(self) -> Floats:
        """Fraction of the answer decided [B]."""

    @property
    def step(self) -> int:
        """For messages."""


@dataclass(frozen=True, kw_only=True)
class Parity:
    """How two engines compare on the same states.

    Attributes:
        max_error: Largest difference of a logit; the mask token's, never predicted, left out.
        largest: Largest magnitude of a logit.
        agreement: Share of positions with the same most probable token.
        explained: Whether each other position is a tie within twice the largest difference.
        positions: Positions compared.
        passes: Passes compared.
    """

    max_error: float
    largest: float
    agreement: float
    explained: bool
    positions: int
    passes: int

    def to_json(self) -> dict[str, object]:
        """Return plain data."""
        return asdict(self)


def states_from_requests(
    requests: Sequence[Request], backend: Backend, model: ModelInfo
) -> list[Pass]:
    """Return every pass of the requests' full-precision denoising, as one ragged batch."""
    states: list[Pass] = []
    full = Schedule.uniform(backend.precision.name, 1)
    same = [replace(request, schedule=full) for request in requests]
    generate(same, {backend.precision.name: backend}, model, on_pass=states.append)
    return states


def compare(
    states: Sequence[State], reference: Backend, candidate: Backend, mask_id: int
) -> Parity:
    """Return how a candidate's logits compare with the reference's on the same states.

    Raises:
        BackendError: The candidate gives a logit that is not finite.
    """
    error = largest = 0.0
    same = positions = 0
    margins: list[NDArray[np.float32]] = []
    for state in states:
        given = (state.ids, state.mask, state.positions, state.progress)
        left = _without(reference.logits(*given), mask_id)
        right = _without(candidate.logits(*given), mask_id)
        if not np.isfinite(right).all():
            raise BackendError(
                f"{candidate.precision.name} gives logits that are not finite in step "
                f"{state.step}; leave this precision out, or keep blocks in fp32"
            )
        error = max(error, float(np.abs(left - right).max()))
        largest = max(largest, float(np.abs(left).max()))
        equal = left.argmax(-1) == right.argmax(-1)
        same, positions = same + int(equal.sum()), positions + equal.size
        best = np.sort(left, axis=-1)[..., -2:]
        margins.append((best[..., 1] - best[..., 0])[~equal])
    widest = max((float(m.max()) for m in margins if m.size), default=0.0)
    return Parity(
        max_error=error,
        largest=largest,
        agreement=same / positions,
        explained=widest <= 2 * error,
        positions=positions,
        passes=len(states),
    )


def check_parity(
    parity: Parity,
    gate: float = GATE,
    mend: str = "nothing was exported, report this with the versions of torch, onnx and "
    "onnxruntime",
) -> None:
    """Let pass what floating point explains.

    Args:
        parity: How an engine compares with the framework.
        gate: Largest difference of a logit, as a share of the largest logit.
        mend: Ends the message.

    Raises:
        BackendError: The graph does not compute what the framework does.
    """
    if parity.max_error > gate * max(parity.largest, 1.0) or not parity.explained:
        raise BackendError(
            f"the graph differs from the framework by {parity.max_error:.3g} where the largest "
            f"logit is {parity.largest:.3g} (gate {gate:g} of it), and predicts the same token at "
            f"{parity.agreement:.2%} of {parity.positions} positions; {mend}"
        )


def check_serve_tail(states: Sequence[Pass], engine: Backend, vocab: int, mask_id: int) -> None:
    """Run the serve tail on some states and check what a sampler relies on.

    Raises:
        BackendError: A probability or entropy is impossible, or a token is none.
    """
    for state in states:
        served = engine.serve(state.ids, state.mask, state.positions, state.progress)
        limits = (
            np.isfinite(served.probability).all()
            and np.isfinite(served.entropy).all()
            and bool((served.probability > 0).all())
            and bool((served.probability <= 1.0 + 1e-5).all())
            and bool((served.entropy >= -1e-4).all())
        )
        tokens = served.tokens
        if not limits or bool(((tokens < 0) | (tokens >= vocab) | (tokens == mask_id)).any()):
            raise BackendError(
                f"{engine.precision.name} gives an impossible token, probability or entropy in "
                f"step {state.step}; leave this precision out, or keep blocks in fp32"
            )


def engine_of(made: Export, graph: str, read_back: bool = False) -> OrtBackend:
    """Return an engine of one graph of an export, on the CPU, for a few passes.

    Raises:
        BackendError: It cannot be loaded, or is not what was asked for.
    """
    entry = made.graphs[graph]
    path = made.folder / entry.file
    return OrtBackend.load(
        serve=path if entry.tail == "serve" else None,
        trace=path if entry.tail == "trace" else None,
        precision=made.precisions[entry.precision],
        scales=None if entry.scales is None else np.array(entry.scales, np.float32),
        # Correctness, not speed; torch's threads spin already.
        options=OrtOptions(spinning=False, exact=stands_in(graph)),
        read_back=read_back,
        light=True,
    )


def smoke(made: Export, states: Sequence[Pass]) -> dict[str, object]:
    """Run every graph of ONNX Runtime on some states; return how each compares with fp32.

    The comparison is for people: what quantization costs is not an error.  Graphs for TensorRT are
    checked by those that stand in for them, and when they are built.

    Raises:
        BackendError: A graph cannot run, gives nonsense, or an int8 one computes in fp32.
    """
    some = states[:: max(1, len(states) // _SMOKE_STATES)]
    kept = _full_logits(made, some)
    found: dict[str, object] = {}
    ahead = target_from_name(made.target).ahead
    for name, entry in made.graphs.items():
        if ahead and not stands_in(name) and entry.precision != FULL_PRECISION.name:
            continue
        checked = _smoke_one(made, name, some, kept)
        if checked is not None:
            found[name] = checked
    return found


def _full_logits(made: Export, states: Sequence[Pass]) -> list[ReferenceState]:
    """Return full precision's logits of some states; its engine is let go of."""
    full = engine_of(made, f"{FULL_PRECISION.name}.trace")
    given = [(each.ids, each.mask, each.positions, each.progress) for each in states]
    return [ReferenceState(*each, full.logits(*each)) for each in given]


def _smoke_one(
    made: Export, name: str, states: Sequence[Pass], kept: Sequence[ReferenceState]
) -> dict[str, object] | None:
    """Run one graph, and return how it compares if it gives logits; its engine is let go of."""
    entry = made.graphs[name]
    engine = engine_of(made, name, read_back=entry.precision == "int8")
    if entry.tail == "serve":
        check_serve_tail(states, engine, made.model.vocab, made.model.mask_id)
        return None
    parity = compare(states, Recorded(kept), engine, made.model.mask_id)
    return {
        "max_error": parity.max_error,
        "agreement": parity.agreement,
        "positions": parity.positions,
        "gemms": engine.built,
    }


def _without(logits: Floats, token: int) -> Floats:
    out: Floats = np.delete(logits, token, axis=-1)
    return out
