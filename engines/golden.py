"""Golden answers rerun: what a bundle answered where it was made, token for token."""

from __future__ import annotations

from dataclasses import dataclass

from engines.bundle import Bundle
from engines.errors import BundleError, InputError
from engines.manifest import TOKENIZER
from engines.runtime import Runtime, device_for, load_engine, probe
from engines.terminal import Progress
from engines.text import tokenizer_from_file


@dataclass(frozen=True, slots=True)
class Golden:
    """How golden answers came out.

    Attributes:
        checked: How many were rerun.
        stale: How many belong to other schedules or another target.
        differences: What differs, a line each.
    """

    checked: int
    stale: int
    differences: tuple[str, ...]

    @property
    def equal(self) -> int:
        """How many are equal, token for token."""
        return self.checked - len(self.differences)

    @property
    def counts(self) -> dict[str, object]:
        """The same as plain data."""
        return {
            "checked": self.checked,
            "equal": self.equal,
            "of_other_schedules": self.stale,
            "differences": list(self.differences),
        }


def load_all(bundle: Bundle, target: str) -> tuple[list[str], Runtime]:
    """Return the names of a target's engines, each loaded and run once, and a runtime of them.

    Raises:
        BackendError: An engine cannot be loaded, or gives numbers that are not finite.
    """
    manifest = bundle.manifest
    serving, checked, device = {}, [], device_for(bundle, target)
    for name, engine in manifest.engines.items():
        if engine.target != target:
            continue
        tail = manifest.graphs[engine.graph].tail
        loaded = load_engine(bundle, engine, device=device)
        probe(bundle, loaded, tail)
        checked.append(name)
        if tail == "serve":
            serving[engine.precision] = loaded
    tokenizer = tokenizer_from_file(bundle.path(TOKENIZER), manifest.model)
    return checked, Runtime(bundle, target, serving, tokenizer, device)


def rerun_golden(runtime: Runtime, made_on: str | None = None) -> Golden:
    """Answer each golden prompt alone, as it was made, and compare token for token.

    Args:
        runtime: Answers.
        made_on: The target that answered when they were made; the runtime's own if None.

    Raises:
        BundleError: A golden prompt is refused.
    """
    bundle, differences = runtime.bundle, []
    target = made_on or runtime.target
    current = {(task, bundle.manifest.schedule_digest(task, target)) for task in runtime.tasks}
    lines = [line for line in bundle.golden if (line.task, line.schedule_digest) in current]
    stale = len(bundle.golden) - len(lines)
    with Progress(len(lines), "golden answers", quiet=not lines) as progress:
        for line in lines:
            try:
                (answer,) = runtime.generate(line.prompt, task=line.task, batch=1)
            except InputError as error:
                raise BundleError(
                    f"the golden prompt {line.id!r} is refused: {error}; tune again"
                ) from error
            progress.advance()
            if answer.ids != line.ids:
                pairs = zip(answer.ids, line.ids, strict=False)
                at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(line.ids))
                differences.append(f"{line.id}: first at token {at}")
    return Golden(len(lines), stale, tuple(differences))
