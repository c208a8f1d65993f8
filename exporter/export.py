"""From a checkpoint to an EXPORT folder.

    checkpoint -> checked -> weights linked -> graph traced -> calibrated along full-precision
    traces -> weights rounded and graphs of every precision -> fp32 held against the framework
    -> each graph run -> the folder gets its name

Other recipes of an export that is there are `exporter.requantize`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from engines import __version__
from engines.errors import InputError
from engines.files import check_replaceable, digest_file, place_file, whole_folder
from engines.machine import give_back_memory
from engines.manifest import Shape
from engines.precision import EXECUTED, FULL_PRECISION, Precision, precision_from_name
from engines.sampler import Request
from engines.targets import Target, refusal, taken, target_from_name
from engines.terminal import Progress
from engines.text import tokenizer_from_file
from exporter.calibrate import Calibration, calibrate
from exporter.folder import (
    CALIBRATION,
    REFERENCE,
    TOKENIZER,
    WEIGHTS,
    Export,
    ExportTask,
    Recipe,
    is_export,
    read_export,
)
from exporter.gptq import rounding_from_hessians
from exporter.parity import GATE, check_parity, compare, engine_of, states_from_requests
from exporter.quantize import Rounding, round_to_nearest
from exporter.reference import reference_of, write_reference
from exporter.requantize import Say, environment, finish, requantize, sha256_of
from exporter.requests import (
    Settings,
    Tasks,
    at_every_token,
    few_of_each_task,
    requests_from_tasks,
    tasks_from_specs,
)
from exporter.states import StateLog, sample_states
from exporter.typed_variants import rest_of, write_typed_variants
from exporter.variants import Core, check_kept, write_variants

if TYPE_CHECKING:
    from exporter.checkpoint import Checkpoint

__all__ = ["ExportConfig", "export", "requantize"]

PRECISIONS = ("fp32", "int8", "w4a3", "w4a4", "w4a6", "w4a8")

# In place of them for TensorRT, as far as the target takes them.
AHEAD_PRECISIONS = ("fp32", "fp16", "int8", "int8-w", "fp8", "nvfp4")


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """What `cadenza export` is asked for.

    Attributes:
        model: The checkpoint's folder.
        out: The EXPORT folder.
        precisions: Their names; fp32 is always made, the others come from it; for TensorRT fp16
            too.  None for the usual ones.
        target: Where the graphs are meant to run; those for one target of TensorRT are for all.
        recipe: Windows, quantizer, clip, and blocks that stay in fp32.
        shape: Ranges of batch and prompt; None for 1:8:64 and what the model's length allows, but
            for TensorRT, whose engines are built for them, it must be said.
        tasks: NAME or NAME=FILE.jsonl; none for all built-in ones.
        settings: Some of SETTINGS for every task.
        task_settings: The same for one task, over `settings`.
        prompts: Calibration prompts of each task.
        states: Denoising states, of all prompts together, that a calibrated quantizer looks at.
        seed: Of the built-in tasks' prompts, and of the choice of states.
        copy: Copy the checkpoint's weights instead of linking them.
        force: Replace an export that another command made.
    """

    model: Path
    out: Path
    precisions: tuple[str, ...] = ()
    target: str = "cpu"
    recipe: Recipe = field(default_factory=Recipe)
    shape: Shape | None = None
    tasks: tuple[str, ...] = ()
    settings: Settings = field(default_factory=dict)
    task_settings: Mapping[str, Settings] = field(default_factory=dict)
    prompts: int = 32
    states: int = 512
    seed: int = 0
    copy: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        if self.prompts < 1:
            raise ValueError(f"prompts >= 1 must hold, got {self.prompts}")
        if self.states < 1:
            raise ValueError(f"states >= 1 must hold, got {self.states}")
        if target_from_name(self.target).ahead and self.shape is None:
            raise ValueError(
                f"TensorRT builds engines for a range of shapes, so {self.target} needs shape: "
                f"--shape batch=MIN:OPT:MAX,prompt=MIN:OPT:MAX"
            )


def export(config: ExportConfig, say: Say = lambda text: None) -> Path:
    """Export a checkpoint and return the folder, named only when everything has been checked.

    The same command again changes nothing.

    Raises:
        InputError: An argument or a file given is at fault.
        BackendError: A graph does not compute what the framework does, or cannot run.
    """
    from exporter.checkpoint import load_denoiser, model_info, read_checkpoint
    from exporter.framework import TorchBackend
    from exporter.hessians import Hessians

    target = target_from_name(config.target)
    precisions = _precisions(config.precisions, target)
    tasks = tasks_from_specs(
        config.tasks, config.settings, config.task_settings, config.recipe.windows
    )
    checkpoint = read_checkpoint(config.model)
    check_kept(config.recipe.keep, checkpoint.config.layers)
    model = model_info(checkpoint)
    shape = config.shape or _default_shape(model.max_length, tasks)
    _check_shape(shape, model.max_length, tasks)
    tokenizer = tokenizer_from_file(config.model / "tokenizer.json", model)
    requests = requests_from_tasks(tasks, tokenizer, model, config.prompts, config.seed)
    request = _digest(config, precisions, model.digest, shape, requests)
    if is_export(config.out) and read_export(config.out).request == request:
        say(f"{config.out} is complete already; nothing was changed")
        return config.out
    if config.out.resolve().is_relative_to(config.model.resolve()):
        raise InputError(
            f"{str(config.out)!r} lies in the checkpoint's folder, which is only read; choose "
            f"another place"
        )
    check_replaceable(config.out, force=config.force, is_ours=is_export, kind="export")
    with whole_folder(config.out, force=config.force, is_ours=is_export, kind="export") as folder:
        core = place_checkpoint(checkpoint, folder, config.copy, say)
        denoiser = load_denoiser(checkpoint)
        method, log = config.recipe.method, StateLog()
        with Progress(len(requests), "calibrating, prompts") as progress:
            calibration = calibrate(
                denoiser,
                [at_every_token(each) for each in requests],
                model,
                on_batch=lambda done: progress.advance(done - progress.done),
                on_pass=log if method.calibrated else None,
                rotate=method.rotated,
            )
        _write_calibration(calibration, folder)
        rounding: Rounding = round_to_nearest
        if method.calibrated:
            sampled = sample_states(log.states, config.states, config.seed)
            say(f"{method.name}: {len(sampled)} of {len(log.states)} denoising states")
            rounding = rounding_from_hessians(Hessians(denoiser, sampled), method.rotated)
        recipe = config.recipe
        cores = typed_cores(checkpoint, core, precisions) if target.ahead else {"F32": core}
        write = write_typed_variants if target.ahead else write_variants
        graphs, families = write(cores, precisions, calibration, recipe, folder, {}, say, rounding)
        made = Export(
            folder=folder,
            model=model,
            sampler=next(iter(tasks.values()))[1],
            tasks={
                name: ExportTask(sampler=sampler, says=task.says, source=task.source)
                for name, (task, sampler) in tasks.items()
            },
            target=target.name,
            shape=shape,
            precisions={precision.name: precision for precision in precisions},
            families=families,
            graphs=graphs,
            recipe=config.recipe,
            parity={},
            environment=environment("torch", "onnxscript"),
            request=request,
        )
        reference = TorchBackend(denoiser)
        states = states_from_requests(few_of_each_task(requests), reference, model)
        full = engine_of(made, f"{FULL_PRECISION.name}.trace")
        parity = compare(states, reference, full, model.mask_id)
        say(
            f"fp32 against the framework: largest difference {parity.max_error:.2g}, same token "
            f"at {parity.agreement:.2%} of {parity.positions} positions"
        )
        check_parity(parity)
        write_reference(reference_of(states, reference, model.vocab), folder / REFERENCE)
        made = replace(made, parity={"fp32": parity.to_json(), "gate": GATE})
        del denoiser, reference, full, rounding  # the weights once more each; engines follow
        give_back_memory()
        finish(made, states, say)
    return config.out


def place_checkpoint(checkpoint: Checkpoint, folder: Path, copy: bool, say: Say) -> Core:
    """Put weights and tokenizer into a folder, trace the graph, and return it with its weights."""
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


def typed_cores(
    checkpoint: Checkpoint, full: Core, precisions: Sequence[Precision]
) -> dict[str, Core]:
    """Return the core of each type of the rest that precisions ask for; `full` is float32's."""
    from exporter.graph import graph_from_config
    from exporter.weights import ONNX_TYPES

    cores = {"F32": full}
    for rest in dict.fromkeys(map(rest_of, precisions)):
        if rest not in cores:
            types = dict.fromkeys(checkpoint.tensors, ONNX_TYPES[rest])
            graph = graph_from_config(checkpoint.config, checkpoint.keys, types, rest)
            cores[rest] = Core.of(graph, full.tensors, checkpoint.architecture)
    return cores


def _write_calibration(calibration: Calibration, folder: Path) -> None:
    text = json.dumps(calibration.to_json(), separators=(",", ":"), allow_nan=False)
    (folder / CALIBRATION).write_text(text + "\n", encoding="utf-8")


def _precisions(names: Sequence[str], target: Target) -> list[Precision]:
    """Return the precisions of the names, fp32 first, each once; those of the target for none.

    Raises:
        InputError: A name is none, or the target does not take it.
    """
    usual = AHEAD_PRECISIONS if target.ahead else PRECISIONS
    if not names:
        names = [name for name in usual if not target.ahead or name in taken(target)]
    always = [FULL_PRECISION]
    if target.ahead:
        always.append(EXECUTED["fp16"])  # what every quantized graph is made from
    try:
        found = [precision_from_name(name) for name in names]
    except ValueError as error:
        raise InputError(f"{error}") from error
    for precision in found:
        if precision != FULL_PRECISION and (why := refusal(target, precision.name)) is not None:
            raise InputError(f"{why}; mend --precision, or choose another --target")
    return list(dict.fromkeys((*always, *found)))


def _default_shape(longest: int, tasks: Tasks) -> Shape:
    """Return 1:8:64 rows, and prompts up to what the model's length leaves for the answer."""
    answer = max(sampler.gen_length for _, sampler in tasks.values())
    if answer >= longest:
        raise InputError(
            f"an answer of {answer} tokens leaves no room for a prompt in the model's {longest}; "
            f"lower --gen-length"
        )
    return Shape((1, 8, 64), (1, min(16, longest - answer), longest - answer))


def _check_shape(shape: Shape, longest: int, tasks: Tasks) -> None:
    """Check that the longest prompt and answer fit the model."""
    answer = max(sampler.gen_length for _, sampler in tasks.values())
    if shape.prompt[2] + answer > longest:
        raise InputError(
            f"prompts of {shape.prompt[2]} and answers of {answer} tokens are more than the "
            f"model's {longest}; lower --shape prompt=..:{longest - answer} or --gen-length"
        )


def _digest(
    config: ExportConfig,
    precisions: Sequence[Precision],
    model: str,
    shape: Shape,
    requests: Sequence[Request],
) -> str:
    """Return the digest of everything that decides an export, its version included."""
    return sha256_of(
        [
            __version__,
            model,
            digest_file((config.model / "tokenizer.json").resolve()).sha256,
            [precision.name for precision in precisions],
            config.target,
            asdict(config.recipe),
            [config.states, config.seed] if config.recipe.method.calibrated else None,
            asdict(shape),
            [[request.task, request.prompt, request.sampler.to_json()] for request in requests],
        ]
    )
