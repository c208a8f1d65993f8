"""The engine inspector's JSON, read: which types the products of a loaded engine multiply.

Not executed: no machine of the project's has a GPU, so no JSON of its own plans was read.  It is
based on public samples and documents: layer entries of TensorRT 10 in issues of NVIDIA/TensorRT
(4020, 4397: `LayerType` "gemm", `Inputs` with "Format/Datatype", a `TacticName` such as
sm80_xmma_gemm_f16f16_f16f16_f16_nn_n_..., the ONNX nodes in `Metadata`, constant weights not among
the inputs), and the migration guide of TensorRT 11 (the type apart from the format, "DataType").
No public sample of fp8, fp4 or of TensorRT-RTX was found.

So a type is believed where the tactic's name spells both sides; else where both sides stand among
the inputs; whatever else is "unknown", and counts as not as asked.  Pure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from engines.audit import Audit, as_asked
from engines.document import Document, document_from_text
from engines.errors import InputError
from engines.plan import Operand, Product

# Versions whose JSON is documented: the first number of TensorRT's, the first of TensorRT-RTX's.
READ_VERSIONS = (10, 11, 1)

# Kinds of layers that multiply matrices.  Kernels that hold a whole attention are none: their
# products are of activations alone.
_KINDS = re.compile(r"gemm|matrix_?multiply|fully_?connected", re.IGNORECASE)
_ATTENTION = re.compile(r"mha|attention", re.IGNORECASE)

# Both sides of a product as the names of kernels spell them.
_SIDES = re.compile(
    r"gemm_(bf16|f16|tf32|f32|i8|s8|e4m3|e2m1)(bf16|f16|tf32|f32|i8|s8|e4m3|e2m1)(?=_)"
)
_SPELLED = {
    "bf16": "bf16",
    "f16": "half",
    "tf32": "float",
    "f32": "float",
    "i8": "int8",
    "s8": "int8",
    "e4m3": "fp8_e4m3",
    "e2m1": "fp4_e2m1",
}

# Types as they stand beside tensors; the first that is found.
_TYPES = (
    (re.compile(r"\bb(?:float|f)16\b", re.IGNORECASE), "bf16"),
    (re.compile(r"\b(?:half|fp16)\b", re.IGNORECASE), "half"),
    (re.compile(r"\b(?:fp8|e4m3)\b", re.IGNORECASE), "fp8_e4m3"),
    (re.compile(r"\b(?:fp4|e2m1)\b", re.IGNORECASE), "fp4_e2m1"),
    (re.compile(r"\bint8\b", re.IGNORECASE), "int8"),
    (re.compile(r"\bint4\b", re.IGNORECASE), "int4"),
    (re.compile(r"\b(?:float|fp32)\b", re.IGNORECASE), "float"),
)
_UNKNOWN = "unknown"
_NODES = re.compile(r"\[ONNX Layer: ([^\]]{1,400})\]")
_MOST_LAYERS = 1 << 16


def audit_from_inspector(
    text: str, version: str, sm: int, precision: str, scratch_bytes: int
) -> Audit | None:
    """Return what an engine multiplies; None where the version's JSON is not known.

    Args:
        text: What `EngineInspector.get_engine_information` gave, as JSON.
        version: Of the module.
        sm: Of the GPU.
        precision: The name of what was asked for.
        scratch_bytes: Of memory that a pass needs besides its inputs and outputs.

    Raises:
        InputError: It is no JSON of this kind.
    """
    first = version.partition(".")[0]
    if not first.isascii() or not first.isdigit() or int(first) not in READ_VERSIONS:
        return None
    products = products_from_inspector(text)
    counts: Counter[str] = Counter()
    asked = every = 0
    otherwise = []
    for product in products:
        counts[" x ".join(product.types)] += 1
        every += product.elements
        if _UNKNOWN not in product.types and as_asked(product, precision):
            asked += product.elements
        else:
            otherwise.append(" + ".join(product.layers[:3]) or "an unnamed product")
    return Audit(
        sm=f"sm{sm}",
        products=dict(sorted(counts.items())),
        share=asked / every if every else 0.0,
        elements=asked,
        otherwise=tuple(otherwise),
        weight_bytes=None,  # not among what it says
        scratch_bytes=scratch_bytes,
        source="inspector",
    )


def products_from_inspector(text: str) -> list[Product]:
    """Return the matrix products of an engine, two operands each.

    Raises:
        InputError: It is no JSON of this kind.
    """
    layers = document_from_text(text, "the engine inspector")["Layers"].entries()
    if len(layers) > _MOST_LAYERS:
        raise InputError(f"the engine inspector names {len(layers)} layers; report this")
    return [product for layer in layers for product in _product(layer)]


def _product(layer: Document) -> Iterator[Product]:
    if isinstance(layer.value, str):  # a plan that was built without details has names alone
        if _KINDS.search(layer.text()) or "matmul" in layer.text().lower():
            yield _of((layer.text(),), (_UNKNOWN, _UNKNOWN), 0, 0)
        return
    kind, tactic = _text(layer, "LayerType"), _text(layer, "TacticName")
    if _ATTENTION.search(tactic) or not (_KINDS.search(kind) or _SIDES.search(tactic)):
        return
    reads, writes = _tensors(layer, "Inputs"), _tensors(layer, "Outputs")
    nodes = tuple(_NODES.findall(_text(layer, "Metadata"))) or (_text(layer, "Name"),)
    sides = _SIDES.search(tactic)
    if sides is not None:
        types = (_SPELLED[sides[1]], _SPELLED[sides[2]])
    elif len(reads) >= 2:
        types = (reads[0][0], reads[1][0])
    else:  # the weight is no input, and nothing names its type
        types = (reads[0][0] if reads else _UNKNOWN, _UNKNOWN)
    inner = reads[0][1][-1] if reads and reads[0][1] else 0
    columns = writes[0][1][-1] if writes and writes[0][1] else 0
    yield _of(nodes, types, max(inner, 0), max(columns, 0))


def _of(nodes: tuple[str, ...], types: tuple[str, str], inner: int, columns: int) -> Product:
    return Product(
        layers=nodes,
        operands=(Operand("", types[0], ()), Operand("", types[1], (inner, columns))),
        fused="",
    )


def _tensors(layer: Document, key: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return type and extents of each tensor of a layer; extents of -1 where they vary."""
    tensors = layer.get(key)
    found = []
    for tensor in tensors.entries() if tensors else []:
        said = " ".join(_text(tensor, name) for name in ("DataType", "Format/Datatype", "Format"))
        dims = tensor.get("Dimensions")
        extents = tuple(each.integer(-1) for each in dims.entries()) if dims else ()
        kind = next((name for pattern, name in _TYPES if pattern.search(said)), _UNKNOWN)
        found.append((kind, extents))
    return found


def _text(layer: Document, key: str) -> str:
    value = layer.get(key)
    return value.text() if value is not None and isinstance(value.value, str) else ""
