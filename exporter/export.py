"""From a checkpoint to an EXPORT folder, and from one EXPORT folder to another recipe's.

    checkpoint -> checked -> weights linked -> graph traced -> calibrated along full-precision
    traces -> fp32 graphs held against the framework -> graphs of every precision, each run once
    -> the folder gets its name

`requantize` begins at the graphs of a folder that is there, and needs no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING

import numpy as np

from calib_data.tasks import TASKS
from calib_data.workload import Workload, WorkloadError, workload_from_spec
from engines import __version__
from engines.errors import InputError
from engines.files import digest_file, place_file, whole_folder
from engines.manifest import Shape
from engines.precision import FULL_PRECISION, Precision, precision_from_name
from engines.sampler import Pass, Request
from engines.schedule import SamplerConfig, Schedule, passes_by_window
from exporter.calibrate import Calibration, read_calibration
from exporter.folder import (
    CALIBRATION,
    EXPORT,
    TOKENIZER,
    WEIGHTS,
    Export,
    ExportTask,
    Recipe,
    is_export,
    read_export,
    write_export,
)
from exporter.parity import GATE, check_parity, compare, engine_of, smoke, states_from_requests
from exporter.variants import Core, stored_weights, write_variants

if TYPE_CHECKING:
    from exporter.checkpoint import Checkpoint

Say = Callable[[str], None]

PRECISIONS = ("fp32", "int8", "w4a3", "w4a4", "w4a6", "w4a8")
SETTINGS = ("steps", "gen_length", "block_length")
TARGETS = ("cpu", "cuda")

# Prompts of each task whose denoising states the graphs are compared on.
_PARITY_PROMPTS = 3


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """What `cadenza export` is asked for.

    Attributes:
        model: The checkpoint's folder.
        out: The EXPORT folder.
        precisions: Their names; fp32 is always made, the others come from it.
        target: Where the graphs are meant to run.
        recipe: Windows, quantizer, clip, and blocks that stay in fp32.
        shape: Ranges of batch and prompt; None for 1:8:64 and what the model's length allows.
        tasks: NAME or NAME=FILE.jsonl; none for all built-in ones.
        settings: steps, gen_length and block_length for every task.
        task_settings: The same for one task, over `settings`.
        prompts: Calibration prompts of each task.
        seed: Of the built-in tasks' prompts.
        copy: Copy the checkpoint's weights instead of linking them.
        force: Replace an export that another command made.
    """

    model: Path
    out: Path
    precisions: tuple[str, ...] = PRECISIONS
    target: str = "cpu"
    recipe: Recipe = field(default_factory=Recipe)
    shape: Shape | None = None
    tasks: tuple[str, ...] = ()
    settings: Mapping[str, int] = field(default_factory=dict)
    task_settings: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    prompts: int = 32
    seed: int = 0
    copy: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        if self.prompts < 1:
            raise ValueError(f"prompts >= 1 must hold, got {self.prompts}")
        if self.target not in TARGETS:
            raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {self.target!r}")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """An export, and whether it was made now or stood there already, the same."""

    export: Export
    made: bool


def export(config: ExportConfig, say: Say = lambda text: None) -> Outcome:
    """Export a checkpoint; the folder gets its name only when everything has been checked.

    Raises:
        InputError: An argument or a file given is at fault.
        BackendError: A graph does not compute what the framework does, or cannot run.
    """
    from exporter.calibrate import calibrate
    from exporter.checkpoint import load_denoiser, model_info, read_checkpoint
    from exporter.framework import TorchBackend

    precisions = _precisions(config.precisions)
    tasks = _workloads(config)
    checkpoint = read_checkpoint(config.model)
    model = model_info(checkpoint)
    shape = config.shape or _default_shape(checkpoint, tasks)
    requests = _requests(checkpoint, tasks, config)
    request = _digest(config, precisions, model.digest, shape, requests)
    if is_export(config.out):
        there = read_export(config.out)
        if there.request == request:
            say(f"{config.out} is complete already; nothing was changed")
            return Outcome(export=there, made=False)
    with whole_folder(config.out, force=config.force, is_ours=is_export, kind="export") as folder:
        core = _write_core(checkpoint, folder, config.copy, say)
        denoiser = load_denoiser(checkpoint)
        calibration = calibrate(
            denoiser,
            requests,
            model,
            on_batch=lambda done: say(f"calibrated on {done}/{len(requests)} prompts"),
        )
        _write_calibration(calibration, folder)
        graphs, families = write_variants(
            core, precisions, calibration, config.recipe, folder, {}, say
        )
        made = Export(
            folder=folder,
            model=model,
            sampler=next(iter(tasks.values()))[1],
            tasks={
                name: ExportTask(sampler=sampler, says=task.says, source=task.source)
                for name, (task, sampler) in tasks.items()
            },
            target=config.target,
            shape=shape,
            precisions={precision.name: precision for precision in precisions},
            families=families,
            graphs=graphs,
            recipe=config.recipe,
            parity={},
            environment=_environment("torch", "onnxscript"),
            request=request,
        )
        reference = TorchBackend(denoiser)
        states = states_from_requests(_few_of_each_task(requests), reference, model)
        full = engine_of(made, f"{FULL_PRECISION.name}.trace")
        parity = compare(states, reference, full, model.mask_id)
        say(
            f"fp32 against the framework: largest difference {parity.max_error:.2g}, same token "
            f"at {parity.agreement:.2%} of {parity.positions} positions"
        )
        check_parity(parity)
        made = replace(made, parity={"fp32": parity.to_json(), "gate": GATE})
        made = _finished(made, states, say)
    return Outcome(export=replace(made, folder=config.out), made=True)


def requantize(source: Path, out: Path, recipe: Recipe, say: Say = lambda text: None) -> Path:
    """Write the EXPORT folder of another recipe beside one, and return `out`.

    Weights are hard-linked where the recipe leaves them as they are.  One that is there already
    with the same recipe of the same source is returned untouched.

    Args:
        source: An export.
        out: The new folder.
        recipe: Windows, clip, and blocks that stay in fp32.
        say: Told what is being done.

    Raises:
        InputError: The source is no whole export, or the recipe does not fit it.
        BackendError: A new graph cannot run, or gives nonsense.
    """
    import onnx

    before = read_export(source)
    for name, task in before.tasks.items():
        _check_windows(name, task.sampler, recipe.windows)
    request = _sha256([before.request, asdict(recipe)])
    if is_export(out) and read_export(out).request == request:
        return out
    calibration = read_calibration(source / CALIBRATION)
    with whole_folder(out, force=False, is_ours=is_export, kind="export") as folder:
        full = before.graphs[f"{FULL_PRECISION.name}.trace"]
        same_weights = recipe.keep == before.recipe.keep
        families: dict[str, Path] = {}
        for family in {precision.family for precision in before.precisions.values()}:
            path = f"{WEIGHTS}/{family}.safetensors"
            if family != FULL_PRECISION.family and same_weights:
                families[family] = folder / path
                place_file(source / path, families[family])
        for path in full.weights:
            place_file(source / path, folder / path)
        for path in before.files:
            if path.startswith(f"{TOKENIZER}/") or path == CALIBRATION:
                place_file(source / path, folder / path)
        tensors = {
            name: stored
            for name, stored in stored_weights(folder).items()
            if f"{WEIGHTS}/{stored.file.name}" in full.weights
        }
        graph = onnx.load(str(source / full.file), load_external_data=False)
        core = Core.of(graph, tensors, before.model.architecture)
        precisions = list(before.precisions.values())
        graphs, sizes = write_variants(
            core, precisions, calibration, recipe, folder, families, say
        )
        made = replace(
            before,
            folder=folder,
            families=sizes,
            graphs=graphs,
            recipe=recipe,
            environment=_environment(),
            request=request,
        )
        states = states_from_requests(_random_requests(made), engine_of(made, "fp32.trace"), made.model)
        _finished(made, states, say)
    return out


def _finished(made: Export, states: Sequence[Pass], say: Say) -> Export:
    """Run every new graph once, write export.json, and return what it says."""
    say(f"running {len(made.graphs)} graphs")
    parity = {**made.parity, "precisions": smoke(made, states)}
    files = {
        path.relative_to(made.folder).as_posix(): digest_file(path)
        for path in sorted(made.folder.rglob("*"))
        if path.is_file() and path.name != EXPORT
    }
    made = replace(made, parity=parity, files=files)
    write_export(made)
    return made


def _write_core(checkpoint: Checkpoint, folder: Path, copy: bool, say: Say) -> Core:
    """Put weights and tokenizer into the folder, trace the graph, and return both."""
    from exporter.graph import graph_from_config
    from exporter.weights import ONNX_TYPES

    linked = [place_file(file, folder / WEIGHTS / file.name, copy) for file in checkpoint.files]
    if not all(linked):
        size = sum(file.stat().st_size for file in checkpoint.files) / 1e6
        why = "as asked" if copy else "small, or on another file system: no hard link"
        say(f"weights were copied ({size:.1f} MB; {why})")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (checkpoint.folder / name).exists():
            place_file(checkpoint.folder / name, folder / TOKENIZER / name, copy=True)
    say("tracing the graph")
    graph = graph_from_config(
        checkpoint.config,
        checkpoint.keys,
        {key: ONNX_TYPES[stored.kind] for key, stored in checkpoint.tensors.items()},
    )
    placed = {
        key: replace(stored, file=folder / WEIGHTS / stored.file.name)
        for key, stored in checkpoint.tensors.items()
    }
    return Core.of(graph, placed, checkpoint.architecture)


def _write_calibration(calibration: Calibration, folder: Path) -> None:
    text = json.dumps(calibration.to_json(), separators=(",", ":"), allow_nan=False)
    (folder / CALIBRATION).write_text(text + "\n", encoding="utf-8")


def _precisions(names: Sequence[str]) -> list[Precision]:
    """Return the precisions of the names, fp32 first, each once."""
    try:
        found = [precision_from_name(name) for name in names]
    except ValueError as error:
        raise InputError(f"{error}") from error
    return list(dict.fromkeys((FULL_PRECISION, *found)))


def _workloads(config: ExportConfig) -> dict[str, tuple[Workload, SamplerConfig]]:
    """Return each task's workload and sampler settings by name."""
    found: dict[str, tuple[Workload, SamplerConfig]] = {}
    for spec in config.tasks or tuple(TASKS):
        name = spec.partition("=")[0]
        settings = {**config.settings, **config.task_settings.get(name, {})}
        try:
            task = workload_from_spec(spec, **settings)
            sampler = SamplerConfig(
                steps=task.steps, gen_length=task.gen_length, block_length=task.block_length
            )
        except WorkloadError as error:
            raise InputError(f"--task {spec}: {error}") from error
        except ValueError as error:
            raise InputError(
                f"task {name!r}: {error}; give --steps, --gen-length, --block-length or "
                f"--task-set {name}.steps=.. that fit"
            ) from error
        if task.name in found:
            raise InputError(f"task {task.name!r} is given twice; rename one")
        _check_windows(task.name, sampler, config.recipe.windows)
        found[task.name] = (task, sampler)
    unknown = sorted(set(config.task_settings) - set(found))
    if unknown:
        raise InputError(
            f"--task-set names the task {unknown[0]!r}, exported are {', '.join(found)}; add "
            f"--task {unknown[0]}"
        )
    return found


def _check_windows(task: str, sampler: SamplerConfig, windows: int) -> None:
    """Check that every window of a task has a pass, so that it can be calibrated."""
    try:
        passes = passes_by_window(sampler, windows)
    except ValueError as error:
        raise InputError(f"task {task!r}: {error}; use fewer --windows or more --steps") from error
    if 0 in passes:
        raise InputError(
            f"task {task!r}: window {passes.index(0)} of {windows} holds none of the "
            f"{sampler.steps} steps; use fewer --windows or more --steps"
        )


def _default_shape(
    checkpoint: Checkpoint, tasks: Mapping[str, tuple[Workload, SamplerConfig]]
) -> Shape:
    """Return 1:8:64 rows, and prompts up to what the model's length leaves for the answer."""
    longest = max(sampler.gen_length for _, sampler in tasks.values())
    room = checkpoint.config.max_length - longest
    if room < 1:
        raise InputError(
            f"an answer of {longest} tokens leaves no room for a prompt in the model's "
            f"{checkpoint.config.max_length}; lower --gen-length"
        )
    return Shape((1, 8, 64), (1, min(16, room), room))


def _requests(
    checkpoint: Checkpoint,
    tasks: Mapping[str, tuple[Workload, SamplerConfig]],
    config: ExportConfig,
) -> list[Request]:
    """Return the calibration prompts of all tasks as requests, tokenized and checked."""
    from exporter.checkpoint import load_tokenizer

    tokenizer = load_tokenizer(checkpoint.folder)
    mask_id, longest = checkpoint.config.mask_id, checkpoint.config.max_length
    requests = []
    for name, (task, sampler) in tasks.items():
        prompts = task.prompts("calibration", config.prompts, config.seed)
        if not prompts:
            raise InputError(
                f"task {name!r} has no calibration prompts; add lines to its file, or give some "
                f'"split": "calibration"'
            )
        for prompt in prompts:
            ids = tuple(tokenizer.encode(prompt.prompt).ids)
            where = f"task {name!r}, prompt {prompt.id!r}"
            if mask_id in ids:
                raise InputError(
                    f"{where} holds the mask token or a symbol that the model's tokenizer does "
                    f"not know: {prompt.prompt[:60]!r}; take it out"
                )
            if len(ids) + sampler.gen_length > longest:
                raise InputError(
                    f"{where} has {len(ids)} tokens, with the answer's {sampler.gen_length} more "
                    f"than the model's {longest}; shorten it or lower --gen-length"
                )
            schedule = Schedule.uniform(FULL_PRECISION.name, config.recipe.windows)
            requests.append(Request(prompt=ids, sampler=sampler, schedule=schedule, task=name))
    return requests


def _few_of_each_task(requests: Sequence[Request]) -> list[Request]:
    """Return the first requests of each task: one ragged batch."""
    tasks = dict.fromkeys(request.task for request in requests)
    return [
        request
        for task in tasks
        for request in [r for r in requests if r.task == task][:_PARITY_PROMPTS]
    ]


def _random_requests(made: Export) -> list[Request]:
    """Return requests of random tokens, of two lengths, for a run without real prompts."""
    rng = np.random.default_rng(0)
    plain = [i for i in range(made.model.vocab) if i not in (made.model.mask_id, made.model.eos_id)]
    schedule = Schedule.uniform(FULL_PRECISION.name, made.windows)
    room = made.model.max_length - made.sampler.gen_length
    return [
        Request(
            prompt=tuple(rng.choice(plain, size=min(length, room)).tolist()),
            sampler=made.sampler,
            schedule=schedule,
        )
        for length in (3, made.shape.prompt[1])
    ]


def _environment(*more: str) -> dict[str, object]:
    """Return the versions that a graph depends on."""
    packages = ("numpy", "onnx", "onnxruntime", *more)
    return {
        "cadenza": __version__,
        "python": python_version(),
        **{name: metadata.version(name) for name in packages},
    }


def _digest(
    config: ExportConfig,
    precisions: Sequence[Precision],
    model: str,
    shape: Shape,
    requests: Sequence[Request],
) -> str:
    """Return the digest of everything that decides an export, its version included."""
    return _sha256(
        [
            __version__,
            model,
            digest_file(config.model.resolve() / "tokenizer.json").sha256,
            [precision.name for precision in precisions],
            config.target,
            asdict(config.recipe),
            asdict(shape),
            [[request.task, request.prompt, asdict(request.sampler)] for request in requests],
        ]
    )


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
