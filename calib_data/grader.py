"""Graders that a user names: `exact`, `regex:PATTERN` and `python:module.fn`.

    exact               the text equals the answer, apart from spaces around both
    regex:PATTERN       PATTERN is searched in the text; of its last match the first group, or all
                        of it where there is no group, equals the answer, apart from spaces
    python:module.fn    fn(prompt: str, text: str, answer: str | None) -> bool, the user's own code

A grader is asked for by an argument of a command, never by a bundle or an export: those hold its
text as a record, and nothing executes it.  `module` is looked for in the current directory first,
then on sys.path.  Its code runs with the rights of the command, like any program of the user's.

A pattern can take time that grows exponentially with the text, as (a+)+b does.  The text is
bounded, its last `TEXT_LIMIT` characters count; the pattern is the user's own to keep simple.

Standard library only.
"""

from __future__ import annotations

import hashlib
import re
import reprlib
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

from calib_data.errors import WorkloadError, shorten
from calib_data.prompt_file import is_unicode
from calib_data.prompts import Prompt

# Characters of an answer that a pattern is searched in, and characters of a pattern.
TEXT_LIMIT, PATTERN_LIMIT = 20_000, 2_000

KINDS = "exact, regex:PATTERN or python:module.fn"

_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


@dataclass(frozen=True, slots=True)
class Grader:
    """How answers are judged.

    Attributes:
        text: As asked for, in full: equal texts judge alike.  For python it carries the digest of
            the module's source; what that module imports is not part of it.
        needs_answers: Whether every prompt must have an answer.
        judge: (prompt, text) to whether the text answers it.
    """

    text: str
    needs_answers: bool
    judge: Callable[[Prompt, str], bool] = field(repr=False, compare=False)


def grader_from_spec(spec: str) -> Grader:
    """Return the grader that `exact`, `regex:PATTERN` or `python:module.fn` names.

    Raises:
        WorkloadError: It names none, the pattern does not compile, or the function cannot be
            imported.
    """
    kind, _, rest = spec.partition(":")
    if not is_unicode(spec):
        raise WorkloadError(f"a grader is Unicode text, got {shorten(spec)}; mend it")
    if spec == "exact":
        return Grader("exact", True, _judge_exact)
    if kind == "regex" and rest:
        return Grader(spec, True, partial(_judge_regex, _pattern(rest)))
    if kind == "python" and rest:
        return _python_grader(rest)
    raise WorkloadError(f"a grader is {KINDS}, got {shorten(spec)}; mend it")


def is_grader_spec(text: str) -> bool:
    """Return whether a text names a grader for itself, and not `NAME=GRADER`."""
    return text == "exact" or text.startswith(("regex:", "python:"))


def _judge_exact(prompt: Prompt, text: str) -> bool:
    return prompt.answer is not None and text.strip() == prompt.answer.strip()


def _pattern(text: str) -> re.Pattern[str]:
    if len(text) > PATTERN_LIMIT:
        raise WorkloadError(
            f"a pattern has at most {PATTERN_LIMIT} characters, got {len(text)}; shorten it, or "
            f"use python:module.fn"
        )
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise WorkloadError(
            f"the pattern {shorten(text)} does not compile: {error}; mend it"
        ) from error


def _judge_regex(pattern: re.Pattern[str], prompt: Prompt, text: str) -> bool:
    matches = deque(pattern.finditer(text[-TEXT_LIMIT:]), maxlen=1)
    if not matches or prompt.answer is None:
        return False
    found = matches[0][1 if pattern.groups else 0]
    return found is not None and found.strip() == prompt.answer.strip()


def _python_grader(name: str) -> Grader:
    if not _FUNCTION.fullmatch(name):
        raise WorkloadError(
            f"python:module.fn names a function of a module, got {shorten(name)}; for instance "
            f"python:my_grader.is_right"
        )
    where, _, attribute = name.rpartition(".")
    module = _import(where)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise WorkloadError(
            f"the module {where!r} ({module.__file__}) has no function {attribute!r}; write "
            f"def {attribute}(prompt, text, answer), which returns True or False"
        )
    return Grader(
        f"python:{name} sha256:{_digest(module)}", False, partial(_judge_python, name, function)
    )


def _import(name: str) -> ModuleType:
    """Import the user's module, the current directory first."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        with _own_code(f"python:{name}: the module cannot be imported"):
            return import_module(name)
    except WorkloadError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and name.startswith(str(cause.name)):
            raise WorkloadError(
                f"python:{name}: there is no module {cause.name!r} in {here} or on sys.path; "
                f"start the command in its folder, or set PYTHONPATH"
            ) from cause
        raise
    finally:
        with suppress(ValueError):  # the module may have changed sys.path
            sys.path.remove(here)


def _digest(module: ModuleType) -> str:
    """Return the digest of a module's source."""
    try:
        return hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()
    except (AttributeError, OSError) as error:
        raise WorkloadError(
            f"the module {module.__name__!r} has no file whose digest could tell one grader from "
            f"another; write the grader in a file of your own"
        ) from error


def _judge_python(
    name: str, function: Callable[[str, str, str | None], object], prompt: Prompt, text: str
) -> bool:
    with _own_code(f"the grader python:{name} failed"):
        verdict = function(prompt.prompt, text, prompt.answer)
    if verdict is not True and verdict is not False:
        raise WorkloadError(
            f"the grader python:{name} returned {reprlib.repr(verdict)}, of type "
            f"{type(verdict).__name__}; let it return True or False"
        )
    return verdict


@contextmanager
def _own_code(failed: str) -> Iterator[None]:
    """Run the user's code: what it prints goes to stderr, what it raises is told with its place.

    Raises:
        WorkloadError: It raised; the cause carries the traceback.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # any code may raise anything
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}, line {frame.lineno}, in {frame.name}"
        if isinstance(error, SyntaxError):
            place = f"{error.filename}, line {error.lineno}"
        # Python's own words, which bear an error that cannot say what it is.
        said = traceback.format_exception_only(error)
        line = said[-1 if isinstance(error, SyntaxError) else 0].splitlines()[0]
        raise WorkloadError(
            f"{failed} at {place}: {line}; mend it (-v shows the traceback)"
        ) from error
