"""TensorRT and TensorRT-RTX behind one interface: plans, built ahead of time from typed graphs.

Both modules have the same classes; which one builds is the target's.  TensorRT-RTX builds for GPUs
that are not here.  A precision is what the graph says: there are no precision flags, and nothing
is calibrated.  A plan is native code: it is built in a child process (`engines.plans`), and read
by TensorRT only after its digest was checked.

The only file that imports tensorrt, tensorrt_rtx and tensorrt_rtx_bindings, and only inside
functions.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import Any

from engines.document import Document
from engines.errors import BackendError, BundleError, InputError, MissingExtra
from engines.targets import Target, target_from_name

# Least, best and most extents of an input.
Extents = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

# Who provides each module, best first, and the extra that brings one.
_PACKAGES: dict[str, tuple[tuple[str, ...], str]] = {
    "tensorrt": (("tensorrt",), "tensorrt"),
    "tensorrt-rtx": (("tensorrt_rtx", "tensorrt_rtx_bindings"), "tensorrt-rtx"),
}

# Severities of TensorRT's log, from the worst on.
_SEVERITIES = ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE")


@dataclass(frozen=True, kw_only=True)
class TrtOptions:
    """How a plan is built, besides the graph, the shapes and the target.

    Attributes:
        optimization_level: 0 to 5: how long TensorRT looks for faster code.
        route: A build route as `engines.routes` writes it; "" for TensorRT's own.
    """

    optimization_level: int = 3
    route: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.optimization_level <= 5:
            raise ValueError(
                f"0 <= optimization_level <= 5 must hold, got {self.optimization_level}"
            )


def options_from_recorded(given: Mapping[str, object], where: str) -> TrtOptions:
    """Return the options that a manifest records with a plan.

    Raises:
        BundleError: One is unknown, or of another type.
    """
    options = Document(dict(given), f"options of {where}", BundleError)
    known = [each.name for each in fields(TrtOptions)]
    for name, value in options.items():
        if name not in known:
            value.fail(f"this version knows only {', '.join(known)}; install a newer Cadenza")
    level, route = options.get("optimization_level"), options.get("route")
    defaults = TrtOptions()
    return TrtOptions(
        optimization_level=level.integer(0, 5) if level else defaults.optimization_level,
        route=route.text() if route else defaults.route,
    )


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """One plan that is wanted.

    Attributes:
        graph: The ONNX file, its weights beside it.
        target: For which it is built.
        profile: Extents of each input whose shape is not fixed.
        options: How.
    """

    graph: Path
    target: str
    profile: Mapping[str, Extents]
    options: TrtOptions = field(default_factory=TrtOptions)


def tensorrt_module(target: Target) -> ModuleType:
    """Return the module that builds for a target.

    Raises:
        MissingExtra: It is not installed; names the extra.
    """
    names, extra = _PACKAGES[target.module]
    for name in names:
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name)
    raise MissingExtra(
        f"target {target.name} needs the package {names[0]!r}, which is not installed; install it "
        f"with: pip install 'cadenza[{extra}]'"
    )


def module_version(target: Target) -> str:
    """Return the version of the module that builds for a target.

    Raises:
        MissingExtra: It is not installed.
    """
    return str(tensorrt_module(target).__version__)


@dataclass(kw_only=True)
class Timing:
    """A timing cache of TensorRT: what its builder measured, so that it need not measure again.

    Attributes:
        before: As an earlier build left it; empty for none.
        strict: Fail where it lacks a time, instead of measuring: then a build chooses the same
            kernels again or does not end.
        after: As this build leaves it.
    """

    before: bytes = b""
    strict: bool = False
    after: bytes = b""


def build_plan(
    request: BuildRequest,
    say: Callable[[str], None],
    marked: Collection[str] = (),
    timing: Timing | None = None,
) -> memoryview:
    """Return the bytes of a plan.

    Args:
        request: What is wanted.
        say: Told every line of TensorRT's log, with its severity.
        timing: Attached to the build, which fills `after`; not for TensorRT-RTX, which measures
            nothing while it builds.
        marked: Names of tensors that are made outputs too, for looking into a plan; what lies on
            both sides of one is no longer fused.

    Raises:
        BackendError: TensorRT refuses the graph; ends with its own words.
        InputError: The graph cannot be read, or an input has no extents.
        MissingExtra: The module is not installed.
    """
    target = target_from_name(request.target)
    trt = tensorrt_module(target)
    logger = _logger(trt, say)
    builder = trt.Builder(logger)
    builder.max_threads = 1  # more of them race, and what they write differs
    network = builder.create_network(0)  # strongly typed: there is no other kind any more
    parser = trt.OnnxParser(network, logger)
    if not request.graph.is_file():
        raise InputError(f"there is no graph {str(request.graph)!r}; export again")
    if not parser.parse_from_file(str(request.graph)):
        faults = [parser.get_error(index).desc() for index in range(parser.num_errors)]
        raise BackendError(
            f"{request.graph.name}: TensorRT cannot read it: {_short(faults)}; use another "
            f"precision, or export again"
        )
    _decompose_attention(trt, network)
    _mark(network, marked, request.graph.name)
    config = builder.create_builder_config()
    config.builder_optimization_level = request.options.optimization_level
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if request.options.route:
        _set_route(config, request.options.route, target)
    if target.sms:
        config.num_compute_capabilities = len(target.sms)
        for index, sm in enumerate(target.sms):
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), index)
    config.add_optimization_profile(_profile(builder, network, request))
    if timing is not None:
        attach_timing(trt, config, timing, request.graph.name)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise BackendError(
            f"{request.graph.name}: TensorRT cannot build it for {target.name}: "
            f"{_short(logger.errors)}; use another precision or target"
        )
    if timing is not None:
        timing.after = bytes(config.get_timing_cache().serialize())
    return memoryview(plan)


def attach_timing(trt: ModuleType, config: Any, timing: Timing, name: str) -> None:
    """Attach a timing cache to a builder's configuration; not executed by TensorRT itself.

    Raises:
        BackendError: It is of another GPU or version.
    """
    if not config.set_timing_cache(config.create_timing_cache(timing.before), False):
        raise BackendError(
            f"{name}: the timing cache was made on another GPU or by another TensorRT; build "
            f"without it"
        )
    if timing.strict:
        config.set_flag(trt.BuilderFlag.ERROR_ON_TIMING_CACHE_MISS)


def serve(given: object) -> Callable[[Any, Callable[[str], None]], Any]:
    """Return the handler of the child in which plans are built.

    A request is a `BuildRequest` as `plain` writes it, with `out`, a file that is nobody's yet,
    and `timing`, null or {"before": a file or null, "after": a file to be, "strict"}; the answer
    is {"sha256", "bytes", "version"}.
    """

    def handle(request: Any, note: Callable[[str], None]) -> Any:
        wanted = request_from_plain(request)
        note(f"building {wanted.graph.name} for {wanted.target}")
        asked, timing = request.get("timing"), None
        if asked is not None:
            before = Path(asked["before"]).read_bytes() if asked["before"] else b""
            timing = Timing(before=before, strict=asked["strict"])
        plan = build_plan(wanted, lambda line: print(line, flush=True), timing=timing)
        Path(request["out"]).write_bytes(plan)
        if timing is not None:
            Path(asked["after"]).write_bytes(timing.after)
        return {
            "sha256": hashlib.sha256(plan).hexdigest(),
            "bytes": plan.nbytes,
            "version": module_version(target_from_name(wanted.target)),
        }

    return handle


def route_text_of_module(target: Target) -> str:
    """Return the JSON in which a target's module lists its build routes; "" where it has none.

    Raises:
        BackendError: The module does not start here.
        MissingExtra: It is not installed.
    """
    trt = tensorrt_module(target)
    logger = _logger(trt, lambda line: print(line, flush=True))
    try:
        config = trt.Builder(logger).create_builder_config()
    except TypeError as error:  # what the bindings raise for a builder that was not made
        raise BackendError(
            f"{target.module} does not start here: {_short(logger.errors)}; see its log"
        ) from error
    return str(getattr(config, "all_build_routes", "") or "")


def serve_routes(given: object) -> Callable[[Any, Callable[[str], None]], Any]:
    """Return the handler of the child that is asked for build routes, by a target's name."""

    def handle(request: Any, note: Callable[[str], None]) -> Any:
        return route_text_of_module(target_from_name(request))

    return handle


def plain(request: BuildRequest) -> dict[str, Any]:
    """Return a request as plain data."""
    return {
        "graph": str(request.graph.resolve()),
        "target": request.target,
        "profile": {name: [list(e) for e in ext] for name, ext in request.profile.items()},
        "options": asdict(request.options),
    }


def request_from_plain(given: Mapping[str, Any]) -> BuildRequest:
    """Return the request of plain data."""
    return BuildRequest(
        graph=Path(given["graph"]),
        target=given["target"],
        profile={
            name: (tuple(low), tuple(best), tuple(high))
            for name, (low, best, high) in given["profile"].items()
        },
        options=TrtOptions(**given["options"]),
    )


def _logger(trt: ModuleType, say: Callable[[str], None]) -> Any:
    base: Any = trt.ILogger

    class Logger(base):  # type: ignore[misc]
        """Hands every line on, and keeps the errors."""

        def __init__(self) -> None:
            base.__init__(self)  # the bindings want it called by name
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            name = str(severity).rpartition(".")[2]
            if name in _SEVERITIES[:2]:
                self.errors.append(message)
            say(f"[{name}] {message}")

    return Logger()


def _profile(builder: Any, network: Any, request: BuildRequest) -> Any:
    """Return the optimization profile of the inputs whose shape is not fixed."""
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        if -1 not in tuple(tensor.shape):
            continue
        if tensor.name not in request.profile:
            raise InputError(
                f"{request.graph.name}: the input {tensor.name!r} has no fixed shape, and no "
                f"extents were given for it; export again"
            )
        profile.set_shape(tensor.name, *request.profile[tensor.name])
    return profile


def _decompose_attention(trt: ModuleType, network: Any) -> None:
    """Let attention be computed in parts where TensorRT has no kernel for it whole.

    It has none for float32 and for narrow heads; where it has one, it still takes it.
    """
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer  # the bindings' own way to narrow a layer
            layer.attention.decomposable = True


def _mark(network: Any, names: Collection[str], graph: str) -> None:
    """Make tensors outputs of a network."""
    left = set(names) - {network.get_output(at).name for at in range(network.num_outputs)}
    for index in range(network.num_layers if left else 0):
        layer = network.get_layer(index)
        for tensor in map(layer.get_output, range(layer.num_outputs)):
            if tensor is not None and tensor.name in left:
                network.mark_output(tensor)
                left.discard(tensor.name)
    if left:
        raise InputError(f"{graph}: TensorRT knows no tensor {min(left)!r}; leave it out")


def _set_route(config: Any, route: str, target: Target) -> None:
    config.build_route = route
    if config.build_route != route:
        raise BackendError(
            f"the module of {target.name} has no build routes, so {route!r} cannot be set; leave "
            f"the route out"
        )


def _short(faults: Sequence[str]) -> str:
    """Return the last fault in a line, without the places in TensorRT's own source."""
    if not faults:
        return "it says nothing more, see the log"
    line = " ".join(faults[-1].split())
    return line if len(line) <= 400 else f"{line[:397]}..."
