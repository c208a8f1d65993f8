"""A null device: host memory for a GPU's, and ONNX Runtime for TensorRT, by the same addresses.

It holds the order of calls to what a GPU needs: every tensor bound and shaped before a pass, no
memory used that was given back, nothing computed while a pass is captured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime

from engines.cuda import Gpu, HostBuffer

_TYPES = {
    "tensor(int64)": ("INT64", np.int64),
    "tensor(float)": ("FLOAT", np.float32),
    "tensor(bool)": ("BOOL", np.bool_),
}


class NullCuda:
    """What `engines.cuda.Cuda` does, in host memory.

    Attributes:
        captures: How many passes were captured; None: every capture is refused.
        launched: How many captured passes were run.
    """

    def __init__(self, refuse: bool = False) -> None:
        self.gpu, self.stream = Gpu("a null device", 89, "13.0"), 7
        self.held: dict[int, Any] = {}
        self.capturing = False
        self.refuse, self.captures, self.launched = refuse, 0, 0

    def allocate(self, size: int, what: str) -> int:
        raw = (ctypes.c_uint8 * (size + 256))()
        address = -(-ctypes.addressof(raw) // 256) * 256
        self.held[address] = raw
        return address

    def free(self, address: int) -> None:
        del self.held[address]

    def pinned(self, size: int, what: str) -> HostBuffer:
        address = self.allocate(size, what)
        raw = (ctypes.c_uint8 * size).from_address(address)
        return HostBuffer(address, np.ctypeslib.as_array(raw))

    def unpin(self, buffer: HostBuffer) -> None:
        self.free(buffer.address)

    def upload(self, to: int, from_: int, size: int) -> None:
        assert to in self.held
        assert from_ in self.held
        ctypes.memmove(to, from_, size)

    download = upload

    def fill(self, to: int, data: np.ndarray[Any, Any]) -> None:
        ctypes.memmove(to, np.ascontiguousarray(data).ctypes.data, data.size)

    def synchronize(self, what: str) -> None:
        assert not self.capturing

    def free_bytes(self) -> int:
        return 1 << 30

    def captured(self, enqueue: Callable[[], bool]) -> Any:
        if self.refuse:
            return None
        self.capturing = True
        assert enqueue()
        self.capturing = False
        self.captures += 1
        return enqueue

    def launch(self, graph: Any) -> None:
        self.launched += 1
        assert graph()

    def forget(self, graph: Any) -> None:
        self.captures -= 1

    def close(self) -> None:
        self.held.clear()


class _Context:
    def __init__(self, cuda: NullCuda, session: Any) -> None:
        self.cuda, self.session = cuda, session
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.memory = (0, 0)

    def set_device_memory(self, address: int, size: int) -> None:
        self.memory = (address, size)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return address % 256 == 0

    def infer_shapes(self) -> list[str]:
        varying = [each for each in self.session.get_inputs() if not _fixed(each.shape)]
        return [each.name for each in varying if each.name not in self.shapes]

    def execute_async_v3(self, stream: int) -> bool:
        assert stream == self.cuda.stream
        assert self.memory[0] in self.cuda.held
        if self.cuda.capturing:
            return True
        feed = {}
        for each in self.session.get_inputs():
            shape = self.shapes.get(each.name) or tuple(each.shape)
            kind = np.dtype(_TYPES[each.type][1])
            size = int(np.prod(shape)) * kind.itemsize
            data = ctypes.string_at(self.addresses[each.name], size)
            feed[each.name] = np.frombuffer(data, kind).reshape(shape)
        names = [each.name for each in self.session.get_outputs()]
        for name, out in zip(names, self.session.run(names, feed), strict=True):
            whole = np.ascontiguousarray(out)
            ctypes.memmove(self.addresses[name], whole.ctypes.data, whole.nbytes)
        return True


class _Cache:
    kept = b"kernels"

    def __init__(self) -> None:
        self.taken: list[bytes] = []

    def serialize(self) -> bytes:
        return self.kept

    def deserialize(self, data: bytes) -> bool:
        self.taken.append(data)
        return True


class _Config:
    cuda_graph_strategy = dynamic_shapes_kernel_specialization_strategy = ""
    cache: _Cache | None = None

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        assert strategy == "USER_MANAGED"

    def create_runtime_cache(self) -> _Cache:
        return _Cache()

    def set_runtime_cache(self, cache: _Cache) -> bool:
        self.cache = cache
        return True


class _Engine:
    device_memory_size_v2 = 4096

    def __init__(self, cuda: NullCuda, plan: bytes) -> None:
        self.cuda, self.session = cuda, onnxruntime.InferenceSession(plan)
        self.tensors = {
            each.name: (mode, _TYPES[each.type][0], _shape(each.shape))
            for mode, side in (
                ("INPUT", self.session.get_inputs()),
                ("OUTPUT", self.session.get_outputs()),
            )
            for each in side
        }
        self.num_io_tensors = len(self.tensors)
        self.configs: list[_Config] = []

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> str:
        return self.tensors[name][0]

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=self.tensors[name][1])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name][2]

    def create_runtime_config(self) -> Any:
        return _Config()

    def create_execution_context(self, config: _Config) -> _Context:
        self.configs.append(config)
        return _Context(self.cuda, self.session)

    def create_engine_inspector(self) -> Any:
        return SimpleNamespace(get_engine_information=lambda form: '{"Layers": ["MatMul_1"]}')


def null_module(cuda: NullCuda) -> ModuleType:
    """Return what stands for TensorRT; its plans are ONNX files."""

    class ILogger:
        Severity = SimpleNamespace(INTERNAL_ERROR=0, ERROR=1)

    class Runtime:
        engine_host_code_allowed = False

        def __init__(self, logger: Any) -> None:
            pass

        def deserialize_cuda_engine(self, plan: bytes) -> _Engine:
            return _Engine(cuda, plan)

    module = ModuleType("null")
    strategy = SimpleNamespace(USER_MANAGED="USER_MANAGED")
    graphs = SimpleNamespace(WHOLE_GRAPH_CAPTURE="WHOLE_GRAPH_CAPTURE")
    kernels = SimpleNamespace(EAGER="EAGER")
    module.__dict__.update(
        __version__="11.4.0.106",
        ILogger=ILogger,
        Runtime=Runtime,
        ExecutionContextAllocationStrategy=strategy,
        CudaGraphStrategy=graphs,
        DynamicShapesKernelSpecializationStrategy=kernels,
        TensorIOMode=SimpleNamespace(INPUT="INPUT"),
        LayerInformationFormat=SimpleNamespace(JSON=1),
    )
    return module


def _fixed(shape: list[Any]) -> bool:
    return all(isinstance(each, int) for each in shape)


def _shape(shape: list[Any]) -> tuple[int, ...]:
    return tuple(each if isinstance(each, int) else -1 for each in shape)
