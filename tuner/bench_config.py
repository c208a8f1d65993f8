"""What `bench` is asked for: frozen values, checked once; the defaults live here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from engines.document import shorten
from engines.errors import InputError
from engines.manifest import Shape
from engines.options import MOST_THREADS


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """The arguments of a bench.

    Attributes:
        path: A bundle, or an export.
        target: Where it runs; None for the folder's own.
        batch: Least, best and most rows, within those declared, or None for these.
        prompt: Tokens of a prompt likewise; the best is what is measured.
        batches: Rows of each measurement, in place of the powers of two.
        tasks: Of the bundle; empty for all.
        input: File of prompts, or None for canned ones.
        seconds: That a measurement takes, about; a bundle has one at each batch.
        repeats: Rounds of each measurement, or None for as many as fit in the seconds.
        threads: Of a pass on the processor; 0 for what the bundle says, or every core.
        seed: Of canned prompts and of the bootstrap.
    """

    path: Path
    target: str | None = None
    batch: tuple[int, int, int] | None = None
    prompt: tuple[int, int, int] | None = None
    batches: tuple[int, ...] = ()
    tasks: tuple[str, ...] = ()
    input: Path | None = None
    seconds: float = 5.0
    repeats: int | None = None
    threads: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds >= 0.0):
            raise ValueError(f"seconds >= 0 must hold, got {self.seconds}")
        if self.repeats is not None and self.repeats < 1:
            raise ValueError(f"repeats >= 1 must hold, got {self.repeats}")
        if not 0 <= self.threads <= MOST_THREADS:
            raise ValueError(f"0 <= threads <= {MOST_THREADS} must hold, got {self.threads}")
        if self.seed < 0:
            raise ValueError(f"seed >= 0 must hold, got {self.seed}")
        if self.batches and self.batch is not None:
            raise ValueError("rows are named by batches or by a shape, not by both")

    def shape(self, declared: Shape) -> Shape:
        """Return the shape to measure at.

        Args:
            declared: What the folder was made for.

        Raises:
            InputError: It leaves what was declared.
        """
        asked = Shape(self.batch or declared.batch, self.prompt or declared.prompt)
        for name in ("batch", "prompt"):
            (low, _, high), (least, _, most) = getattr(asked, name), getattr(declared, name)
            if low < least or high > most:
                raise InputError(
                    f"the {name} must be from {least} to {most}, as declared, got {low} to "
                    f"{high}; ask for less, or export again with another --shape"
                )
        return asked

    def rows(self, declared: Shape) -> tuple[int, ...]:
        """Return the batches to measure: powers of two, the best one, and both ends.

        Raises:
            InputError: One leaves what was declared.
        """
        low, best, high = self.shape(declared).batch
        wrong = [each for each in self.batches if not low <= each <= high]
        if wrong:
            raise InputError(
                f"the batch must be from {low} to {high}, as declared, got {wrong[0]}; ask for "
                f"less, or export again with another --shape"
            )
        powers = (1 << bit for bit in range(high.bit_length()))
        every = {each for each in powers if low <= each} | {low, best, high}
        return tuple(sorted(set(self.batches) or every))


def ranges_from_text(text: str) -> dict[str, tuple[int, int, int]]:
    """Return the ranges that `batch=1:8:64,prompt=1:16:40` names; one of the two may be left out.

    Raises:
        InputError: It is written otherwise, or a range does not ascend.
    """
    found: dict[str, tuple[int, int, int]] = {}
    for part in text.split(","):
        name, _, numbers = part.partition("=")
        sizes = [int(each) for each in numbers.split(":") if each.isascii() and each.isdecimal()]
        whole = len(sizes) == numbers.count(":") + 1 == 3
        if name not in ("batch", "prompt") or name in found or not whole:
            raise InputError(
                f"--shape is batch=MIN:OPT:MAX,prompt=MIN:OPT:MAX, or one of the two, got "
                f"{shorten(text)}; for instance batch=1:8:64"
            )
        low, best, high = sizes
        if not 1 <= low <= best <= high:
            raise InputError(
                f"--shape: 1 <= MIN <= OPT <= MAX must hold for {name}, got {low}:{best}:{high}; "
                f"mend it"
            )
        found[name] = (low, best, high)
    return found
