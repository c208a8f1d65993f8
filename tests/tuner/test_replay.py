from __future__ import annotations

import numpy as np
import pytest

from tuner.replay import State, batches, kl_divergence


def test_kl_is_zero_only_between_equal_distributions() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 7))
    assert kl_divergence(logits, logits + 3.0) == pytest.approx(0.0, abs=1e-12)
    assert (kl_divergence(logits, rng.normal(size=(4, 7))) > 0.01).all()


def test_kl_bears_logits_far_apart() -> None:
    sure, other = np.array([[0.0, -1e9]]), np.array([[-1e9, 0.0]])
    assert np.isfinite(kl_divergence(sure, other)).all()


def test_kl_does_not_depend_on_how_many_rows_are_taken_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(1)
    p, q = rng.normal(size=(9, 7)), rng.normal(size=(9, 7))
    whole = kl_divergence(p, q)
    monkeypatch.setattr("tuner.replay._MOST_DOUBLES", 14)
    assert (kl_divergence(p, q) == whole).all()
    assert kl_divergence(p[:0], q[:0]).shape == (0,)


def states(count: int, seed: int = 0) -> list[State]:
    rng = np.random.default_rng(seed)
    return [
        State(
            trace=index,
            step=0,
            window=int(rng.integers(3)),
            ids=rng.integers(1, 9, rng.integers(4, 9)),
            asked=np.sort(rng.choice(4, rng.integers(1, 4), replace=False)),
            committed=0,
            total=4,
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_batches_hold_every_state_once_of_one_window_and_padding_is_masked(batch: int) -> None:
    made = states(20)
    found = list(batches(made, batch, vocab=10))
    assert sorted(state.trace for part in found for state in part.states) == list(range(20))
    for part in found:
        assert len({state.window for state in part.states}) == 1
        assert len(part.states) <= batch
        for row, state in enumerate(part.states):
            assert (part.ids[row, part.mask[row]] == state.ids).all()
            assert not part.mask[row, len(state.ids) :].any()
            assert (part.positions[row, : len(state.asked)] == state.asked).all()
            assert (part.positions[row, len(state.asked) :] == state.asked[0]).all()


def test_groups_stay_together_and_large_logits_make_small_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    twins = [state for state in states(12) for _ in range(2)]
    for part in batches(twins, 5, vocab=10, together=2):
        assert len(part.states) in (2, 4)
        assert all(a is b for a, b in zip(part.states[::2], part.states[1::2], strict=True))
    monkeypatch.setattr("tuner.replay._MOST_LOGITS", 40)
    for part in batches(states(12), 100, vocab=10):
        assert len(part.states) == 1 or part.positions.size * 10 <= 40
