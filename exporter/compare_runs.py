"""Runs two graphs of an export and returns how each layer differs, with Polygraphy.

Polygraphy marks tensors as outputs (`ModifyOutputs`), runs the graphs (`OnnxrtRunner`,
`TrtRunner`) and measures (`SimpleCompareFunc`, `L2CompareFunc`, `CosineSimilarityCompareFunc`).
Not its `Comparator.run`: what one graph gave goes into the other.  What may differ, and which
layer is told, is `exporter.compare`'s.

Never all layers at once: as many as their outputs hold `MOST_BYTES` in a state.  In memory are
then, of one state, those outputs of both graphs and of the layers alone, and what these read:
about four times that at most, besides the weights of three sessions.

Polygraphy's `EngineFromBytes` lets an engine run code on the host, so it is never used here:
engines come from `engines.trt_device`, which does not, and are built in this very process's call.

The only file that imports polygraphy, and only inside functions.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engines.errors import BackendError, InputError, require
from engines.model import ASKED, BATCH, IDS, LENGTH, LOGITS, MASK, POSITIONS, SCALES
from engines.options import OrtOptions
from engines.ort import failures, session_from_model
from engines.precision import Precision
from engines.targets import target_from_name
from engines.trt import BuildRequest, build_plan, tensorrt_module
from engines.trt_device import Device
from exporter.compare import (
    Difference,
    Row,
    chunks,
    crest_of,
    differs,
    layers_of,
    tolerance,
)
from exporter.cuts import alone, floats_of, pruned

if TYPE_CHECKING:
    import onnx

    from exporter.parity import State

# Outputs of the layers that are looked at together, in a state.
MOST_BYTES = 64 << 20

Feed = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Side:
    """A graph and how it is run.

    Attributes:
        name: For people: `int8.trace by ONNX Runtime`.
        model: With the trace tail; its weights lie outside.
        folder: Where its weights are found from.
        precision: What it holds.
        scales: Activation scales of each window [W, S] where they are an input.
        rewritten: Whether ONNX Runtime may rewrite the graph.
        exact: Compute in floating point whatever the graph only rounds.
        plan: What TensorRT builds, where that runs it and not ONNX Runtime.
    """

    name: str
    model: onnx.ModelProto
    folder: Path
    precision: Precision
    scales: NDArray[np.float32] | None = None
    rewritten: bool = True
    exact: bool = True
    plan: BuildRequest | None = None

    def feed(self, state: State) -> dict[str, NDArray[Any]]:
        """Return the graph's inputs in a state."""
        found: dict[str, NDArray[Any]] = {
            IDS: np.ascontiguousarray(state.ids, np.int64),
            MASK: np.ascontiguousarray(state.mask, np.bool_),
            POSITIONS: np.ascontiguousarray(state.positions, np.int64),
        }
        if self.scales is not None:
            windows = len(self.scales)
            row = (state.progress * float(windows) + 1e-6).astype(np.int64).clip(0, windows - 1)
            found[SCALES] = self.scales[row][:, None, :]
        return found


@dataclass(frozen=True, kw_only=True)
class Question:
    """Two graphs to hold against each other.

    Attributes:
        held_against: The one whose tensors are given to the other's layers.
        looked_into: The one whose layers are told.
        rest: Type of both graphs' results as they are rounded, by safetensors' name.
        quantized: Whether one is quantized and the other is not.
        between: Tensors between which layers are told; others are inside one, so that the kernels
            that a runtime fuses stay whole.  None for all.
    """

    held_against: Side
    looked_into: Side
    rest: str
    quantized: bool = False
    between: frozenset[str] | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How the layers of two graphs differ.

    Attributes:
        rows: In the order of the graph that is looked into.
        outputs: How the logits of the two differ where nothing inside is marked.
        states: Denoising states compared.
    """

    rows: tuple[Row, ...]
    outputs: Difference
    states: int


def answer(
    question: Question,
    states: Sequence[State],
    architecture: str,
    chosen: float | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Answer:
    """Return how each layer differs, the worst of all states.

    Args:
        question: What is compared.
        states: Legal ones, at least one.
        architecture: Of the model, for the names of its weights.
        chosen: The tolerance of every layer, in place of what its arithmetic explains.
        say: Told how far it has come.

    Raises:
        BackendError: A graph cannot be run; says which.
        InputError: The graphs have no tensor in common, or one is damaged.
        MissingExtra: Polygraphy is not installed.
    """
    left, right = question.held_against, question.looked_into
    lefts, rights = floats_of(left.model), floats_of(right.model)
    cuts = lefts.keys() & rights.keys()
    if question.between is not None:
        cuts &= question.between
    if not cuts:
        raise InputError(f"{left.name} and {right.name} have no tensor in common; export again")
    layers = layers_of(right.model, cuts, architecture)
    length = max(state.ids.shape[1] for state in states)
    sizes = {name: max(_numbers(lefts[name], state) for state in states) for name in cuts}
    by_engine = right.plan is not None
    own: dict[str, Difference] = {}
    run: dict[str, float] = {}
    crest: dict[str, float] = {}
    with quiet():
        done = 0
        for part in chunks(layers, sizes, MOST_BYTES // 4):
            wanted = [layer.tensor for layer in part]
            for found, so_far, crests in _chunk(question, states, wanted, cuts, rights):
                for name, most in crests.items():
                    crest[name] = max(crest.get(name, 1.0), most)
                for name, each in found.items():
                    own[name] = each.worst(own[name]) if name in own else each
                    run[name] = max(run.get(name, 0.0), so_far[name], key=_nan_last)
            done += len(part)
            say(f"{right.name}: {done} of {len(layers)} layers")
        outputs = _outputs(question, states)
    rows: list[Row] = []
    carried = 0.0
    precision = right.precision if question.quantized or by_engine else None
    for layer in layers:
        outlying = max((crest[name] for name in layer.sources), default=1.0)
        may = tolerance(layer, question.rest, length, precision, outlying)
        if by_engine:
            # A number that falls to the other side of a step is off by the step, in one layer and
            # then in all behind it: at most as if each side had rounded for itself.
            carried = may = max(carried, may)
        may = may if chosen is None else chosen
        each = own[layer.tensor]
        rows.append(
            Row(
                layer,
                each,
                run[layer.tensor],
                may,
                differs(each, may, 0.0 if chosen else layer.step),
            )
        )
    return Answer(rows=tuple(rows), outputs=outputs, states=len(states))


def measured(name: str, left: NDArray[Any], right: NDArray[Any]) -> Difference:
    """Return how an array differs from the one that it is held against, by Polygraphy.

    In float64, or the squares of a mask's huge numbers overflow.

    Args:
        name: Of the tensor.
        left: What it is held against.
        right: Of the same shape.
    """
    if left.shape != right.shape:
        return Difference(np.inf, np.inf, -1.0, np.inf)
    compare = require("polygraphy.comparator", "compare", "comparing")
    wide = _results(name, left, right)
    with np.errstate(all="ignore"):
        simple = compare.SimpleCompareFunc(check_error_stat="max")(*wide)[name]
        cosine = compare.CosineSimilarityCompareFunc()(*wide)[name].cosine_similarity
    largest = float(np.abs(wide[1][name]).max(initial=0.0))
    return Difference(simple.max_absdiff, apart(name, left, right), float(cosine), largest)


def apart(name: str, left: NDArray[Any], right: NDArray[Any]) -> float:
    """Return the norm of the difference over that of what is held against; see `measured`."""
    if left.shape != right.shape:
        return np.inf
    compare = require("polygraphy.comparator", "compare", "comparing")
    wide = _results(name, left, right)
    with np.errstate(all="ignore"):
        between = float(compare.L2CompareFunc()(*wide)[name].l2_norm)
        norm = float(np.linalg.norm(wide[1][name].reshape(-1)))
    return between / norm if norm else (0.0 if between == 0.0 else np.inf)


def _results(name: str, left: NDArray[Any], right: NDArray[Any]) -> list[Any]:
    """Return what is looked into and what it is held against as Polygraphy's comparators want."""
    result = require("polygraphy.comparator", "compare", "comparing").IterationResult
    return [
        result(outputs={name: each.astype(np.float64)}, runner_name=side)
        for each, side in ((right, "looked into"), (left, "held against"))
    ]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Polygraphy from writing to the terminal; what it refuses is a `BackendError`.

    Raises:
        MissingExtra: Polygraphy is not installed.
    """
    log = require("polygraphy.logger", "compare", "comparing").G_LOGGER
    refusal = require("polygraphy.exception", "compare", "comparing").PolygraphyException
    try:
        with log.verbosity(log.CRITICAL + 1):
            yield
    except refusal as error:
        line = " ".join(str(error).split())
        raise BackendError(f"Polygraphy could not compare: {line}; export again") from error


def _chunk(
    question: Question,
    states: Sequence[State],
    wanted: Sequence[str],
    cuts: set[str],
    types: Mapping[str, onnx.TypeProto],
) -> Iterator[tuple[dict[str, Difference], dict[str, float], dict[str, float]]]:
    """Yield, for each state, how some layers differ alone and in the whole run; outliers, too.

    These are the largest magnitudes over root mean squares of what the layers are given.
    """
    left, right = question.held_against, question.looked_into
    single, own, given = alone(right.model, wanted, cuts, types)
    both = list(dict.fromkeys([*given, *wanted]))
    against = _runner(left, _marked(left.model, both), "held against")
    whole = (
        _engine(right, wanted)
        if right.plan
        else _runner(right, _marked(right.model, wanted), "looked into")
    )
    engine = right.plan is not None  # its layers are not run alone: each would be a plan
    lone = nullcontext() if engine else _runner(right, single, "alone")
    by_row = right.precision.simulated or right.precision.name == "nvfp4"
    kinds = {name: _numpy(types[name]) for name in given}
    with against as one, whole as two, lone as three:
        for state in states:
            with np.errstate(all="ignore"):
                first = _infer(one, left, left.feed(state))
                second = _infer(two, right, right.feed(state))
                third = {own[name]: second[name] for name in wanted}
                if not engine:
                    cast = {name: first[name].astype(kinds[name]) for name in given}
                    third = _infer(three, right, right.feed(state) | cast)
            yield (
                {name: measured(name, first[name], third[own[name]]) for name in wanted},
                {name: apart(name, first[name], second[name]) for name in wanted},
                {name: crest_of(first[name], by_row) for name in given},
            )


def _outputs(question: Question, states: Sequence[State]) -> Difference:
    """Return how the logits differ where nothing inside is marked: nothing keeps kernels apart."""
    sides = (question.held_against, question.looked_into)
    runners = [
        _engine(side, ()) if side.plan else _runner(side, side.model, side.name) for side in sides
    ]
    found: Difference | None = None
    with runners[0] as one, runners[1] as two:
        for state in states:
            left = _infer(one, sides[0], sides[0].feed(state))[LOGITS]
            right = _infer(two, sides[1], sides[1].feed(state))[LOGITS]
            each = measured(LOGITS, left, right)
            found = each if found is None else each.worst(found)
    assert found is not None
    return found


def _marked(model: onnx.ModelProto, wanted: Sequence[str]) -> onnx.ModelProto:
    """Return a copy whose outputs are some tensors, without what they do not need."""
    modify = require("polygraphy.backend.onnx", "compare", "comparing").ModifyOutputs
    made: onnx.ModelProto = modify(pruned(model, wanted), outputs=list(wanted))()
    return made


def _runner(side: Side, model: onnx.ModelProto, name: str) -> Any:
    """Return Polygraphy's runner of a graph that stands in for a side's."""
    runner = require("polygraphy.backend.onnxrt", "compare", "comparing").OnnxrtRunner

    def session() -> Any:
        options = OrtOptions(exact=side.exact)
        data = model.SerializeToString()
        try:
            return session_from_model(
                data, side.folder, side.precision, options, rewritten=side.rewritten
            )
        except BackendError as error:
            raise BackendError(f"{side.name}: {error}") from error

    return runner(session, name=name)


@contextmanager
def _engine(side: Side, marked: Sequence[str]) -> Iterator[Any]:
    """Yield Polygraphy's runner of a plan that is built here and now, with some tensors marked.

    No machine with a GPU has run this yet.
    """
    request = side.plan
    assert request is not None
    target = target_from_name(request.target)
    if target.module == "tensorrt-rtx":  # how Polygraphy is told which of the two modules it is
        os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1"
        sys.modules.setdefault("tensorrt_rtx", tensorrt_module(target))
    runner = require("polygraphy.backend.trt", "compare", "comparing").TrtRunner
    with Device.open(target) as device, tempfile.TemporaryDirectory(prefix="cadenza-") as scratch:
        file = Path(scratch) / f"{request.graph.stem}.plan"
        file.write_bytes(build_plan(request, lambda line: None, marked))
        with runner(device.engine(file), name=side.name) as active:
            yield active


def _infer(runner: Any, side: Side, feed: Feed) -> dict[str, NDArray[Any]]:
    """Return the outputs of an active runner, with only the inputs that it has."""
    names = runner.get_input_metadata(use_numpy_dtypes=False).keys()
    try:
        outputs = runner.infer({name: feed[name] for name in names})
    except failures() as error:
        line = " ".join(str(error).split())[:300]
        raise BackendError(f"{side.name} failed: {line}; leave this precision out") from error
    return dict(outputs)


def _numbers(kind: onnx.TypeProto, state: State) -> int:
    """Return how many numbers a tensor holds in a state; an axis of no name counts as tokens."""
    axes: dict[str, int] = {
        BATCH: state.ids.shape[0],
        LENGTH: state.ids.shape[1],
        ASKED: state.positions.shape[1],
    }
    count = 1
    for dim in kind.tensor_type.shape.dim:
        known = axes.get(dim.dim_param, int(state.ids.shape[1]))
        count *= int(dim.dim_value) or known
    return max(count, 1)


def _numpy(kind: onnx.TypeProto) -> Any:
    from onnx import helper

    return helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type)


def _nan_last(value: float) -> float:
    return np.inf if np.isnan(value) else value
