"""config.json of LLaDA's and Dream's checkpoints: sizes, and what is not supported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.errors import InputError
from exporter.denoiser import DenoiserConfig

# What these architectures can be configured to do that the denoiser does not.
_ONLY: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "llada": {
        "block_type": ("llama",),
        "activation_type": ("silu",),
        "layer_norm_type": ("rms",),
        "rope": (True,),
        "alibi": (False,),
        "include_bias": (False,),
        "include_qkv_bias": (False, None),
        "bias_for_layer_norm": (False, None),
        "attention_layer_norm": (False,),
        "input_emb_norm": (False,),
        "scale_logits": (False,),
        "clip_qkv": (None,),
    },
    "dream": {
        "hidden_act": ("silu",),
        "use_sliding_window": (False,),
        "rope_scaling": (None,),
    },
}


def read_config(folder: Path) -> tuple[str, DenoiserConfig, int]:
    """Return (architecture, sizes, id of the end of an answer) of a checkpoint folder.

    Raises:
        InputError: The folder or its config.json is missing or at fault, or of an architecture
            that is not known.
    """
    if not folder.is_dir():
        raise InputError(f"there is no checkpoint folder {str(folder)!r}; give its path")
    values = read_json(folder / "config.json")
    kind = str(values.get("model_type", "")).lower()
    if kind not in _ONLY:
        raise InputError(
            f"{folder / 'config.json'}: unknown model_type {values.get('model_type')!r} "
            f"(architectures {values.get('architectures')}); known are LLaDA ('llada') and "
            f"Dream ('Dream')"
        )
    for key, allowed in _ONLY[kind].items():
        if key in values and values[key] not in allowed:
            raise InputError(
                f"{folder / 'config.json'}: {key} = {values[key]!r} is not supported, only "
                f"{' or '.join(map(repr, allowed))}; use a checkpoint of the released shape"
            )
    try:
        config = _llada_config(values) if kind == "llada" else _dream_config(values)
        eos_id = int(values["eos_token_id"])
        if not 0 <= eos_id < config.vocab or eos_id == config.mask_id:
            raise ValueError(
                f"eos_token_id must be below {config.vocab} and not the mask token, got {eos_id}"
            )
    except KeyError as error:
        raise InputError(
            f"{folder / 'config.json'}: the key {error} is missing; add it"
        ) from error
    except (ValueError, TypeError) as error:
        raise InputError(f"{folder / 'config.json'}: {error}; mend it") from error
    return kind, config, eos_id


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a checkpoint.

    Raises:
        InputError: The file is missing, no JSON, or no object.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"cannot read {str(file)!r}: {error.strerror}; give a complete checkpoint"
        ) from error
    except ValueError as error:
        raise InputError(f"{file} is not JSON ({error}); download it again") from error
    if not isinstance(values, dict):
        raise InputError(f"{file} is not a JSON object; download it again")
    return values


def _llada_config(values: Mapping[str, Any]) -> DenoiserConfig:
    heads = int(values["n_heads"])
    return DenoiserConfig(
        hidden=int(values["d_model"]),
        layers=int(values["n_layers"]),
        heads=heads,
        kv_heads=int(values.get("n_kv_heads") or heads),
        ffn=int(values["mlp_hidden_size"]),
        vocab=int(values.get("embedding_size") or values["vocab_size"]),
        mask_id=int(values["mask_token_id"]),
        max_length=int(values["max_sequence_length"]),
        rope_theta=float(values["rope_theta"]),
        norm_eps=float(values["rms_norm_eps"]),
        tied=bool(values["weight_tying"]),
    )


def _dream_config(values: Mapping[str, Any]) -> DenoiserConfig:
    heads = int(values["num_attention_heads"])
    return DenoiserConfig(
        hidden=int(values["hidden_size"]),
        layers=int(values["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(values.get("num_key_value_heads") or heads),
        ffn=int(values["intermediate_size"]),
        vocab=int(values["vocab_size"]),
        mask_id=int(values["mask_token_id"]),
        max_length=int(values["max_position_embeddings"]),
        rope_theta=float(values["rope_theta"]),
        norm_eps=float(values["rms_norm_eps"]),
        qkv_bias=True,
        tied=bool(values["tie_word_embeddings"]),
        shifted=True,
    )
