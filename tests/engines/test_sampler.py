"""Laws of the sampler, against a plain reference that handles one row at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from engines.backend import Backend, FakeBackend, Floats, Ids, Mask, Served, served_from_logits
from engines.errors import BackendError, InputError
from engines.model import ModelInfo
from engines.precision import precision_from_name
from engines.sampler import Committed, Generation, Pass, Request, generate
from engines.schedule import SamplerConfig, Schedule

VOCAB, MASK, EOS = 17, 16, 15
MODEL = ModelInfo(
    name="fake",
    architecture="llada",
    vocab=VOCAB,
    mask_id=MASK,
    eos_id=EOS,
    max_length=64,
    digest="0" * 64,
)


def row_logits(seed: int, ids: Ids, mask: Mask, positions: Ids) -> Floats:
    """Return logits [B, M, V] that each row's own unmasked ids decide; the mask token's lowest."""
    batch, asked = positions.shape
    out = np.empty((batch, asked, VOCAB), np.float32)
    for row in range(batch):
        seen = ids[row][mask[row]]
        state = int(seen @ (1 + np.arange(len(seen)) ** 2))
        for column in range(asked):
            place = int(positions[row, column])
            rng = np.random.default_rng([seed, state % 1_000_003, place])
            # Few levels, so that equal probabilities and equal logits are common.
            out[row, column] = rng.integers(0, 3, VOCAB)
    out[..., MASK] = -1e9
    return out


def fake(name: str, seed: int, **settings: object) -> FakeBackend:
    """Return a deterministic fake engine of a precision."""
    return FakeBackend(
        precision_from_name(name),
        lambda ids, mask, positions: row_logits(seed, ids, mask, positions),
        **settings,  # type: ignore[arg-type]
    )


def engines() -> dict[str, Backend]:
    """Return three fakes that disagree with each other."""
    return {"fp32": fake("fp32", 1), "int8": fake("int8", 2), "w4a4": fake("w4a4", 3)}


def reference(request: Request, using: dict[str, Backend]) -> tuple[list[int], list[int], float]:
    """Return (answer, commit steps, mean bits) of one row, as plainly as it can be said."""
    least = 2.0 if request.sampler.threshold is None else request.sampler.threshold
    config, schedule = request.sampler, request.schedule
    canvas = list(request.prompt) + [MASK] * config.gen_length
    start, done, bits = len(request.prompt), 0, 0.0
    commit_step = [0] * config.gen_length
    for step, due in enumerate(config.commits, start=1):
        if done == config.gen_length:
            break
        window = min(done * schedule.windows // config.gen_length, schedule.windows - 1)
        engine = using[schedule.precisions[window]]
        bits += engine.precision.bits
        block = done // config.block_length
        first = start + block * config.block_length
        asked = [i for i in range(first, first + config.block_length) if canvas[i] == MASK]
        served = engine.serve(
            np.array([canvas]),
            np.ones((1, len(canvas)), bool),
            np.array([asked]),
            np.array([done / config.gen_length], np.float32),
        )
        ranked = sorted(range(len(asked)), key=lambda i: (-served.probability[0, i], i))
        count = max(due, sum(float(p) >= least for p in served.probability[0]))
        for i in ranked[:count]:
            canvas[asked[i]] = int(served.tokens[0, i])
            commit_step[asked[i] - start] = step
        done += count
    return canvas[start:], commit_step, bits / max(commit_step)


# The fakes' tokens have probabilities from 0.1 to 0.3.
BY_THRESHOLD = [
    SamplerConfig(rule="threshold", threshold=0.16),
    SamplerConfig(rule="threshold", threshold=0.14, gen_length=12, block_length=4),
    SamplerConfig(rule="threshold", threshold=0.19, gen_length=16, block_length=8),
]


def random_requests(
    rng: np.random.Generator, count: int, more: Sequence[SamplerConfig] = ()
) -> list[Request]:
    """Return requests with mixed tasks, prompts, blocks, steps and windows."""
    configs = [
        *more,
        SamplerConfig(steps=12, gen_length=24, block_length=24),
        SamplerConfig(steps=8, gen_length=12, block_length=6),
        SamplerConfig(steps=6, gen_length=16, block_length=8),
        SamplerConfig(steps=5, gen_length=5, block_length=5),
        SamplerConfig(steps=1, gen_length=7, block_length=7),
        SamplerConfig(steps=4, gen_length=18, block_length=9),
    ]
    names = ("fp32", "int8", "w4a4")
    return [
        Request(
            prompt=tuple(int(i) for i in rng.integers(0, EOS, rng.integers(0, 20))),
            sampler=configs[int(rng.integers(len(configs)))],
            schedule=Schedule(tuple(rng.choice(names, rng.integers(1, 7)).tolist())),
            task=f"task{index % 3}",
        )
        for index in range(count)
    ]


def same_answer(one: Generation, other: Generation) -> bool:
    return (one.ids, one.commit_step, one.tokens) == (other.ids, other.commit_step, other.tokens)


@pytest.mark.parametrize("more", [[], BY_THRESHOLD], ids=["fixed", "by threshold"])
@pytest.mark.parametrize("seed", range(6))
def test_split_equals_the_plain_reference_row_by_row(seed: int, more: list[SamplerConfig]) -> None:
    requests = random_requests(np.random.default_rng(seed), 9, more)
    answers = generate(requests, engines(), MODEL, policy="split")
    for request, answer in zip(requests, answers, strict=True):
        ids, commit_step, bits = reference(request, engines())
        assert list(answer.ids) == ids
        assert list(answer.commit_step) == commit_step
        assert answer.bits == pytest.approx(bits)
        assert answer.passes == max(commit_step) <= request.sampler.steps


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", ["safest", "split"])
def test_uniform_schedules_equal_the_plain_reference_under_both_policies(
    seed: int, policy: str
) -> None:
    requests = [
        replace(request, schedule=Schedule.uniform("int8", 1 + index % 6))
        for index, request in enumerate(random_requests(np.random.default_rng(seed), 8))
    ]
    answers = generate(requests, engines(), MODEL, policy=policy)
    for request, answer in zip(requests, answers, strict=True):
        ids, commit_step, bits = reference(request, engines())
        assert (list(answer.ids), list(answer.commit_step)) == (ids, commit_step)
        assert answer.bits == bits == 8


def test_batch_mates_never_change_a_rows_answer() -> None:
    requests = random_requests(np.random.default_rng(7), 7)
    together = generate(requests, engines(), MODEL, policy="split")
    backwards = generate(requests[::-1], engines(), MODEL, policy="split")[::-1]
    for request, one, other in zip(requests, together, backwards, strict=True):
        alone = generate([request], engines(), MODEL)[0]
        assert same_answer(one, alone) and same_answer(other, alone)


def test_safest_runs_every_row_on_the_most_bits_that_any_row_wants() -> None:
    config = SamplerConfig(steps=6, gen_length=12, block_length=12)
    low = Request(prompt=(1,), sampler=config, schedule=Schedule.uniform("w4a4", 6))
    edge = Schedule(("fp32", "w4a4", "int8", "w4a4", "w4a4", "w4a4"))
    mixed = Request(prompt=(2, 3), sampler=config, schedule=edge)
    using = engines()
    first, second = generate([low, mixed], using, MODEL, policy="safest")
    expected = replace(low, schedule=edge)
    assert first.ids == generate([expected], engines(), MODEL)[0].ids
    assert first.bits == second.bits == pytest.approx((32 + 8 + 4 * 4) / 6)
    assert using["fp32"].passes == 1  # type: ignore[attr-defined]


def test_split_runs_one_pass_for_each_engine_wanted() -> None:
    config = SamplerConfig(steps=6, gen_length=12, block_length=12)
    requests = [
        Request(prompt=(i,), sampler=config, schedule=Schedule.uniform(name, 2))
        for i, name in enumerate(("int8", "fp32", "int8", "fp32"))
    ]
    using = engines()
    generate(requests, using, MODEL, policy="split")
    assert [using[name].passes for name in ("fp32", "int8", "w4a4")] == [6, 6, 0]  # type: ignore[attr-defined]


def constant(logits: Callable[[Ids], Floats]) -> FakeBackend:
    return FakeBackend(precision_from_name("fp32"), lambda ids, mask, positions: logits(positions))


def flat(positions: Ids) -> Floats:
    out = np.zeros((*positions.shape, VOCAB), np.float32)
    out[..., MASK] = -1e9
    return out


def test_ties_go_to_the_lowest_index_and_the_lowest_id() -> None:
    config = SamplerConfig(steps=4, gen_length=12, block_length=6)
    request = Request(prompt=(5, 5), sampler=config, schedule=Schedule(("fp32",)))
    answer = generate([request], {"fp32": constant(flat)}, MODEL)[0]
    assert answer.ids == (0,) * 12
    assert answer.commit_step == (1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4)


def test_tokens_are_those_before_the_first_end_of_sequence() -> None:
    def ends_at_five(positions: Ids) -> Floats:
        out = flat(positions)
        out[positions >= 5, EOS] = 9.0
        return out

    config = SamplerConfig(steps=4, gen_length=8, block_length=8)
    request = Request(prompt=(1, 2), sampler=config, schedule=Schedule(("fp32",)))
    answer = generate([request], {"fp32": constant(ends_at_five)}, MODEL)[0]
    assert answer.ids == (0, 0, 0, EOS, EOS, EOS, EOS, EOS) and answer.tokens == 3


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_probability_that_is_not_finite_names_window_step_and_request(value: float) -> None:
    @dataclass
    class Sick:
        inner: FakeBackend = field(default_factory=lambda: fake("int8", 2))
        precision = precision_from_name("int8")

        def logits(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Floats:
            raise AssertionError

        def serve(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Served:
            served = self.inner.serve(ids, mask, positions, progress)
            if self.inner.passes == 4:
                served.probability[1, 2] = value
            return served

    config = SamplerConfig(steps=6, gen_length=12, block_length=12)
    request = Request(prompt=(1,), sampler=config, schedule=Schedule.uniform("int8", 6), task="t")
    with pytest.raises(BackendError, match=r"'int8'.*window 3, step 4 of 6, request 1 \(task 't'"):
        generate([request, request], {"int8": Sick()}, MODEL)


@pytest.mark.parametrize("token", [MASK, VOCAB, -1])
def test_an_answer_that_holds_no_real_token_is_refused(token: int) -> None:
    class Foreign(FakeBackend):
        def serve(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Served:
            served = super().serve(ids, mask, positions, progress)
            return replace(served, tokens=np.full_like(served.tokens, token))

    config = SamplerConfig(steps=2, gen_length=4, block_length=4)
    request = Request(prompt=(1,), sampler=config, schedule=Schedule(("fp32",)))
    engine = Foreign(precision_from_name("fp32"), lambda ids, mask, positions: flat(positions))
    with pytest.raises(BackendError, match="request 0"):
        generate([request], {"fp32": engine}, MODEL)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ((1, -1), r"id -1 at 1 is not in \[0, 17\)"),
        ((VOCAB,), r"id 17 at 0"),
        ((2**31,), r"id 2147483648"),
        ((2**70,), "must be integers"),
        ((1.0,), "must be integers"),
        ((True,), "must be integers"),
        ((3, MASK), "mask token 16 at 1"),
        ((1,) * 60, "the model's longest is 64"),
    ],
)
def test_a_prompt_that_is_not_of_the_model_is_refused_by_request(
    prompt: tuple[int, ...], words: str
) -> None:
    config = SamplerConfig(steps=2, gen_length=8, block_length=8)
    good = Request(prompt=(1,), sampler=config, schedule=Schedule(("fp32",)))
    with pytest.raises(InputError, match=words) as caught:
        generate([good, replace(good, prompt=prompt)], engines(), MODEL)
    assert "request 1" in str(caught.value)


def test_eos_in_a_prompt_is_an_ordinary_token() -> None:
    config = SamplerConfig(steps=4, gen_length=8, block_length=8)
    request = Request(prompt=(1, EOS, 2, EOS), sampler=config, schedule=Schedule(("fp32",)))
    longer = replace(request, prompt=(3,) * 9)
    answer = generate([request, longer], engines(), MODEL)[0]
    assert list(answer.ids) == reference(request, engines())[0]


def test_an_empty_prompt_and_no_request_are_answered() -> None:
    assert generate([], {}, MODEL) == []
    config = SamplerConfig(steps=4, gen_length=8, block_length=8)
    request = Request(prompt=(), sampler=config, schedule=Schedule(("fp32",)))
    assert list(generate([request], engines(), MODEL)[0].ids) == reference(request, engines())[0]


def test_a_missing_engine_and_an_unknown_policy_are_the_callers_mistakes() -> None:
    request = Request(prompt=(1,), sampler=SamplerConfig(), schedule=Schedule(("int8", "w4a6")))
    with pytest.raises(ValueError, match="w4a6"):
        generate([request], engines(), MODEL)
    with pytest.raises(ValueError, match="safest, split"):
        generate([request], engines(), MODEL, policy="fast")


def test_engine_time_falls_into_the_window_of_its_pass() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    using: dict[str, Backend] = {
        "fp32": fake("fp32", 1, latency_ms=5.0, sleep=sleep),
        "int8": fake("int8", 2, latency_ms=2.0, sleep=sleep),
    }
    config = SamplerConfig(steps=12, gen_length=24, block_length=24)
    one = Request(prompt=(1,), sampler=config, schedule=Schedule(("fp32", "int8", "int8", "fp32")))
    two = replace(one, schedule=Schedule(("int8", "int8")))
    first, second = generate([one, two], using, MODEL, policy="split", clock=lambda: now[0])
    assert first.engine_ms == pytest.approx((15, 6, 6, 15))
    assert second.engine_ms == pytest.approx((12, 12))
    first, second = generate([one, two], using, MODEL, policy="safest", clock=lambda: now[0])
    assert first.engine_ms == pytest.approx((15, 6, 6, 15))
    assert second.engine_ms == pytest.approx((21, 21))
    assert second.bits == pytest.approx(20)


def test_hooks_see_each_state_before_its_pass_and_what_it_committed() -> None:
    requests = random_requests(np.random.default_rng(11), 6)
    passes: list[Pass] = []
    records: list[tuple[Pass, Committed]] = []
    answers = generate(
        requests,
        engines(),
        MODEL,
        policy="split",
        on_pass=passes.append,
        record=lambda state, committed: records.append((state, committed)),
    )
    assert [id(state) for state in passes] == [id(state) for state, _ in records]
    canvases = [[*r.prompt, *[MASK] * r.sampler.gen_length] for r in requests]
    for state, committed in records:
        for row, index in enumerate(state.requests.tolist()):
            request, length = requests[index], int(state.lengths[row])
            assert state.ids[row, :length].tolist() == canvases[index]
            assert state.mask[row].tolist() == [i < length for i in range(state.ids.shape[1])]
            left = canvases[index].count(MASK)
            assert request.sampler.gen_length - left == state.committed[row]
            assert state.progress[row] == np.float32(1 - left / request.sampler.gen_length)
            mine = committed.rows == row
            assert mine.sum() == request.sampler.commits[state.step - 1]
            for place, token in zip(
                committed.positions[mine].tolist(), committed.tokens[mine].tolist(), strict=True
            ):
                assert canvases[index][place] == MASK
                canvases[index][place] = token
        at = state.positions[committed.rows, committed.columns]
        assert at.tolist() == committed.positions.tolist()
    for request, canvas, answer in zip(requests, canvases, answers, strict=True):
        assert canvas[len(request.prompt) :] == list(answer.ids)


def test_only_the_masked_positions_of_the_active_block_are_asked() -> None:
    config = SamplerConfig(steps=6, gen_length=12, block_length=4)
    request = Request(prompt=(1, 2, 3), sampler=config, schedule=Schedule(("fp32",)))
    seen: list[Pass] = []
    generate([request], {"fp32": constant(flat)}, MODEL, on_pass=seen.append)
    assert [state.positions[0].tolist() for state in seen] == [
        [3, 4, 5, 6],
        [5, 6],
        [7, 8, 9, 10],
        [9, 10],
        [11, 12, 13, 14],
        [13, 14],
    ]


def test_served_from_logits_is_a_distribution() -> None:
    logits = row_logits(3, np.ones((2, 9), np.int64), np.ones((2, 9), bool), np.zeros((2, 4), int))
    served = served_from_logits(logits)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(-1, keepdims=True)
    assert np.allclose(served.probability, p.max(-1))
    assert np.array_equal(served.tokens, p.argmax(-1))
    assert np.allclose(served.entropy, -(p * np.log(np.maximum(p, 1e-300))).sum(-1), atol=1e-5)
