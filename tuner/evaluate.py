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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calib_data.prompts import Prompt
from calib_data.workload import Workload, WorkloadError
from engines.backend import Backend
from engines.build import Cache
from engines.errors import InputError
from engines.model import ModelInfo
from engines.sampler import Request, generate
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
    """Return the answers of a schedule to items; as `answer_all`."""
    return answer_all(items, sampler, [schedule], fleet, cache)[schedule]


def answer_all(
    items: Sequence[Item],
    sampler: SamplerConfig,
    schedules: Sequence[Schedule],
    fleet: Fleet,
    cache: Cache,
    advance: Callable[[int], None] = lambda answers: None,
) -> dict[Schedule, Answers]:
    """Return the answers of schedules to items, from the cache where they were made before.

    Windows that schedules have in common at their start are run once: an answer begins where the
    schedules part.

    Args:
        items: Prompts [N].
        sampler: How they are denoised.
        schedules: The precision of each window.
        fleet: Has an engine for each precision of the schedules.
        cache: Where answers are kept, a schedule's as soon as it is through.
        advance: Told of the answers that are there, N a schedule.
    """
    found: dict[Schedule, Answers] = {}
    missing: list[Schedule] = []
    for schedule in dict.fromkeys(schedules):
        kept = cache.get("answers", _key(items, sampler, schedule, fleet))
        if kept is None:
            missing.append(schedule)
        else:
            found[schedule] = _answers(kept, (len(items), sampler.gen_length))
            advance(len(items))
    for windows in dict.fromkeys(schedule.windows for schedule in missing):
        alike = [schedule for schedule in missing if schedule.windows == windows]
        # Uniform schedules answer alike whatever their windows: the cache has them once.
        pending = [(alike, 0, _blank(items, sampler, fleet.model))]
        while pending:
            group, window, state = pending.pop()
            stop = _parting(group, window)
            state = _continued(state, items, sampler, group[0], stop, fleet)
            if stop == windows:
                (schedule,) = group
                kept = {"ids": state.ids, "commit_step": state.commit_step, "bits": state.bits}
                made = {name: values.tolist() for name, values in kept.items()}
                cache.put("answers", _key(items, sampler, schedule, fleet), made)
                found[schedule] = state
                advance(len(items))
                continue
            branches: dict[str, list[Schedule]] = {}
            for schedule in group:
                branches.setdefault(schedule.precisions[stop], []).append(schedule)
            pending += [(branch, stop, state) for branch in branches.values()]
    return found


def _parting(group: Sequence[Schedule], window: int) -> int:
    """Return the first window, from `window` on, in which schedules of a group differ; W if none.

    The schedules are different ones, so a group of several has such a window.
    """
    windows = group[0].windows
    for at in range(window, windows):
        if len({schedule.precisions[at] for schedule in group}) > 1:
            return at
    return windows


def _blank(items: Sequence[Item], sampler: SamplerConfig, model: ModelInfo) -> Answers:
    shape = (len(items), sampler.gen_length)
    return Answers(np.full(shape, model.mask_id), np.zeros(shape, np.int64), np.zeros(len(items)))


def _continued(
    state: Answers,
    items: Sequence[Item],
    sampler: SamplerConfig,
    schedule: Schedule,
    stop: int,
    fleet: Fleet,
) -> Answers:
    """Return answers carried on by a schedule up to a window's start, or to the end.

    `bits` are means over the passes so far.
    """
    total, windows, model = sampler.gen_length, schedule.windows, fleet.model
    edge = -(-stop * total // windows)  # the fewest decided tokens that are in window `stop`
    ids, commit_step, bits = state.ids.copy(), state.commit_step.copy(), state.bits.copy()
    # Of equal lengths together: the less padding, the less a pass computes for nobody.
    order = sorted(range(len(items)), key=lambda index: len(items[index].ids))
    order = [row for row in order if np.count_nonzero(ids[row] != model.mask_id) < edge]
    for start in range(0, len(order), EVALUATION_BATCH):
        rows = order[start : start + EVALUATION_BATCH]
        requests = [
            Request(
                prompt=items[row].ids,
                sampler=sampler,
                schedule=schedule,
                begun=tuple(ids[row].tolist()) if commit_step[row].any() else None,
                stop=None if stop == windows else edge,
            )
            for row in rows
        ]
        for row, made in zip(rows, generate(requests, fleet.engines, model, "split"), strict=True):
            before = int(commit_step[row].max())
            ids[row] = made.ids
            commit_step[row] = np.maximum(commit_step[row], made.commit_step)
            bits[row] = (before * bits[row] + made.passes * made.bits) / (before + made.passes)
    return Answers(ids, commit_step, bits)


def _answers(kept: Mapping[str, Any], shape: tuple[int, int]) -> Answers:
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
    """Return which answers [N] the workload's grader accepts, or None without a grader.

    Raises:
        InputError: The grader is the user's code, or the harness's, and failed.
    """
    texts = [decode(row.tolist()) for row in ids]
    found = grades(workload, [item.prompt.prompt for item in items], texts)
    return None if found is None else np.array(found, np.bool_)


def grades(workload: Workload, prompts: Sequence[str], texts: Sequence[str]) -> list[bool] | None:
    """Return which texts answer their prompts, or None without a grader.

    Raises:
        InputError: As `graded`.
    """
    if workload.grade is None:
        return None
    try:
        return [workload.grade(*each) for each in zip(prompts, texts, strict=True)]
    except WorkloadError as error:
        raise InputError(f"task {workload.name!r}: {error}") from error


def same_answers(ids: NDArray[np.int64], full: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which answers [N] equal full precision's; ids and full [N, G]."""
    return np.asarray((ids == full).all(axis=1))


def read_positions(scored: str, ids: NDArray[np.int64], eos_id: int) -> NDArray[np.bool_]:
    """Return which tokens of answers a grader reads [N, G].

    Those are all tokens up to the first end-of-sequence token, and that one, for it says where the
    text ends; of a task that scores only the start or the end of the text, its first or its last
    token.

    Args:
        scored: As `Workload.scored` says.
        ids: Answers of full precision [N, G].
        eos_id: The end-of-sequence token.
    """
    at = np.arange(ids.shape[1])
    ends = ids == eos_id
    length = np.where(ends.any(axis=1), ends.argmax(axis=1), ids.shape[1])[:, None]
    if scored == "start":
        read = np.broadcast_to(at == 0, ids.shape)
    elif scored == "end":
        read = at == np.maximum(length - 1, 0)
    else:
        read = at <= length
    return np.asarray(read)


def token_agreement(
    ids: NDArray[np.int64], full: NDArray[np.int64], read: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """Return the share of each answer's tokens [N] that equal full precision's, 0 to 1.

    Args:
        ids: Answers [N, G].
        full: Full precision's [N, G].
        read: Tokens that count [N, G], one in each answer at least; None for all.
    """
    if read is None:
        return np.asarray((ids == full).mean(axis=1))
    return np.asarray(((ids == full) & read).sum(axis=1) / read.sum(axis=1))
