"""The build routes of the module that builds a target's plans: asked once a version, in a child.

target -> in the cache, for this version of the module? -> else a child asks it -> read as data
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from engines.build import Cache, digest_json
from engines.child import Child
from engines.errors import BackendError, MissingExtra
from engines.routes import RouteKnob, knobs_from_json
from engines.targets import Target
from engines.trt import module_version

SERVE = "engines.trt:serve_routes"
_KIND = "routes"


@dataclass(frozen=True)
class ModuleRoutes:
    """What a module lists.

    Attributes:
        knobs: In its order; none where it has none, or cannot be asked.
        says: The same in a few words.
        why_not_timed: Why its plans are not timed here, a sentence; None where they are.
    """

    knobs: tuple[RouteKnob, ...]
    says: str
    why_not_timed: str | None


def routes_of(
    target: Target,
    cache: Cache,
    limit_s: float | None,
    keep: bool = True,
    why_not_timed: str | None = None,
) -> ModuleRoutes:
    """Return the build routes of the module that builds for a target.

    Where its plans are not timed anyway, a module that cannot be asked is no error.

    Args:
        target: One of TensorRT.
        cache: Where the list is kept, by module and version.
        limit_s: Seconds after which a child that says nothing is ended.
        keep: Whether to keep it; the cache is only read otherwise.
        why_not_timed: As `ModuleRoutes` has it.

    Raises:
        BackendError: The module does not start here.
        InputError: What it lists is no list of routes.
        MissingExtra: It is not installed.
    """
    try:
        version = module_version(target)
        key = digest_json({"module": target.module, "version": version})
        text: str | None = cache.get(_KIND, key)
        if text is None:
            with (
                tempfile.TemporaryDirectory(prefix="cadenza-") as folder,
                Child(SERVE, None, limit_s) as child,
            ):
                text = str(child.ask(target.name, Path(folder) / "log"))
            if keep:
                cache.put(_KIND, key, text)
    except (BackendError, MissingExtra) as error:
        if why_not_timed is None:
            raise
        return ModuleRoutes((), f"not asked for: {error}", why_not_timed)
    name = f"{target.module} {version}"
    found = knobs_from_json(text, f"build routes of {name}")
    says = f"{len(found)} of {name} are" if found else f"{name} has none"
    return ModuleRoutes(found, says, why_not_timed)
