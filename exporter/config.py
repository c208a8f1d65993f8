"""config.json of LLaDA's and Dream's checkpoints: sizes, and what is not supported."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.errors import InputError
from exporter.denoiser import DenoiserConfig

# Bounds on sizes, checked before anything of that size is made.
MOST, MOST_LAYERS = 2**31 - 1, 4096

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
        eos_id = _count(values, "eos_token_id", least=0)
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
        if not stat.S_ISREG(file.stat().st_mode):
            raise InputError(f"{str(file)!r} is not a regular file; give a complete checkpoint")
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"cannot read {str(file)!r}: {error.strerror}; give a complete checkpoint"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not JSON ({error}); download it again") from error
    if not isinstance(values, dict):
        raise InputError(f"{file} is not a JSON object; download it again")
    return values


def _llada_config(values: Mapping[str, Any]) -> DenoiserConfig:
    heads = _count(values, "n_heads")
    return DenoiserConfig(
        hidden=_count(values, "d_model"),
        layers=_count(values, "n_layers", most=MOST_LAYERS),
        heads=heads,
        kv_heads=_count(values, "n_kv_heads", otherwise=heads),
        ffn=_count(values, "mlp_hidden_size"),
        vocab=_count(values, "embedding_size", otherwise=_count(values, "vocab_size")),
        mask_id=_count(values, "mask_token_id", least=0),
        max_length=_count(values, "max_sequence_length"),
        rope_theta=_number(values, "rope_theta"),
        norm_eps=_number(values, "rms_norm_eps"),
        tied=_flag(values, "weight_tying"),
    )


def _dream_config(values: Mapping[str, Any]) -> DenoiserConfig:
    heads = _count(values, "num_attention_heads")
    return DenoiserConfig(
        hidden=_count(values, "hidden_size"),
        layers=_count(values, "num_hidden_layers", most=MOST_LAYERS),
        heads=heads,
        kv_heads=_count(values, "num_key_value_heads", otherwise=heads),
        ffn=_count(values, "intermediate_size"),
        vocab=_count(values, "vocab_size"),
        mask_id=_count(values, "mask_token_id", least=0),
        max_length=_count(values, "max_position_embeddings"),
        rope_theta=_number(values, "rope_theta"),
        norm_eps=_number(values, "rms_norm_eps"),
        qkv_bias=True,
        tied=_flag(values, "tie_word_embeddings"),
        shifted=True,
    )


def _count(
    values: Mapping[str, Any],
    key: str,
    least: int = 1,
    most: int = MOST,
    otherwise: int | None = None,
) -> int:
    """Return an integer in [least, most]; `otherwise` where the key is absent or null."""
    if otherwise is not None and values.get(key) is None:
        return otherwise
    value = values[key]
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{key} must be an integer from {least} to {most}, got {str(value)[:40]}")
    return value


def _number(values: Mapping[str, Any], key: str) -> float:
    """Return a positive, finite number."""
    value = values[key]
    if type(value) not in (int, float) or not 0 < value < 1e30:
        raise ValueError(f"{key} must be a positive number, got {str(value)[:40]}")
    return float(value)


def _flag(values: Mapping[str, Any], key: str) -> bool:
    """Return true or false; no other value is taken for either."""
    value = values[key]
    if type(value) is not bool:
        raise ValueError(f"{key} must be true or false, got {str(value)[:40]}")
    return value
