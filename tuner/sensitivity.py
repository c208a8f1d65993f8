"""How much each precision damages each window of each prompt: K, flips, moves and influence.

Along full-precision traces, for a prompt x, window w and precision b, the engine b is put in front
of the trace's own states (teacher forcing), and over the steps t of w and the commits of t:

    K_w^b(x)      sum over the positions i that t commits of
                  KL(p_full(. | S_t)_i || p_b(. | S_t)_i)
    flips_w^b(x)  positions i whose most probable token under b is another one
    moves_w^b(x)  commits (position, token) of the trace that the sampler's rule would not make
                  with b's tail: it sees that another position is committed first, which K cannot
    I_w(x)        how far what w commits travels; see `influence`

K adds up over steps by the chain rule for a sampler that draws.  One forward pass of a state
serves K, flips and moves.

What it costs in forward passes of rows: a generation's for each precision other than full, and
what the influence takes; `PromptTables.rows` counts them.  What is made of the tables stands in
`gain`, and needs no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from engines.backend import Backend, Floats, served_from_logits
from engines.commit import choose
from engines.errors import BackendError
from engines.model import ModelInfo
from engines.schedule import THRESHOLD, SamplerConfig
from engines.trace import Trace, TraceStep
from tuner.costs import Indices, Reals
from tuner.influence import counterfactual_influence, remask_influence
from tuner.replay import (
    BATCH,
    Batch,
    Prompts,
    State,
    batches,
    check,
    kl_divergence,
    window_at,
)

Influence = Literal["remask", "counterfactual"]
INFLUENCES: tuple[Influence, ...] = get_args(Influence)
Scored = Callable[[Trace], NDArray[np.bool_]]


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptTables:
    """What was measured of a task: N prompts, W windows, P precisions.

    Attributes:
        precisions: Names, in the order of the tables [P].
        kl: K [N, W, P], nats.
        flips: Committed positions whose most probable token is another one [N, W, P].
        moves: Commits that the sampler's rule would not make [N, W, P]; None: not measured.
        influence: I [N, W], at least 1.
        rollout: Share of the tokens read that differ when one window alone changes from the base
            [N, W, P]; None: not measured; see `rollout`.
        passes: Steps that the trace takes in each window [N, W].
        rows: Forward passes of single rows that were spent.
    """

    precisions: tuple[str, ...]
    kl: Reals
    flips: Reals
    moves: Reals | None
    influence: Reals
    passes: Reals
    rows: int
    rollout: Reals | None = None

    def only(self, prompts: Sequence[int] | Indices) -> PromptTables:
        """Return the tables of some of the prompts, by index, in that order; rows as they are."""
        index = np.asarray(prompts, np.intp)
        return PromptTables(
            precisions=self.precisions,
            kl=self.kl[index],
            flips=self.flips[index],
            moves=None if self.moves is None else self.moves[index],
            influence=self.influence[index],
            passes=self.passes[index],
            rows=self.rows,
            rollout=None if self.rollout is None else self.rollout[index],
        )

    def to_json(self) -> dict[str, object]:
        """Return what `from_json` reads."""
        return {
            each.name: value.tolist() if isinstance(value, np.ndarray) else value
            for each in fields(self)
            for value in (getattr(self, each.name),)
        }

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> PromptTables:
        """Return what `to_json` wrote."""
        moves, rollout = value["moves"], value.get("rollout")
        return cls(
            precisions=tuple(cast("list[str]", value["precisions"])),
            kl=np.array(value["kl"], np.float64),
            flips=np.array(value["flips"], np.float64),
            moves=None if moves is None else np.array(moves, np.float64),
            influence=np.array(value["influence"], np.float64),
            passes=np.array(value["passes"], np.float64),
            rows=cast("int", value["rows"]),
            rollout=None if rollout is None else np.array(rollout, np.float64),
        )


def prompt_tables(
    traces: Sequence[Trace],
    engines: Mapping[str, Backend],
    full: Backend,
    *,
    windows: int,
    model: ModelInfo,
    influence: Influence = "remask",
    target: str | None = None,
    scored: Scored | None = None,
    with_moves: bool = False,
    batch: int = BATCH,
    advance: Callable[[int], None] = lambda rows: None,
    prompt_ids: Sequence[str] | None = None,
) -> PromptTables:
    """Return K, flips, moves and influence of each prompt, with the engines that will run.

    Args:
        traces: Of full precision, a prompt each [N].
        engines: By name of the precision [P].  The one named as `full` is not run: its K is 0.
        full: Made the traces.
        windows: W.
        model: Its mask token stands for what is not decided.
        influence: "remask" or "counterfactual"; see `influence`.
        target: For counterfactual, the precision whose commits replace the window's; None for the
            one of fewest bits.
        scored: Which answer positions [G] of a trace count in kl, flips and moves; None: all.
        with_moves: Measure them; every masked position of the active block is asked for then.
        batch: Rows put before an engine at once; bounds memory.
        advance: Told of the rows of each batch done.
        prompt_ids: What messages call the prompts [N]; None: their numbers.

    Raises:
        BackendError: Logits are NaN or infinite; names engine, window, step and prompt.
        ValueError: No traces or engines, fewer than 1 window or row, or the target is no engine.
    """
    check(traces, windows, batch)
    if influence not in INFLUENCES:
        raise ValueError(f"influence is one of {', '.join(INFLUENCES)}, got {influence!r}")
    names = tuple(engines)
    if not names or (target is not None and target not in names):
        raise ValueError(f"need engines, and the target among them, got {target!r} of {names}")
    prompts = Prompts(traces, prompt_ids)
    if influence == "remask":
        travelled = remask_influence(prompts, full, windows, model, batch, advance)
    else:
        least = min(names, key=lambda name: engines[name].precision.bits)
        other = engines[least if target is None else target]
        travelled = counterfactual_influence(prompts, other, full, windows, model, batch, advance)
    own = {name: each for name, each in engines.items() if name != full.precision.name}
    shape = (len(traces), windows, len(names))
    kl, flips = np.zeros(shape), np.zeros(shape)
    moves = np.zeros(shape) if with_moves else None
    rows = travelled.rows
    states = _states(traces, windows, model.mask_id if with_moves else None)
    passes = np.zeros((len(traces), windows))
    np.add.at(passes, ([each.trace for each in states], [each.window for each in states]), 1.0)
    for part in batches(states, batch, model.vocab) if own else ():
        commits, window = _Commits.of(part, prompts, scored), part.states[0].window
        for name, engine in own.items():
            logits = part.logits(engine, prompts)
            found = logits[commits.rows, commits.columns]
            column = names.index(name)
            np.add.at(kl[:, window, column], commits.traces, kl_divergence(commits.log_p, found))
            changed = found.argmax(axis=-1) != commits.tokens
            np.add.at(flips[:, window, column], commits.traces, changed)
            if moves is not None:
                moved = ~_made(part, logits, commits, prompts)
                np.add.at(moves[:, window, column], commits.traces, moved)
            advance(len(part.states))
        rows += len(part.states) * len(own)
    return PromptTables(
        precisions=names,
        kl=kl,
        flips=flips,
        moves=moves,
        influence=travelled.values,
        passes=passes,
        rows=rows,
    )


def divergence(traces: Sequence[Trace], engine: Backend, batch: int = BATCH) -> float:
    """Return the K of a whole answer, mean over the prompts, nats; arguments as `prompt_tables`.

    The engine is run whatever its name is.
    """
    check(traces, 1, batch)
    prompts, total = Prompts(traces), 0.0
    for part in batches(_states(traces, 1, None), batch, traces[0].steps[0].log_p.shape[-1]):
        commits = _Commits.of(part, prompts, None)
        found = part.logits(engine, prompts)[commits.rows, commits.columns]
        total += float(kl_divergence(commits.log_p, found).sum())
    return total / len(traces)


def _states(traces: Sequence[Trace], windows: int, mask_id: int | None) -> list[State]:
    """Return the states of every step.

    Args:
        traces: Of full precision.
        windows: W.
        mask_id: Ask, as the sampler does, for every masked position of the active block; None:
            only for those that the step commits.
    """
    states = []
    for index, trace in enumerate(traces):
        sampler = trace.request.sampler
        for number, step in enumerate(trace.steps):
            asked = step.positions if mask_id is None else _block(step, sampler, mask_id)
            window = window_at(step.committed, trace, windows)
            states.append(
                State(index, number, window, step.ids, asked, step.committed, sampler.gen_length)
            )
    return states


def _block(step: TraceStep, sampler: SamplerConfig, mask_id: int) -> NDArray[np.int64]:
    """Return the masked positions of a state's active block, ascending."""
    left = sampler.block_length - step.committed % sampler.block_length
    return np.flatnonzero(step.ids == mask_id)[:left]


@dataclass(frozen=True, slots=True)
class _Commits:
    """What the traces commit at the states of a batch and what counts of it, C commits.

    Attributes:
        rows: Row of the batch [C].
        columns: Column of the batch's positions [C].
        traces: Index of the trace [C].
        tokens: The token put there [C].
        log_p: Log probabilities of full precision [C, V].
    """

    rows: NDArray[np.intp]
    columns: NDArray[np.intp]
    traces: NDArray[np.intp]
    tokens: NDArray[np.int64]
    log_p: Floats

    @classmethod
    def of(cls, part: Batch, prompts: Prompts, scored: Scored | None) -> _Commits:
        """Return those of a batch."""
        steps = [prompts.traces[state.trace].steps[state.step] for state in part.states]
        counts = np.array([len(step.positions) for step in steps])
        rows = np.repeat(np.arange(len(steps)), counts)
        positions = np.concatenate([step.positions for step in steps])
        traces = np.array([state.trace for state in part.states], np.intp)[rows]
        # Every commit is among the row's asked positions; the first match is the one.
        columns = (part.positions[rows] == positions[:, None]).argmax(axis=1)
        found = cls(
            rows=rows,
            columns=columns,
            traces=traces,
            tokens=np.concatenate([step.tokens for step in steps]),
            log_p=np.concatenate([step.log_p for step in steps]),
        )
        if not np.isfinite(found.log_p).all():
            row = rows[np.flatnonzero(~np.isfinite(found.log_p).all(axis=1))[0]]
            state = part.states[row]
            raise BackendError(
                f"full precision's log probabilities are not finite in window {state.window}, "
                f"step {state.step + 1} of {len(prompts.traces[state.trace].steps)}, prompt "
                f"{prompts.name(state.trace)}; check the checkpoint's weights"
            )
        if scored is None:
            return found
        kept = np.concatenate(
            [
                scored(trace)[step.positions - len(trace.request.prompt)]
                for state, step in zip(part.states, steps, strict=True)
                for trace in (prompts.traces[state.trace],)
            ]
        )
        return cls(rows[kept], columns[kept], traces[kept], found.tokens[kept], found.log_p[kept])


def _made(part: Batch, logits: Floats, commits: _Commits, prompts: Prompts) -> NDArray[np.bool_]:
    """Return which of the trace's commits [C] the sampler's rule makes with these logits."""
    served = served_from_logits(logits)
    asked = np.array([len(state.asked) for state in part.states])
    traces = [prompts.traces[state.trace] for state in part.states]
    samplers = [trace.request.sampler for trace in traces]
    by_threshold = np.array([sampler.rule == THRESHOLD for sampler in samplers])
    counts = [
        len(trace.steps[state.step].positions)
        for trace, state in zip(traces, part.states, strict=True)
    ]
    least = [1.0 if sampler.threshold is None else sampler.threshold for sampler in samplers]
    made = choose(
        served.probability,
        asked,
        np.where(by_threshold, 1, counts),
        np.where(by_threshold, least, np.inf) if by_threshold.any() else None,
    )
    chosen = np.zeros(served.probability.shape, np.bool_)
    chosen[made.rows, made.columns] = True
    at = commits.rows, commits.columns
    found: NDArray[np.bool_] = chosen[at] & (served.tokens[at] == commits.tokens)
    return found
