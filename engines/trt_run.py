"""Plans of TensorRT and TensorRT-RTX, run on a GPU: named tensors, one stream, captured passes.

Not executed: no machine of the project's has a GPU.  Every name of the modules that is used here
is held against the real module by tests; what a GPU would do with it was not seen.

    Device            one GPU and what all plans share on it (`engines.trt_device`)
      |
    PlanBackend       one plan a tail; its weights bound by address
      |
    _Slot             one execution context and one captured graph a bucket: a graph holds
                      addresses and shapes, so a context that changes shape would spoil it

TensorRT-RTX captures a pass itself when it first runs; TensorRT's passes are captured here, after
one that is not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.audit import Audit
from engines.backend import Floats, Ids, Mask, Served
from engines.bindings import Bindings, Tensor, bindings_of
from engines.buckets import Bucket, Buckets, padded, rows_of
from engines.errors import BackendError, InputError
from engines.inspector import audit_from_inspector
from engines.model import IDS, MASK, POSITIONS, SCALES
from engines.precision import Precision
from engines.tensor_file import tensors_of
from engines.trt_device import Device, cannot_run

__all__ = ["Device", "PlanBackend", "cannot_run", "inspect_plan"]

_LOG = logging.getLogger("cadenza")
_NUMPY = {"INT64": np.int64, "FLOAT": np.float32, "BOOL": np.bool_}


@dataclass
class _Slot:
    """A bucket of a plan: its context, and its captured graph where we captured it."""

    context: Any
    generation: int
    graph: Any = None


class _Part:
    """One plan, loaded: bindings, addresses of its weights, and a slot a bucket."""

    def __init__(
        self,
        device: Device,
        plan: Path,
        tail: str,
        sites: int,
        weights: Sequence[Path],
        buckets: Buckets,
        runtime_cache: Path | None,
    ) -> None:
        self.device, self.plan, self.runtime_cache = device, plan, runtime_cache
        self.engine = device.engine(plan)
        stored = {file: tensors_of(file) for file in weights}
        tensors = tuple(_tensors(self.engine, device.trt))
        self.bindings: Bindings = bindings_of(plan.name, tensors, tail, sites, stored)
        self._addresses = device.weights(self.bindings.weights)
        self._slots: dict[Bucket, _Slot] = {}
        self._refused = False
        for name, size in self.bindings.sizes(buckets.every()[0]).items():
            device.buffer(name, size)

    def run(self, bucket: Bucket, feed: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Run a pass of exactly a bucket's shape and return its outputs, views of shared memory.

        Raises:
            BackendError: It failed; names the plan and the bucket.
        """
        cuda, sizes = self.device.cuda, self.bindings.sizes(bucket)
        slot = self._slots.get(bucket)
        fresh = slot is None or slot.generation != self.device.generation
        before = cuda.free_bytes() if fresh else 0
        if slot is None or fresh:
            slot = self._made(bucket)
        for name, value in feed.items():
            host, address = self.device.buffer(name, sizes[name])
            host.bytes[: sizes[name]] = np.ascontiguousarray(value).view(np.uint8).reshape(-1)
            cuda.upload(address, host.address, sizes[name])
        what = f"a pass of {self.plan.name} on {bucket.rows} rows of {bucket.length} tokens"
        if slot.graph is not None:
            cuda.launch(slot.graph)
        elif not self._enqueue(slot.context):
            raise BackendError(
                f"{what} was refused by TensorRT on {self.device.name}: {self.device.said()}; "
                f"lower the batch, or rebuild the bundle for this machine"
            )
        for name in self.bindings.outputs:
            host, address = self.device.buffer(name, sizes[name])
            cuda.download(host.address, address, sizes[name])
        cuda.synchronize(what)
        if fresh:
            self._capture(slot, what)
            self.device.took(before)
        shapes = self.bindings.shapes(bucket)
        return [
            self.device.buffer(name, sizes[name])[0]
            .bytes[: sizes[name]]
            .view(_NUMPY[kind])
            .reshape(shapes[name])
            for name, kind in self.bindings.outputs.items()
        ]

    def close(self) -> None:
        """Let go of contexts and captured graphs, then of the plan."""
        for slot in self._slots.values():
            self._let_go(slot)
        self._slots.clear()
        self.engine = None

    def _let_go(self, slot: _Slot) -> None:
        if slot.graph is not None:
            self.device.cuda.forget(slot.graph)
        slot.graph = slot.context = None

    def _made(self, bucket: Bucket) -> _Slot:
        """Return a bucket's slot, made anew, with every tensor bound."""
        old = self._slots.pop(bucket, None)
        if old is not None:
            self._let_go(old)
        context = self.device.context(self.engine, self.runtime_cache)
        shapes, sizes = self.bindings.shapes(bucket), self.bindings.sizes(bucket)
        taken = [context.set_input_shape(name, shapes[name]) for name in self.bindings.inputs]
        bound = {name: self.device.buffer(name, size)[1] for name, size in sizes.items()}
        for name, address in {**bound, **self._addresses}.items():
            taken.append(context.set_tensor_address(name, address))
        lacking = context.infer_shapes()
        if not all(taken) or lacking:
            raise BackendError(
                f"{self.plan.name} does not take {bucket.rows} rows of {bucket.length} tokens "
                f"with {bucket.asked} asked: {self.device.said()}"
                f"{' (' + ', '.join(lacking) + ')' if lacking else ''}; rebuild the bundle"
            )
        slot = _Slot(context, self.device.generation)
        self._slots[bucket] = slot
        return slot

    def _enqueue(self, context: Any) -> bool:
        return bool(context.execute_async_v3(self.device.cuda.stream))

    def _capture(self, slot: _Slot, what: str) -> None:
        """Capture a pass that has run once; where that is refused it stays as it is."""
        if self.device.own_graphs or self._refused:
            return
        slot.graph = self.device.cuda.captured(lambda: self._enqueue(slot.context))
        if slot.graph is None:
            self._refused = True
            _LOG.warning("cadenza: %s cannot be captured, so it is enqueued each time", what)


class PlanBackend:
    """A loaded engine of plans: one for each tail that it was given.

    Attributes:
        precision: What it runs.
        built: Products by the types of their operands, as the engine inspector tells; empty where
            it does not.
    """

    def __init__(
        self,
        parts: Mapping[str, _Part],
        precision: Precision,
        scales: NDArray[np.float32] | None,
        buckets: Buckets,
        pad_id: int,
    ) -> None:
        """Use `load`."""
        self.precision, self.built = precision, dict[str, int]()
        self.buckets = buckets
        self._parts, self._pad_id = dict(parts), pad_id
        self._scales = None if scales is None else scales.astype(np.float32)[:, None, :]

    @classmethod
    def load(
        cls,
        *,
        serve: Path | None,
        trace: Path | None,
        precision: Precision,
        scales: NDArray[np.float32] | None,
        weights: Sequence[Path],
        device: Device,
        buckets: Buckets,
        runtime_cache: Path | None = None,
        pad_id: int = 0,
    ) -> PlanBackend:
        """Return a loaded engine.  Its plans' digests were checked by the caller.

        Args:
            serve: Plan with the serve tail, or None.
            trace: Plan with the trace tail, or None.
            precision: What the plans compute in.
            scales: Activation scales of each window [W, S], where the plans read `scales`.
            weights: The family's files; what a plan reads besides a pass's arrays is there.
            device: Where it runs; it must outlive the engine.
            buckets: Shapes that passes are padded to.
            runtime_cache: Folder of TensorRT-RTX's compiled kernels; the user's own if None.
            pad_id: What stands on the padded part of a canvas, masked: the model's eos_id.

        Raises:
            BackendError: A plan cannot be loaded or is not of this kind.
            BundleError: A weight is missing or of another type.
        """
        plans = {"serve": serve, "trace": trace}
        if serve is None and trace is None:
            raise ValueError("an engine needs a plan for its serve tail, its trace tail, or both")
        sites = 0 if scales is None else scales.shape[-1]
        parts = {
            tail: _Part(device, plan, tail, sites, weights, buckets, runtime_cache)
            for tail, plan in plans.items()
            if plan is not None
        }
        loaded = cls(parts, precision, scales, buckets, pad_id)
        try:
            audits = _audits(device, next(iter(parts.values())).engine, precision.name)
        except InputError as error:  # a best effort: what runs does not hang on it
            _LOG.warning("cadenza: what was built was not read back: %s", error)
            audits = []
        loaded.built = {name: n for audit in audits for name, n in audit.products.items()}
        return loaded

    def serve(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Served:
        tokens, probability, entropy = self._outputs("serve", ids, mask, positions, progress)
        return Served(tokens, probability, entropy)

    def logits(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Floats:
        out: Floats = self._outputs("trace", ids, mask, positions, progress)[0]
        return out

    def warm_up(self) -> None:
        """Run each bucket of each plan once: kernels are compiled, and passes captured.

        Raises:
            BackendError: One failed, or gave a number that is not finite.
        """
        for tail in self._parts:
            for bucket in self.buckets.every():
                ids = np.full((bucket.rows, bucket.length), self._pad_id, np.int64)
                asked = np.zeros((bucket.rows, bucket.asked), np.int64)
                progress = np.zeros(bucket.rows, np.float32)
                out = self._outputs(tail, ids, np.ones(ids.shape, np.bool_), asked, progress)
                if not all(np.isfinite(each).all() for each in out):
                    raise BackendError(
                        f"engine {self.precision.name!r} gives numbers that are not finite on a "
                        f"warm-up pass; tune again without this precision"
                    )
        next(iter(self._parts.values())).device.keep_kernels()

    def close(self) -> None:
        """Let go of the plans; the device's memory is the device's."""
        for part in self._parts.values():
            part.close()

    def _outputs(
        self, tail: str, ids: Ids, mask: Mask, positions: Ids, progress: Floats
    ) -> list[NDArray[Any]]:
        part = self._parts.get(tail)
        if part is None:
            raise BackendError(
                f"engine {self.precision.name!r} was loaded without its {tail} plan; load it too"
            )
        rows, asked = positions.shape
        bucket = self.buckets.fit(rows, ids.shape[1], asked)
        feed: dict[str, NDArray[Any]] = dict(
            zip(
                (IDS, MASK, POSITIONS),
                padded(bucket, ids, mask, positions, self._pad_id),
                strict=True,
            )
        )
        if self._scales is not None:
            windows = len(self._scales)
            window = (progress * float(windows) + 1e-6).astype(np.int64).clip(0, windows - 1)
            feed[SCALES] = self._scales[window[rows_of(bucket, rows)]]
        return [out[:rows, :asked].copy() for out in part.run(bucket, feed)]


def inspect_plan(device: Device, plan: Path, precision: str) -> list[Audit]:
    """Return what a plan multiplies, by the engine inspector; nothing where it cannot tell.

    Args:
        device: Where it is loaded for that.
        plan: Its digest was checked by the caller.
        precision: The name of what was asked for.

    Raises:
        BackendError: TensorRT refuses the plan.
        InputError: What the inspector says cannot be read.
    """
    return _audits(device, device.engine(plan), precision)


def _audits(device: Device, engine: Any, precision: str) -> list[Audit]:
    inspector = engine.create_engine_inspector()
    text = inspector.get_engine_information(device.trt.LayerInformationFormat.JSON)
    scratch = engine.device_memory_size_v2
    audit = audit_from_inspector(text, device.version, device.sm, precision, scratch)
    return [] if audit is None else [audit]


def _tensors(engine: Any, trt: ModuleType) -> Iterator[Tensor]:
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        yield Tensor(
            name=name,
            read=engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT,
            type=engine.get_tensor_dtype(name).name,
            shape=tuple(engine.get_tensor_shape(name)),
        )
