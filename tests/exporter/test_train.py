"""The training script: what it draws, that it resumes, and that its checkpoint can be exported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from calib_data.prompts import split_of
from calib_data.tasks import TASKS
from exporter import train as training
from exporter.checkpoint import load_denoiser, save_checkpoint
from exporter.train import TrainConfig, draw_batch, learning_rate, train, vocabulary

SMALL = TrainConfig(steps=4, stop=4, batch=6, warmup=1, late=2)


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    first, again, other = draw_batch(SMALL, 1), draw_batch(SMALL, 1), draw_batch(SMALL, 3)
    assert torch.equal(first.ids, again.ids) and torch.equal(first.targets, again.targets)
    assert first.ids.shape != other.ids.shape or not torch.equal(first.ids, other.ids)


def test_what_is_masked_is_what_is_to_be_told() -> None:
    mask_id = len(vocabulary()) - 1
    batch = draw_batch(TrainConfig(), 0)
    shown = batch.ids.gather(1, batch.positions)
    assert torch.equal(shown == mask_id, batch.targets >= 0)
    assert ((batch.weights > 0) == (batch.targets >= 0)).all()
    assert (batch.targets >= 0).any(1).all()


def test_only_prompts_of_the_training_split_are_drawn() -> None:
    tokens = vocabulary()
    batch = draw_batch(TrainConfig(), 5)
    for row, at in zip(batch.ids, batch.positions[:, 0].tolist(), strict=True):
        assert split_of("".join(tokens[i] for i in row[:at].tolist())) == "train"


def test_the_later_mixture_has_every_task_too() -> None:
    config = TrainConfig()
    for mixture in (config.mixture, config.late_mixture):
        assert {name for name, _ in mixture} == set(TASKS)
        assert sum(share for _, share in mixture) == pytest.approx(1.0)


def test_the_learning_rate_rises_stays_and_falls() -> None:
    config = TrainConfig()
    rates = [learning_rate(config, step) for step in range(config.steps)]
    assert rates[0] < 0.01 and max(rates) == 1.0 and rates[-1] < 0.01
    assert rates[config.warmup] == rates[config.steps // 2] == 1.0


def test_a_broken_training_ends_with_the_weights_of_an_unbroken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(SMALL, tmp_path / "whole", threads=1)
    draws = training.draw_batch

    def stops(config: TrainConfig, step: int) -> training.Batch:
        if step == 3:
            raise KeyboardInterrupt
        return draws(config, step)

    monkeypatch.setattr(training, "SAVE_SECONDS", -1.0)
    monkeypatch.setattr(training, "draw_batch", stops)
    with pytest.raises(KeyboardInterrupt):
        train(SMALL, tmp_path / "broken", threads=1)
    monkeypatch.setattr(training, "draw_batch", draws)
    resumed = train(SMALL, tmp_path / "broken", threads=1)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_the_checkpoint_is_read_by_the_code_that_exports(tmp_path: Path) -> None:
    model = train(SMALL, tmp_path / "work", threads=1)
    save_checkpoint(model, vocabulary(), tmp_path / "reference")
    read = load_denoiser(tmp_path / "reference")
    assert read.config == model.config
    for name, value in model.state_dict().items():
        assert torch.equal(value, read.state_dict()[name]), name
