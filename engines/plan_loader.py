"""Plans of a bundle on this machine's GPU: checked, then loaded; and which target to run.

    digest -> header, version, SM and system against this machine -> TensorRT sees the first byte

Loading is not executed: no machine of the project's has a GPU.  The checks are.
"""

from __future__ import annotations

import numpy as np

from engines.buckets import Buckets, buckets_of
from engines.bundle import Bundle
from engines.cuda import gpu_here
from engines.errors import BackendError, BundleError, InputError, MissingExtra
from engines.files import digest_file
from engines.machine import machine
from engines.manifest import Engine
from engines.plan import plan_from_file
from engines.plan_fit import Here, misfit
from engines.targets import target_from_name
from engines.trt import module_version
from engines.trt_run import Device, PlanBackend

# What `best_target` does, for people.
BEST_TARGET = "plans that fit this machine's GPU, else cpu"


def has_plans(target: str) -> bool:
    """Return whether a name is a target whose engines are plans."""
    try:
        return target_from_name(target).ahead
    except InputError:
        return False


def best_target(bundle: Bundle) -> str:
    """Return where a bundle runs best here: on a GPU by plans that fit it, else by ONNX Runtime.

    That is the first of its targets whose plans fit this machine, else cpu, else its first.
    """
    targets = bundle.manifest.targets
    for name in targets:
        if has_plans(name) and why_not(bundle, name) is None:
            return name
    return "cpu" if "cpu" in targets else targets[0]


def why_not(bundle: Bundle, target: str) -> str | None:
    """Return why a target's plans cannot run here, a sentence, or None.  Loads nothing."""
    try:
        check_fit(bundle, target)
    except (BackendError, InputError) as error:
        return str(error)
    return None


def check_fit(bundle: Bundle, target: str) -> None:
    """Hold every plan of a target against this machine, before TensorRT sees a byte of one.

    Raises:
        BackendError: There is no GPU, or a plan is for another one, version or system; prints
            both sides and the command that mends it.
        BundleError: A plan is not whole, or not the one that the manifest names.
        MissingExtra: A package is not installed.
    """
    wanted = target_from_name(target)
    try:
        gpu, version = gpu_here(), module_version(wanted)  # the quicker one first
    except MissingExtra as error:
        raise MissingExtra(f"target {target} cannot run here: {error}") from error
    except BackendError as error:
        raise BackendError(
            f"target {target} cannot run here: {error}, or --target cpu, which runs what stands "
            f"in for its plans"
        ) from error
    here = Here(version=version, sm=gpu.sm, system=machine()["system"])
    for name, engine in bundle.manifest.engines.items():
        if engine.target == target:
            check_engine(bundle, name, engine, here)


def check_engine(bundle: Bundle, name: str, engine: Engine, here: Here) -> None:
    """Hold a plan against the manifest, then against what would run it.

    Args:
        bundle: Has it.
        name: Of the engine.
        engine: Its entry.
        here: What would run it.

    Raises:
        BackendError: It does not fit; both sides and the command that mends it.
        BundleError: It is not whole, or not the one that the manifest names.
    """
    file, wanted = bundle.path(engine.file), target_from_name(engine.target)
    if digest_file(file).sha256 != engine.sha256:
        raise BundleError(f"engine {name!r}: {engine.file} was changed; get the bundle again")
    try:
        plan = plan_from_file(file)
    except InputError as error:
        raise BundleError(f"engine {name!r}: {error}") from error
    why = misfit(name, wanted, plan, engine.built, here, str(bundle.folder))
    if why is not None:
        raise BackendError(why)


def load_plan(bundle: Bundle, engine: Engine, device: Device) -> PlanBackend:
    """Return a loaded plan of a bundle; `check_fit` has passed.

    Raises:
        BackendError: TensorRT refuses it, or there is not enough memory.
        BundleError: A weight is missing or of another type.
    """
    manifest = bundle.manifest
    graph = manifest.graphs[engine.graph]
    file = bundle.path(engine.file)
    return PlanBackend.load(
        serve=file if graph.tail == "serve" else None,
        trace=file if graph.tail == "trace" else None,
        precision=manifest.precisions[engine.precision],
        scales=None if graph.scales is None else np.array(graph.scales, np.float32),
        weights=[bundle.path(path) for path in graph.weights if path.endswith(".safetensors")],
        device=device,
        buckets=buckets_in(bundle),
        pad_id=manifest.model.eos_id,
    )


def buckets_in(bundle: Bundle) -> Buckets:
    """Return the shapes that a bundle declares for plans, or those that its shape asks for."""
    manifest = bundle.manifest
    if manifest.buckets is not None:
        return manifest.buckets
    answers = [task.sampler.gen_length for task in manifest.tasks.values()]
    return buckets_of(manifest.shape, answers, manifest.model.max_length)
