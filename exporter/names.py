"""Names: from the denoiser's parameters to a checkpoint's tensors and to quantization sites.

A trap that these tables avoid: LLaDA calls both the down projection of each block and the LM head
`ff_out`, so no rule here looks at a part of a name.

A *site* is a distinct input of the linear layers in the blocks: q, k and v share one, so do the
gate and up projections.  Embedding, norms and the LM head are never quantized and have none.

Knows nothing about torch, ONNX or files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

BLOCK = "blocks.{}."

_LLADA = {
    "embed.weight": "model.transformer.wte.weight",
    "norm.weight": "model.transformer.ln_f.weight",
    "head.weight": "model.transformer.ff_out.weight",
    **{
        f"blocks.{{}}.{ours}.weight": f"model.transformer.blocks.{{}}.{theirs}.weight"
        for ours, theirs in {
            "attn_norm": "attn_norm",
            "q_proj": "q_proj",
            "k_proj": "k_proj",
            "v_proj": "v_proj",
            "attn_out": "attn_out",
            "ff_norm": "ff_norm",
            "ff_gate": "ff_proj",
            "ff_up": "up_proj",
            "ff_down": "ff_out",
        }.items()
    },
}

_DREAM = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    **{
        f"blocks.{{}}.{ours}": f"model.layers.{{}}.{theirs}"
        for ours, theirs in {
            "attn_norm.weight": "input_layernorm.weight",
            "q_proj.weight": "self_attn.q_proj.weight",
            "k_proj.weight": "self_attn.k_proj.weight",
            "v_proj.weight": "self_attn.v_proj.weight",
            "q_proj.bias": "self_attn.q_proj.bias",
            "k_proj.bias": "self_attn.k_proj.bias",
            "v_proj.bias": "self_attn.v_proj.bias",
            "attn_out.weight": "self_attn.o_proj.weight",
            "ff_norm.weight": "post_attention_layernorm.weight",
            "ff_gate.weight": "mlp.gate_proj.weight",
            "ff_up.weight": "mlp.up_proj.weight",
            "ff_down.weight": "mlp.down_proj.weight",
        }.items()
    },
}

ARCHITECTURES: Mapping[str, Mapping[str, str]] = {"llada": _LLADA, "dream": _DREAM}

_SITE_OF_LINEAR = {
    "q_proj": "attn_in",
    "k_proj": "attn_in",
    "v_proj": "attn_in",
    "attn_out": "attn_out",
    "ff_gate": "ff_in",
    "ff_up": "ff_in",
    "ff_down": "ff_down",
}


def keys_from_parameters(architecture: str, parameters: Mapping[str, bool]) -> dict[str, str]:
    """Return the checkpoint's name of each parameter.

    Args:
        architecture: One of `ARCHITECTURES`.
        parameters: Names of the denoiser's parameters; only the names are read.
    """
    table = ARCHITECTURES[architecture]
    keys = {}
    for name in parameters:
        number = _block_number(name)
        pattern = name if number is None else name.replace(f"blocks.{number}.", BLOCK, 1)
        keys[name] = table[pattern].format(number)
    return keys


def linear_from_key(architecture: str, key: str) -> tuple[int, str] | None:
    """Return (block, site) of a quantizable weight by its name in the checkpoint, else None."""
    for ours, theirs in ARCHITECTURES[architecture].items():
        pattern = re.escape(theirs).replace(r"\{\}", r"(\d+)")
        match = re.fullmatch(pattern, key)
        if match and ours.startswith(BLOCK) and ours.endswith(".weight"):
            layer = ours.removeprefix(BLOCK).removesuffix(".weight")
            if layer in _SITE_OF_LINEAR:
                return int(match[1]), f"blocks.{match[1]}.{_SITE_OF_LINEAR[layer]}"
    return None


def sites_of_blocks(layers: int) -> tuple[str, ...]:
    """Return the sites in the order of a pass."""
    names = dict.fromkeys(_SITE_OF_LINEAR.values())
    return tuple(f"blocks.{block}.{name}" for block in range(layers) for name in names)


def _block_number(name: str) -> int | None:
    match = re.match(r"blocks\.(\d+)\.", name)
    return int(match[1]) if match else None
