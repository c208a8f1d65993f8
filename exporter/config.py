"""config.json of LLaDA's and Dream's checkpoints: sizes, and what is not supported."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

from engines.document import Document, document_from_text, shorten
from engines.errors import InputError
from exporter.denoiser import DenoiserConfig

# Bounds on sizes, checked before anything of that size is made.
MOST, MOST_LAYERS, MOST_WEIGHTS = 2**31 - 1, 4096, 2**48

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
    document = read_json(folder / "config.json")
    values = document.mapping()
    kind = str(values.get("model_type", "")).lower()
    if kind not in _ONLY:
        document.fail(
            f"unknown model_type {shorten(values.get('model_type'))} (architectures "
            f"{str(values.get('architectures'))[:80]}); known are LLaDA ('llada') and Dream "
            f"('Dream')"
        )
    for key, allowed in _ONLY[kind].items():
        if key in values and values[key] not in allowed:
            document.fail(
                f"{key} = {shorten(values[key])} is not supported, only "
                f"{' or '.join(map(repr, allowed))}; use a checkpoint of the released shape"
            )
    try:
        config = _llada_config(document) if kind == "llada" else _dream_config(document)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{document.where}: {error}; mend it") from error
    largest = config.hidden * max(config.hidden, config.ffn, config.vocab)
    if largest > MOST_WEIGHTS:
        document.fail(
            f"a matrix of {largest} weights is beyond {MOST_WEIGHTS}; use the config.json of "
            f"these weights"
        )
    eos_id = document["eos_token_id"].integer(0, MOST)
    if eos_id >= config.vocab or eos_id == config.mask_id:
        document.fail(
            f"eos_token_id must be below {config.vocab} and not the mask token, got {eos_id}; "
            f"mend it"
        )
    return kind, config, eos_id


def read_json(file: Path) -> Document:
    """Return the object in a JSON file of a checkpoint.

    Raises:
        InputError: The file is missing, irregular, no JSON, or no object.
    """
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise InputError(f"{str(file)!r} is not a regular file; give a complete checkpoint")
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"cannot read {str(file)!r}: {error.strerror}; give a complete checkpoint"
        ) from error
    except UnicodeError as error:
        raise InputError(f"{file}: not valid JSON ({error}); download it again") from error
    document = document_from_text(text, str(file))
    document.mapping()
    return document


def _llada_config(values: Document) -> DenoiserConfig:
    heads = _size(values, "n_heads")
    rows = "vocab_size" if values.get("embedding_size") is None else "embedding_size"
    return DenoiserConfig(
        hidden=_size(values, "d_model"),
        layers=_size(values, "n_layers", most=MOST_LAYERS),
        heads=heads,
        kv_heads=_size(values, "n_kv_heads", otherwise=heads),
        ffn=_size(values, "mlp_hidden_size"),
        vocab=_size(values, rows),
        mask_id=values["mask_token_id"].integer(0, MOST),
        max_length=_size(values, "max_sequence_length"),
        rope_theta=_positive(values["rope_theta"]),
        norm_eps=_positive(values["rms_norm_eps"]),
        tied=values["weight_tying"].flag(),
    )


def _dream_config(values: Document) -> DenoiserConfig:
    heads = _size(values, "num_attention_heads")
    return DenoiserConfig(
        hidden=_size(values, "hidden_size"),
        layers=_size(values, "num_hidden_layers", most=MOST_LAYERS),
        heads=heads,
        kv_heads=_size(values, "num_key_value_heads", otherwise=heads),
        ffn=_size(values, "intermediate_size"),
        vocab=_size(values, "vocab_size"),
        mask_id=values["mask_token_id"].integer(0, MOST),
        max_length=_size(values, "max_position_embeddings"),
        rope_theta=_positive(values["rope_theta"]),
        norm_eps=_positive(values["rms_norm_eps"]),
        qkv_bias=True,
        tied=values["tie_word_embeddings"].flag(),
        shifted=True,
    )


def _size(values: Document, key: str, most: int = MOST, otherwise: int | None = None) -> int:
    """Return an integer in [1, most]; `otherwise` where the key is absent or null."""
    if otherwise is not None and values.get(key) is None:
        return otherwise
    return values[key].integer(1, most)


def _positive(value: Document) -> float:
    """Return a positive number that float32 can hold."""
    number = value.number()
    if not 0 < number < 1e30:
        value.fail(f"must be a positive number below 1e30, got {shorten(number)}; mend it")
    return number
