"""`cadenza rebuild`: a bundle's plans built for another target, from the graphs that it carries.

    bundle -> graph of each precision in use -> plan for the target, read back -> the bundle again,
    with one target more

Schedules are carried over, and how each plan's weights are given; build routes are not.  What was
measured for the old target says nothing about the new one, so it is marked stale; golden answers
are those of the graphs that stand in: they are rerun first, and compared with the new plans'
where those can run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from engines.build import BuildLog, Cache, open_cache
from engines.bundle import Bundle, read_bundle, write_bundle
from engines.cuda import sm_here
from engines.errors import BackendError, InputError
from engines.golden import load_all, rerun_golden
from engines.manifest import GOLDEN, Engine
from engines.plan_loader import why_not
from engines.plans import built_plan, engine_entry, profile_of, read_back, timing_file
from engines.targets import refusal, target_from_name
from engines.terminal import command_parser, emit, emit_json, run_command
from engines.trt import BuildRequest, TrtOptions, module_version, options_from_recorded

# The target whose graphs answer in the place of plans.
_STANDS_IN = "cpu"

_EXAMPLES = """\
examples:
  cadenza rebuild BUNDLE --target rtx-sm120              one target more, in place
  cadenza rebuild BUNDLE --target rtx-sm86 -o ANOTHER    into a new bundle
"""


def main(argv: Sequence[str]) -> int:
    """Run `argv`, rebuild and its arguments, and return the exit code."""
    if not argv or argv[0] != "rebuild":
        raise ValueError(f"the command is rebuild, got {list(argv)}")
    return run_command(_parser(), _rebuild, argv[1:])


def rebuild(
    bundle: Bundle,
    target: str,
    out: Path,
    cache: Cache,
    log: BuildLog,
    say: Callable[[str], None] = lambda text: None,
    allow_mismatch: bool = False,
    strict: bool = False,
) -> Bundle:
    """Write a bundle with the plans of one target more, or of one of its own again.

    Args:
        bundle: Has the graphs; every byte of it was checked.
        target: One of TensorRT.
        out: The folder to be; the bundle's own is replaced when the new one is whole.
        cache: Where plans are kept.
        log: Counts what was built and what was found.
        say: Where progress goes, a line at a time.
        allow_mismatch: Take a plan that was not built as asked, and say so in the manifest.
        strict: Fail where the bundle's timing cache lacks a time.

    Raises:
        InputError: The bundle was not made for TensorRT, or the target lacks a precision.
        BackendError: TensorRT refuses a graph, or builds something else.
        MissingExtra: The module that builds for the target is not installed.
    """
    name = _checked(bundle, target)
    before = _plans_of(bundle)
    _recheck(bundle, say)
    for precision in before:
        why = refusal(target_from_name(name), precision)
        if why is not None:
            raise InputError(f"{why}; the schedules need {precision}: tune for {name} instead")
    manifest = json.loads(json.dumps(bundle.manifest.raw))
    files = {
        path: bundle.path(path)
        for path in bundle.manifest.files
        if path != GOLDEN and not path.endswith(f".{name}.plan")
    }
    for precision, engine in before.items():
        say(f"building {precision} for {name}")
        request = _request(bundle, engine, name, say)
        timed = timing_file(name) if timing_file(name) in bundle.manifest.files else None
        plan = built_plan(
            request,
            cache,
            log,
            _digests(bundle),
            timing=None if timed is None else bundle.path(timed),
            strict=strict,
        )
        recorded = engine.built.get("quantized")
        quantized = recorded if isinstance(recorded, int) else 0
        built = read_back(plan, precision, quantized, allow_mismatch, say)
        entry = engine_entry(request, engine.graph, precision, built)
        files[entry["file"]] = plan.file
        if plan.timing is not None and timed is None:
            files[timing_file(name)] = plan.timing
        manifest["engines"][f"{precision}.{name}"] = entry
    if name not in manifest["targets"]:
        manifest["targets"].append(name)
    old = next(iter(before.values())).target
    for task in manifest["tasks"].values():
        if name != old:
            schedule = task["targets"][old]["schedule"]
            stale = f"carried over from {old}: nothing was measured for {name}"
            task["targets"][name] = {"schedule": schedule, "measured": {"stale": stale}}
    return write_bundle(out, manifest, files, bundle.golden, force=out == bundle.folder)


def agreement(made: Bundle, target: str, say: Callable[[str], None]) -> dict[str, int] | None:
    """Return how many golden answers the new plans give again, where they can run; else None.

    The answers are those of the graphs that stand in: a plan rounds as they do and sums in another
    order, so that some may differ.  Not executed: no machine of the project's has a GPU.
    """
    why = why_not(made, target)
    if why is not None or _STANDS_IN not in made.manifest.targets:
        say(f"the plans for {target} were not run: {why or 'nothing to compare them with'}")
        return None
    _, runtime = load_all(made, target)
    with runtime:
        golden = rerun_golden(runtime, _STANDS_IN)
    say(f"on {target} {golden.equal} of {golden.checked} golden answers are the same")
    return {"checked": golden.checked, "equal": golden.equal}


def _recheck(bundle: Bundle, say: Callable[[str], None]) -> None:
    """Rerun the golden answers of what stands in for plans, before anything is built.

    Raises:
        BackendError: One differs: the graphs do not compute here what they did.
    """
    if _STANDS_IN not in bundle.manifest.targets:
        return
    _, runtime = load_all(bundle, _STANDS_IN)
    with runtime:
        golden = rerun_golden(runtime)
    say(f"{golden.equal} of {golden.checked} golden answers are equal on {_STANDS_IN}")
    if golden.differences:
        raise BackendError(
            f"{len(golden.differences)} of {golden.checked} golden answers differ on "
            f"{_STANDS_IN}; {golden.differences[0]}; rebuild where the bundle was tuned"
        )


def _checked(bundle: Bundle, target: str) -> str:
    """Return the target's own name, if plans can be built for it from a bundle.

    Raises:
        InputError: They cannot.
    """
    wanted = target_from_name(target)
    if not wanted.ahead:
        raise InputError(
            f"{wanted.name} has no engines that are built ahead; rebuild for rtx-* or trt"
        )
    if not _plans_of(bundle):
        raise InputError(
            f"{str(bundle.folder)!r} has no graphs for TensorRT, only those of "
            f"{', '.join(bundle.manifest.targets)}; export and tune for {wanted.name}"
        )
    return wanted.name


def _plans_of(bundle: Bundle) -> dict[str, Engine]:
    """Return the plan of each precision, of the first target that has plans."""
    for target in bundle.manifest.targets:
        if target_from_name(target).ahead:
            return bundle.manifest.serving(target)
    return {}


def _request(
    bundle: Bundle, engine: Engine, target: str, say: Callable[[str], None]
) -> BuildRequest:
    manifest = bundle.manifest
    graph = manifest.graphs[engine.graph]
    return BuildRequest(
        graph=bundle.path(graph.file),
        target=target,
        profile=profile_of(
            manifest.shape,
            [task.sampler.gen_length for task in manifest.tasks.values()],
            manifest.model.max_length,
            graph.scales,
        ),
        options=_options(engine, target, say),
    )


def _options(engine: Engine, target: str, say: Callable[[str], None]) -> TrtOptions:
    """Return how an engine was built, as far as that means something for a target.

    What a build route does depends on the compiler and on the GPU that it was timed on: what
    ships of a search is its engines, not its routes.
    """
    options = options_from_recorded(engine.options, f"engine {engine.file!r}")
    if not options.route:
        return options
    wanted = target_from_name(target)
    where = (target, module_version(wanted), None if wanted.sms else sm_here())
    found = (engine.target, engine.built.get("module"), engine.built.get("sm"))
    if where == found:
        return options
    say(
        f"{engine.precision}: its build route, {options.route}, was found on {engine.target} by "
        f"version {found[1] or 'unknown'} of the module and means nothing for {target} by version "
        f"{where[1]}: the default one is built; tune for {target} to search others"
    )
    return replace(options, route=TrtOptions().route)


def _digests(bundle: Bundle) -> dict[str, str]:
    return {path: entry.sha256 for path, entry in bundle.manifest.files.items()}


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rebuild",
        "Build a bundle's engines of TensorRT for another target, from the graphs in it.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add("bundle", metavar="BUNDLE", type=Path, help="what cadenza tune wrote for TensorRT")
    add("--target", metavar="T", required=True, help="for instance rtx-sm120, rtx-sm89+sm120")
    add("-o", "--output", metavar="BUNDLE", type=Path, help="a new bundle (default: in place)")
    add("--cache", metavar="DIR", type=Path, help="folder of engines")
    add(
        "--allow-precision-mismatch",
        action="store_true",
        help="take an engine that was not built in the precision asked for, with a warning",
    )
    add(
        "--timing-cache-miss",
        choices=("measure", "error"),
        default="measure",
        help="what TensorRT does where the bundle's timing cache lacks a time; error: the same "
        "kernels are chosen again, or nothing is built (default: measure)",
    )
    add("--json", action="store_true", help="print the result as JSON on stdout")
    return parser


def _rebuild(args: argparse.Namespace) -> int:
    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    bundle, log = read_bundle(args.bundle), BuildLog()
    made = rebuild(
        bundle,
        args.target,
        args.output or bundle.folder,
        open_cache(args.cache, os.environ),
        log,
        say,
        args.allow_precision_mismatch,
        args.timing_cache_miss == "error",
    )
    found = agreement(made, target_from_name(args.target).name, say)
    targets: Mapping[str, object] = {"agreement": found, "targets": list(made.manifest.targets)}
    if args.json:
        counts = {"built": log.built, "reused": log.reused}
        emit_json({"bundle": str(made.folder), "digest": made.digest, **targets, **counts})
    else:
        emit(f"{made.folder}: targets {', '.join(made.manifest.targets)}; {log}")
        emit(f"next: cadenza verify {made.folder}")
    return 0
