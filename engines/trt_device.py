"""One GPU as plans of TensorRT and TensorRT-RTX see it, and the memory that they share on it.

Not executed: no machine of the project's has a GPU.  Every name of the modules that is used here
is held against the real module by tests; what a GPU would do with it was not seen.

Passes never overlap, so all plans share one stream, one activation memory, and one pair of
buffers a tensor; each stored weight is there once.  Memory that many share must not move under a
captured graph, which holds addresses: where it grows, a new generation begins, and what was
captured in an older one is made again when it is next used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

import numpy as np

from engines.bindings import Weight, placed
from engines.cuda import Cuda, HostBuffer, gpu_here
from engines.errors import BackendError, MissingExtra
from engines.runtime_cache import cache_file, cache_folder, read_cache, write_cache
from engines.targets import Target
from engines.trt import tensorrt_module

# The least activation memory, so that there is always an address.
_LEAST_BYTES = 256


def cannot_run(target: Target, ordinal: int = 0) -> str | None:
    """Return why plans of a target cannot run here, a sentence with both sides; None if they can.

    Args:
        target: One of TensorRT.
        ordinal: Which GPU.
    """
    try:
        tensorrt_module(target)
        gpu = gpu_here(ordinal)
    except (MissingExtra, BackendError) as error:
        return f"plans of {target.name} cannot run here: {error}"
    if target.sms and gpu.sm not in target.sms:
        wanted = " or ".join(f"sm{sm}" for sm in target.sms)
        return f"plans of {target.name} need a GPU of {wanted}, here is {gpu.name} of sm{gpu.sm}"
    return None


class Device:
    """One GPU, and what plans share on it.

    Attributes:
        name: Of the GPU.
        sm: Its compute capability times ten.
        version: Of the module.
        cuda: The runtime.
        generation: Counts how often shared memory moved.
    """

    def __init__(self, target: Target, cuda: Cuda, trt: ModuleType) -> None:
        """Use `open`."""
        self.name, self.sm = cuda.gpu.name, cuda.gpu.sm
        self.target, self.cuda, self.trt = target, cuda, trt
        self.version = str(trt.__version__)
        self.generation = 0
        self._logger = _logger(trt)
        runtime = trt.Runtime(self._logger)
        runtime.engine_host_code_allowed = False  # a plan may bring code for the host: never
        self._runtime = runtime
        self._activations: tuple[int, int] = (0, 0)  # address, bytes
        self._buffers: dict[str, tuple[HostBuffer, int]] = {}
        self._weights: dict[tuple[Path, str], int] = {}
        self._weight_bytes = self._graph_bytes = 0
        self._cache: Any = None
        self._cache_file: Path | None = None

    @classmethod
    def open(cls, target: Target, ordinal: int = 0) -> Device:
        """Return a GPU that runs plans of a target.

        Raises:
            BackendError: There is none; says why.
            MissingExtra: A package is not installed.
        """
        trt = tensorrt_module(target)
        why = cannot_run(target, ordinal)
        if why is not None:
            raise BackendError(f"{why}; --target cpu runs what stands in for them")
        return cls(target, Cuda(ordinal), trt)

    def memory_bytes(self) -> dict[str, int]:
        """Return device memory by what it is for.

        `graphs` is what became less free while contexts were made, passes captured, and kernels
        loaded; `activations` counts the inputs and outputs of a pass too, and `weights` what
        became less free while plans were loaded, which is their constants.
        """
        buffers = sum(host.bytes.size for host, _ in self._buffers.values())
        return {
            "activations": self._activations[1] + buffers,
            "weights": self._weight_bytes,
            "graphs": self._graph_bytes,
        }

    def engine(self, plan: Path) -> Any:
        """Return a plan as TensorRT loads it; its digest was checked by the caller.

        Raises:
            BackendError: TensorRT refuses it; ends with its own words.
        """
        runtime, before = self._runtime, self.cuda.free_bytes()
        engine = runtime.deserialize_cuda_engine(plan.read_bytes())
        if engine is None:
            raise BackendError(
                f"{plan.name}: TensorRT {self.version} cannot load it on {self.name}: "
                f"{self.said()}; rebuild the bundle for this machine"
            )
        self._weight_bytes += max(0, before - self.cuda.free_bytes())
        self._reserve(engine.device_memory_size_v2)
        return engine

    def buffer(self, name: str, size: int) -> tuple[HostBuffer, int]:
        """Return pinned and device memory for a tensor of a pass, of at least so many bytes."""
        found = self._buffers.get(name)
        if found is not None and found[0].bytes.size >= size:
            return found
        if found is not None:
            self.generation += 1
            self.cuda.free(found[1])
            self.cuda.unpin(found[0])
            del self._buffers[name]
        made = (self.cuda.pinned(size, name), self.cuda.allocate(size, name))
        self._buffers[name] = made
        return made

    def weights(self, wanted: Mapping[str, Weight]) -> dict[str, int]:
        """Return the address of each stored weight; what is not there yet is copied there.

        All that one plan adds of a file lies in one allocation, which later plans use too.

        Raises:
            BackendError: There is not enough memory.
        """
        for file in sorted({weight.file for weight in wanted.values()}):
            missing = {
                name: weight
                for name, weight in wanted.items()
                if weight.file == file and (file, name) not in self._weights
            }
            if not missing:
                continue
            places, size = placed(missing)
            begin = self.cuda.allocate(size, f"the weights of {file.name}")
            self._weight_bytes += size
            data = np.memmap(file, np.uint8, "r")
            for name, weight in missing.items():
                self.cuda.fill(begin + places[name], data[weight.range.begin : weight.range.end])
                self._weights[file, name] = begin + places[name]
        return {name: self._weights[weight.file, name] for name, weight in wanted.items()}

    def context(self, engine: Any, runtime_cache: Path | None) -> Any:
        """Return an execution context on the shared activation memory.

        Raises:
            BackendError: TensorRT refuses.
        """
        trt = self.trt
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(
            trt.ExecutionContextAllocationStrategy.USER_MANAGED
        )
        if self.own_graphs:
            config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            # A context runs one shape: its own kernels now, not others until those are there,
            # whose sums may differ in their last digits.
            config.dynamic_shapes_kernel_specialization_strategy = (
                trt.DynamicShapesKernelSpecializationStrategy.EAGER
            )
            config.set_runtime_cache(self._kernels(config, runtime_cache))
        context = engine.create_execution_context(config)
        if context is None:
            raise BackendError(
                f"TensorRT makes no execution context on {self.name}: {self.said()}; lower the "
                f"batch, or free memory of the GPU"
            )
        context.set_device_memory(*self._activations)
        return context

    @property
    def own_graphs(self) -> bool:
        """Whether the module captures passes itself, as TensorRT-RTX does."""
        return self.target.module == "tensorrt-rtx"

    def took(self, before: int) -> None:
        """Count what became less free since `before` as graphs."""
        self._graph_bytes += max(0, before - self.cuda.free_bytes())

    def said(self) -> str:
        """Return TensorRT's last error, on one line."""
        return self._logger.last or "it says nothing more"

    def keep_kernels(self) -> None:
        """Write what TensorRT-RTX compiled into the user's cache folder."""
        cache = self._cache
        if cache is not None and self._cache_file is not None:
            write_cache(self._cache_file, bytes(memoryview(cache.serialize())))

    def close(self) -> None:
        """Give all memory back; no backend on it may be used afterwards."""
        self._cache = self._runtime = None
        self._buffers.clear()
        self._weights.clear()
        self.cuda.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _reserve(self, size: int) -> None:
        """Make the activation memory at least so large."""
        address, held = self._activations
        size = max(size, _LEAST_BYTES)
        if size <= held:
            return
        if address:
            self.generation += 1
            self.cuda.free(address)
            self._activations = (0, 0)
        self._activations = (self.cuda.allocate(size, "activations"), size)

    def _kernels(self, config: Any, folder: Path | None) -> Any:
        """Return the one cache of compiled kernels, with what was kept in the user's folder."""
        if self._cache is None:
            cache = config.create_runtime_cache()
            folder = folder or cache_folder(os.environ)
            if folder is not None:
                self._cache_file = cache_file(folder, self.name, self.version)
                kept = read_cache(self._cache_file)
                if kept is not None:
                    cache.deserialize(kept)  # refuses, and stays empty, what is not for here
            self._cache = cache
        return self._cache


def _logger(trt: ModuleType) -> Any:
    base: Any = trt.ILogger

    class Logger(base):  # type: ignore[misc]
        """Keeps the last error."""

        def __init__(self) -> None:
            base.__init__(self)  # the bindings want it called by name
            self.last = ""

        def log(self, severity: Any, message: str) -> None:
            if severity in (base.Severity.INTERNAL_ERROR, base.Severity.ERROR):
                self.last = " ".join(message.split())[:400]

    return Logger()
