"""Predicted latency of a pass on a GPU that is not here.

Each kernel takes the longer of its arithmetic at the GPU's peak and its bytes at the GPU's
bandwidth, both at the share of the published rate that kernels reach, and then its launch.
Kernels are the calls of `exporter.gemms` and the groups of `exporter.groups`: 12 a block at fp16
and int8 and 15 with int8 weights alone, as plans of TensorRT-RTX 1.7 for sm89 have them.

A prediction ranks and warns.  It knows nothing of caches, of tiles that shapes do not fill, or of
clocks, and whoever shows it says that it is one: `Predicted.source`.  Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engines.errors import InputError
from engines.gpus import FORMATS, Gpu, format_from_precision
from engines.precision import EXECUTED, Precision
from exporter.gemms import Call, Pass, Product, rest_bits

# Shares of the published rates that good kernels reach on large shapes.
COMPUTE_SHARE, BANDWIDTH_SHARE = 0.7, 0.8
# What a kernel costs beside its work when a graph of kernels is launched at once, microseconds.
LAUNCH_US = 2.0

# Speeds closer than this cannot be told apart by a prediction.
_TIE = 0.05

COMPUTE, WEIGHTS, ACTIVATIONS, LAUNCH = "arithmetic", "weights", "activations", "launches"

# What `pays` compares: 16 bits, the same weights without and with rounded activations.
HALF, WEIGHT_ONLY, INT8 = (EXECUTED[name] for name in ("fp16", "int8-w", "int8"))


@dataclass(frozen=True, slots=True)
class Predicted:
    """The predicted latency of a pass.

    Attributes:
        precision: Name of the precision.
        gpu: Name of the GPU.
        latency_ms: Of a pass: the bounds of all kernels and their launches, one after another.
        compute_ms: Arithmetic of all products, at the share of the peak that is reached.
        memory_ms: Bytes of all kernels, at the share of the bandwidth that is reached.
        launch_ms: Launches of all kernels.
        kernels: How many there are.
        bounds: What bounds each call of products: arithmetic, weights or activations.
        shares: Part of the latency that each of these and launches accounts for; sums to 1.
    """

    precision: str
    gpu: str
    latency_ms: float
    compute_ms: float
    memory_ms: float
    launch_ms: float
    kernels: int
    bounds: tuple[str, ...]
    shares: dict[str, float]

    source: ClassVar[str] = "predicted"

    @property
    def bound(self) -> str:
        """What the largest part of the latency is due to."""
        return max(self.shares, key=lambda cause: self.shares[cause])

    def to_json(self) -> dict[str, object]:
        """Return plain data; `source` says that nothing was measured."""
        return {
            "source": self.source,
            "precision": self.precision,
            "gpu": self.gpu,
            "latency_ms": self.latency_ms,
            "compute_ms": self.compute_ms,
            "memory_ms": self.memory_ms,
            "launch_ms": self.launch_ms,
            "kernels": self.kernels,
            "bound": self.bound,
            "shares": dict(self.shares),
        }


def predict(work: Pass, gpu: Gpu, precision: Precision) -> Predicted:
    """Return the latency that a pass should have.

    Args:
        work: The products of the full-precision graph, and what lies between them.
        gpu: Where it would run.
        precision: What its quantized products would be multiplied in; the rest is in 16 bits, or
            in 32 at fp32.

    Raises:
        InputError: The GPU does not multiply that format; says what it does.
        ValueError: The precision is simulated: it has no latency.
    """
    spent = dict.fromkeys((COMPUTE, WEIGHTS, ACTIVATIONS, LAUNCH), 0.0)
    compute_ms = memory_ms = 0.0
    bounds = []
    for call in work.calls(precision):
        arithmetic, moving = _times(call, gpu, precision)
        bound = COMPUTE
        if moving > arithmetic:
            activations = call.activation_bytes(precision)
            bound = WEIGHTS if call.weight_bytes(precision) > activations else ACTIVATIONS
        bounds.append(bound)
        spent[bound] += max(arithmetic, moving)
        compute_ms += arithmetic
        memory_ms += moving
    between = [_moving_ms(count, gpu) for count in work.bytes_between(precision)]
    spent[ACTIVATIONS] += sum(between)
    kernels = len(between) + len(bounds)
    spent[LAUNCH] = kernels * LAUNCH_US / 1e3
    latency_ms = sum(spent.values())
    return Predicted(
        precision=precision.name,
        gpu=gpu.name,
        latency_ms=latency_ms,
        compute_ms=compute_ms,
        memory_ms=memory_ms + sum(between),
        launch_ms=spent[LAUNCH],
        kernels=kernels,
        bounds=tuple(bounds),
        shares={cause: ms / latency_ms for cause, ms in spent.items()},
    )


def pays(work: Pass, gpu: Gpu) -> str:
    """Return one sentence: whether fewer bits of activations make a pass faster on a GPU.

    int8 is compared with the faster of fp16 and int8 weights alone: where they take the same time,
    rounding activations costs quality and buys nothing.
    """
    half, weight_only, int8 = (predict(work, gpu, each) for each in (HALF, WEIGHT_ONLY, INT8))
    best = min(half, weight_only, key=lambda each: each.latency_ms)
    shape = f"at batch {work.batch} and {work.length} tokens on {gpu.name}"
    ms = [f"{each.latency_ms:.3g} ms" for each in (int8, weight_only, half)]
    times = f"predicted {ms[0]} at int8, {ms[1]} with int8 weights alone, {ms[2]} at fp16"
    gain = best.latency_ms / int8.latency_ms
    if gain > 1 + _TIE:
        return f"Activation precision pays {shape}: {gain:.2f} times as fast ({times})."
    return f"Activation precision cannot pay {shape}: {_obstacle(best, gpu)} ({times})."


def _obstacle(best: Predicted, gpu: Gpu) -> str:
    """Return why the faster pass with 16-bit activations is not slower than int8."""
    share = f"{100 * best.shares[best.bound]:.0f} % of a pass is"
    alone = ", so int8 weights alone are as fast" if best.precision == WEIGHT_ONLY.name else ""
    if best.bound == WEIGHTS:
        return f"{share} reading weights{alone}"
    if best.bound == LAUNCH:
        return f"{share} launching kernels, which no precision shortens; batch more"
    if (gpu.peak("int8") or 0.0) <= (gpu.peak("fp16") or 0.0):
        return f"{gpu.name} multiplies int8 no faster than fp16"
    if best.bound == ACTIVATIONS:
        return f"{share} moving activations, of which most stay in 16 bits"
    return f"{share} arithmetic, of which most stays in 16 bits"


def side(product: Product, gpu: Gpu, precision: Precision) -> str | None:
    """Return `compute` or `memory`, the roof of the published rates that a product lies under.

    None where the GPU does not multiply the format.
    """
    ridge = gpu.ridge(_format(product, precision))
    if ridge is None:
        return None
    return "compute" if product.intensity(precision) >= ridge else "memory"


def _format(product: Product, precision: Precision) -> str:
    """Return the format that a product is multiplied in."""
    format_ = format_from_precision(precision)
    if product.quantized or rest_bits(precision) == 32:
        return format_
    return "bf16" if format_ == "bf16" else "fp16"


def _times(call: Call, gpu: Gpu, precision: Precision) -> tuple[float, float]:
    """Return (arithmetic, moving) of a call, ms."""
    format_ = _format(call.products[0], precision)
    peak = gpu.peak(format_)
    if peak is None:
        has = ", ".join(name for name in FORMATS if gpu.peak(name) is not None)
        raise InputError(
            f"{gpu.name} does not multiply {format_}, which {precision.name} needs; it multiplies "
            f"{has}, so take another precision or another GPU"
        )
    arithmetic = call.operations / (peak * 1e12 * COMPUTE_SHARE) * 1e3
    return arithmetic, _moving_ms(call.bytes(precision), gpu)


def _moving_ms(count: float, gpu: Gpu) -> float:
    return count / (gpu.bandwidth * 1e9 * BANDWIDTH_SHARE) * 1e3
