"""The CUDA runtime as far as engines need it: one GPU's memory, stream, copies, captured graphs.

Not executed: no machine of the project's has a GPU; names and arguments are checked by tests.

Every call is checked, and an error says what was being done.  The only file that imports cuda
(package cuda-bindings), and only inside functions; without a driver it imports fine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.errors import BackendError, MissingExtra, require

# Copied at once from a file by way of pinned memory.
_STAGE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that is here.

    Attributes:
        name: As its driver calls it.
        sm: Compute capability times ten.
        driver: The newest CUDA that the driver runs, for instance "13.1".
    """

    name: str
    sm: int
    driver: str


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """Pinned host memory: its address, and its bytes as an array."""

    address: int
    bytes: NDArray[np.uint8]


def gpu_here(ordinal: int = 0) -> Gpu:
    """Return a GPU of this machine.

    Raises:
        BackendError: There is no driver or no such GPU.
        MissingExtra: cuda-bindings is not installed.
    """
    cuda = _cuda()
    count = checked(cuda, cuda.cudaGetDeviceCount(), "looking for a GPU")
    if not 0 <= ordinal < count:
        raise BackendError(
            f"there is no GPU {ordinal}, the driver sees {count}; use a machine with one"
        )
    properties = checked(cuda, cuda.cudaGetDeviceProperties(ordinal), "asking a GPU what it is")
    version = checked(cuda, cuda.cudaDriverGetVersion(), "asking for the driver's version")
    name = properties.name
    return Gpu(
        name=name.decode(errors="replace").rstrip("\0") if isinstance(name, bytes) else str(name),
        sm=10 * properties.major + properties.minor,
        driver=f"{version // 1000}.{version % 1000 // 10}",
    )


def no_gpu(ordinal: int = 0) -> str | None:
    """Return why there is no GPU to run on, a sentence, or None."""
    try:
        gpu_here(ordinal)
    except (BackendError, MissingExtra) as error:
        return str(error)
    return None


def sm_here() -> int | None:
    """Return the compute capability of this machine's GPU times ten; None where there is none."""
    try:
        return gpu_here().sm
    except (BackendError, MissingExtra):
        return None


class Cuda:
    """One GPU: its stream, and the memory taken from it, given back by `close`.

    Attributes:
        gpu: What it is.
        stream: The one stream that everything runs on, as an address.
    """

    def __init__(self, ordinal: int = 0) -> None:
        """Take a GPU.

        Raises:
            BackendError: There is none.
            MissingExtra: cuda-bindings is not installed.
        """
        self.gpu = gpu_here(ordinal)
        self._cuda = _cuda()
        self._call("choosing the GPU", self._cuda.cudaSetDevice(ordinal))
        flags = self._cuda.cudaStreamNonBlocking
        made = self._call("making a stream", self._cuda.cudaStreamCreateWithFlags(flags))
        self._stream = made
        self.stream = int(made)
        self._device: set[int] = set()
        self._host: set[int] = set()
        self._stage: HostBuffer | None = None

    def allocate(self, size: int, what: str) -> int:
        """Return the address of device memory; at least one byte, aligned to 256.

        Raises:
            BackendError: There is not enough.
        """
        address = int(self._call(f"taking {size:,} bytes for {what}", self._cuda.cudaMalloc(size)))
        self._device.add(address)
        return address

    def free(self, address: int) -> None:
        """Give device memory back; waits for what still runs."""
        self.synchronize("what ran before memory was given back")
        self._device.discard(address)
        self._call("giving memory back", self._cuda.cudaFree(address))

    def pinned(self, size: int, what: str) -> HostBuffer:
        """Return pinned host memory.

        Raises:
            BackendError: There is not enough.
        """
        flags = self._cuda.cudaHostAllocDefault
        said = f"pinning {size:,} bytes of host memory for {what}"
        address = int(self._call(said, self._cuda.cudaHostAlloc(size, flags)))
        self._host.add(address)
        raw = (ctypes.c_uint8 * size).from_address(address)
        return HostBuffer(address, np.ctypeslib.as_array(raw))

    def unpin(self, buffer: HostBuffer) -> None:
        """Give pinned memory back."""
        self._host.discard(buffer.address)
        self._call("giving pinned memory back", self._cuda.cudaFreeHost(buffer.address))

    def upload(self, to: int, from_: int, size: int) -> None:
        """Copy from pinned memory to the device, in the stream's order."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("an upload", self._cuda.cudaMemcpyAsync(to, from_, size, kind, self._stream))

    def download(self, to: int, from_: int, size: int) -> None:
        """Copy from the device to pinned memory, in the stream's order."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("a download", self._cuda.cudaMemcpyAsync(to, from_, size, kind, self._stream))

    def fill(self, to: int, data: NDArray[np.uint8]) -> None:
        """Copy bytes of any length to the device, a piece at a time, and wait for them."""
        if self._stage is None:
            self._stage = self.pinned(_STAGE_BYTES, "copies")
        for begin in range(0, data.size, _STAGE_BYTES):
            piece = data[begin : begin + _STAGE_BYTES]
            self._stage.bytes[: piece.size] = piece
            self.upload(to + begin, self._stage.address, piece.size)
            self.synchronize("a copy of weights")

    def synchronize(self, what: str) -> None:
        """Wait for everything in the stream.

        Raises:
            BackendError: Something in it failed; `what` names it.
        """
        self._call(what, self._cuda.cudaStreamSynchronize(self._stream))

    def free_bytes(self) -> int:
        """Return the device memory that nobody has taken."""
        (free, _) = self._call("asking for free memory", self._cuda.cudaMemGetInfo())
        return int(free)

    def captured(self, enqueue: Callable[[], bool]) -> Any | None:
        """Return the graph of what `enqueue` puts into the stream; None where it is refused."""
        cuda = self._cuda
        mode = cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("beginning a capture", cuda.cudaStreamBeginCapture(self._stream, mode))
        taken = enqueue()
        code, *rest = cuda.cudaStreamEndCapture(self._stream)
        if code != cuda.cudaError_t.cudaSuccess or not taken:
            if code == cuda.cudaError_t.cudaSuccess:
                self._call("letting a capture go", cuda.cudaGraphDestroy(rest[0]))
            cuda.cudaGetLastError()  # a refused capture leaves its error behind
            return None
        made = cuda.cudaGraphInstantiate(rest[0], 0)
        self._call("letting a capture go", cuda.cudaGraphDestroy(rest[0]))
        if made[0] != cuda.cudaError_t.cudaSuccess:
            cuda.cudaGetLastError()
            return None
        return made[1]

    def launch(self, graph: Any) -> None:
        """Put a captured graph into the stream."""
        self._call("launching a captured pass", self._cuda.cudaGraphLaunch(graph, self._stream))

    def forget(self, graph: Any) -> None:
        """Give a captured graph back; waits for what still runs."""
        self.synchronize("what ran before a captured pass was given back")
        self._call("letting a captured pass go", self._cuda.cudaGraphExecDestroy(graph))

    def close(self) -> None:
        """Give everything back, also after an error; nothing of it may be used afterwards."""
        cuda = self._cuda
        cuda.cudaStreamSynchronize(self._stream)
        for address in self._device:
            cuda.cudaFree(address)
        for address in self._host:
            cuda.cudaFreeHost(address)
        self._device.clear()
        self._host.clear()
        self._stage = None
        cuda.cudaStreamDestroy(self._stream)

    def _call(self, what: str, result: tuple[Any, ...]) -> Any:
        return checked(self._cuda, result, f"{what} on {self.gpu.name}")


def checked(cuda: ModuleType, result: tuple[Any, ...], what: str) -> Any:
    """Return what a call of the runtime gave, without its code: a value, several, or None.

    Args:
        cuda: The module.
        result: Its code, then what it gave.
        what: What was being done, for the message.

    Raises:
        BackendError: The code is an error.
    """
    code, *values = result
    if code == cuda.cudaError_t.cudaSuccess:
        return values[0] if len(values) == 1 else tuple(values) or None
    name, says = _text(cuda.cudaGetErrorName(code)), _text(cuda.cudaGetErrorString(code))
    if code == cuda.cudaError_t.cudaErrorMemoryAllocation:
        mend = "lower the batch, or free memory of the GPU"
    elif code in (
        cuda.cudaError_t.cudaErrorInsufficientDriver,
        cuda.cudaError_t.cudaErrorNoDevice,
    ):
        mend = "use a machine with an NVIDIA GPU and its driver"
    else:
        mend = "load the bundle again; if it stays, look at the system's log"
    raise BackendError(f"{what} failed: {says} ({name}, {int(code)}); {mend}")


def _text(result: tuple[Any, ...]) -> str:
    text = result[1]
    return text.decode(errors="replace") if isinstance(text, bytes) else str(text)


def _cuda() -> ModuleType:
    return require("cuda.bindings.runtime", "tensorrt-rtx", "running plans of TensorRT")
