"""Laws of reading JSON from elsewhere: taken by type, refused by place."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engines.document import Document, document_from_text, shorten
from engines.errors import BundleError, InputError


def read(text: str) -> Document:
    return document_from_text(text, "file.json")


def test_values_come_back_by_their_type() -> None:
    top = read('{"t": "é", "n": 3, "x": 0.5, "f": false, "l": [1, 2], "o": {"a": 1}, "z": null}')
    assert top["t"].text() == top["t"].name() == "é"
    assert top["n"].integer() == 3
    assert (top["n"].number(), top["x"].number()) == (3.0, 0.5)
    assert top["f"].flag() is False
    assert [one.integer() for one in top["l"].entries()] == [1, 2]
    assert [(key, one.integer()) for key, one in top["o"].items()] == [("a", 1)]
    assert top["o"].mapping() == {"a": 1}
    assert top.get("z") is top.get("absent") is None


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[1,]", "nonsense", '{"a": 1, "a": 2}', '{"a": NaN}', '{"a": Infinity}',
        '{"a": -Infinity}', '{"a": 1e999}', "[" * 100_000, '{"a": ' + "9" * 5000 + "}", "\ufeff{}",
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_not_plain_json_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^file\.json: not valid JSON \(.*; make the file again"):
        read(text)


TAKE: dict[str, Callable[[Document], object]] = {
    "text": Document.text,
    "name": Document.name,
    "integer": Document.integer,
    "number": Document.number,
    "flag": Document.flag,
    "entries": Document.entries,
    "mapping": Document.mapping,
    "items": lambda document: list(document.items()),
}


@pytest.mark.parametrize(
    ("take", "text"),
    [
        ("text", "1"), ("text", r'"\ud800"'), ("name", r'"a\u0000"'), ("name", r'"a\n"'),
        ("name", r'"\u001b[31m"'), ("name", '""'), ("name", f'"{"a" * 201}"'), ("integer", "1.0"),
        ("integer", "true"), ("integer", "-1"), ("integer", str(2**53 + 1)), ("integer", '"1"'),
        ("number", "true"), ("number", '"1"'), ("number", "1" + "0" * 400), ("flag", "1"),
        ("flag", '"true"'), ("entries", "{}"), ("entries", '"ab"'), ("mapping", "[]"),
        ("items", "[]"), ("items", r'{"a\u0000": 1}'),
    ],
)  # fmt: skip
def test_another_type_is_refused_with_its_place(take: str, text: str) -> None:
    document = read(f'{{"deep": [{text}]}}')["deep"].entries()[0]
    with pytest.raises(InputError, match=r"^file\.json: deep: 0: .*; \w+"):
        TAKE[take](document)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(InputError, match=r"^file\.json: deep: the key 'x' is missing"):
        read('{"deep": {}}')["deep"]["x"]
    with pytest.raises(InputError, match="must be an object"):
        read("[]")["x"]


def test_the_error_is_the_one_asked_for_at_every_depth() -> None:
    top = document_from_text('{"a": {"b": 1}}', "m", BundleError)
    with pytest.raises(BundleError):
        top["a"]["b"].text()
    with pytest.raises(BundleError):
        document_from_text("{", "m", BundleError)


def test_a_message_is_one_short_printable_line() -> None:
    for value in (
        "x" * 9999,
        "a\nb\x1b[2J",
        [1] * 9999,
        {"a": "b"},
        10**4000,
        None,
        1.5,
        "\ud800",
    ):
        assert len(shorten(value)) <= 80
        assert shorten(value).isprintable()
        assert shorten(value, quote=False).isprintable()
