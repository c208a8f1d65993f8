"""Checkpoints: what is written is read back, and whatever is wrong is named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.errors import InputError
from engines.text import tokenizer_from_file
from exporter import requantize
from exporter.checkpoint import (
    check_finite,
    load_denoiser,
    model_info,
    read_checkpoint,
    save_checkpoint,
)
from exporter.denoiser import Denoiser
from exporter.folder import Export
from exporter.names import keys_from_parameters
from exporter.train import vocabulary
from tests.tiny_export import random_denoiser, tiny_config

QUERY = "model.transformer.blocks.0.q_proj.weight"


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint, folder)
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    tensors = {name: value.clone() for name, value in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_saved_is_loaded_the_same(tied: bool, tmp_path: Path) -> None:
    saved = random_denoiser(tiny_config(tied=tied))
    save_checkpoint(saved, vocabulary(), tmp_path)
    loaded = load_denoiser(tmp_path)
    assert loaded.config == saved.config
    for name, value in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    ids = torch.arange(10)[None]
    given = (ids, torch.ones((1, 10), dtype=torch.bool), torch.tensor([[3, 9]]))
    assert torch.equal(loaded(*given), saved(*given))
    assert ("model.transformer.ff_out.weight" in read_checkpoint(tmp_path).tensors) is not tied


def test_the_names_are_llada_s(checkpoint: Path) -> None:
    names = set(load_file(checkpoint / "model.safetensors"))
    assert "model.transformer.blocks.1.ff_out.weight" in names
    assert "model.transformer.ff_out.weight" in names
    assert len(names) == 3 + 2 * 9


def test_the_tokenizer_knows_words_and_characters(checkpoint: Path) -> None:
    model = model_info(read_checkpoint(checkpoint))
    tokenizer = tokenizer_from_file(checkpoint / "tokenizer.json", model)
    tokens = vocabulary()
    ids = tokenizer.encode("edit:ab,aabb")
    assert [tokens[i] for i in ids] == ["edit:", "a", "b", ",", "a", "a", "b", "b"]
    assert tokenizer.decode([*ids[1:], model.eos_id, ids[1]]) == "ab,aabb"


@pytest.mark.parametrize("text", ["edit:?", "edit: a", "edit:a<mask>b", "", "é"])
def test_the_tokenizer_refuses_what_the_model_does_not_know(text: str, checkpoint: Path) -> None:
    model = model_info(read_checkpoint(checkpoint))
    tokenizer = tokenizer_from_file(checkpoint / "tokenizer.json", model)
    with pytest.raises(InputError, match="prompt"):
        tokenizer.encode(text)


def test_shards_and_symbolic_links_are_read(copy: Path, checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[:7], "model-2.safetensors": names[7:]}
    for file, part in shards.items():
        save_file({name: tensors[name].clone() for name in part}, tmp_path / file)
        os.symlink(tmp_path / file, copy / file)
    where = {name: file for file, part in shards.items() for name in part}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (copy / "model.safetensors").unlink()
    one, two = load_denoiser(checkpoint), load_denoiser(copy)
    for name, value in one.state_dict().items():
        assert torch.equal(two.state_dict()[name], value)
    (copy / "model-2.safetensors").unlink()
    with pytest.raises(InputError, match=r"model-2\.safetensors"):
        read_checkpoint(copy)


@pytest.mark.parametrize(
    "shard", ["../model-1.safetensors", "/etc/passwd", "model\\b.safetensors", "int8.safetensors"]
)
def test_an_index_can_neither_leave_its_folder_nor_take_a_family_s_name(
    shard: str, copy: Path
) -> None:
    index = json.dumps({"weight_map": {QUERY: shard}})
    (copy / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InputError, match="shards are called model"):
        read_checkpoint(copy)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(name: str, copy: Path) -> None:
    (copy / name).unlink()
    with pytest.raises(InputError, match=name):
        read_checkpoint(copy)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no checkpoint folder"):
        read_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_truncated_file_is_found(kept: int, copy: Path) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(InputError, match=r"truncated|not a whole"):
        read_checkpoint(copy)


@pytest.mark.parametrize(
    "header", [b"[]", b"{", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [-1]}}', b"\xff\xfe"]
)
def test_a_header_that_is_none_is_an_input_error(header: bytes, copy: Path) -> None:
    content = len(header).to_bytes(8, "little") + header
    (copy / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError):
        read_checkpoint(copy)


def test_a_tensor_of_the_wrong_shape_is_named(copy: Path) -> None:
    edit_tensors(copy, lambda tensors: tensors.update({QUERY: torch.zeros(32, 31)}))
    with pytest.raises(InputError, match=rf"{QUERY} has the shape \[32, 31\]"):
        read_checkpoint(copy)


@pytest.mark.parametrize("kind", [torch.int8, torch.float64])
def test_a_tensor_of_the_wrong_type_is_named(kind: torch.dtype, copy: Path) -> None:
    edit_tensors(copy, lambda tensors: tensors.update({QUERY: torch.zeros(32, 32, dtype=kind)}))
    with pytest.raises(InputError, match=f"{QUERY} has the type"):
        read_checkpoint(copy)


def test_a_tensor_that_is_missing_or_too_many_is_named(copy: Path) -> None:
    edit_tensors(copy, lambda tensors: tensors.update({"spare": torch.zeros(1)}))
    with pytest.raises(InputError, match="a tensor spare too many"):
        read_checkpoint(copy)
    edit_tensors(copy, lambda tensors: (tensors.pop("spare"), tensors.pop(QUERY)))  # type: ignore[arg-type, return-value]
    with pytest.raises(InputError, match=f"lacks the tensor {QUERY}"):
        read_checkpoint(copy)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_named(kind: torch.dtype, bad: float, copy: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[QUERY] = tensors[QUERY].to(kind)
        tensors[QUERY][31, 30] = bad

    edit_tensors(copy, spoil)
    with pytest.raises(InputError, match=f"{QUERY} holds NaN or infinity"):
        check_finite(read_checkpoint(copy))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gpt2"}, "unknown model_type 'gpt2'"),
        ({"block_type": "sequential"}, "block_type = 'sequential' is not supported"),
        ({"n_heads": 5}, "heads must divide hidden"),
        ({"eos_token_id": 64}, "eos_token_id must be below 64"),
        ({"d_model": "wide"}, "d_model: must be an integer"),
        ({"mask_token_id": 99}, "mask_id"),
        ({"d_model": 2**31 - 2, "n_heads": 1, "n_kv_heads": 1}, "a matrix of"),
    ],
)
def test_a_config_that_does_not_fit_says_why(
    changes: dict[str, object], says: str, copy: Path
) -> None:
    edit_config(copy, **changes)
    with pytest.raises(InputError, match=says):
        read_checkpoint(copy)


def test_a_config_without_a_key_names_it(copy: Path) -> None:
    values = json.loads((copy / "config.json").read_text())
    del values["rope_theta"]
    (copy / "config.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match="'rope_theta' is missing"):
        read_checkpoint(copy)


def dream_folder(denoiser: Denoiser, folder: Path, kind: torch.dtype = torch.float32) -> None:
    """Write a checkpoint in Dream's format."""
    config = denoiser.config
    state = {name: value for name, value in denoiser.state_dict().items() if name != "frequencies"}
    keys = keys_from_parameters("dream", dict.fromkeys(state, True))
    folder.mkdir()
    tensors = {keys[name]: value.to(kind) for name, value in state.items()}
    save_file(tensors, folder / "model.safetensors")
    values = {
        "model_type": "Dream",
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.ffn,
        "vocab_size": config.vocab,
        "mask_token_id": config.mask_id,
        "eos_token_id": 0,
        "max_position_embeddings": config.max_length,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(values))


def test_dream_is_read_with_biases_and_shifted_logits(tmp_path: Path) -> None:
    saved = random_denoiser(tiny_config(qkv_bias=True, shifted=True))
    dream_folder(saved, tmp_path / "dream")
    loaded = load_denoiser(tmp_path / "dream")
    assert loaded.config == saved.config
    ids, mask = torch.arange(10)[None], torch.ones((1, 10), dtype=torch.bool)
    plain = random_denoiser(tiny_config(qkv_bias=True))
    shifted = loaded(ids, mask, torch.tensor([[0, 1, 5]]))
    np.testing.assert_array_equal(shifted, plain(ids, mask, torch.tensor([[0, 0, 4]])))


@pytest.mark.parametrize(
    "change",
    [
        {"mask_token_id": 1.5},
        {"eos_token_id": True},
        {"n_kv_heads": 0},
        {"embedding_size": 0},
        {"weight_tying": "false"},
        {"d_model": 10**30},
        {"n_layers": 10**30},
        {"max_sequence_length": 10**30},
        {"rope_theta": -1.0},
        {"rms_norm_eps": None},
    ],
)
def test_a_number_of_the_config_is_taken_as_it_stands_or_refused(
    change: dict[str, object], copy: Path
) -> None:
    file = copy / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(InputError, match=next(iter(change))):
        read_checkpoint(copy)


def test_a_config_nested_without_end_is_refused(copy: Path) -> None:
    (copy / "config.json").write_text("[" * 200_000)
    with pytest.raises(InputError, match="not valid JSON"):
        read_checkpoint(copy)


def test_a_config_that_gives_a_key_twice_is_refused(copy: Path) -> None:
    file = copy / "config.json"
    file.write_text(file.read_text().rstrip().removesuffix("}") + ', "d_model": 32}')
    with pytest.raises(InputError, match="'d_model' is given twice"):
        read_checkpoint(copy)


@pytest.mark.parametrize("absent", ["n_kv_heads", "embedding_size", "vocab_size"])
def test_a_key_that_may_be_absent_keeps_its_default(absent: str, tmp_path: Path) -> None:
    saved = random_denoiser(tiny_config(kv_heads=tiny_config().heads))
    save_checkpoint(saved, vocabulary(), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    del values[absent]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_checkpoint(tmp_path).config == saved.config


def test_an_index_nested_without_end_is_refused(copy: Path) -> None:
    (copy / "model.safetensors.index.json").write_text('{"a":' * 100_000)
    with pytest.raises(InputError, match="not valid JSON"):
        read_checkpoint(copy)


def test_a_config_that_is_no_regular_file_is_refused_at_once(copy: Path) -> None:
    (copy / "config.json").unlink()
    os.mkfifo(copy / "config.json")
    with pytest.raises(InputError, match="not a regular file"):
        read_checkpoint(copy)


def test_an_export_that_the_reader_refuses_is_never_finished(
    exported: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requantize, "smoke", lambda made, states: {})
    with pytest.raises(InputError, match="is not listed under 'files'"):
        requantize.finish(replace(exported, folder=tmp_path), [], lambda text: None)
