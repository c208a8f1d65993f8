"""Prompts to token ids and answers to text, by the checkpoint's own tokenizer.

The one place that tokenizes: export, tune and the runtime share it, so that a model is tuned on
the ids that it is served.  The package `tokenizers` is imported inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from engines.document import shorten
from engines.errors import InputError, require
from engines.model import ModelInfo


class Tokenizer:
    """A tokenizer held to the vocabulary of a model."""

    def __init__(self, tokenizer: Any, model: ModelInfo) -> None:
        self._tokenizer, self._model = tokenizer, model

    def encode(self, prompt: str) -> tuple[int, ...]:
        """Return a prompt's ids: no special tokens added, none of them the mask token.

        Raises:
            InputError: The prompt is empty, holds what the tokenizer has no token for, the mask
                token, or gives an id outside the model's vocabulary.
        """
        said = shorten(prompt)
        if not prompt:
            raise InputError(f"a prompt must not be empty, got {said}; write one")
        try:
            prompt.encode()
            encoded = self._tokenizer.encode(prompt, add_special_tokens=False)
        except UnicodeEncodeError as error:
            raise InputError(f"the prompt {said} is not Unicode text; mend it") from error
        except Exception as error:
            _reraise_unless_plain(error)
            raise InputError(
                f"the prompt {said} cannot be tokenized ({error}); use only what the model knows"
            ) from error
        ids: list[int] = encoded.ids
        if not ids or encoded.offsets[-1][1] < len(prompt.rstrip()):
            raise InputError(
                f"the prompt {said} holds characters that the tokenizer has no token for; take "
                f"them out"
            )
        if self._model.mask_id in ids:
            token = self._tokenizer.id_to_token(self._model.mask_id)
            raise InputError(
                f"the prompt {said} holds the mask token {token!r}, which stands for what is not "
                f"yet decided; take it out"
            )
        if max(ids) >= self._model.vocab:
            raise InputError(
                f"the prompt {said} has the id {max(ids)}, the model's vocabulary ends at "
                f"{self._model.vocab - 1}; use the tokenizer of this model"
            )
        return tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return an answer's text: up to the first end-of-sequence token, no special tokens."""
        tokens = list(ids)
        if self._model.eos_id in tokens:
            tokens = tokens[: tokens.index(self._model.eos_id)]
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def tokenizer_from_file(file: Path, model: ModelInfo) -> Tokenizer:
    """Return the tokenizer of a `tokenizer.json`.

    Raises:
        InputError: It cannot be read, or is no tokenizer.
        MissingExtra: The package `tokenizers` is not installed.
    """
    package: ModuleType = require("tokenizers", "ort", "reading a tokenizer")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InputError(f"cannot read the tokenizer {str(file)!r}: {error}") from error
    try:
        tokenizer = package.Tokenizer.from_str(text)
    except Exception as error:
        _reraise_unless_plain(error)
        raise InputError(
            f"{str(file)!r} is no tokenizer ({error}); copy the checkpoint's tokenizer.json again"
        ) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return Tokenizer(tokenizer, model)


def _reraise_unless_plain(error: Exception) -> None:
    """Reraise anything but a bare `Exception`, the only class that `tokenizers` ever raises."""
    if type(error) is not Exception:
        raise error
