"""Measure a space once, to replay searches on: `python -m tests.bench.search_table`.

Latency is measured once for each distinct engine with each set of session options, in turns with
full precision, and quality once for each distinct graph and schedule.  What a candidate comes to
is composed of these by the tuner's own rules.  Everything measured lies in a cache, so the script
can be killed and goes on; on two cores it takes less than 90 minutes.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engines.backend import Backend
from engines.build import BuildLog, Cache, digest_json, engine_key
from engines.files import digest_file
from engines.machine import machine, state
from engines.measure import measure, measure_switch, ratio
from engines.options import OrtOptions, option_choices
from engines.ort import environment
from engines.precision import FULL_PRECISION
from engines.schedule import SamplerConfig, fixed_steps_like
from exporter.export import ExportConfig, export
from exporter.folder import Recipe
from tests.bench.search_space import TABLE, Table, recipe_id, schedules_wanted, space_of_table
from tuner.config import TuneConfig
from tuner.contest import Contest
from tuner.evaluate import answer_all, graded
from tuner.folder import write_json
from tuner.objective import loss_in_points
from tuner.space import Candidate, Value
from tuner.workbench import prepare
from tuner.workshop import Workshop, engine_spec

HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "calib_data" / "reference"
QUANTIZERS = ("rtn", "gptq")
RECIPES: dict[str, tuple[Value, ...]] = {
    "quantizer": QUANTIZERS,
    "windows": (6, 3),
    "clip": (1.0, 0.9),
    "keep": (0, 1, 2),
    "scales": ("shared", "window"),
}
REPEATS = 7


def main(argv: list[str]) -> int:
    """Measure what is missing, write the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, default=HERE.parents[1] / "evidence" / "search_table")
    parser.add_argument("--output", type=Path, default=TABLE)
    parser.add_argument("--only", choices=("latency", "quality"), help="stop after the latencies")
    args = parser.parse_args(argv)
    began = time.monotonic()
    exports = [
        export(
            ExportConfig(
                model=MODEL,
                out=args.work / "exports" / name,
                precisions=("fp32", "int8"),
                recipe=Recipe(quantizer=name),
            ),
            _say,
        )
        for name in QUANTIZERS
    ]
    config = TuneConfig(
        export=exports[0],
        others=tuple(exports[1:]),
        output=args.work / "bundle",
        mode="quick",
        max_loss=100.0,
    )
    bench = prepare(config, Cache(args.work / "cache"), _say)
    contest = Contest(Workshop(bench, args.work))
    (sampler,) = {job.sampler for job in bench.jobs.values()}
    options = {name: tuple(values) for name, values in option_choices("cpu").items()}
    space = space_of_table(RECIPES, options, [each.name for each in bench.precisions])
    latency = _latencies(contest, sampler, options)
    if args.only == "latency":
        _count(bench.cache, began)
        return 0
    table: dict[str, Any] = {
        "format": "cadenza-search-table/1",
        "space": [{"name": k.name, "choices": k.choices, "kind": k.kind} for k in space],
        "tasks": {name: job.sampler.to_json() for name, job in bench.jobs.items()},
        "precisions": [
            {"name": each.name, "bits": each.bits, "family": each.family}
            for each in reversed(bench.precisions)
        ],
        "environment": {**environment(OrtOptions()), **machine()},
        "script": digest_file(Path(__file__)).sha256,
        "prompts": {
            "calibration": bench.effort.calibration,
            "tuning": bench.effort.tuning,
        },
        "repeats": REPEATS,
        **latency,
        "recipes": {},
    }
    for number, recipe in enumerate(_recipes(contest), start=1):
        engines = contest.shop.engines(recipe)
        table["recipes"][recipe_id(recipe)] = {
            "engine": engines.fleet.keys["int8"],
            "family_mib": {
                name: size / (1 << 20) for name, size in engines.folder.families.items()
            },
            "gain": {
                name: contest.sensitivity(recipe, job).gain.tolist()
                for name, job in bench.jobs.items()
            },
        }
        _say(f"gains: {number} recipes")
    wanted = schedules_wanted(Table.from_json({**table, "loss": {}}))
    table["loss"] = _losses(contest, wanted)
    table["seconds"] = round(_count(bench.cache, began))
    write_json(args.output, table)
    _say(f"{args.output}: {table['seconds']} s of measuring")
    return 0


def _recipes(contest: Contest) -> Iterator[Candidate]:
    """Yield every recipe, with the default schedule and options."""
    for values in itertools.product(*RECIPES.values()):
        yield contest.shop.default.changed(**dict(zip(RECIPES, values, strict=True)))


def _latencies(
    contest: Contest, sampler: SamplerConfig, options: dict[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """Return milliseconds of a pass of each engine with each set of options, and of a switch.

    Each is timed in turns with full precision as it is by default: what counts is the ratio.
    """
    shop, cache = contest.shop, contest.bench.cache
    shape, model = contest.bench.export.shape, contest.bench.export.model
    where = (contest.bench.export.windows, shape.batch[1], shape.prompt[1], model)
    fixed = fixed_steps_like(sampler, contest.bench.export.windows)
    anchor = shop.engines(shop.default).fleet.engines[FULL_PRECISION.name]
    specs = {}
    for recipe in _recipes(contest):
        folder = shop.engines(recipe).folder
        for name in (FULL_PRECISION.name, "int8"):
            plain = engine_spec(folder, name, recipe.scales, OrtOptions())[1]
            specs[engine_key(plain)] = (folder, name, recipe.scales)
    found: dict[str, dict[str, list[float]]] = {key: {} for key in specs}
    switches: dict[str, float] = {}
    sets = [
        dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())
    ]
    count = 0
    for chosen in sets:
        label, told = digest_json(chosen)[:12], OrtOptions(**chosen)

        def load(key: str, told: OrtOptions = told) -> Backend:
            folder, name, scales = specs[key]
            return cache.engine(engine_spec(folder, name, scales, told)[1], BuildLog())

        for key in specs:
            asked = digest_json([key, chosen, REPEATS])

            def timed(key: str = key, load: Callable[[str], Backend] = load) -> Any:
                lanes = {"anchor": anchor, "engine": load(key)}
                made = measure(lanes, fixed, *where, repeats=REPEATS)
                held = ratio(made.of("engine"), made.of("anchor"))
                return [made.of("anchor").latency_ms, held.median, held.low, held.high, state()]

            found[key][label] = _kept(cache, "table-latency", asked, timed)[:4]
            count += 1
        first = next(key for key, (_, name, _) in specs.items() if name == FULL_PRECISION.name)
        other = next(key for key, (_, name, _) in specs.items() if name == "int8")

        def switched(load: Callable[[str], Backend] = load) -> Any:
            lanes = {"one": load(first), "other": load(other)}  # noqa: B023 - called at once
            return measure_switch(lanes, fixed, *where, repeats=2 * REPEATS)

        switches[label] = _kept(cache, "table-switch", digest_json([chosen, REPEATS]), switched)
        _say(f"latencies: {count} of {len(specs) * len(sets)}")
    anchors = [row[0] for rows in found.values() for row in rows.values()]
    return {
        "anchor_ms": float(np.median(anchors)),
        "latency": {
            key: {label: [round(value, 5) for value in row[1:]] for label, row in rows.items()}
            for key, rows in found.items()
        },
        "full_engine": first,
        "switch_ms": switches,
    }


def _losses(contest: Contest, wanted: Any) -> dict[str, dict[str, dict[str, float]]]:
    """Return points lost by task, distinct graph and schedule."""
    bench, shop = contest.bench, contest.shop
    done: dict[str, dict[str, dict[str, float]]] = {}
    for number, recipe in enumerate(_recipes(contest), start=1):
        engines, name_of = shop.engines(recipe), recipe_id(recipe)
        done[name_of] = {}
        for name, job in bench.jobs.items():
            schedules = wanted[name_of][name]
            answers = answer_all(job.tuning, job.sampler, schedules, engines.fleet, bench.cache)
            full = graded(
                job.workload,
                job.tuning,
                contest.full_answers(job, job.tuning).ids,
                bench.tokenizer.decode,
            )
            rows = {}
            for schedule, made in answers.items():
                own = graded(job.workload, job.tuning, made.ids, bench.tokenizer.decode)
                assert own is not None, "built-in tasks are graded"
                rows["/".join(schedule.precisions)] = loss_in_points(own, full).mean
            done[name_of][name] = rows
        _say(f"losses: {number} recipes")
    return done


def _count(cache: Cache, began: float) -> float:
    """Return the seconds that all runs of the script took, this one counted."""
    seconds: float = cache.get("seconds", digest_json("all")) or 0.0
    seconds += time.monotonic() - began
    cache.put("seconds", digest_json("all"), seconds)
    return seconds


def _kept(cache: Cache, kind: str, key: str, make: Callable[[], Any]) -> Any:
    found = cache.get(kind, key)
    if found is None:
        found = make()
        cache.put(kind, key, found)
    return found


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
