"""Plans of TensorRT, built once: each in a child process, kept in the cache by their content.

    request -> key -> in the cache? -> digest checked, there it is
                   -> a child builds it under a temporary name -> renamed, and recorded

TensorRT-RTX goes through sets of pointers when it writes a plan, and its threads race, so builds
are the same byte for byte only where addresses are and one thread works: the child is steady.
Once in some dozens they still differ, in generated names.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines.audit import audits, mismatch
from engines.build import BuildLog, Cache, digest_json, graph_digest
from engines.bundle import Bundle
from engines.child import Child
from engines.cuda import sm_here
from engines.errors import BackendError, BundleError, CadenzaError, InputError
from engines.files import digest_file
from engines.machine import machine
from engines.manifest import Shape
from engines.model import IDS, MASK, POSITIONS, SCALES
from engines.plan import plan_from_file
from engines.targets import Target, target_from_name
from engines.trt import BuildRequest, Extents, module_version, plain

SERVE = "engines.trt:serve"
_KIND, _TIMING, _LATEST = "plan", "timing", "timing-latest"


@dataclass(frozen=True, kw_only=True)
class BuiltPlan:
    """A plan in the cache.

    Attributes:
        file: Where it lies; only read.
        sha256: Of its bytes, hex.
        bytes: Of the file.
        version: Of the module that built it.
        log: The builder's whole log.
        timing: The timing cache as its build left it; None for a module that has none.
    """

    file: Path
    sha256: str
    bytes: int
    version: str
    log: Path
    timing: Path | None = None


def profile_of(
    shape: Shape,
    answers: Collection[int],
    longest: int,
    scales: Sequence[Sequence[float]] | None = None,
) -> dict[str, Extents]:
    """Return the extents of a graph's inputs.

    Args:
        shape: Ranges of rows, and of prompt tokens.
        answers: Tokens of an answer, of every task.
        longest: Tokens of prompt and answer that the model takes.
        scales: Static activation scales of each window [W][S], where they are an input.
    """
    few, most = min(answers), max(answers)
    least, best, top = shape.prompt
    lengths = [min(prompt + most, longest) for prompt in (least, best, top)]
    lengths[0] = min(least + few, longest)
    rows, asked = shape.batch, (1, most, most)
    canvas = tuple((b, length) for b, length in zip(rows, lengths, strict=True))
    places = tuple((b, count) for b, count in zip(rows, asked, strict=True))
    found: dict[str, Extents] = {IDS: _three(canvas), MASK: _three(canvas)}
    found[POSITIONS] = _three(places)
    if scales is not None:
        found[SCALES] = _three(tuple((b, 1, len(scales[0])) for b in rows))
    return found


def plan_key(request: BuildRequest, digests: Mapping[str, str], timing: Path | None = None) -> str:
    """Return the sha256 of everything that a plan depends on, hex.

    That is the graph and the weights in it, extents, options, target, the module's version, where
    it builds for this machine's GPU that GPU, and a timing cache that is to be followed.  What an
    earlier build of ours measured changes a plan no more than measuring again would.

    Args:
        request: What is wanted.
        digests: sha256 of weight files that are known already, by their path.
        timing: A timing cache that was given.

    Raises:
        InputError: A graph or a weight file cannot be read.
        MissingExtra: The module is not installed.
    """
    target = target_from_name(request.target)
    return digest_json(
        {
            "graph": graph_digest(request.graph, digests),
            **{key: value for key, value in plain(request).items() if key != "graph"},
            "module": [target.module, module_version(target)],
            "machine": None if target.sms else machine(gpu=True),
            **({} if timing is None else {"timing": digest_file(timing).sha256}),
        }
    )


def built_plan(
    request: BuildRequest,
    cache: Cache,
    log: BuildLog,
    digests: Mapping[str, str] | None = None,
    limit_s: float | None = None,
    timing: Path | None = None,
    strict: bool = False,
) -> BuiltPlan:
    """Return the plan of a request, built where the cache has none.

    Args:
        request: What is wanted.
        cache: Where plans are kept.
        log: Counts what was built and what was found.
        digests: sha256 of weight files that are known already, by their path.
        limit_s: Seconds after which a build that says nothing is ended.
        timing: A timing cache to follow, only read; None for the one that grows in the cache.
        strict: Fail where the timing cache lacks a time.

    Raises:
        BackendError: TensorRT refuses the graph, or its process died; ends with the reason.
        InputError: A graph or a weight file cannot be read, or the module has no timing caches.
        MissingExtra: The module is not installed.
    """
    target = target_from_name(request.target)
    if strict and not has_timing(target):
        raise InputError(
            f"{target.module} measures nothing while it builds, so {target.name} has no timing "
            f"cache to miss; leave --timing-cache-miss out"
        )
    key = plan_key(request, digests or {}, timing)
    folder = cache.blobs(_KIND)
    file, said = folder / f"{key}.plan", folder / f"{key}.log"
    record = cache.get(_KIND, key)
    if record is not None and file.is_file() and digest_file(file).sha256 == record["sha256"]:
        log.reused += 1
        os.utime(file)
        return _plan(record, file, said, cache)
    scratch = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder))
    try:
        with Child(SERVE, None, limit_s, steady=True) as child:
            made, print_ = scratch / "plan", scratch / "log"
            grown = scratch / "timing"
            asked = None
            if has_timing(target):
                before = timing or _latest_timing(cache, target)
                asked = {"after": str(grown), "strict": strict}
                asked["before"] = None if before is None else str(before)
            record = child.ask({**plain(request), "out": str(made), "timing": asked}, print_)
        if digest_file(made).sha256 != record["sha256"]:
            raise CadenzaError(
                f"the plan of {request.graph.name} was not written whole; free some space and try "
                f"again"
            )
        os.replace(made, file)
        os.replace(print_, said)
        if asked is not None:
            record["timing"] = _keep_timing(cache, target, grown, latest=timing is None)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    cache.put(_KIND, key, record)
    log.built += 1
    return _plan(record, file, said, cache)


def has_timing(target: Target) -> bool:
    """Return whether a target's builder measures kernels, and keeps the times in a cache."""
    return target.module == "tensorrt"


def timing_file(target: str) -> str:
    """Return the place of a target's timing cache in a bundle."""
    return f"engines/{target}.timing"


def _plan(record: Mapping[str, Any], file: Path, said: Path, cache: Cache) -> BuiltPlan:
    """Return a plan of the cache; a timing cache that was removed is none."""
    known = {key: value for key, value in record.items() if key != "timing"}
    timing = None
    if record.get("timing") is not None:
        timing = cache.blobs(_TIMING) / f"{record['timing']}.timing"
        if not timing.is_file() or digest_file(timing).sha256 != record["timing"]:
            timing = None
    return BuiltPlan(file=file, log=said, timing=timing, **known)


def _timing_key(target: Target) -> str:
    """Return where the latest timing cache of this GPU and this version is remembered."""
    return digest_json([target.module, module_version(target), machine(gpu=True)])


def _latest_timing(cache: Cache, target: Target) -> Path | None:
    """Return the timing cache that the builds so far left, or None."""
    found = cache.get(_LATEST, _timing_key(target))
    if found is None:
        return None
    file = cache.blobs(_TIMING) / f"{found['sha256']}.timing"
    whole = file.is_file() and digest_file(file).sha256 == found["sha256"]
    return file if whole else None


def _keep_timing(cache: Cache, target: Target, grown: Path, latest: bool) -> str:
    """Keep the timing cache of a build by its content, and return its sha256."""
    sha256 = digest_file(grown).sha256
    os.replace(grown, cache.blobs(_TIMING) / f"{sha256}.timing")
    cache.put(_TIMING, sha256, {"module": module_version(target)})
    if latest:
        cache.put(_LATEST, _timing_key(target), {"sha256": sha256})
    return sha256


def read_back(
    plan: BuiltPlan,
    precision: str,
    quantized: int,
    allowed: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Return what a plan holds, for the manifest, held against what was asked for.

    Args:
        plan: As it was built.
        precision: The name of what was asked for.
        quantized: Elements of the weights that were to be multiplied so; 0 for all.
        allowed: Whether it may differ; then that is said and kept.
        say: Where warnings go.

    Raises:
        BackendError: It differs, and may not.
    """
    read = plan_from_file(plan.file)
    made = audits(read, precision)
    differs = [why for each in made if (why := mismatch(each, precision, quantized)) is not None]
    if differs and not allowed:
        raise BackendError(
            f"{differs[0]}; leave {precision} out, or take it as it is with "
            f"--allow-precision-mismatch"
        )
    for each in differs:
        say(f"warning: {each}")
    if not made:
        say(f"warning: what {precision} was built in was not read back: {read.why}")
    return {
        "module": plan.version,
        "system": machine()["system"],
        "sm": None if read.sms else sm_here(),  # where the plan says it, it is not said twice
        "executed": "not executed: no GPU was asked",
        "quantized": quantized,
        "audit": [audit.to_json() for audit in made],
        "not_read": read.why,
        "mismatch": differs,
    }


def engine_entry(
    request: BuildRequest, graph: str, precision: str, built: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what the manifest of a bundle says of a plan; `file` is its place in the bundle.

    Args:
        request: What it was built of.
        graph: The graph's id.
        precision: The name of the precision.
        built: As `read_back` gave it.
    """
    return {
        "file": f"engines/{precision}.{request.target}.plan",
        "graph": graph,
        "precision": precision,
        "target": request.target,
        "built": dict(built),
        "options": asdict(request.options),
    }


def check_plans(bundle: Bundle, target: str) -> dict[str, str]:
    """Return what the header of each plan of a target says, by the engine's name.

    Raises:
        BundleError: A plan is not whole, or for other SMs than its target.
    """
    found = {}
    for name, engine in bundle.manifest.engines.items():
        if engine.target != target:
            continue
        try:
            plan = plan_from_file(bundle.path(engine.file))
        except InputError as error:
            raise BundleError(f"engine {name!r}: {error}") from error
        wanted = set(target_from_name(target).sms)
        if not wanted <= set(plan.sms):
            raise BundleError(
                f"engine {name!r} is for {_sms(plan.sms)}, its target is {target}; tune again"
            )
        version = ".".join(map(str, plan.version))
        found[name] = f"whole, for {_sms(plan.sms)}, by version {version}"
    return found


def _sms(sms: tuple[int, ...]) -> str:
    return ", ".join(f"sm{sm}" for sm in sms) or "no SM that is known"


def _three(extents: tuple[tuple[int, ...], ...]) -> Extents:
    low, best, high = extents
    return low, best, high
