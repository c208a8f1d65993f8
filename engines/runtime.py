"""Serve a bundle: text in, text out.

    runtime = Runtime.load("demo/bundle")
    answer = runtime.generate("edit:ab,aabbaabbaabb", task="edit")[0]
    answer.text, answer.passes, answer.bits, answer.engine_ms

Only the engines that some schedule uses are loaded, each once.  Nothing is written, so a bundle
may stand on a read-only file system.  One runtime serves one caller at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from engines.backend import Backend
from engines.bundle import Bundle, read_bundle
from engines.document import Document
from engines.errors import BackendError, BundleError, InputError
from engines.manifest import DEFAULT_TASK, TOKENIZER, Engine
from engines.options import MOST_THREADS, PROVIDERS, OrtOptions
from engines.ort import OrtBackend
from engines.plan_loader import best_target, check_fit, has_plans, load_plan
from engines.sampler import POLICIES, Generation, Request, generate
from engines.targets import target_from_name
from engines.text import Tokenizer, tokenizer_from_file
from engines.trt_run import Device, PlanBackend


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer and what it took; `ids`, `passes`, ... are the `Generation`'s.

    Attributes:
        text: The answer up to the first end-of-sequence token.
        ids: Its tokens, end-of-sequence padding included.
        passes: Engine passes in which it took part.
        tokens: Tokens before the first end-of-sequence token.
        bits: Mean activation bits of its passes, as run.
        engine_ms: Wall time of its passes in each window, milliseconds.
        task: Whose schedule it followed.
        commit_step: The step, from 1, in which each of its tokens was committed.
    """

    text: str
    ids: tuple[int, ...]
    passes: int
    tokens: int
    bits: float
    engine_ms: tuple[float, ...]
    task: str
    commit_step: tuple[int, ...]


class Runtime:
    """A loaded bundle.

    Attributes:
        bundle: What was loaded.
        target: What it runs on.
        engines: The loaded engine of each precision in use.
        device: The GPU of a target whose engines are plans; None elsewhere.
    """

    def __init__(
        self,
        bundle: Bundle,
        target: str,
        engines: Mapping[str, Backend],
        tokenizer: Tokenizer,
        device: Device | None = None,
    ) -> None:
        self.bundle, self.target, self.engines, self.device = bundle, target, engines, device
        self._tokenizer = tokenizer
        self._ready = False

    @classmethod
    def load(
        cls,
        path: str | Path,
        target: str | None = None,
        threads: int = 0,
        warmup: bool = True,
        verify: bool = True,
        expect: str | None = None,
    ) -> Runtime:
        """Return a runtime whose engines are loaded and, unless told otherwise, warm.

        Args:
            path: The bundle's folder.
            target: One of the bundle's targets; None for `best_target`: plans that fit this
                machine's GPU, else cpu.
            threads: Threads of a pass on the CPU; 0 for what the bundle says.
            warmup: Run one pass of each engine now, so that the first request is not slower; of a
                plan one of each bucket, in which its graph is captured.
            verify: Check the sha256 of every file before anything is loaded.
            expect: The digest that the bundle must have, where it is known beforehand.

        Raises:
            BundleError: The bundle is damaged, not the one expected, or has no such target.
            BackendError: An engine cannot be loaded, is not for this machine, or gives no finite
                number.
            MissingExtra: onnxruntime, tokenizers, or what runs plans is not installed.
        """
        bundle = read_bundle(path, verify)
        manifest = bundle.manifest
        if expect is not None and expect != bundle.digest:
            raise BundleError(
                f"the bundle {str(path)!r} has the digest {bundle.digest}, expected is "
                f"{expect}; use the bundle that was meant, or expect this one"
            )
        if target is None:
            target = best_target(bundle)
        if target not in manifest.targets:
            raise BundleError(
                f"the bundle {str(path)!r} has no target {target!r}; it has "
                f"{', '.join(manifest.targets)}"
            )
        tokenizer = tokenizer_from_file(bundle.path(TOKENIZER), manifest.model)
        used = {
            name
            for task in manifest.tasks.values()
            for name in task.targets[target].schedule.precisions
        }
        serving = manifest.serving(target)
        device = device_for(bundle, target)
        try:
            engines = {
                name: load_engine(bundle, serving[name], threads, device) for name in sorted(used)
            }
            runtime = cls(bundle, target, engines, tokenizer, device)
            if warmup:
                runtime.warm_up()
        except BaseException:
            if device is not None:
                device.close()
            raise
        return runtime

    def close(self) -> None:
        """Give back a GPU's memory; the runtime may not be used afterwards.  Twice is once."""
        self._ready = False
        for engine in self.engines.values():
            if isinstance(engine, PlanBackend):
                engine.close()
        device, self.device, self.engines = self.device, None, {}
        if device is not None:
            device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names that `generate` takes as task."""
        return tuple(self.bundle.manifest.tasks)

    @property
    def ready(self) -> bool:
        """Whether every engine has run; of plans, each of their buckets."""
        return self._ready

    @property
    def digest(self) -> str:
        """Digest of schedules and engines; equal where two bundles answer alike."""
        return self.bundle.digest

    def encode(self, text: str) -> tuple[int, ...]:
        """Return a prompt's ids, checked.

        Raises:
            InputError: The prompt is at fault.
        """
        return self._tokenizer.encode(text)

    def warm_up(self) -> None:
        """Run one pass of each engine at the declared best shape, of a plan at each bucket.

        Raises:
            BackendError: An engine failed or gave no finite probability.
        """
        for engine in self.engines.values():
            if isinstance(engine, PlanBackend):
                engine.warm_up()
            else:
                probe(self.bundle, engine)
        self._ready = True

    def generate(
        self,
        prompts: str | Sequence[str],
        task: str | Sequence[str | None] | None = None,
        policy: str = "safest",
        batch: int | None = None,
        on_answers: Callable[[int], None] | None = None,
    ) -> list[Answer]:
        """Return an answer for each prompt, in their order.

        Args:
            prompts: One or more.
            task: Whose schedule and sampler settings are used, for all or for each; None for
                `default`.
            policy: `safest` or `split`: what happens when rows of a batch want different engines.
            batch: Rows that run together at most; None for the most that the bundle declares.
            on_answers: Told how many more answers are done, after each batch.

        Raises:
            InputError: A prompt, a task, the policy or the batch is at fault; nothing has run.
            BackendError: An engine failed.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        tasks = [task] * len(texts) if task is None or isinstance(task, str) else list(task)
        if len(tasks) != len(texts):
            raise ValueError(f"{len(texts)} prompts need as many tasks, got {len(tasks)}")
        most = self.bundle.manifest.shape.batch[2]
        size = most if batch is None else batch
        if not 1 <= size <= most:
            raise InputError(f"the batch must be from 1 to {most}, as declared, got {size}")
        if policy not in POLICIES:
            raise InputError(f"the policy must be {' or '.join(POLICIES)}, got {policy!r}")
        requests = [
            self._request(number, text, name or DEFAULT_TASK)
            for number, (text, name) in enumerate(zip(texts, tasks, strict=True), start=1)
        ]
        # Longest first: rows of a batch are padded to its longest one.
        order = sorted(
            range(len(requests)),
            key=lambda i: (requests[i].sampler.steps, len(requests[i].prompt)),
            reverse=True,
        )
        answers: dict[int, Answer] = {}
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            generations = generate(
                [requests[i] for i in chosen], self.engines, self.bundle.manifest.model, policy
            )
            for i, generation in zip(chosen, generations, strict=True):
                answers[i] = self._answer(generation, requests[i].task)
            if on_answers is not None:
                on_answers(len(chosen))
        self._ready = self._ready or self.device is None
        return [answers[i] for i in range(len(requests))]

    def _request(self, number: int, text: str, task: str) -> Request:
        """Return a checked request; `number` counts prompts from 1, for messages."""
        manifest = self.bundle.manifest
        if task not in manifest.tasks:
            raise InputError(
                f"unknown task {task!r}; this bundle has {', '.join(manifest.tasks)}; a prompt "
                f"without a task uses {DEFAULT_TASK!r}"
            )
        settings = manifest.tasks[task]
        try:
            ids = self._tokenizer.encode(text)
        except InputError as error:
            raise InputError(f"prompt {number}: {error}") from error
        longest = min(
            manifest.shape.prompt[2], manifest.model.max_length - settings.sampler.gen_length
        )
        if len(ids) > longest:
            raise InputError(
                f"prompt {number} has {len(ids)} tokens, the bundle is made for {longest} at "
                f"most; shorten it, or export again with a larger --shape"
            )
        return Request(
            prompt=ids,
            sampler=settings.sampler,
            schedule=settings.targets[self.target].schedule,
            task=task,
        )

    def _answer(self, generation: Generation, task: str) -> Answer:
        return Answer(
            text=self._tokenizer.decode(generation.ids),
            ids=generation.ids,
            passes=generation.passes,
            tokens=generation.tokens,
            bits=generation.bits,
            engine_ms=generation.engine_ms,
            commit_step=generation.commit_step,
            task=task,
        )


def device_for(bundle: Bundle, target: str) -> Device | None:
    """Return the GPU for a bundle's plans, which were held against it; None where it has none.

    Raises:
        BackendError: There is no GPU, or a plan is for another one, version or system.
        BundleError: A plan is damaged.
        MissingExtra: A package is not installed.
    """
    if not has_plans(target):
        return None
    check_fit(bundle, target)
    return Device.open(target_from_name(target))


def load_engine(
    bundle: Bundle, engine: Engine, threads: int = 0, device: Device | None = None
) -> Backend:
    """Return a loaded engine of a bundle, for the one tail that its graph has.

    Args:
        bundle: Has it.
        engine: Its entry.
        threads: Of a pass on the CPU; 0 for what the bundle says.
        device: Where plans run, from `device_for`.

    Raises:
        BundleError: Its target or its options are unknown to this version.
        BackendError: It cannot be loaded.
    """
    graph = bundle.manifest.graphs[engine.graph]
    if device is not None and has_plans(engine.target):
        return load_plan(bundle, engine, device)
    if engine.target not in PROVIDERS:
        raise BundleError(
            f"engine {engine.file!r} is for target {engine.target!r}, which this version cannot "
            f"run; it runs {', '.join(PROVIDERS)}"
        )
    file = bundle.path(engine.file)
    return OrtBackend.load(
        serve=file if graph.tail == "serve" else None,
        trace=file if graph.tail == "trace" else None,
        precision=bundle.manifest.precisions[engine.precision],
        scales=None if graph.scales is None else np.array(graph.scales, np.float32),
        options=_options(engine, threads),
    )


def probe(bundle: Bundle, engine: Backend, tail: str = "serve") -> None:
    """Run one pass of an engine at the declared best shape.

    Raises:
        BackendError: It failed, or gave a number that is not finite.
    """
    manifest = bundle.manifest
    rows, prompt = manifest.shape.batch[1], manifest.shape.prompt[1]
    gen = manifest.sampler.gen_length
    length = min(prompt + gen, manifest.model.max_length)
    ids = np.full((rows, length), manifest.model.mask_id)
    ids[:, : length - gen] = manifest.model.eos_id
    asked = np.tile(np.arange(length - gen, length), (rows, 1))
    run = engine.serve if tail == "serve" else engine.logits
    out = run(ids, np.ones(ids.shape, np.bool_), asked, np.zeros(rows, np.float32))
    numbers = out if isinstance(out, np.ndarray) else out.probability
    if not np.isfinite(numbers).all():
        raise BackendError(
            f"engine {engine.precision.name!r} gives numbers that are not finite on a warm-up "
            f"pass; tune again without this precision"
        )


def _options(engine: Engine, threads: int) -> OrtOptions:
    """Return the options recorded with an engine; its target names the provider."""
    given = Document(dict(engine.options), f"options of engine {engine.file!r}", BundleError)
    known = ("provider", "threads", "graph_optimization", "spinning", "arena", "exact")
    for name, value in given.items():
        if name not in known:
            value.fail(f"this version knows only {', '.join(known)}; install a newer Cadenza")
    defaults = OrtOptions()
    texts, flags = given.get("graph_optimization"), (given.get("spinning"), given.get("arena"))
    recorded, exact = given.get("threads"), given.get("exact")
    try:
        return OrtOptions(
            provider=engine.target,
            threads=threads
            or (recorded.integer(0, MOST_THREADS) if recorded else defaults.threads),
            graph_optimization=texts.text() if texts else defaults.graph_optimization,
            spinning=flags[0].flag() if flags[0] else defaults.spinning,
            arena=flags[1].flag() if flags[1] else defaults.arena,
            exact=exact.flag() if exact else defaults.exact,
        )
    except ValueError as error:
        given.fail(f"{error}; mend it")
