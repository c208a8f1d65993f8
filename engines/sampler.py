"""Denoise a batch of answers: one loop over `Backend`, LLaDA's low-confidence remasking, greedy.

Each row is [prompt][G answer tokens][padding on the right]; positions start at 0 in every row and
padding is masked, so a row's answer does not depend on its batch-mates.  All rows start together;
in each step every unfinished row takes one pass, and finished rows leave the batch:

    window of each row  ->  the engine that its schedule wants  ->  passes (one, or one a group)
    pass: ask the masked positions of the row's block  ->  engine  ->  commit the most probable

Blocks are denoised from the left, so the masked positions of the active block are simply the
first masked ones of the row; nothing else knows about blocks.

Knows nothing about text, files or which engines there are.  The loop is vectorised over rows and
costs tens of microseconds a pass; the C++ sampler is its only copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.backend import Backend, Floats, Ids, Mask
from engines.errors import BackendError, InputError
from engines.model import ModelInfo
from engines.schedule import SamplerConfig, Schedule, window_of

POLICIES = ("safest", "split")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One answer that is wanted.

    Attributes:
        prompt: Token ids, below the vocabulary and without the mask token; may be empty.
        sampler: How it is denoised.
        schedule: The precision of each window.
        task: Whose schedule it is; for messages.
    """

    prompt: tuple[int, ...]
    sampler: SamplerConfig
    schedule: Schedule
    task: str = "default"


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer and what it took.

    Attributes:
        ids: The answer [G], end-of-sequence padding included.
        passes: Engine passes in which the row took part.
        tokens: Tokens before the first end-of-sequence token; G where there is none.
        bits: Mean activation bits over its passes, of the engines that ran them.
        engine_ms: Wall time of its passes in each window of its schedule [W], milliseconds.  A
            pass counts in full for every row that took part.
        commit_step: The step, from 1, in which each token of the answer was committed [G].
    """

    ids: tuple[int, ...]
    passes: int
    tokens: int
    bits: float
    engine_ms: tuple[float, ...]
    commit_step: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pass:
    """What an engine is given, for B rows of the batch.  The arrays are this pass's own.

    Attributes:
        step: Counted from 1.
        precision: Name of the engine that runs.
        requests: Index of each row in the list of requests [B].
        windows: Window of each row [B].
        committed: Answer tokens decided by each row so far [B].
        lengths: Tokens of each row without padding, prompt plus answer [B].
        ids: The canvas [B, L].
        mask: True where a token is attended to [B, L].
        positions: Asked positions on the canvas, ascending [B, M]; the first one stands in where
            a row asks for fewer.
        asked: How many of a row's positions are asked [B], from 1 to M.
        progress: Fraction of the answer decided [B].
    """

    step: int
    precision: str
    requests: NDArray[np.intp]
    windows: NDArray[np.int64]
    committed: NDArray[np.int64]
    lengths: NDArray[np.int64]
    ids: Ids
    mask: Mask
    positions: Ids
    asked: NDArray[np.int64]
    progress: Floats


@dataclass(frozen=True, slots=True)
class Committed:
    """What a pass committed: N tokens of all its rows, row by row, most probable first.

    Attributes:
        rows: Row of the pass, 0 to B - 1 [N].
        columns: Column of `Pass.positions` [N].
        positions: Position on the canvas [N].
        tokens: The token put there [N].
    """

    rows: NDArray[np.intp]
    columns: NDArray[np.intp]
    positions: Ids
    tokens: Ids


def generate(
    requests: Sequence[Request],
    engines: Mapping[str, Backend],
    model: ModelInfo,
    policy: str = "safest",
    clock: Callable[[], float] = time.perf_counter,
    on_pass: Callable[[Pass], None] | None = None,
    record: Callable[[Pass, Committed], None] | None = None,
) -> list[Generation]:
    """Return an answer for each request, denoised as one batch.

    Args:
        requests: Rows of the batch; tasks, lengths, samplers and schedules may differ.
        engines: Backend of each precision name that a schedule uses.
        model: Special ids, vocabulary and the longest canvas.
        policy: When rows of a step want different engines: `safest` runs all of them on the one
            of most activation bits (then weight bits, then the last by name); `split` runs one
            pass for each engine.
        clock: Seconds; read twice a pass.
        on_pass: Called before each pass.
        record: Called after each pass, before its tokens are written to the canvas.

    Raises:
        InputError: A prompt holds an id that is not of the model, or the mask token, or is too
            long for the model.
        BackendError: An engine failed, or gave a probability that is not finite or a token that
            cannot be one; names window, step and request.
        ValueError: Unknown policy, or an engine that a schedule wants is missing.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    if not requests:
        return []
    names = _engines_by_safety(requests, engines)
    batch = _Batch(requests, model, names)
    bits = [engines[name].precision.bits for name in names]
    for step in range(1, int(batch.steps[0]) + 1):
        for engine, rows, windows in batch.groups(step, policy):
            state = batch.ask(step, names[engine], rows, windows)
            if on_pass is not None:
                on_pass(state)
            began = clock()
            served = engines[names[engine]].serve(
                state.ids, state.mask, state.positions, state.progress
            )
            elapsed_ms = (clock() - began) * 1000.0
            if not np.isfinite(served.probability).all():
                raise BackendError(_nonfinite(state, served.probability, requests))
            committed = _commit(
                state, served.tokens, served.probability, batch.commits[rows, step - 1]
            )
            if record is not None:
                record(state, committed)
            batch.write(step, rows, windows, committed, bits[engine], elapsed_ms)
    return batch.finish()


class _Batch:
    """Rows sorted by their steps, most first, so that unfinished rows are always a prefix.

    R requests, L the longest row, A the longest answer, T the most steps, W the most windows.
    """

    def __init__(self, requests: Sequence[Request], model: ModelInfo, names: list[str]) -> None:
        steps = np.array([request.sampler.steps for request in requests])
        self.order = np.argsort(-steps, kind="stable")
        self.steps = steps[self.order]
        rows = [requests[index] for index in self.order]
        self.requests, self.model = rows, model
        prompts = [_checked_prompt(index, requests[index], model) for index in self.order.tolist()]
        self.prompt = np.array([len(prompt) for prompt in prompts])
        self.gen = np.array([row.sampler.gen_length for row in rows])
        self.block = np.array([row.sampler.block_length for row in rows])
        self.windows = np.array([row.schedule.windows for row in rows])
        self.lengths = self.prompt + self.gen
        answer, count = int(self.gen.max()), len(rows)
        offsets, places = np.arange(answer), np.arange(int(self.lengths.max()))
        self.open = offsets < self.gen[:, None]  # [R, A], undecided
        self.mask = places < self.lengths[:, None]  # [R, L]
        self.canvas = np.where(self.mask, model.mask_id, model.eos_id)  # [R, L]
        self.commits = np.zeros((count, int(self.steps[0])), np.int64)  # [R, T]
        self.wanted = np.zeros((count, int(self.windows.max())), np.int64)  # [R, W], index
        rank = {name: index for index, name in enumerate(names)}
        for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            self.canvas[index, : len(prompt)] = prompt
            self.commits[index, : row.sampler.steps] = row.sampler.commits
            self.wanted[index, : row.schedule.windows] = [
                rank[name] for name in row.schedule.precisions
            ]
        self.committed = np.zeros(count, np.int64)
        self.commit_step = np.zeros((count, answer), np.int64)
        self.engine_ms = np.zeros(self.wanted.shape)
        self.bits = np.zeros(count)
        self.everyone = np.arange(count)

    def groups(
        self, step: int, policy: str
    ) -> list[tuple[int, NDArray[np.intp], NDArray[np.int64]]]:
        """Return (index of the engine, rows, their windows) of each pass of a step."""
        live = len(self.steps)
        if self.steps[-1] < step:
            live = int(np.count_nonzero(self.steps >= step))
        rows = self.everyone[:live]
        windows = window_of(self.committed[:live], self.gen[:live], self.windows[:live])
        wanted = self.wanted[rows, windows]
        most = int(wanted.max())
        if policy == "safest" or most == int(wanted.min()):
            return [(most, rows, windows)]
        return [
            (engine, rows[wanted == engine], windows[wanted == engine])
            for engine in np.unique(wanted).tolist()
        ]

    def ask(
        self, step: int, precision: str, rows: NDArray[np.intp], windows: NDArray[np.int64]
    ) -> Pass:
        """Return what the engine is given: all masked positions of each row's active block."""
        committed, block, lengths = self.committed[rows], self.block[rows], self.lengths[rows]
        asked = block - committed % block
        most = int(asked.max())
        offsets = (~self.open[rows]).argsort(axis=1, kind="stable")[:, :most]
        if most != int(asked.min()):
            offsets = np.where(np.arange(most) < asked[:, None], offsets, offsets[:, :1])
        length = int(lengths.max())
        return Pass(
            step=step,
            precision=precision,
            requests=self.order[rows],
            windows=windows,
            committed=committed,
            lengths=lengths,
            ids=self.canvas[rows, :length],
            mask=self.mask[rows, :length],
            positions=offsets + self.prompt[rows, None],
            asked=asked,
            progress=(committed / self.gen[rows]).astype(np.float32),
        )

    def write(
        self,
        step: int,
        rows: NDArray[np.intp],
        windows: NDArray[np.int64],
        committed: Committed,
        bits: float,
        elapsed_ms: float,
    ) -> None:
        """Put the committed tokens on the canvas and account for the pass."""
        places = rows[committed.rows]
        offsets = committed.positions - self.prompt[places]
        self.canvas[places, committed.positions] = committed.tokens
        self.open[places, offsets] = False
        self.commit_step[places, offsets] = step
        self.committed[rows] += self.commits[rows, step - 1]
        self.engine_ms[rows, windows] += elapsed_ms
        self.bits[rows] += bits

    def finish(self) -> list[Generation]:
        """Return the answers in the order of the requests."""
        answers: dict[int, Generation] = {}
        for row, (index, request) in enumerate(zip(self.order, self.requests, strict=True)):
            start, gen = int(self.prompt[row]), request.sampler.gen_length
            ids = self.canvas[row, start : start + gen].tolist()
            if self.model.mask_id in ids or not 0 <= min(ids) <= max(ids) < self.model.vocab:
                raise BackendError(
                    f"request {index} (task {request.task!r}) was answered with the mask token "
                    f"or an id outside the vocabulary of {self.model.vocab}: {ids}; the engine "
                    f"is not of this model, export it again"
                )
            eos, steps = self.model.eos_id, request.sampler.steps
            answers[int(index)] = Generation(
                ids=tuple(ids),
                passes=steps,
                tokens=ids.index(eos) if eos in ids else gen,
                bits=float(self.bits[row]) / steps,
                engine_ms=tuple(self.engine_ms[row, : request.schedule.windows].tolist()),
                commit_step=tuple(self.commit_step[row, :gen].tolist()),
            )
        return [answers[index] for index in range(len(answers))]


def _commit(state: Pass, tokens: Ids, probability: Floats, counts: NDArray[np.int64]) -> Committed:
    """Return the `counts` [B] most probable asked positions; ties to the lowest index. Pure."""
    least, most = int(counts.min()), int(counts.max())
    if int(state.asked.min()) != probability.shape[1]:
        columns = np.arange(probability.shape[1])
        probability = np.where(columns < state.asked[:, None], probability, -1.0)
    chosen = (-probability).argsort(axis=1, kind="stable")[:, :most]
    if least == most:
        rows, columns = np.repeat(np.arange(len(chosen)), most), chosen.reshape(-1)
    else:
        wanted = np.arange(most) < counts[:, None]
        rows, columns = np.nonzero(wanted)[0], chosen[wanted]
    return Committed(rows, columns, state.positions[rows, columns], tokens[rows, columns])


def _engines_by_safety(requests: Sequence[Request], engines: Mapping[str, Backend]) -> list[str]:
    """Return the names that the schedules use, the safest last."""
    names = {name for schedule in {r.schedule for r in requests} for name in schedule.precisions}
    missing = sorted(names - set(engines))
    if missing:
        raise ValueError(
            f"schedules want the engines {', '.join(missing)}, but given are only "
            f"{', '.join(sorted(engines)) or 'none'}"
        )
    return sorted(
        names,
        key=lambda name: (engines[name].precision.bits, engines[name].precision.weight_bits, name),
    )


def _checked_prompt(index: int, request: Request, model: ModelInfo) -> NDArray[np.int64]:
    """Return the prompt [n]; refuses what an engine would crash on or silently misread."""
    where = f"request {index} (task {request.task!r})"
    prompt = np.array(request.prompt) if request.prompt else np.zeros(0, np.int64)
    if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
        raise InputError(f"{where}: prompt ids must be integers below {model.vocab}; tokenize it")
    bad = np.flatnonzero((prompt < 0) | (prompt >= model.vocab))
    if bad.size:
        raise InputError(
            f"{where}: prompt id {prompt[bad[0]]} at {bad[0]} is not in [0, {model.vocab}); "
            f"tokenize with the tokenizer of this model"
        )
    masked = np.flatnonzero(prompt == model.mask_id)
    if masked.size:
        raise InputError(
            f"{where}: the prompt holds the mask token {model.mask_id} at {masked[0]}, which "
            f"stands for what is not yet decided; take it out"
        )
    length = len(prompt) + request.sampler.gen_length
    if length > model.max_length:
        raise InputError(
            f"{where}: prompt of {len(prompt)} and answer of {request.sampler.gen_length} tokens "
            f"are {length}, the model's longest is {model.max_length}; shorten the prompt or "
            f"lower gen-length"
        )
    return prompt.astype(np.int64)


def _nonfinite(state: Pass, probability: Floats, requests: Sequence[Request]) -> str:
    """Return the message for the first row with a probability that is not finite."""
    row = int(np.flatnonzero(~np.isfinite(probability).all(axis=1))[0])
    column = int(np.flatnonzero(~np.isfinite(probability[row]))[0])
    request = requests[int(state.requests[row])]
    return (
        f"engine {state.precision!r} gave the probability {probability[row, column]} at position "
        f"{state.positions[row, column]} in window {state.windows[row]}, step {state.step} of "
        f"{request.sampler.steps}, request {state.requests[row]} (task {request.task!r}); "
        f"schedule a higher precision for this window, or check the checkpoint's weights"
    )
