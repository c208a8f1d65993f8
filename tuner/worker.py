"""The child in which trials run: whatever runs an engine crashes here, and not the search.

`engines.child` starts `serve` in a process of its own.  Requests and answers are plain data:

    {"do": "baseline"} -> how full precision compares with the framework, and what it costs
    {"do": "trial", "candidate", "number", "best"} -> a `TrialResult`
    {"do": "finish", "results", "asked"} -> what `tuner.finish` comes to
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from engines.build import BuildLog, Cache
from engines.errors import InputError
from engines.precision import FULL_PRECISION
from tuner.config import Effort, TuneConfig
from tuner.contest import Contest
from tuner.finish import Asked, finish
from tuner.gate import check_baseline
from tuner.search_file import full_precision
from tuner.space import Candidate
from tuner.stopwatch import EVALUATE, Stopwatch
from tuner.trial import run_trial
from tuner.trials import TrialResult
from tuner.workbench import Workbench, prepare
from tuner.workshop import Workshop

SERVE = "tuner.worker:serve"

# Fields of TuneConfig that are paths.
_PATHS = ("export", "output", "others", "baselines", "latencies")


def given_to(bench: Workbench, work: Path) -> dict[str, Any]:
    """Return what a worker is started with, as plain data."""
    return {
        "config": _plain(asdict(bench.config)),
        "effort": asdict(bench.effort),
        "cache": str(bench.cache.folder),
        "work": str(work),
    }


def serve(given: Mapping[str, Any]) -> Callable[[Any, Callable[[str], None]], Any]:
    """Return the handler of requests; see the module's description.

    Args:
        given: As `given_to` made it.

    Raises:
        CadenzaError: What `prepare` finds at fault.
    """
    values = {
        name: _path(value) if name in _PATHS else _frozen(value)
        for name, value in given["config"].items()
        if name in {each.name for each in fields(TuneConfig)}
    }
    config, cache = TuneConfig(**values), Cache(Path(given["cache"]))
    bench = prepare(config, cache, print, Effort(**given["effort"]))
    shop = Workshop(bench, Path(given["work"]))

    def handle(request: Mapping[str, Any], note: Callable[[str], None]) -> Any:
        contest = Contest(shop, step=note)
        if request["do"] == "baseline":
            full = shop.engines(shop.default).fleet.engines[FULL_PRECISION.name]
            with shop.watch(EVALUATE):
                found = check_baseline(bench.export, full)
            return {
                "baseline": None if found is None else found.to_json(),
                "full": full_precision(contest),
                "seconds": dict(shop.watch.spent),
            }
        if request["do"] == "finish":
            # Its engines and traces stay; what was built and spent in trials is in their results.
            shop.bench = replace(bench, say=note)
            shop.built, shop.watch = BuildLog(reused=shop.built.reused), Stopwatch()
            results = [TrialResult.from_json(each) for each in request["results"]]
            asked = Asked(**{**request["asked"], "left_out": tuple(request["asked"]["left_out"])})
            with redirect_stderr(Lines(note)):
                return finish(Contest(shop), shop.work, results, asked)
        if request["do"] != "trial":
            raise InputError(f"a worker knows no request {request['do']!r}; report this")
        built = shop.built.built
        best = None if request["best"] is None else TrialResult.from_json(request["best"])
        result = run_trial(contest, Candidate.of(request["candidate"]), request["number"], best)
        counted = {**result.seconds, "built": float(shop.built.built - built)}
        return replace(result, seconds=counted).to_json()

    return handle


class Lines(io.StringIO):
    """A stream that hands on whole lines, for progress that is shown elsewhere."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note, self._begun = note, ""

    def write(self, text: str) -> int:
        """Take text; every line that is whole goes on."""
        *whole, self._begun = (self._begun + text).split("\n")
        for line in whole:
            self._note(line)
        return len(text)


def _plain(value: Any) -> Any:
    """Return a config's values with paths as text and tuples as lists."""
    if isinstance(value, Path):
        return str(value.resolve())
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _path(value: Any) -> Any:
    if value is None:
        return None
    return tuple(map(Path, value)) if isinstance(value, list) else Path(value)
