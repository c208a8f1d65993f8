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
from engines.targets import target_from_name
from engines.trt import BuildRequest, Extents, module_version, plain

SERVE = "engines.trt:serve"
_KIND = "plan"


@dataclass(frozen=True, kw_only=True)
class BuiltPlan:
    """A plan in the cache.

    Attributes:
        file: Where it lies; only read.
        sha256: Of its bytes, hex.
        bytes: Of the file.
        version: Of the module that built it.
        log: The builder's whole log.
    """

    file: Path
    sha256: str
    bytes: int
    version: str
    log: Path


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


def plan_key(request: BuildRequest, digests: Mapping[str, str]) -> str:
    """Return the sha256 of everything that a plan depends on, hex.

    That is the graph and the weights in it, extents, options, target, the module's version and,
    where it builds for this machine's GPU, that GPU.

    Args:
        request: What is wanted.
        digests: sha256 of weight files that are known already, by their path.

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
        }
    )


def built_plan(
    request: BuildRequest,
    cache: Cache,
    log: BuildLog,
    digests: Mapping[str, str] | None = None,
    limit_s: float | None = None,
) -> BuiltPlan:
    """Return the plan of a request, built where the cache has none.

    Args:
        request: What is wanted.
        cache: Where plans are kept.
        log: Counts what was built and what was found.
        digests: sha256 of weight files that are known already, by their path.
        limit_s: Seconds after which a build that says nothing is ended.

    Raises:
        BackendError: TensorRT refuses the graph, or its process died; ends with the reason.
        InputError: A graph or a weight file cannot be read.
        MissingExtra: The module is not installed.
    """
    key = plan_key(request, digests or {})
    folder = cache.blobs(_KIND)
    file, said = folder / f"{key}.plan", folder / f"{key}.log"
    record = cache.get(_KIND, key)
    if record is not None and file.is_file() and digest_file(file).sha256 == record["sha256"]:
        log.reused += 1
        os.utime(file)
        return BuiltPlan(file=file, log=said, **record)
    scratch = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder))
    try:
        with Child(SERVE, None, limit_s, steady=True) as child:
            made, print_ = scratch / "plan", scratch / "log"
            record = child.ask({**plain(request), "out": str(made)}, print_)
        if digest_file(made).sha256 != record["sha256"]:
            raise CadenzaError(
                f"the plan of {request.graph.name} was not written whole; free some space and try "
                f"again"
            )
        os.replace(made, file)
        os.replace(print_, said)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    cache.put(_KIND, key, record)
    log.built += 1
    return BuiltPlan(file=file, log=said, **record)


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
