"""The ranking of blocks: each quantized alone, the most harmful first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engines.backend import Backend, FakeBackend, Floats, Ids, Mask
from engines.model import ModelInfo
from engines.precision import EXECUTED
from engines.sampler import Request
from engines.schedule import SamplerConfig, Schedule
from engines.trace import record
from exporter.folder import Recipe
from tuner.ranking import rank_blocks

MODEL = ModelInfo(
    name="fake",
    architecture="llada",
    vocab=12,
    mask_id=11,
    eos_id=10,
    max_length=40,
    digest="0" * 64,
)


def engine(name: str, harm: float) -> FakeBackend:
    """Return an engine whose logits are flatter the more it harms."""

    def logits_of(ids: Ids, mask: Mask, positions: Ids) -> Floats:
        return np.asarray(np.eye(12, dtype=np.float32)[positions % 10] * (4 - harm), np.float32)

    return FakeBackend(EXECUTED[name], logits_of)


@pytest.mark.parametrize(
    ("harms", "ranks"),
    [
        ((0.1, 2.0, 0.5), (1, 2, 0)),
        ((0.0, 0.0, 0.0, 0.0), (0, 1, 2, 3)),
        ((1.0, 3.0, 1.0), (1, 0, 2)),
    ],
)
def test_the_block_that_diverges_most_alone_comes_first_and_ties_go_to_the_lowest(
    harms: tuple[float, ...], ranks: tuple[int, ...]
) -> None:
    sampler = SamplerConfig(steps=2, gen_length=4, block_length=4)
    request = Request(prompt=(1, 2), sampler=sampler, schedule=Schedule.uniform("fp32", 1))
    traces = record([request], engine("fp32", 0.0), MODEL)
    asked: list[Recipe] = []

    def engine_of(recipe: Recipe) -> Backend:
        asked.append(recipe)
        (alone,) = set(range(len(harms))) - set(recipe.keep)
        return engine("int8", harms[alone])

    base = Recipe(windows=2, clip=0.9, quantizer="gptq")
    assert rank_blocks(len(harms), base, engine_of, traces) == ranks
    assert len(asked) == len(harms)
    assert all(replace(recipe, keep=()) == base for recipe in asked)
    kept = replace(base, keep=(1,))
    assert rank_blocks(len(harms), kept, engine_of, traces) == tuple(b for b in ranks if b != 1)
