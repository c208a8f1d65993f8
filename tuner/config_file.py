"""The config of a tune from a YAML file, `--set` and flags: every value with where it came from.

    default < FILE.yaml < --set a.b=v < flag

Each scalar is read by the type that its key expects, not by YAML's guesses: `no` is a word where a
word is expected, `1e-3` a number, `0755` none.  Unknown and repeated keys are errors, with their
line; anchors and aliases are refused.  Relative paths in a file are relative to the file.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.errors import InputError, require
from tuner.space import Value

DEFAULT = "default"

# Most bytes of a file.
_LARGEST = 1 << 20

_NULLS = ("", "~", "null", "Null", "NULL")


@dataclass(frozen=True, slots=True)
class Sourced:
    """A value and where it came from: `default`, FILE.yaml:LINE, `--set` or a flag."""

    value: Any
    source: str


@dataclass(frozen=True)
class Effective:
    """Every value of a config by its key, in the order of `KEYS`."""

    values: Mapping[str, Sourced]

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key; None where it is not given."""
        found = self.values.get(key)
        return None if found is None else found.value

    def below(self, key: str) -> dict[str, Any]:
        """Return the values of an open key, by the rest of their names."""
        start = f"{key}."
        return {
            name.removeprefix(start): each.value
            for name, each in self.values.items()
            if name.startswith(start)
        }

    def to_json(self, shown: Callable[[str, Any], Any] = lambda key, value: value) -> Any:
        """Return {key: {value, source}}; `shown` may hide what must not be seen."""
        return {
            key: {"value": _plain(shown(key, each.value)), "source": each.source}
            for key, each in self.values.items()
        }

    def to_yaml(self, shown: Callable[[str, Any], Any] = lambda key, value: value) -> str:
        """Return a file with the source of each value beside it; it can be given again."""
        lines: list[str] = []
        before: list[str] = []
        for key, each in self.values.items():
            parts = key.split(".")
            for depth, part in enumerate(parts[:-1]):
                if before[: depth + 1] != parts[: depth + 1]:
                    lines.append(f"{'  ' * depth}{_dumped(part)}:")
            before = parts[:-1]
            said = _dumped(_plain(shown(key, each.value)))
            name = _dumped(parts[-1])
            source = "".join(letter if letter.isprintable() else "?" for letter in each.source)
            lines.append(f"{'  ' * len(before)}{name}: {said}  # {source}")
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class _Field:
    """What a key takes: `read` a value from a node; `many` a list of such.

    Where `one` holds, a single value is no list of one: it means something else.
    """

    read: Callable[[_Scalar], Any]
    expected: str
    many: bool = False
    one: bool = False


@dataclass(frozen=True, slots=True)
class _Scalar:
    """A scalar as written, whether it stood in quotes, and the folder that paths begin at."""

    text: str
    quoted: bool
    folder: Path

    @property
    def null(self) -> bool:
        return not self.quoted and self.text in _NULLS


def _number(scalar: _Scalar) -> float:
    value = float(scalar.text)
    if not math.isfinite(value):
        raise ValueError(scalar.text)
    return value


def _integer(scalar: _Scalar) -> int:
    digits = scalar.text.lstrip("-")
    if not digits.isascii() or not digits.isdigit() or (digits[0] == "0" and len(digits) > 1):
        raise ValueError(scalar.text)
    return int(scalar.text)


def _flag(scalar: _Scalar) -> bool:
    return {"true": True, "false": False}[scalar.text]


def _text(scalar: _Scalar) -> str:
    if not scalar.text:
        raise ValueError("empty")
    return scalar.text


def _path(scalar: _Scalar) -> Path:
    return scalar.folder / _text(scalar)


def _any(scalar: _Scalar) -> Value:
    """Return a knob's value: a whole number, a number, true, false, or a word."""
    if not scalar.quoted:
        readers: tuple[Callable[[_Scalar], Value], ...] = (_integer, _number, _flag)
        for read in readers:
            try:
                return read(scalar)
            except (ValueError, KeyError):
                continue
    return _text(scalar)


_NUMBER = _Field(_number, "a number")
_INTEGER = _Field(_integer, "a whole number")
_FLAG = _Field(_flag, "true or false")
_WORD = _Field(_text, "a text")
_WORDS = _Field(_text, "a list of texts", many=True)
_PATHS = _Field(_path, "a list of paths", many=True)
_ROUTES = _Field(_text, "a value or a list of values", many=True, one=True)
_CHOICES = _Field(_any, "a value or a list of values", many=True, one=True)

# Every key; one that ends with a star is open: any name may stand there.
KEYS: dict[str, _Field] = {
    "exports": _PATHS,
    "output": _Field(_path, "a path"),
    "target": _WORD,
    "precisions": _WORDS,
    "tasks": _WORDS,
    "graders": _WORDS,
    "baselines": _PATHS,
    "budget.mean_bits": _NUMBER,
    "budget.latency_ms": _Field(_text, "milliseconds, or a percentage such as 85%"),
    "budget.memory_mib": _NUMBER,
    "budget.latencies": _Field(_path, "a path"),
    "budget.gpu": _WORD,
    "quality.objective": _WORD,
    "quality.max_loss.*": _NUMBER,
    "quality.gates.*": _NUMBER,
    "quality.proxy": _WORD,
    "search.mode": _WORD,
    "search.strategy": _WORD,
    "search.trials": _INTEGER,
    "search.timeout_s": _NUMBER,
    "search.seed": _INTEGER,
    "search.storage": _WORD,
    "space.*": _CHOICES,
    "run.cache": _Field(_path, "a path"),
    "run.cache_limit_mib": _NUMBER,
    "run.child_limit_s": _NUMBER,
    "run.child_memory_mib": _NUMBER,
    "run.allow_precision_mismatch": _FLAG,
    "run.strict": _FLAG,
    "run.force": _FLAG,
}


def effective(
    defaults: Mapping[str, Any],
    file: Path | None,
    settings: Sequence[str],
    flags: Mapping[str, Sourced],
) -> Effective:
    """Return every value with its source.

    Args:
        defaults: By key.
        file: YAML, or None.
        settings: As given to `--set`.
        flags: What stood on the command line, by key.

    Raises:
        InputError: The file or a setting is at fault; names file, line and key.
    """
    found = {key: Sourced(value, DEFAULT) for key, value in defaults.items()}
    if file is not None:
        found |= _from_file(file)
    for each in settings:
        found |= _from_setting(each)
    found |= flags
    order = list(KEYS)
    known = {key: each for key, each in found.items() if each.value is not None}
    return Effective(
        dict(sorted(known.items(), key=lambda item: (order.index(_field_of(item[0])), item[0])))
    )


def _field_of(key: str) -> str:
    """Return the entry of KEYS that a key belongs to.

    Raises:
        KeyError: There is none.
    """
    if key in KEYS and not key.endswith("*"):
        return key
    for star in KEYS:
        if star.endswith(".*") and key.startswith(star[:-1]) and len(key) > len(star) - 1:
            return star
    raise KeyError(key)


def _from_file(file: Path) -> dict[str, Sourced]:
    try:
        with file.open("rb") as stream:
            data = stream.read(_LARGEST + 1)
        if len(data) > _LARGEST:
            raise InputError(f"{str(file)!r} is larger than {_LARGEST} bytes; it is no config")
        text = data.decode("utf-8")
    except OSError as error:
        raise InputError(
            f"cannot read the config {str(file)!r}: {error.strerror}; give another --config"
        ) from error
    except UnicodeError as error:
        raise InputError(f"{str(file)!r} is not UTF-8 ({error}); save it as UTF-8") from error
    node = _composed(text, str(file))
    if node is None or (node.id == "scalar" and node.value in _NULLS):
        return {}
    found: dict[str, Sourced] = {}
    _walk(node, "", str(file), file.parent, found)
    return found


def _from_setting(given: str) -> dict[str, Sourced]:
    key, equals, text = given.partition("=")
    if not equals or not key:
        raise InputError(f"--set takes KEY=VALUE, got {given!r}; for instance search.trials=20")
    node = _composed(text, f"--set {key}")
    found: dict[str, Sourced] = {}
    if node is None:
        _known(key, f"--set {given}", whole=True)
        return {}
    _walk(node, key, f"--set {given}", Path(), found)
    return {name: Sourced(each.value, "--set") for name, each in found.items()}


def _composed(text: str, where: str) -> Any:
    """Return the node of a text, or None of an empty one; no anchors, one document."""
    yaml = require("yaml", "tune", "a config file")
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                line = event.start_mark.line + 1
                raise InputError(f"{where}:{line}: anchors and aliases are not read; write it out")
            if str(getattr(event, "tag", None) or "!").startswith(("tag:", "!!")):
                line = event.start_mark.line + 1
                raise InputError(f"{where}:{line}: tags are not read; write the plain value")
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        said = " ".join(str(error).split())
        raise InputError(f"{where} is no YAML: {said[:300]}; mend it there") from error


def _walk(node: Any, key: str, where: str, folder: Path, found: dict[str, Sourced]) -> None:
    """Collect the values below a node."""
    at = f"{where}:{node.start_mark.line + 1}" if not where.startswith("--set") else where
    if node.id == "mapping":
        if key and not any(each.startswith(f"{key}.") for each in KEYS):
            _known(key, at)
            raise InputError(f"{at}: {key} must be {KEYS[_field_of(key)].expected}")
        seen: set[str] = set()
        for name, value in node.value:
            line = at if where.startswith("--set") else f"{where}:{name.start_mark.line + 1}"
            is_open = f"{key}.*" in KEYS  # any name may stand there
            if name.id != "scalar" or not name.value or ("." in name.value and not is_open):
                raise InputError(f"{line}: a key must be a plain word, got {str(name.value)!r}")
            if name.value in seen:
                raise InputError(f"{line}: the key {name.value!r} stands there twice; keep one")
            seen.add(name.value)
            _walk(value, f"{key}.{name.value}" if key else name.value, where, folder, found)
        return
    if not key:
        raise InputError(f"{at}: the config must be a mapping of keys to values")
    _known(key, at, whole=True)
    if key == "quality.max_loss":  # one number for every task
        key = "quality.max_loss.all"
    if f"{key}.*" in KEYS or any(each.startswith(f"{key}.") for each in KEYS):
        if node.id == "scalar" and _Scalar(node.value, node.style is not None, folder).null:
            return
        raise InputError(f"{at}: {key} must be a mapping of keys to values")
    # A build route's values are words to TensorRT, whatever they look like.
    field = _ROUTES if key.startswith("space.-") else KEYS[_field_of(key)]
    value = _value(node, key, field, at, folder)
    if value is not None:  # null stands for "not given"
        found[key] = Sourced(value, at)


def _value(node: Any, key: str, field: _Field, at: str, folder: Path) -> Any:
    """Return the value of a node by what its key expects; None where it is null."""
    if node.id == "sequence":
        if not field.many:
            raise InputError(f"{at}: {key} must be {field.expected}, got a list")
        return tuple(_scalar(each, key, field, at, folder) for each in node.value)
    if node.id == "scalar" and _Scalar(node.value, node.style is not None, folder).null:
        return None
    one = _scalar(node, key, field, at, folder)
    return (one,) if field.many and not field.one else one


def _scalar(node: Any, key: str, field: _Field, at: str, folder: Path) -> Any:
    if node.id != "scalar":
        raise InputError(f"{at}: {key} must be {field.expected}")
    scalar = _Scalar(node.value, node.style is not None, folder)
    try:
        if scalar.null:
            raise ValueError("null")
        return field.read(scalar)
    except (ValueError, KeyError) as error:
        raise InputError(f"{at}: {key} must be {field.expected}, got {node.value!r}") from error


def _known(key: str, at: str, whole: bool = False) -> None:
    """Refuse a key that there is not, with the nearest one.

    Args:
        key: As given.
        at: Where.
        whole: Whether a value stands there, not a mapping.
    """
    try:
        _field_of(key)
    except KeyError:
        if whole and any(each.startswith(f"{key}.") for each in KEYS):
            return
        every = [each.removesuffix(".*") for each in KEYS]
        every += [each.partition(".")[0] for each in KEYS if "." in each]
        plain = list(dict.fromkeys(every))
        near = difflib.get_close_matches(key, plain, 1, 0.5)
        mend = f"did you mean {near[0]!r}?" if near else f"keys are {', '.join(plain)}"
        raise InputError(f"{at}: unknown key {key!r}; {mend}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def _dumped(value: Any) -> str:
    yaml = require("yaml", "tune", "a config file")
    said: str = yaml.safe_dump(
        value, default_flow_style=True, allow_unicode=True, width=math.inf
    ).strip()
    return said.removesuffix("\n...").removesuffix("...").strip()
