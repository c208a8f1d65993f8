"""Denoise a batch of answers: one loop over `Backend`, greedy, by fixed steps or by threshold.

Each row is [prompt][G answer tokens][padding on the right]; positions start at 0 in every row and
padding is masked, so a row's answer does not depend on its batch-mates.  All rows start together,
each where its answer was begun; in each turn every live row takes its next step, in one pass, and
a row leaves the batch when as many of its tokens are decided as were asked for:

    window of each row  ->  the engine that its schedule wants  ->  passes (one, or one a group)
    pass: ask the masked positions of the row's block  ->  engine  ->  commit the most probable,
          as many as the row's step is due, or all that reach its threshold if these are more

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
from engines.commit import choose
from engines.errors import BackendError
from engines.model import ModelInfo
from engines.row import checked_row
from engines.schedule import SamplerConfig, Schedule, window_of

POLICIES = ("safest", "split")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One answer that is wanted, or a piece of one.

    A piece goes on exactly as the whole answer would: same windows, progress and commits.

    Attributes:
        prompt: Token ids, below the vocabulary and without the mask token; may be empty.
        sampler: How it is denoised.
        schedule: The precision of each window.
        task: Whose schedule it is; for messages.
        begun: The answer so far [G], the model's mask id where undecided; it must be what whole
            steps of this sampler can leave.  None: nothing is decided yet.
        stop: The row leaves the batch as soon as this many tokens are decided, those that it was
            begun with included; at once where they are already.  None: all.
    """

    prompt: tuple[int, ...]
    sampler: SamplerConfig
    schedule: Schedule
    task: str = "default"
    begun: tuple[int, ...] | None = None
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer and what it took now, whatever it was begun with.

    Attributes:
        ids: The answer [G], end-of-sequence padding included; the model's mask id where undecided,
            which only a request with `stop` can leave.
        passes: Engine passes in which the row took part.
        tokens: Tokens before the first end-of-sequence token; G where there is none.
        bits: Mean activation bits over its passes, of the engines that ran them; 0 without passes.
        engine_ms: Wall time of its passes in each window of its schedule [W], milliseconds.  A
            pass counts in full for every row that took part.
        commit_step: The step in which each token of the answer was committed [G], from 1 at the
            answer's start (by threshold, where it was begun); 0 for tokens that it was begun
            with, and for undecided ones.
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
        step: Turn of the batch, counted from 1.
        steps: Step of each row, from 1 at its answer's start [B]; by threshold from where it was
            begun, as how many passes lie before is not known.
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
    steps: NDArray[np.int64]
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
            long for the model; or `begun` or `stop` cannot be of such an answer.
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
    turn = 0
    while len(batch.live):
        turn += 1
        for engine, rows, windows in batch.groups(policy):
            state = batch.ask(turn, names[engine], rows, windows)
            if on_pass is not None:
                on_pass(state)
            began = clock()
            served = engines[names[engine]].serve(
                state.ids, state.mask, state.positions, state.progress
            )
            elapsed_ms = (clock() - began) * 1000.0
            if np.count_nonzero(np.isfinite(served.probability)) != served.probability.size:
                raise BackendError(_nonfinite(state, served.probability, requests))
            counts, of, columns = choose(
                served.probability,
                state.asked,
                batch.commits[rows, state.steps - 1],
                None if batch.threshold is None else batch.threshold[rows],
            )
            places, tokens = state.positions[of, columns], served.tokens[of, columns]
            committed = Committed(of, columns, places, tokens)
            if record is not None:
                record(state, committed)
            batch.write(state, rows, committed, counts, bits[engine], elapsed_ms)
        batch.retire(turn)
    return batch.finish()


class _Batch:
    """The state of all rows, in the order of the requests, and which of them are live.

    R requests, L the longest row, A the longest answer, T the most steps, W the most windows.
    """

    def __init__(self, requests: Sequence[Request], model: ModelInfo, names: list[str]) -> None:
        self.requests, self.model = requests, model
        rows = [
            checked_row(
                f"request {index} (task {one.task!r})",
                one.prompt,
                one.begun,
                one.stop,
                one.sampler,
                model,
            )
            for index, one in enumerate(requests)
        ]
        self.prompt = np.array([len(row.prompt) for row in rows])
        self.gen = np.array([one.sampler.gen_length for one in requests])
        self.block = np.array([one.sampler.block_length for one in requests])
        self.windows = np.array([one.schedule.windows for one in requests])
        self.lengths = self.prompt + self.gen
        steps, answer, count = [one.sampler.steps for one in requests], self.gen.max(), len(rows)
        self.open = np.arange(answer) < self.gen[:, None]  # [R, A], undecided
        self.mask = np.arange(int(self.lengths.max())) < self.lengths[:, None]  # [R, L]
        self.canvas = np.where(self.mask, model.mask_id, model.eos_id)  # [R, L]
        self.commits = np.zeros((count, max(steps)), np.int64)  # [R, T]
        self.wanted = np.zeros((count, int(self.windows.max())), np.int64)  # [R, W], index
        rank = {name: index for index, name in enumerate(names)}
        for index, (row, one) in enumerate(zip(rows, requests, strict=True)):
            self.canvas[index, : len(row.prompt)] = row.prompt
            if row.begun is not None:
                self.canvas[index, len(row.prompt) : self.lengths[index]] = row.begun
                self.open[index, : len(row.begun)] = row.begun == model.mask_id
            self.commits[index, : steps[index]] = one.sampler.commits
            precisions = one.schedule.precisions
            self.wanted[index, : len(precisions)] = [rank[name] for name in precisions]
        self.committed = np.array([row.decided for row in rows])
        self.stop = np.array([row.stop for row in rows])
        bounds = [np.inf if t is None else t for t in (one.sampler.threshold for one in requests)]
        self.threshold = np.array(bounds) if min(bounds) <= 1.0 else None  # [R], if any row's
        self.behind = np.array([row.step for row in rows])
        self.passes = np.zeros(count, np.int64)
        self.commit_step = np.zeros((count, answer), np.int64)
        self.engine_ms = np.zeros(self.wanted.shape)
        self.bits = np.zeros(count)
        self.live = np.flatnonzero(self.committed < self.stop)

    def groups(self, policy: str) -> list[tuple[int, NDArray[np.intp], NDArray[np.int64]]]:
        """Return (index of the engine, rows, their windows) of each pass of a turn."""
        rows = self.live
        windows = window_of(self.committed[rows], self.gen[rows], self.windows[rows])
        wanted = self.wanted[rows, windows]
        most = int(wanted.max())
        if policy == "safest" or most == int(wanted.min()):
            return [(most, rows, windows)]
        return [
            (engine, rows[wanted == engine], windows[wanted == engine])
            for engine in np.unique(wanted).tolist()
        ]

    def ask(
        self, turn: int, precision: str, rows: NDArray[np.intp], windows: NDArray[np.int64]
    ) -> Pass:
        """Return what the engine is given: all masked positions of each row's active block."""
        committed, block, lengths = self.committed[rows], self.block[rows], self.lengths[rows]
        asked = block - committed % block
        most = int(asked.max())
        offsets = (~self.open[rows]).argsort(axis=1, kind="stable")[:, :most]
        if np.count_nonzero(asked != most):
            offsets = np.where(np.arange(most) < asked[:, None], offsets, offsets[:, :1])
        length = int(lengths.max())
        return Pass(
            step=turn,
            steps=self.behind[rows] + turn,
            precision=precision,
            requests=rows,
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
        state: Pass,
        rows: NDArray[np.intp],
        committed: Committed,
        counts: NDArray[np.int64],
        bits: float,
        elapsed_ms: float,
    ) -> None:
        """Put the committed tokens on the canvas and account for the pass."""
        places = rows[committed.rows]
        offsets = committed.positions - self.prompt[places]
        self.canvas[places, committed.positions] = committed.tokens
        self.open[places, offsets] = False
        self.commit_step[places, offsets] = state.steps[committed.rows]
        self.committed[rows] += counts
        self.engine_ms[rows, state.windows] += elapsed_ms
        self.bits[rows] += bits

    def retire(self, turn: int) -> None:
        """Take the rows that have come to their stop out of the batch."""
        done = self.committed[self.live] >= self.stop[self.live]
        if np.count_nonzero(done):
            self.passes[self.live[done]] = turn
            self.live = self.live[~done]

    def finish(self) -> list[Generation]:
        """Return the answers in the order of the requests."""
        answers = []
        for index, request in enumerate(self.requests):
            start, gen = int(self.prompt[index]), request.sampler.gen_length
            ids = self.canvas[index, start : start + gen].tolist()
            undecided = gen - int(self.committed[index])
            if (
                ids.count(self.model.mask_id) != undecided
                or not 0 <= min(ids) <= max(ids) < self.model.vocab
            ):
                raise BackendError(
                    f"request {index} (task {request.task!r}) was answered with the mask token "
                    f"or an id outside the vocabulary of {self.model.vocab}: {ids}; the engine "
                    f"is not of this model, export it again"
                )
            eos, passes = self.model.eos_id, int(self.passes[index])
            answers.append(
                Generation(
                    ids=tuple(ids),
                    passes=passes,
                    tokens=ids.index(eos) if eos in ids else gen,
                    bits=float(self.bits[index]) / max(passes, 1),
                    engine_ms=tuple(self.engine_ms[index, : request.schedule.windows].tolist()),
                    commit_step=tuple(self.commit_step[index, :gen].tolist()),
                )
            )
        return answers


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


def _nonfinite(state: Pass, probability: Floats, requests: Sequence[Request]) -> str:
    """Return the message for the first row with a probability that is not finite."""
    row = int(np.flatnonzero(~np.isfinite(probability).all(axis=1))[0])
    column = int(np.flatnonzero(~np.isfinite(probability[row]))[0])
    request = requests[int(state.requests[row])]
    return (
        f"engine {state.precision!r} gave the probability {probability[row, column]} at position "
        f"{state.positions[row, column]} in window {state.windows[row]}, step {state.steps[row]} "
        f"of {request.sampler.steps}, request {state.requests[row]} (task {request.task!r}); "
        f"schedule a higher precision for this window, or check the checkpoint's weights"
    )
