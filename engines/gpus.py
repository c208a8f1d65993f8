"""Published peaks of GPUs by name: dense tera-operations a second by format, bandwidth, memory.

Numbers are those of the vendors' documents, with these choices:

- Dense.  NVIDIA's data sheets of 2020 and later print rates "with sparsity", twice these.
- Sums in 32 bits, as inference engines ask for.  On GeForce cards fp16, bf16 and fp8 then run at
  half the rate that advertisements show, so there fp8 is slower than int8; on data-centre and
  professional cards there is no difference.
- fp32 on NVIDIA is that of the CUDA cores: TF32 is another format.  On CDNA it is that of the
  matrix cores.
- Rates in `derived` were not printed: they follow from a printed one by the ratios of the same
  architecture's other cards.

A GPU that is missing is better than one that is guessed.  Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from engines.document import shorten
from engines.errors import InputError
from engines.precision import Precision

FORMATS = ("fp32", "fp16", "bf16", "int8", "fp8", "fp4")


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a GPU can do at most.

    Attributes:
        name: Short, as people say it.
        vendor: NVIDIA or AMD.
        sm: Compute capability times ten, for instance 89; None where there is none (AMD).
        peaks: Dense tera-operations a second in the order of `FORMATS`; None where the hardware
            does not multiply that format.
        bandwidth: Of its memory, GB/s (10^9).
        memory: As sold, GiB.
        source: Title of the document.
        derived: Formats whose rate the document does not print.
    """

    name: str
    vendor: str
    sm: int | None
    peaks: tuple[float | None, ...]
    bandwidth: float
    memory: float
    source: str
    derived: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.peaks) != len(FORMATS):
            raise ValueError(f"peaks must be those of {', '.join(FORMATS)}, got {self.peaks}")
        if not all(rate is None or rate > 0 for rate in (*self.peaks, self.bandwidth)):
            raise ValueError(f"rates must be above 0, got {self.peaks}, {self.bandwidth=}")

    def peak(self, format_: str) -> float | None:
        """Return dense tera-operations a second in a format; None where it lacks the format."""
        return self.peaks[FORMATS.index(format_)]

    def ridge(self, format_: str) -> float | None:
        """Return operations a byte above which a product is bound by arithmetic, below by memory.

        None where the GPU lacks the format.
        """
        peak = self.peak(format_)
        return None if peak is None else peak * 1e3 / self.bandwidth


_T4 = "NVIDIA T4 Tensor Core GPU, data sheet"
_A100 = "NVIDIA A100 Tensor Core GPU, data sheet"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture, whitepaper"
_A10 = "NVIDIA A10 Tensor Core GPU, data sheet"
_ADA = "NVIDIA Ada GPU Architecture, whitepaper"
_4070 = "NVIDIA GeForce RTX 4070, product page"
_L4 = "NVIDIA L4 Tensor Core GPU, data sheet"
_L40S = "NVIDIA L40S GPU, data sheet"
_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture, whitepaper"
_H200 = "NVIDIA H200 Tensor Core GPU, data sheet"
_B200 = "NVIDIA Blackwell, data sheet (HGX B200)"
_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture, whitepaper"
_5070 = "NVIDIA GeForce RTX 5070, product page"
_PRO = "NVIDIA RTX Blackwell PRO GPU Architecture, whitepaper"
_GB10 = "NVIDIA DGX Spark, data sheet (fp4); GB10 at Hot Chips 2025 (fp32)"
_MI200 = "AMD Instinct MI200 series, data sheet"
_GCD = _MI200 + ", halved: a program sees each die as a GPU"
_MI300X = "AMD Instinct MI300X accelerator, data sheet"
_MI325X = "AMD Instinct MI325X accelerator, data sheet"
_7900 = "AMD Radeon RX 7900 XTX, product page"
_9070 = "AMD Radeon RX 9070 XT, product page"

# What follows from a printed rate of int8, or of fp4.
_OF_INT8, _OF_FP4 = ("fp16", "bf16", "fp8"), ("fp16", "bf16", "int8", "fp8")

# The first of each compute capability is what a target of it stands for, see `typical`.
#   name, vendor, sm, (fp32, fp16, bf16, int8, fp8, fp4), GB/s, GiB, source, derived
GPUS: tuple[Gpu, ...] = (
    Gpu("T4", "NVIDIA", 75, (8.1, 65, None, 130, None, None), 320, 16, _T4),
    Gpu("A100 80 GB", "NVIDIA", 80, (19.5, 312, 312, 624, None, None), 2039, 80, _A100),
    Gpu("A100 PCIe 80 GB", "NVIDIA", 80, (19.5, 312, 312, 624, None, None), 1935, 80, _A100),
    Gpu("A100 40 GB", "NVIDIA", 80, (19.5, 312, 312, 624, None, None), 1555, 40, _A100),
    Gpu("RTX 3090", "NVIDIA", 86, (35.6, 71, 71, 284, None, None), 936, 24, _GA102),
    Gpu("A10", "NVIDIA", 86, (31.2, 125, 125, 250, None, None), 600, 24, _A10),
    Gpu("RTX 4090", "NVIDIA", 89, (82.6, 165.2, 165.2, 660.6, 330.3, None), 1008, 24, _ADA),
    Gpu(
        "RTX 4070", "NVIDIA", 89, (29.1, 58.3, 58.3, 233.2, 116.6, None), 504, 12, _4070, _OF_INT8
    ),
    Gpu("L4", "NVIDIA", 89, (30.3, 121, 121, 242.5, 242.5, None), 300, 24, _L4),
    Gpu("L40S", "NVIDIA", 89, (91.6, 362.05, 362.05, 733, 733, None), 864, 48, _L40S),
    Gpu("H100 SXM", "NVIDIA", 90, (66.9, 989.4, 989.4, 1978.9, 1978.9, None), 3350, 80, _HOPPER),
    Gpu("H100 PCIe", "NVIDIA", 90, (51.2, 756, 756, 1513, 1513, None), 2000, 80, _HOPPER),
    Gpu("H200", "NVIDIA", 90, (67, 989.5, 989.5, 1979, 1979, None), 4800, 141, _H200),
    Gpu("B200", "NVIDIA", 100, (75, 2250, 2250, 4500, 4500, 9000), 7700, 180, _B200),
    Gpu("RTX 5090", "NVIDIA", 120, (104.8, 209.5, 209.5, 838, 419, 1676), 1792, 32, _BLACKWELL),
    Gpu("RTX 5080", "NVIDIA", 120, (56.3, 112.6, 112.6, 450.2, 225.1, 900.4), 960, 16, _BLACKWELL),
    Gpu(
        "RTX 5070", "NVIDIA", 120, (30.9, 61.7, 61.7, 246.9, 123.5, 493.9), 672, 12, _5070, _OF_FP4
    ),
    Gpu(
        "RTX PRO 6000 Blackwell",
        "NVIDIA",
        120,
        (125.9, 503.8, 503.8, 1007.6, 1007.6, 2015.2),
        1792,
        96,
        _PRO,
    ),
    Gpu("DGX Spark", "NVIDIA", 121, (31, 125, 125, 250, 250, 500), 273, 128, _GB10, _OF_FP4),
    Gpu("MI210", "AMD", None, (45.3, 181, 181, 181, None, None), 1638.4, 64, _MI200),
    Gpu("MI250X", "AMD", None, (95.7, 383, 383, 383, None, None), 3276.8, 128, _MI200),
    Gpu("MI250X GCD", "AMD", None, (47.85, 191.5, 191.5, 191.5, None, None), 1638.4, 64, _GCD),
    Gpu("MI300X", "AMD", None, (163.4, 1307.4, 1307.4, 2614.9, 2614.9, None), 5300, 192, _MI300X),
    Gpu("MI325X", "AMD", None, (163.4, 1307.4, 1307.4, 2614.9, 2614.9, None), 6000, 256, _MI325X),
    Gpu(
        "RX 7900 XTX",
        "AMD",
        None,
        (61.4, 122.8, 122.8, 122.8, None, None),
        960,
        24,
        _7900,
        ("bf16", "int8"),
    ),
    Gpu("RX 9070 XT", "AMD", None, (48.7, 195, 195, 389, 389, None), 640, 16, _9070, ("bf16",)),
)

# What drivers report and people write, beside the names.
_ALIASES = {
    "A100-SXM4-80GB": "A100 80 GB",
    "A100 SXM 80 GB": "A100 80 GB",
    "A100 80GB PCIe": "A100 PCIe 80 GB",
    "A100-SXM4-40GB": "A100 40 GB",
    "A100-PCIE-40GB": "A100 40 GB",
    "H100 80GB HBM3": "H100 SXM",
    "H100 SXM5": "H100 SXM",
    "HGX B200": "B200",
    "RTX PRO 6000 Blackwell Workstation Edition": "RTX PRO 6000 Blackwell",
    "GB10": "DGX Spark",
    "MI300X OAM": "MI300X",
    "MI325X OAM": "MI325X",
}


def gpu_from_name(name: str) -> Gpu:
    """Return a GPU by its name; case, spaces, hyphens and brand words do not matter.

    Raises:
        InputError: It is not in the table; names the nearest that are.
    """
    known = {_key(gpu.name): gpu for gpu in GPUS}
    known |= {_key(alias): known[_key(meant)] for alias, meant in _ALIASES.items()}
    key = _key(name[:200])
    if key in known:
        return known[key]
    near = {known[match].name for match in get_close_matches(key, known, n=5, cutoff=0.6)}
    near |= {gpu.name for each, gpu in known.items() if key and each.startswith(key)}
    listed = [gpu.name for gpu in GPUS if gpu.name in near] or [gpu.name for gpu in GPUS]
    says = "the nearest are" if near else "known are"
    raise InputError(f"the GPU {shorten(name)} is not known; {says} {', '.join(listed)}")


def gpus_of_sm(sm: int) -> tuple[Gpu, ...]:
    """Return the GPUs of a compute capability (89 for 8.9), the typical one first."""
    return tuple(gpu for gpu in GPUS if gpu.sm == sm)


def typical(sm: int) -> Gpu:
    """Return the GPU that a target of a compute capability stands for unless another is named.

    Raises:
        InputError: No GPU of that compute capability is known; lists those there are.
    """
    found = gpus_of_sm(sm)
    if not found:
        known = sorted({gpu.sm for gpu in GPUS if gpu.sm is not None})
        listed = ", ".join(f"sm{each}" for each in known)
        raise InputError(f"no GPU of sm{sm} is known; name a GPU, or one of {listed}")
    return found[0]


def format_from_precision(precision: Precision) -> str:
    """Return the format that the quantized products of a precision are multiplied in.

    That of its activations: weights of fewer bits are widened before they are multiplied.

    Raises:
        ValueError: The precision is simulated, so that nothing is multiplied in its format.
    """
    if precision.simulated:
        raise ValueError(f"{precision.name} is simulated and is executed in no format of its own")
    if precision.bits > 16:
        return "fp32"
    if precision.bits > 8:
        return "bf16" if precision.name.startswith("bf16") else "fp16"
    if precision.bits > 4.5:
        return "fp8" if precision.name.startswith("fp8") else "int8"
    return "fp4"


_BRANDS = {"nvidia", "geforce", "rtx", "tesla", "amd", "radeon", "instinct", "rx", "gpu"}


def _key(name: str) -> str:
    """Return a name without case, spaces, punctuation and brand words."""
    words = re.findall(r"[a-z]+|[0-9]+", name.lower())
    return "".join(word for word in words if word not in _BRANDS)
