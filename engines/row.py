"""Where a row of a batch starts and where it leaves, checked.

An answer may begin in the middle and stop early: cut at the end of any step, its pieces run one
after another are the whole run.  Everything here is refused before an engine sees it.  Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.errors import InputError
from engines.model import ModelInfo
from engines.schedule import THRESHOLD, SamplerConfig

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Row:
    """A checked row; G is its answer's length.

    Attributes:
        prompt: Token ids [n].
        begun: The answer so far [G], the mask token where undecided; None: nothing is decided.
        decided: How many of its tokens are decided.
        step: Steps that lie behind it; 0 by threshold, where any number may.
        stop: Decided tokens at which it leaves the batch, from 0 to G.
    """

    prompt: Ids
    begun: Ids | None
    decided: int
    step: int
    stop: int


def checked_row(
    where: str,
    prompt: Sequence[int],
    begun: Sequence[int] | None,
    stop: int | None,
    sampler: SamplerConfig,
    model: ModelInfo,
) -> Row:
    """Return a row; refuses what an engine would crash on or silently misread.

    Args:
        where: Names the request, for messages.
        prompt: Token ids, without the mask token.
        begun: The answer so far, the mask token where undecided; None where nothing is decided.
        stop: Decided tokens at which the row leaves; None for all.
        sampler: How it is denoised.
        model: Special ids, vocabulary and the longest canvas.

    Raises:
        InputError: An id is not of the model, the row is too long, or no run of this sampler
            could have come to `begun`; shows the values.
    """
    ids = _checked_prompt(where, prompt, sampler, model)
    gen = sampler.gen_length
    last = gen if stop is None else stop
    if type(last) is not int or not 0 <= last <= gen:  # a bool is an int too
        raise InputError(
            f"{where}: stop must be a whole number from 0 to the answer's {gen} tokens, got {stop}"
        )
    if begun is None:
        return Row(ids, None, 0, 0, last)
    answer = _checked_ids(where, "the answer so far", begun, model)
    if len(answer) != gen:
        raise InputError(
            f"{where}: the answer so far has {len(answer)} ids, the whole answer has {gen}; give "
            f"one for each token, the mask token {model.mask_id} where it is undecided"
        )
    undecided = answer == model.mask_id
    decided = gen - int(undecided.sum())
    _check_block_order(where, undecided, decided, sampler)
    return Row(ids, answer, decided, _step_of(where, decided, sampler), last)


def _checked_prompt(
    where: str, prompt: Sequence[int], sampler: SamplerConfig, model: ModelInfo
) -> Ids:
    ids = _checked_ids(where, "prompt", prompt, model)
    masked = ids == model.mask_id
    if np.count_nonzero(masked):
        at = int(masked.argmax())
        raise InputError(
            f"{where}: the prompt holds the mask token {model.mask_id} at {at}, which stands for "
            f"what is not yet decided; take it out"
        )
    length = len(ids) + sampler.gen_length
    if length > model.max_length:
        raise InputError(
            f"{where}: prompt of {len(ids)} and answer of {sampler.gen_length} tokens "
            f"are {length}, the model's longest is {model.max_length}; shorten the prompt or "
            f"lower gen-length"
        )
    return ids


def _checked_ids(where: str, what: str, values: Sequence[int], model: ModelInfo) -> Ids:
    """Return ids [n], each of the vocabulary."""
    ids = np.array(values) if len(values) else np.zeros(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InputError(f"{where}: {what} ids must be integers below {model.vocab}; tokenize it")
    bad = (ids < 0) | (ids >= model.vocab)
    if np.count_nonzero(bad):
        at = int(bad.argmax())
        raise InputError(
            f"{where}: {what} id {ids[at]} at {at} is not in [0, {model.vocab}); "
            f"tokenize with the tokenizer of this model"
        )
    return ids.astype(np.int64)


def _check_block_order(
    where: str, undecided: NDArray[np.bool_], decided: int, sampler: SamplerConfig
) -> None:
    """Refuse an answer whose blocks were not decided one after another from the left."""
    block = sampler.block_length
    done = decided - decided % block
    holes = np.flatnonzero(undecided[:done])
    ahead = done + block + np.flatnonzero(~undecided[done + block :])
    if holes.size or ahead.size:
        at, state = (holes[0], "decided") if holes.size else (ahead[0], "masked")
        raise InputError(
            f"{where}: the answer so far has {decided} tokens decided in blocks of {block}, which "
            f"are filled from the left, so position {at} must be {state}; begin with what a run "
            f"of these settings left"
        )


def _step_of(where: str, decided: int, sampler: SamplerConfig) -> int:
    """Return the steps that lead to `decided` tokens; 0 by threshold, where it is not known."""
    if sampler.rule == THRESHOLD:
        return 0
    edges = np.cumsum((0, *sampler.commits))
    step = int(np.searchsorted(edges, decided))
    if edges[step] != decided:
        raise InputError(
            f"{where}: the answer so far has {decided} tokens decided, but step {step} of "
            f"{sampler.steps} goes from {edges[step - 1]} to {edges[step]}; begin at a step's edge"
        )
    return step
