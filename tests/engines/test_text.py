"""Laws of the tokenizer: a round trip, or a sentence that says why not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models

from engines.errors import InputError
from engines.text import Tokenizer, tokenizer_from_file
from tests.engines.tiny_bundle import tiny_tokenizer
from tests.engines.tiny_graph import EOS_ID, MASK_ID, MODEL


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return tokenizer_from_file(tiny_tokenizer(tmp_path / "模型 é $HOME" / "t.json"), MODEL)


def test_a_text_comes_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abcdefghijklmno01")
    assert ids == tuple(range(17))
    assert tokenizer.decode(ids) == "abcdefghijklmno01"


def test_an_answer_ends_at_the_first_end_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([0, 1, EOS_ID, 2, EOS_ID]) == "ab"
    assert tokenizer.decode([EOS_ID] * 5) == ""
    assert tokenizer.decode([0, MASK_ID, 1]) == "ab"


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "must not be empty"),
        ("ab<mask>c", "holds the mask token '<mask>'"),
        ("abz", "cannot be tokenized"),
        ("ab é", "cannot be tokenized"),
        ("ab\ud800", "is not Unicode text"),
        ("a\x1b[2Jb", "cannot be tokenized"),
    ],
)
def test_a_bad_prompt_is_refused_in_a_printable_sentence(
    tokenizer: Tokenizer, prompt: str, says: str
) -> None:
    with pytest.raises(InputError, match=says) as caught:
        tokenizer.encode(prompt)
    assert str(caught.value).isprintable()


def test_an_id_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    model = replace(MODEL, vocab=10, mask_id=9, eos_id=8)
    small = tokenizer_from_file(tiny_tokenizer(tmp_path / "t.json"), model)
    assert small.encode("abc") == (0, 1, 2)
    with pytest.raises(InputError, match="has the id 12, the model's vocabulary ends at 9"):
        small.encode("abm")


def test_a_character_that_the_tokenizer_drops_is_refused(tmp_path: Path) -> None:
    RawTokenizer(models.BPE({"a": 0, "b": 1}, [])).save(str(tmp_path / "t.json"))
    tokenizer = tokenizer_from_file(tmp_path / "t.json", MODEL)
    assert tokenizer.encode("ab") == (0, 1)
    for prompt in ("aéb", "éab", "abé", "é"):
        with pytest.raises(InputError, match="has no token for"):
            tokenizer.encode(prompt)


def test_a_prompt_is_never_cut_or_padded_whatever_the_file_says(tmp_path: Path) -> None:
    raw = RawTokenizer.from_file(str(tiny_tokenizer(tmp_path / "t.json")))
    raw.enable_truncation(2)
    raw.enable_padding(length=9)
    raw.save(str(tmp_path / "t.json"))
    assert tokenizer_from_file(tmp_path / "t.json", MODEL).encode("abc") == (0, 1, 2)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"nonsense", b"\xff\xfe", None])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(InputError, match=r"t\.json"):
        tokenizer_from_file(tmp_path / "t.json", MODEL)


def test_a_truncated_tokenizer_is_refused(tmp_path: Path) -> None:
    text = tiny_tokenizer(tmp_path / "t.json").read_text()
    assert json.loads(text)
    for end in range(1, len(text) - 1, 61):
        (tmp_path / "t.json").write_text(text[:end])
        with pytest.raises(InputError, match="is no tokenizer"):
            tokenizer_from_file(tmp_path / "t.json", MODEL)
