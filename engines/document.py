"""JSON that came from elsewhere: values are taken by type, faults are named by their place.

A `Document` is a value and where it stands; indexing goes deeper.  Every message reads
`PLACE: what is wrong; the mend`.  Pure.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from engines.errors import InputError


@dataclass(frozen=True, slots=True)
class Document:
    """A JSON value that nobody has checked yet.

    Attributes:
        value: As parsed.
        where: Its place, for messages; the file first.
        error: What to raise.
    """

    value: object
    where: str
    error: type[InputError] = InputError

    def fail(self, says: str) -> NoReturn:
        """Raise the document's error about this value."""
        raise self.error(f"{self.where}: {says}")

    def get(self, key: str) -> Document | None:
        """Return the value of an optional key; None where it is absent or null."""
        if not isinstance(self.value, dict):
            self.fail(f"must be an object, got {shorten(self.value)}; mend it")
        inner = self.value.get(key)
        return None if inner is None else self._inner(key, inner)

    def __getitem__(self, key: str) -> Document:
        inner = self.get(key)
        if inner is None:
            self.fail(f"the key {key!r} is missing; add it or make the file again")
        return inner

    def items(self) -> Iterator[tuple[str, Document]]:
        """Yield the names and values of an object whose keys are names."""
        if not isinstance(self.value, dict):
            self.fail(f"must be an object, got {shorten(self.value)}; mend it")
        for key, inner in self.value.items():
            yield Document(key, f"{self.where}: key", self.error).name(), self._inner(key, inner)

    def entries(self) -> list[Document]:
        """Return the elements of a list."""
        if not isinstance(self.value, list):
            self.fail(f"must be a list, got {shorten(self.value)}; mend it")
        return [self._inner(str(index), inner) for index, inner in enumerate(self.value)]

    def text(self) -> str:
        """Return a text that can be encoded; JSON can spell half a character."""
        if not isinstance(self.value, str):
            self.fail(f"must be text, got {shorten(self.value)}; quote it")
        try:
            self.value.encode()
        except UnicodeEncodeError:
            self.fail(f"is not Unicode text, {shorten(self.value)}; mend it")
        return self.value

    def name(self) -> str:
        """Return a text that may stand in a line: printable, 1 to 200 characters."""
        text = self.text()
        if not (1 <= len(text) <= 200 and text.isprintable()):
            self.fail(f"must be 1 to 200 printable characters, got {shorten(text)}; rename it")
        return text

    def integer(self, least: int = 0, most: int = 2**53) -> int:
        """Return an integer in [least, most]."""
        if type(self.value) is not int or not least <= self.value <= most:
            self.fail(
                f"must be an integer from {least} to {most}, got {shorten(self.value)}; mend it"
            )
        return self.value

    def number(self) -> float:
        """Return a finite number."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
            self.fail(f"must be a finite number, got {shorten(value)}; mend it")
        return float(value)

    def flag(self) -> bool:
        """Return true or false."""
        if not isinstance(self.value, bool):
            self.fail(f"must be true or false, got {shorten(self.value)}; mend it")
        return self.value

    def mapping(self) -> dict[str, object]:
        """Return an object as it stands, unknown keys included."""
        if not isinstance(self.value, dict):
            self.fail(f"must be an object, got {shorten(self.value)}; mend it")
        return self.value

    def _inner(self, key: str, value: object) -> Document:
        return Document(value, f"{self.where}: {shorten(key, quote=False)}", self.error)


def document_from_text(text: str, where: str, error: type[InputError] = InputError) -> Document:
    """Return the document that a JSON text holds.

    Raises:
        InputError: (or `error`) It is no JSON, holds a key twice, or NaN or an infinity.
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except (ValueError, RecursionError) as problem:
        raise error(f"{where}: not valid JSON ({problem}); make the file again") from problem
    return Document(value, where, error)


# Larger files are none of ours: a table of 64 windows, 8 precisions and 20 tasks is under 1 MB.
MOST_BYTES = 1 << 26


def text_from_file(path: Path | None, where: str, wanted: str, most: int = MOST_BYTES) -> str:
    """Return what a file, a pipe, or (None) stdin holds, read to its end or to too many bytes.

    Args:
        path: The file.
        where: What messages call it.
        wanted: What should have been given, for messages.
        most: Bytes.

    Raises:
        InputError: It cannot be read, is empty, too large, or is not UTF-8.
    """
    try:
        if path is None:
            data = sys.stdin.buffer.read(most + 1)
        else:
            # Opening a pipe waits for who writes, unless told not to.
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
            with os.fdopen(handle, "rb") as stream:
                os.set_blocking(handle, True)
                data = stream.read(most + 1)
    except IsADirectoryError as error:
        raise InputError(f"{where}: is a folder; give {wanted}") from error
    except (OSError, ValueError) as error:
        says = getattr(error, "strerror", None) or error
        raise InputError(f"{where}: cannot be read ({says}); give {wanted}") from error
    if len(data) > most:
        raise InputError(f"{where}: has more than {most >> 20} MiB; give {wanted}")
    if data.startswith(b"\xef\xbb\xbf"):
        raise InputError(f"{where}: starts with a byte order mark; save it as UTF-8 without one")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where}: is not UTF-8 at byte {error.start}; save it as UTF-8"
        ) from error
    if not text.strip():
        raise InputError(f"{where}: is empty, or nobody has written to it yet; give {wanted}")
    return text


def shorten(value: object, quote: bool = True) -> str:
    """Return a value as one short printable line for a message."""
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'object'} of {len(value)}"
    if isinstance(value, int) and abs(value) > 2**64:
        return "a huge integer"
    text = repr(value) if quote or not str(value).isprintable() else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"the key {shorten(twice)} is given twice")
    return found


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{shorten(number, quote=False)} is not a finite number")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a finite number")
