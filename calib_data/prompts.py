"""Prompts by task and split, drawn from seeds, so that no split ever sees another's prompt.

A prompt's split is decided by a digest of its text: whoever draws it, with whatever seed, it
lands in the same split.  Training, calibration, tuning and test are therefore disjoint by
construction, and stay so when more prompts are asked for.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Literal, get_args

from calib_data.tasks import Task

Split = Literal["train", "calibration", "tuning", "test"]

# Of eight digests five train; the other splits have one each.
_SPLIT_OF_DIGEST: tuple[Split, ...] = (
    *("train",) * 5,
    "calibration",
    "tuning",
    "test",
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: an id that names it for ever, its text, and a right answer if one is known."""

    id: str
    prompt: str
    answer: str | None = None


def split_of(prompt: str) -> Split:
    """Return the split that a prompt's text belongs to."""
    return _SPLIT_OF_DIGEST[hashlib.sha256(prompt.encode()).digest()[0] % len(_SPLIT_OF_DIGEST)]


def draw_prompts(task: Task, split: Split, count: int, seed: int = 0) -> list[Prompt]:
    """Return `count` different prompts of a task that belong to a split.

    Raises:
        ValueError: The split is unknown, or count is negative.
    """
    if split not in get_args(Split):
        raise ValueError(f"split is one of {get_args(Split)}, got {split!r}")
    if count < 0:
        raise ValueError(f"count >= 0 must hold, got {count}")
    rng = random.Random(f"{task.name}/{split}/{seed}")
    found: dict[str, Prompt] = {}
    while len(found) < count:
        text, answer = task.draw(rng)
        if split_of(text) == split and text not in found:
            name = f"{task.name}/{split}/{seed}/{len(found)}"
            found[text] = Prompt(name, text, answer)
    return list(found.values())
