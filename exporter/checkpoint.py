"""Checkpoints of LLaDA and Dream: read strictly, written in LLaDA's format.

A checkpoint is a folder with config.json, model.safetensors (or shards and
model.safetensors.index.json) and tokenizer.json.  Nothing is guessed: names, shapes and types of
all tensors must be the architecture's, and every number must be finite.

The folder is only read.  Symbolic links in it are fine: a Hugging Face cache is made of them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engines.errors import InputError
from engines.model import ModelInfo
from exporter.config import read_config, read_json
from exporter.denoiser import Denoiser, DenoiserConfig, rotary_frequencies
from exporter.names import keys_from_parameters
from exporter.weights import FLOATS, Item, Stored, is_finite, read_header, write_family

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END, MASK = "<eos>", "<mask>"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A folder that has been looked at, its weights not yet read.

    Attributes:
        folder: Where it lies.
        architecture: "llada" or "dream".
        config: Sizes of the denoiser.
        eos_id: Ends an answer.
        keys: From the denoiser's parameters to the checkpoint's tensors; a tied LM head and the
            embedding have the same.
        tensors: Where each tensor lies, by its name in the checkpoint.
    """

    folder: Path
    architecture: str
    config: DenoiserConfig
    eos_id: int
    keys: Mapping[str, str]
    tensors: Mapping[str, Stored]

    @property
    def files(self) -> tuple[Path, ...]:
        """The files with tensors, by name."""
        return tuple(sorted({stored.file for stored in self.tensors.values()}))


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return a checkpoint whose tensors have the right names, shapes and types.

    Raises:
        InputError: A file is missing or truncated, or a tensor is missing, unexpected, or of the
            wrong shape or type.
    """
    architecture, config, eos_id = read_config(folder)
    shapes = _parameter_shapes(config)
    keys = keys_from_parameters(architecture, dict.fromkeys(shapes, True))
    tensors = {
        key: stored
        for key, stored in _stored_tensors(folder).items()
        if not key.endswith("rotary_emb.inv_freq")  # computed, and stored by some versions
    }
    wanted = {keys[name]: shape for name, shape in shapes.items()}
    missing, extra = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
    if missing or extra:
        what = f"lacks the tensor {missing[0]}" if missing else f"has a tensor {extra[0]} too many"
        raise InputError(
            f"the checkpoint {str(folder)!r} {what} ({len(missing)} missing, {len(extra)} "
            f"unexpected); config.json and weights are not of one model, download both again"
        )
    for key, shape in wanted.items():
        stored = tensors[key]
        if stored.shape != shape:
            raise InputError(
                f"{stored.file}: {key} has the shape {list(stored.shape)}, config.json wants "
                f"{list(shape)}; use the config.json of these weights"
            )
        if stored.kind not in FLOATS:
            raise InputError(
                f"{stored.file}: {key} has the type {stored.kind}, wanted is one of "
                f"{', '.join(FLOATS)}; use the unquantized checkpoint"
            )
    if config.tied:
        keys["head.weight"] = keys["embed.weight"]
    return Checkpoint(
        folder=folder,
        architecture=architecture,
        config=config,
        eos_id=eos_id,
        keys=keys,
        tensors=tensors,
    )


def check_finite(checkpoint: Checkpoint) -> None:
    """Read all weights once, in chunks.

    Raises:
        InputError: One holds a NaN or an infinity; names it.
    """
    for key, stored in checkpoint.tensors.items():
        if not is_finite(stored):
            raise InputError(
                f"{stored.file}: {key} holds NaN or infinity; the file is damaged or the training "
                f"diverged, use another checkpoint"
            )


def load_denoiser(checkpoint: Checkpoint | Path) -> Denoiser:
    """Return the denoiser with its weights in float32, ready to evaluate.

    Raises:
        InputError: The checkpoint is at fault, as `read_checkpoint` and `check_finite` say.
    """
    import torch
    from safetensors import safe_open

    if isinstance(checkpoint, Path):
        checkpoint = read_checkpoint(checkpoint)
    check_finite(checkpoint)
    with torch.device("meta"):
        denoiser = Denoiser(checkpoint.config)
    state = {}
    parameters = {key: name for name, key in checkpoint.keys.items()}
    for file in checkpoint.files:
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  (not a mapping)
                if key in parameters:
                    state[key] = tensors.get_tensor(key).float()
    named = {name: state[key] for name, key in checkpoint.keys.items()}
    denoiser.load_state_dict(named, assign=True)
    denoiser.frequencies = rotary_frequencies(checkpoint.config)
    return denoiser.eval().requires_grad_(False)


def model_info(checkpoint: Checkpoint) -> ModelInfo:
    """Return the identity of a checkpoint; reads its tensor files once for the digest."""
    digest = hashlib.sha256()
    for file in checkpoint.files:
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 22):
                digest.update(chunk)
    return ModelInfo(
        name=checkpoint.folder.resolve().name,
        architecture=checkpoint.architecture,
        vocab=checkpoint.config.vocab,
        mask_id=checkpoint.config.mask_id,
        eos_id=checkpoint.eos_id,
        max_length=checkpoint.config.max_length,
        digest=digest.hexdigest(),
    )


def save_checkpoint(
    model: Denoiser, vocabulary: Sequence[str], out: Path, kind: str = "F32"
) -> None:
    """Write a checkpoint in LLaDA's format: weights, config and tokenizer.

    Args:
        model: Its biases are not LLaDA's, so it may have none.
        vocabulary: Tokens in the order of their ids, `<eos>` and `<mask>` among them.
        out: Folder, made if need be.
        kind: Type of the weights, "F32" or "BF16".
    """
    import torch

    def stored(name: str) -> NDArray[np.generic]:
        values = state[name].detach().cpu().to(torch.float32 if kind == "F32" else torch.bfloat16)
        made: NDArray[np.generic] = (values if kind == "F32" else values.view(torch.int16)).numpy()
        return made

    config = model.config
    if config.qkv_bias or vocabulary[config.mask_id] != MASK:
        raise ValueError(f"LLaDA has no biases, and {config.mask_id=} must be {MASK!r}")
    out.mkdir(parents=True, exist_ok=True)
    shapes = _parameter_shapes(config)
    keys = keys_from_parameters("llada", dict.fromkeys(shapes, True))
    state = model.state_dict()
    eos_id = list(vocabulary).index(END)
    items = [
        Item(keys[name], kind, shape, partial(stored, name)) for name, shape in shapes.items()
    ]
    (out / WEIGHTS).unlink(missing_ok=True)
    write_family(out / WEIGHTS, items)
    _write_json(
        out / "config.json",
        {
            "architectures": ["LLaDAModelLM"],
            "model_type": "llada",
            "block_type": "llama",
            "d_model": config.hidden,
            "n_layers": config.layers,
            "n_heads": config.heads,
            "n_kv_heads": config.kv_heads,
            "mlp_hidden_size": config.ffn,
            "embedding_size": config.vocab,
            "vocab_size": config.vocab,
            "max_sequence_length": config.max_length,
            "rope_theta": config.rope_theta,
            "rms_norm_eps": config.norm_eps,
            "weight_tying": config.tied,
            "mask_token_id": config.mask_id,
            "eos_token_id": eos_id,
            "pad_token_id": eos_id,
        },
    )
    (out / "tokenizer.json").write_text(_tokenizer(vocabulary).to_str(pretty=True) + "\n", "utf-8")
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": END,
            "mask_token": MASK,
        },
    )


def _tokenizer(vocabulary: Sequence[str]) -> Tokenizer:
    """Return a tokenizer of whole words such as `edit:`, and else of single characters.

    It has no token for "unknown", so it refuses a text that holds other characters.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    ids = {token: index for index, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids))
    words = [token for token in vocabulary if len(token) > 1 and token not in (END, MASK)]
    pattern = "|".join([*(re.escape(word) for word in sorted(words)), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END, MASK])
    return tokenizer


def _parameter_shapes(config: DenoiserConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each stored parameter; a tied LM head is not stored."""
    import torch

    with torch.device("meta"):
        denoiser = Denoiser(config)
    return {name: tuple(value.shape) for name, value in denoiser.named_parameters()}


def _stored_tensors(folder: Path) -> dict[str, Stored]:
    """Return where each tensor lies, in one file or in the shards of an index."""
    index = folder / INDEX
    if not index.exists():
        if not (folder / WEIGHTS).exists():
            raise InputError(
                f"the checkpoint {str(folder)!r} has neither {WEIGHTS} nor {INDEX}; download it "
                f"again, in safetensors format"
            )
        return read_header(folder / WEIGHTS)
    wanted = read_json(index).mapping().get("weight_map")
    if not isinstance(wanted, dict) or not wanted:
        raise InputError(f"{index}: 'weight_map' is missing; download it again")
    tensors: dict[str, Stored] = {}
    for name in sorted({str(name) for name in wanted.values()}):
        if not re.fullmatch(r"model[\w.-]*\.safetensors", name):
            raise InputError(
                f"{index} names the file {name!r}; shards are called model*.safetensors and lie "
                f"beside the index"
            )
        tensors |= read_header(folder / name)
    lost = sorted(set(wanted) - set(tensors))
    if lost:
        raise InputError(f"{index} promises {lost[0]}, which no shard holds; download it again")
    return tensors


def _write_json(file: Path, values: Mapping[str, object]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
