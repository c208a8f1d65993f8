"""What a user can mend, as a small tree; each message ends with the mend.

    CadenzaError            exit 1   the work failed
    +-- InputError          exit 2   an argument or a file given is at fault
    |   +-- BundleError     exit 2   a bundle is damaged, foreign, or leaves its folder
    |   +-- MissingExtra    exit 2   an optional dependency is not installed
    +-- BudgetError         exit 3   no candidate meets the budgets
    +-- BackendError        exit 1   an engine could not be built, loaded or run
    +-- DegradedError       exit 4   the result is degraded and `--strict` was given

A caller's mistake in code is a `ValueError` that shows the values, and no part of this tree.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


class CadenzaError(Exception):
    """The work failed."""

    exit_code = 1


class InputError(CadenzaError):
    """An argument or a file given is at fault."""

    exit_code = 2


class BundleError(InputError):
    """A bundle is damaged, foreign, or names a path outside its folder."""


class MissingExtra(InputError):
    """An optional dependency is not installed."""


class BudgetError(CadenzaError):
    """No candidate meets the budgets.

    Attributes:
        nearest: For each budget given the smallest value that is feasible with the others as
            given, else None; keys mean_bits, latency_ms, memory_mib.
    """

    exit_code = 3

    def __init__(self, message: str, nearest: dict[str, float | None] | None = None) -> None:
        super().__init__(message)
        self.nearest = nearest or {}


class BackendError(CadenzaError):
    """An engine could not be built, loaded or run."""


class DegradedError(CadenzaError):
    """The result is degraded and `--strict` was given."""

    exit_code = 4


def require(module: str, extra: str, needed_for: str) -> ModuleType:
    """Import and return an optional dependency.

    Raises:
        MissingExtra: It is not installed; names the extra that brings it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise MissingExtra(
            f"{needed_for} needs the package {module!r}, which is not installed; "
            f"install it with: pip install 'cadenza[{extra}]'"
        ) from error
