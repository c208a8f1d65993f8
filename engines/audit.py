"""Requested against built: what a plan's products compute in, held against its precision.

Attention, the embedding and the LM head stay in 16 bits by design.  So a precision was built when
its quantized layers multiply in its types, by the elements of their weights: a builder may join
layers that read the same tensor into one product.  Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from engines.plan import Plan, Product, Program

# What both sides of a product are, by precision.
_BOTH = {
    "fp32": "float",
    "fp16": "half",
    "bf16": "bf16",
    "int8": "int8",
    "int4-int8": "int8",
    "fp8": "fp8_e4m3",
    "nvfp4": "fp4_e2m1",
}

# What one side alone is, where weights are widened on their way into the product.
_STORED = {"int8-w": "int8", "fp8-w": "fp8_e4m3", "int4-w": "int4"}

# What weights are stored in, where a kernel before the product makes another type of them.
_UNPACKED = {"int4-int8": "int4"}

_WIDE = ("half", "bf16")
_NARROW = ("int8", "int4", "fp8_e4m3", "fp4_e2m1")

# Layers that an error names.
_MOST_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What was built for an SM, or for several at once.

    Attributes:
        sm: As the plan calls it; several with a +.
        products: How many, by the types of their operands ("int8 x int8").
        share: Of the elements of all weight matrices, those multiplied as asked.
        elements: Weight elements multiplied as asked.
        otherwise: ONNX nodes of the other products.
        weight_bytes: Of the weights in the plan, of all its SMs.
        scratch_bytes: Of memory that a pass needs besides its inputs and outputs.
        source: Where this comes from: "plan", a best effort.
    """

    sm: str
    products: Mapping[str, int]
    share: float
    elements: int
    otherwise: tuple[str, ...]
    weight_bytes: int | None
    scratch_bytes: int
    source: str = "plan"

    def to_json(self) -> dict[str, Any]:
        """Return plain data; of the other layers their number and the first."""
        plain = asdict(self) | {"otherwise": len(self.otherwise)}
        return plain | {"otherwise_first": list(self.otherwise[:_MOST_NAMED])}


def audits(plan: Plan, precision: str) -> list[Audit]:
    """Return what was built for the SMs of a plan; nothing where it could not be read.

    Args:
        plan: As it was read.
        precision: The name of what was asked for.
    """
    return [_audit(plan, program, precision) for program in plan.programs]


def mismatch(audit: Audit, precision: str, quantized: int) -> str | None:
    """Return how a plan differs from what was asked for, or None.

    Args:
        audit: What was built.
        precision: The name of what was asked for.
        quantized: Elements of the weights that were to be multiplied so; 0 for all there are.
    """
    if audit.elements >= quantized and not (quantized == 0 and audit.otherwise):
        return None
    named = ", ".join(audit.otherwise[:_MOST_NAMED]) or "none"
    more = len(audit.otherwise) - _MOST_NAMED
    wanted = f"{quantized:,}" if quantized else "all"
    return (
        f"{precision} was asked for on {audit.sm}, but only {audit.elements:,} of {wanted} "
        f"weights are multiplied so; products are {said(audit.products)}; otherwise: {named}"
        + (f" and {more} more" if more > 0 else "")
    )


def said(products: Mapping[str, int]) -> str:
    """Return products by their types, for people."""
    return ", ".join(f"{count} {types}" for types, count in products.items()) or "none"


def as_asked(product: Product, precision: str) -> bool:
    """Return whether a product computes in a precision.

    What a kernel reads besides (a residual, scales) may have any type, so few bits are counted: on
    both sides twice, of weights alone once.
    """
    narrow = [each for each in product.types if each in _NARROW]
    if precision in _STORED:
        wide = any(each in _WIDE for each in product.types)
        return bool(product.fused) and wide and narrow == [_STORED[precision]]
    wanted = _BOTH[precision]
    if wanted not in _NARROW:
        return not narrow and wanted in product.types[:1]
    return narrow.count(wanted) == 2


def _audit(plan: Plan, program: Program, precision: str) -> Audit:
    counts: Counter[str] = Counter()
    asked, every = 0, sum(product.elements for product in program.products)
    most = every
    if precision in _UNPACKED:  # multiplied as another type than they are stored in
        most = program.stored.get(_UNPACKED[precision], 0)
    otherwise: list[str] = []
    for product in program.products:
        counts[" x ".join(product.types) or "unknown"] += 1
        if most and as_asked(product, precision):
            asked += product.elements
        else:
            otherwise.append(" + ".join(product.layers[:3]) or "an unnamed product")
    return Audit(
        sm="+".join(program.sms),
        products=dict(sorted(counts.items())),
        share=min(asked, most) / every if every else 0.0,
        elements=min(asked, most),
        otherwise=tuple(otherwise),
        weight_bytes=plan.weight_bytes,
        scratch_bytes=program.scratch_bytes,
    )
