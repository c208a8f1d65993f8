"""Answers of a schedule to prompts, made once and kept; and what they are worth.

Quality is measured two ways.  *Accuracy* needs a grader: the share of answers that it accepts.
*Agreement* needs none: how much of full precision's answers a schedule reproduces, whole answers
or single tokens.  Both are paired: every schedule answers the same prompts.

Answers are cached by everything that decides them: the engines' contents, the schedule, the
sampler and the prompts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from calib_data.prompts import Prompt
from calib_data.workload import Workload
from engines.backend import Backend
from engines.build import Cache
from engines.model import ModelInfo
from engines.sampler import Generation, Request, generate
from engines.schedule import SamplerConfig, Schedule, window_of

# Rows denoised together where nobody names a batch: large enough for full GEMMs.
EVALUATION_BATCH = 64


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt with its token ids."""

    prompt: Prompt
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Fleet:
    """Loaded engines by the name of their precision, and the digest of each one's content."""

    engines: Mapping[str, Backend]
    keys: Mapping[str, str]
    model: ModelInfo


@dataclass(frozen=True)
class Answers:
    """What one schedule answered, in the order of the items.

    Attributes:
        ids: Answer tokens [N, G].
        commit_step: Step in which each token was committed, from 1 [N, G].
        bits: Mean activation bits of each answer over its passes, as run [N].
    """

    ids: NDArray[np.int64]
    commit_step: NDArray[np.int64]
    bits: NDArray[np.float64]

    def passes(self, windows: int) -> NDArray[np.float64]:
        """Return the passes in each window [W] as run, mean over the answers.

        A pass is in the window of what was decided before it; each step has committed a token.
        """
        count, gen = self.commit_step.shape
        found: NDArray[np.float64] = np.zeros(windows)
        for steps in self.commit_step:
            committed = np.cumsum(np.bincount(steps)[:-1])  # before steps 1, 2, ...
            found += np.bincount(window_of(committed, gen, windows), minlength=windows)
        found /= count
        return found


def sampler_of(workload: Workload) -> SamplerConfig:
    """Return the sampler settings that a workload asks for.

    Raises:
        ValueError: They do not fit together; says which and the values.
    """
    return SamplerConfig(
        steps=workload.steps,
        gen_length=workload.gen_length,
        block_length=workload.block_length,
    )


def answer(
    items: Sequence[Item],
    sampler: SamplerConfig,
    schedule: Schedule,
    fleet: Fleet,
    cache: Cache,
) -> Answers:
    """Return the answers of a schedule to items, from the cache where they were made before.

    Args:
        items: Prompts [N].
        sampler: How they are denoised.
        schedule: The precision of each window.
        fleet: Has an engine for each precision of the schedule.
        cache: Where answers are kept.
    """
    key = _key(items, sampler, schedule, fleet)
    kept = cache.get("answers", key)
    if kept is None:
        # Of equal lengths together: the less padding, the less a pass computes for nobody.
        order = sorted(range(len(items)), key=lambda index: len(items[index].ids))
        made: dict[int, Generation] = {}
        for start in range(0, len(order), EVALUATION_BATCH):
            rows = order[start : start + EVALUATION_BATCH]
            requests = [
                Request(prompt=items[row].ids, sampler=sampler, schedule=schedule) for row in rows
            ]
            made.update(zip(rows, generate(requests, fleet.engines, fleet.model), strict=True))
        generations = [made[index] for index in range(len(items))]
        kept = {
            "ids": [list(each.ids) for each in generations],
            "commit_step": [list(each.commit_step) for each in generations],
            "bits": [each.bits for each in generations],
        }
        cache.put("answers", key, kept)
    shape = (len(items), sampler.gen_length)
    return Answers(
        ids=np.array(kept["ids"], np.int64).reshape(shape),
        commit_step=np.array(kept["commit_step"], np.int64).reshape(shape),
        bits=np.array(kept["bits"], np.float64),
    )


def _key(items: Sequence[Item], sampler: SamplerConfig, schedule: Schedule, fleet: Fleet) -> str:
    """Return the digest of everything that decides the answers.

    A uniform schedule answers alike however many windows it is written with.
    """
    precisions = schedule.precisions if not schedule.is_uniform else schedule.precisions[:1]
    parts = {
        "model": asdict(fleet.model),
        "engines": [fleet.keys[name] for name in precisions],
        "sampler": sampler.to_json(),
        "prompts": [item.ids for item in items],
        "batch": EVALUATION_BATCH,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def graded(
    workload: Workload,
    items: Sequence[Item],
    ids: NDArray[np.int64],
    decode: Callable[[Sequence[int]], str],
) -> NDArray[np.bool_] | None:
    """Return which answers [N] the workload's grader accepts, or None without a grader."""
    if workload.grade is None:
        return None
    return np.array(
        [
            workload.grade(item.prompt.prompt, decode(row.tolist()))
            for item, row in zip(items, ids, strict=True)
        ],
        np.bool_,
    )


def same_answers(ids: NDArray[np.int64], full: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which answers [N] equal full precision's; ids and full [N, G]."""
    return np.asarray((ids == full).all(axis=1))


def token_agreement(ids: NDArray[np.int64], full: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the share of each answer's tokens [N] that equal full precision's, 0 to 1."""
    return np.asarray((ids == full).mean(axis=1))
