"""Laws of answers that begin in the middle and stop early, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engines.errors import InputError
from engines.row import checked_row
from engines.sampler import Generation, Pass, Request, generate
from engines.schedule import SamplerConfig, Schedule
from tests.engines.test_sampler import (
    BY_THRESHOLD,
    EOS,
    MASK,
    MODEL,
    VOCAB,
    engines,
    fake,
    random_requests,
)

SAMPLER = SamplerConfig(steps=6, gen_length=12, block_length=6)  # 2 tokens a step, 2 blocks
M = MASK


def in_pieces(
    requests: list[Request], rng: np.random.Generator, pieces: int
) -> list[list[Generation]]:
    """Return what each of the pieces of each request gave; rows stop anywhere, often at once."""
    stops = np.sort(rng.random((len(requests), pieces)), axis=1)
    stops[:, -1] = 1.0
    begun: list[tuple[int, ...] | None] = [None] * len(requests)
    made: list[list[Generation]] = [[] for _ in requests]
    for piece in range(pieces):
        # Another order of the rows in each piece: batch-mates change, answers do not.
        order = rng.permutation(len(requests)).tolist()
        rows = [
            replace(
                requests[i],
                begun=begun[i],
                stop=int(stops[i, piece] * requests[i].sampler.gen_length),
            )
            for i in order
        ]
        for i, answer in zip(order, generate(rows, engines(), MODEL, policy="split"), strict=True):
            made[i].append(answer)
            begun[i] = answer.ids
    return made


@pytest.mark.parametrize("more", [[], BY_THRESHOLD], ids=["fixed", "by threshold"])
@pytest.mark.parametrize("seed", range(8))
def test_the_pieces_of_any_split_are_the_whole_run(seed: int, more: list[SamplerConfig]) -> None:
    rng = np.random.default_rng(seed)
    requests = random_requests(rng, 9, more)
    whole = generate(requests, engines(), MODEL, policy="split")
    made = in_pieces(requests, rng, 1 + seed % 4)
    for request, one, pieces in zip(requests, whole, made, strict=True):
        assert pieces[-1].ids == one.ids and pieces[-1].tokens == one.tokens
        assert sum(piece.passes for piece in pieces) == one.passes
        bits = sum(piece.bits * piece.passes for piece in pieces)
        assert bits == pytest.approx(one.bits * one.passes)
        # Each token is committed in one piece, in the step of the whole run.
        steps = np.array([piece.commit_step for piece in pieces])
        assert (np.count_nonzero(steps, axis=0) == 1).all()
        if request.sampler.threshold is not None:  # a piece counts its own passes
            before = np.cumsum([0, *(piece.passes for piece in pieces[:-1])])
            steps += np.where(steps > 0, before[:, None], 0)
        assert tuple(steps.sum(axis=0)) == one.commit_step


def test_the_states_of_a_piece_are_those_of_the_whole_run() -> None:
    whole: list[Pass] = []
    rest: list[Pass] = []
    request = Request(prompt=(1, 2), sampler=SAMPLER, schedule=Schedule(("fp32", "int8", "w4a4")))
    generate([request], engines(), MODEL, on_pass=whole.append)
    first = generate([replace(request, stop=4)], engines(), MODEL)[0]
    generate([replace(request, begun=first.ids)], engines(), MODEL, on_pass=rest.append)
    assert [int(state.steps[0]) for state in rest] == [3, 4, 5, 6]
    for one, other in zip(whole[2:], rest, strict=True):
        assert one.precision == other.precision and one.step == other.step + 2
        for field in ("steps", "windows", "committed", "ids", "positions", "asked", "progress"):
            assert np.array_equal(getattr(one, field), getattr(other, field)), field


@pytest.mark.parametrize("stop", range(13))
def test_a_row_leaves_as_soon_as_the_tokens_are_decided(stop: int) -> None:
    engine = fake("fp32", 1)
    request = Request(prompt=(1,), sampler=SAMPLER, schedule=Schedule(("fp32",)), stop=stop)
    answer = generate([request], {"fp32": engine}, MODEL)[0]
    decided = 12 - answer.ids.count(MASK)
    assert decided == stop + stop % 2  # a step commits two
    assert answer.passes == engine.passes == decided // 2
    assert sum(step > 0 for step in answer.commit_step) == decided
    assert answer.bits == (32 if stop else 0)


def test_time_of_a_piece_falls_into_the_windows_of_the_whole_run() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    engine = fake("fp32", 1, latency_ms=5.0, sleep=sleep)
    request = Request(prompt=(1,), sampler=SAMPLER, schedule=Schedule.uniform("fp32", 3))
    first = generate([replace(request, stop=6)], {"fp32": engine}, MODEL, clock=lambda: now[0])[0]
    assert first.engine_ms == pytest.approx((10, 5, 0))
    rest = replace(request, begun=first.ids)
    last = generate([rest], {"fp32": engine}, MODEL, clock=lambda: now[0])[0]
    assert last.engine_ms == pytest.approx((0, 5, 10))


def test_an_answer_that_is_whole_already_takes_no_pass() -> None:
    begun = (1, 2, 3, EOS) * 3
    request = Request(prompt=(1,), sampler=SAMPLER, schedule=Schedule(("fp32",)), begun=begun)
    other = replace(request, begun=None)
    answer, mate = generate([request, other], engines(), MODEL)
    assert (answer.ids, answer.passes, answer.bits, answer.tokens) == (begun, 0, 0, 3)
    assert answer.commit_step == (0,) * 12 and answer.engine_ms == (0.0,)
    assert mate == replace(generate([other], engines(), MODEL)[0], engine_ms=mate.engine_ms)


@pytest.mark.parametrize(
    ("begun", "words"),
    [
        ((M,) * 11, "has 11 ids, the whole answer has 12"),
        ((), "has 0 ids"),
        ((1, -1, *(M,) * 10), r"id -1 at 1 is not in \[0, 17\)"),
        ((VOCAB, *(M,) * 11), "id 17 at 0"),
        ((2**70, *(M,) * 11), "must be integers"),
        ((1.5, *(M,) * 11), "must be integers"),
        ((True,) * 12, "must be integers"),
        ((1, 1, 1, *(M,) * 9), "3 tokens decided, but step 2 of 6 goes from 2 to 4"),
        ((1, 1, 1, *(M,) * 8, 1), "position 11 must be masked"),
        ((1, M, 1, 1, 1, 1, 1, *(M,) * 5), "position 1 must be decided"),
        ((*(M,) * 6, *(1,) * 6), "position 0 must be decided"),
        ((M, M, M, M, M, 1, 1, *(M,) * 5), "position 6 must be masked"),
    ],
)
def test_an_answer_that_no_run_could_have_begun_is_refused(
    begun: tuple[int, ...], words: str
) -> None:
    good = Request(prompt=(1,), sampler=SAMPLER, schedule=Schedule(("fp32",)))
    with pytest.raises(InputError, match=words) as caught:
        generate([good, replace(good, begun=begun, task="t")], engines(), MODEL)
    assert str(caught.value).startswith("request 1 (task 't'): ")


@pytest.mark.parametrize("stop", [-1, 13, 2.0, True, "3"])
def test_a_stop_that_is_no_number_of_tokens_is_refused(stop: object) -> None:
    good = Request(prompt=(1,), sampler=SAMPLER, schedule=Schedule(("fp32",)))
    with pytest.raises(InputError, match=f"from 0 to the answer's 12 tokens, got {stop}"):
        generate([replace(good, stop=stop)], engines(), MODEL)  # type: ignore[arg-type]


def test_by_threshold_a_row_may_begin_with_any_number_of_tokens() -> None:
    sampler = SamplerConfig(rule="threshold", threshold=0.5, gen_length=12, block_length=6)
    for decided in range(13):
        begun = (1,) * decided + (MASK,) * (12 - decided)
        row = checked_row("r", (), begun, None, sampler, MODEL)
        assert (row.decided, row.step) == (decided, 0)
    with pytest.raises(InputError, match="position 6 must be masked"):
        checked_row("r", (), (M,) * 6 + (1,) + (M,) * 5, None, sampler, MODEL)


def test_a_row_may_begin_at_every_edge_of_uneven_steps_and_nowhere_else() -> None:
    sampler = SamplerConfig(steps=4, gen_length=14, block_length=7)  # 4 + 3, twice
    for decided in range(15):
        begun = (1,) * decided + (MASK,) * (14 - decided)
        if decided in (0, 4, 7, 11, 14):
            row = checked_row("r", (), begun, None, sampler, MODEL)
            assert (row.decided, row.step) == (decided, (0, 4, 7, 11, 14).index(decided))
        else:
            with pytest.raises(InputError, match="begin at a step's edge"):
                checked_row("r", (), begun, None, sampler, MODEL)
