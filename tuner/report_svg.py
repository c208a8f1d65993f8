"""Figures as SVG inside a page: drawn by matplotlib, coloured by the page's own style.

matplotlib draws with colours that stand for others: each becomes a CSS variable, so that a figure
follows the page from light to dark.  Text stays text.  Equal input gives equal bytes.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from tuner.report_values import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# What the figures are drawn with, and the variables of `report.css` that these stand for.
INK, MUTED, LINE, CARD = "#010101", "#020202", "#030303", "#040404"
GOOD, BAD, FAILED, CHOSEN = "#050501", "#050502", "#050503", "#050504"
PALETTE = tuple(f"#0606{rank:02x}" for rank in range(1, 9))
HEAT = tuple(f"#0707{level:02x}" for level in range(1, 10))
_VARIABLES: dict[str, str] = {
    INK: "--ink",
    MUTED: "--muted",
    LINE: "--line",
    CARD: "--card",
    GOOD: "--good",
    BAD: "--bad",
    FAILED: "--failed",
    CHOSEN: "--chosen",
    **{colour: f"--p{rank}" for rank, colour in enumerate(PALETTE)},
    **{colour: f"--h{level}" for level, colour in enumerate(HEAT)},
}

# Inches to a pixel of the page.
_DPI = 72.0

# Characters of a name in a figure; its table has the whole.
SHORT = 26

_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_COLOUR = re.compile("|".join(_VARIABLES))
_FONT = re.compile(r"font: ([^;]*?)([\d.]+px)[^;]*")
_FAMILY = re.compile(r"font-family: [^;]*(; )?")
_URL = re.compile(r"url\(#([^)]+)\)")

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "cadenza",
    "path.simplify": False,
    "text.parse_math": False,
    "axes.unicode_minus": True,
    "font.size": 12.0,
    "axes.titlesize": 12.0,
    "axes.labelsize": 12.0,
    "xtick.labelsize": 11.0,
    "ytick.labelsize": 11.0,
    "legend.fontsize": 11.0,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.edgecolor": LINE,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.labelcolor": MUTED,
    "lines.solid_capstyle": "round",
}


@contextmanager
def canvas(width: float, height: float) -> Iterator[Figure]:
    """Yield an empty figure of a size in pixels, in the page's style.

    Names in scripts that matplotlib's own font lacks are no fault: the browser has others.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with warnings.catch_warnings(), mpl.rc_context():
        mpl.rcdefaults()  # whatever a user's own matplotlibrc says
        mpl.rcParams.update(_STYLE)
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        warnings.filterwarnings("ignore", "constrained_layout not applied", UserWarning)
        yield Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, layout="constrained")


def plain_axes(axes: Axes, grid: str = "both") -> None:
    """Give axes the page's look: a faint grid and no ticks that stick out."""
    axes.grid(True, axis=grid)  # type: ignore[arg-type]
    axes.tick_params(length=0)


def inlined(figure: Figure, name: str, label: str) -> str:
    """Return a drawn figure as an `svg` element for a page.

    Args:
        figure: As drawn.
        name: Unlike that of any other figure of the page; its ids begin with it.
        label: What it shows, for who cannot see it.
    """
    stream = io.StringIO()
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure.savefig(stream, format="svg", metadata=nothing)
    root = ElementTree.fromstring(stream.getvalue())
    # Some of matplotlib's ids differ from run to run: those referred to are numbered instead.
    places: dict[str, str] = {}
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        for child in [each for each in element if each.tag in _UNWANTED]:
            element.remove(child)
        if (target := element.attrib.pop(_LINK, None)) is not None:
            element.set("href", f"#{_numbered(target[1:], places, name)}")
        for key, value in element.attrib.items():
            if key not in ("id", "href"):
                element.set(key, _restyled(value, places, name))
    for element in root.iter():
        if (own := element.attrib.pop("id", None)) in places:
            element.set("id", places[own])
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    root.set("aria-label", shown(label))
    return ElementTree.tostring(root, encoding="unicode")


# Of the whole document's: a style for every element, and who made it.
_UNWANTED = (f"{_SVG}metadata", f"{_SVG}style", f"{_SVG}title")


def _numbered(own: str, places: dict[str, str], name: str) -> str:
    """Return the id that stands for a drawn one, the same for the same."""
    return places.setdefault(own, f"{name}-{len(places)}")


def _restyled(value: str, places: dict[str, str], name: str) -> str:
    value = _URL.sub(lambda found: f"url(#{_numbered(found[1], places, name)})", value)
    value = _FONT.sub(
        lambda found: (
            f"font-size: {found[2]}"
            + "; font-weight: 600" * ("bold" in found[1] or "700" in found[1])
        ),
        value,
    )
    value = _FAMILY.sub("", value)
    return _COLOUR.sub(lambda found: f"var({_VARIABLES[found[0]]})", value)


def short(name: str, most: int = SHORT) -> str:
    """Return a name as it stands in a figure: one line, its middle left out where it is long."""
    plain = shown(name)
    if len(plain) <= most:
        return plain
    return f"{plain[: most - most // 3 - 1]}…{plain[-(most // 3) :]}"


def padded(values: Sequence[float], share: float = 0.06) -> tuple[float, float]:
    """Return limits around finite values, apart even where all values are one."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = (high - low) * share or abs(high) * 0.1 or 1.0
    return low - room, high + room
