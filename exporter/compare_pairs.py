"""Which graphs of an export are held against each other, and on which denoising states.

    cpu, cuda     full precision against each precision            what quantization costs, where
                  a graph rewritten against the same as it stands  they agree to rounding
    TensorRT      what TensorRT builds, run by ONNX Runtime where it can, against what stands in
                  for it; that one rewritten against as it stands; on a GPU TensorRT itself

States are those of the export whose logits the framework gave; random ones are legal, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engines.cuda import no_gpu
from engines.errors import BackendError, InputError
from engines.files import regular_file
from engines.plans import profile_of
from engines.precision import FULL_PRECISION
from engines.targets import target_from_name
from engines.trt import BuildRequest
from exporter.compare_runs import Answer, Question, Side, answer, quiet
from exporter.cuts import coarse, without_repeated_types
from exporter.folder import EXPORT, Export, read_export, stands_in
from exporter.reference import ReferenceState, read_reference
from exporter.typed_variants import rest_of
from exporter.weights import external_ranges

if TYPE_CHECKING:
    import onnx

RUNNERS = ("ort", "simulation", "tensorrt")

# Larger graphs are none of ours: weights stand outside.
_MOST_BYTES = 1 << 26


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """What is compared.

    Attributes:
        export: The export's folder.
        precisions: Names; none for all.
        runners: Of `RUNNERS`; none for those that can run here.
        window: Only rows of this window of the export; None for all.
        tolerance: Of every layer, relative; None for what its arithmetic explains.
        limit: Denoising states at most.
        seed: Of random states in place of the export's own; None for those.
    """

    export: Path
    precisions: tuple[str, ...] = ()
    runners: tuple[str, ...] = ()
    window: int | None = None
    tolerance: float | None = None
    limit: int = 2
    seed: int | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.runners if name not in RUNNERS]
        if unknown:
            raise ValueError(f"runners are {', '.join(RUNNERS)}, got {unknown[0]!r}")
        if self.limit < 1:
            raise ValueError(f"limit >= 1 must hold, got {self.limit}")
        if self.tolerance is not None and not 0.0 < self.tolerance < math.inf:
            raise ValueError(f"tolerance > 0 must hold, got {self.tolerance}")
        if self.seed is not None and self.seed < 0:
            raise ValueError(f"seed >= 0 must hold, got {self.seed}")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One pair of graphs.

    Attributes:
        precision: Its name.
        says: The two sides, for people.
        answer: How they differ; None where one cannot be run here.
        why: Then why not.
    """

    precision: str
    says: str
    answer: Answer | None = None
    why: str = ""


def compare(config: CompareConfig, say: Callable[[str], None]) -> list[Compared]:
    """Return how the graphs of an export differ, a pair at a time.

    Raises:
        BackendError: No pair could be run.
        InputError: The export is damaged, or what is asked for does not fit it.
        MissingExtra: Polygraphy is not installed.
    """
    folder = config.export.parent if config.export.name == EXPORT else config.export
    with quiet():  # or the error that says what to install
        export = read_export(folder)
    states = _states(export, config)
    found = []
    for precision, says, question in _questions(export, config):
        say(says)
        try:
            made = answer(question(), states, export.model.architecture, config.tolerance, say)
        except BackendError as error:
            found.append(Compared(precision=precision, says=says, why=str(error)))
        else:
            found.append(Compared(precision=precision, says=says, answer=made))
    if all(each.answer is None for each in found):
        raise BackendError(found[0].why if found else "there is nothing to compare; export again")
    return found


def _questions(
    export: Export, config: CompareConfig
) -> Iterator[tuple[str, str, Callable[[], Question]]]:
    """Yield each pair's precision, what it is, and what makes the question of it."""
    target = target_from_name(export.target)
    unknown = [name for name in config.precisions if name not in export.precisions]
    if unknown:
        raise InputError(
            f"{export.folder} has no precision {unknown[0]!r}, only "
            f"{', '.join(export.precisions)}; export again with --precision {unknown[0]}"
        )
    runners = config.runners or _runners_here(target.ahead)
    strange = [name for name in runners if name != "ort" and not target.ahead]
    if strange:
        raise InputError(
            f"{export.folder} is for {target.name}, which has no {strange[0]}; use --runner ort, "
            f"or export with --target rtx-sm89 or another of TensorRT"
        )
    full = f"{FULL_PRECISION.name}.trace"
    for name in config.precisions or tuple(export.precisions):
        typed, sim = f"{name}.trace", f"{name}.sim.trace"
        if not target.ahead:
            if typed != full:
                says = f"{name} against full precision"
                yield name, says, _against(export, full, typed, "F32", quantized=True)
            yield name, f"{name}, rewritten against as it stands", _rewritten(export, typed)
            continue
        if typed == full:
            sim = full
        rest = rest_of(export.precisions[name])
        for runner in runners:
            if runner == "simulation":
                yield name, f"{sim}, rewritten against as it stands", _rewritten(export, sim)
            elif runner == "tensorrt":
                says = f"{typed} by TensorRT, its layers marked, against {sim}"
                yield name, says, _against(export, sim, typed, rest, by_engine=True)
            elif typed != full:
                says = f"{typed} by ONNX Runtime against {sim}"
                yield name, says, _against(export, sim, typed, rest)


def _runners_here(ahead: bool) -> tuple[str, ...]:
    if not ahead:
        return RUNNERS[:1]
    return RUNNERS if no_gpu() is None else RUNNERS[:2]


def _against(
    export: Export,
    left: str,
    right: str,
    rest: str,
    quantized: bool = False,
    by_engine: bool = False,
) -> Callable[[], Question]:
    return lambda: Question(
        held_against=_side(export, left),
        looked_into=_side(export, right, by_engine=by_engine),
        rest=rest,
        quantized=quantized,
    )


def _rewritten(export: Export, graph: str) -> Callable[[], Question]:
    """Return a question of one graph, told from product to product: kernels there stay fused."""
    exact = stands_in(graph)
    return lambda: Question(
        held_against=_side(export, graph, rewritten=False, exact=exact),
        looked_into=_side(export, graph, exact=exact),
        rest=rest_of(export.precisions[export.graphs[graph].precision]) if exact else "F32",
        between=_cuts(export, graph),
    )


def _cuts(export: Export, graph: str) -> frozenset[str] | None:
    """Return where kernels may be parted that a runtime fuses; None where nobody knows.

    Linear layers have the names of the graph that a quantized one was made of.
    """
    core = f"{FULL_PRECISION.name}.trace"
    if target_from_name(export.target).ahead:
        rest = rest_of(export.precisions[export.graphs[graph].precision])
        core = {"F16": "fp16.trace", "BF16": "bf16.trace"}.get(rest, core)
    return frozenset(coarse(_graph(export, core))) if core in export.graphs else None


def _side(
    export: Export,
    graph: str,
    rewritten: bool = True,
    exact: bool = True,
    by_engine: bool = False,
) -> Side:
    model = without_repeated_types(_graph(export, graph))
    entry = export.graphs[graph]
    plan = None
    if by_engine:
        answers = [task.sampler.gen_length for task in export.tasks.values()]
        plan = BuildRequest(
            graph=export.path(graph),
            target=export.target,
            profile=profile_of(export.shape, answers, export.model.max_length, entry.scales),
        )
    return Side(
        name=f"{graph} by {'TensorRT' if by_engine else 'ONNX Runtime'}",
        model=model,
        folder=export.folder,
        precision=export.precisions[entry.precision],
        scales=None if entry.scales is None else np.array(entry.scales, np.float32),
        rewritten=rewritten,
        exact=exact,
        plan=plan,
    )


def _graph(export: Export, name: str) -> onnx.ModelProto:
    """Return a graph of an export; its weights are files that the export lists.

    Raises:
        InputError: It is no graph, or names other files.
    """
    import onnx

    export.path(name)  # or the error that says what to export
    file = regular_file(export.folder, export.graphs[name].file)
    if file.stat().st_size > _MOST_BYTES:
        raise InputError(f"{str(file)!r} has more than {_MOST_BYTES >> 20} MiB; export again")
    try:
        model = onnx.load_model_from_string(file.read_bytes())
        places = {location for location, _, _ in external_ranges(model)}
    except (
        import_module("google.protobuf.message").DecodeError,
        KeyError,
        ValueError,
    ) as error:
        raise InputError(f"{str(file)!r} is no graph of ours ({error}); export again") from error
    foreign = sorted(places - export.files.keys())
    if foreign:
        raise InputError(
            f"{str(file)!r} wants weights of {foreign[0]!r}, which the export does not list; "
            f"export again"
        )
    return model


def _states(export: Export, config: CompareConfig) -> list[ReferenceState]:
    """Return denoising states: those whose logits the framework gave, or random ones."""
    kept = read_reference(export) if config.seed is None else None
    states = kept or _random_states(export, config.seed or 0, config.limit)
    windows = export.windows
    if config.window is not None:
        if not 0 <= config.window < windows:
            raise InputError(
                f"--window is from 0 to {windows - 1} for this export, got {config.window}"
            )
        states = [cut for state in states if (cut := _in_window(state, config.window, windows))]
        if not states:
            raise InputError(
                f"no state of {export.folder} is in window {config.window}; give --seed 0 for "
                f"random states of every window"
            )
    count = min(config.limit, len(states))
    picked = np.unique(np.linspace(0, len(states) - 1, count).round().astype(int))
    return [states[index] for index in picked.tolist()]


def _in_window(state: ReferenceState, window: int, windows: int) -> ReferenceState | None:
    """Return the rows of a state that are in a window."""
    of = (state.progress * np.float32(windows) + 1e-6).astype(int).clip(0, windows - 1)
    rows = of == window
    if not rows.any():
        return None
    return ReferenceState(
        ids=state.ids[rows],
        mask=state.mask[rows],
        positions=state.positions[rows],
        progress=state.progress[rows],
        logits=state.logits[rows],
        step=state.step,
    )


def _random_states(export: Export, seed: int, count: int) -> list[ReferenceState]:
    """Return states of random prompts, a row of every window, answers partly decided."""
    rng = np.random.default_rng(seed)
    model, answer_tokens = export.model, export.sampler.gen_length
    plain = np.array([i for i in range(model.vocab) if i not in (model.mask_id, model.eos_id)])
    prompt = min(export.shape.prompt[1], model.max_length - answer_tokens)
    found = []
    for step in range(count):
        rows = export.windows
        ids = rng.choice(plain, size=(rows, prompt + answer_tokens))
        progress = np.arange(rows, dtype=np.float32) / np.float32(rows)
        for row in range(rows):
            decided = int(progress[row] * answer_tokens)
            open_ = prompt + rng.permutation(answer_tokens)[decided:]
            ids[row, open_] = model.mask_id
        asked = min(export.sampler.block_length, answer_tokens)
        positions = np.tile(np.arange(prompt, prompt + asked), (rows, 1))
        found.append(
            ReferenceState(
                ids=ids.astype(np.int64),
                mask=np.ones(ids.shape, bool),
                positions=positions.astype(np.int64),
                progress=progress,
                logits=np.zeros((rows, asked, 0), np.float32),
                step=step,
            )
        )
    return found
