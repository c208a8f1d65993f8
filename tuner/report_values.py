"""Values of JSON that nobody has checked, for people: by type, and never a fault.

Numbers that are not finite become NaN, which is shown as "not finite" and never drawn.  Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Object = Mapping[str, object]

NOTHING, NOT_FINITE = "—", "not finite"

# Characters of a text that are shown; longer ones are cut, and it is said.
LONGEST = 2_000

# Not printable, but harmless and needed: spaces, and what joins the letters of some scripts.
_KEPT = frozenset("\u00a0\u3000\u200c\u200d")


def mapping(value: object) -> Object:
    """Return an object as it stands, {} of anything else."""
    return value if isinstance(value, dict) else {}


def entries(value: object) -> Sequence[object]:
    """Return a list as it stands, nothing of anything else."""
    return value if isinstance(value, list | tuple) else ()


def number(value: object) -> float | None:
    """Return a number, NaN for one that is not finite, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return math.nan
    return found if math.isfinite(found) else math.nan


def numbers(value: object) -> dict[str, float]:
    """Return the numbers of an object by their keys."""
    found = {key: number(each) for key, each in mapping(value).items()}
    return {key: each for key, each in found.items() if each is not None}


def said(value: object, nothing: str = NOTHING) -> str:
    """Return a value for people, in a line."""
    if value is None:
        return nothing
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return ", ".join(said(each) for each in value[:100]) or nothing
    if isinstance(value, dict):
        parts = list(value.items())[:100]
        return ", ".join(f"{key} {said(each)}" for key, each in parts) or nothing
    found = number(value)
    if found is None or math.isnan(found):
        return NOT_FINITE
    return str(value) if isinstance(value, int) else f"{found:.6g}"


def shown(text: str, most: int = LONGEST) -> str:
    """Return a text as it may stand on a page: a long one cut, controls as a mark.

    Line ends, halves of characters, and what reorders a line's letters are such controls.
    """
    cut = text[:most]
    plain = "".join(c if c.isprintable() or c in _KEPT else "\ufffd" for c in cut)
    return plain if len(cut) == len(text) else f"{plain}… (cut; {len(text):,} characters)"


def figure_of(value: float | None, digits: int) -> str:
    """Return a number with so many decimals; in powers of ten where it is huge or tiny."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return NOT_FINITE
    if value and not 0.5 * 10.0**-digits <= abs(value) < 1e7:
        return f"{value:.2e}"
    return f"{value:.{digits}f}"
