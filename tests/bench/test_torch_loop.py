from __future__ import annotations

import numpy as np
import torch

from engines.backend import Floats, Ids, Mask, Served, served_from_logits
from engines.model import ModelInfo
from engines.precision import FULL_PRECISION, Precision
from engines.sampler import Request, generate
from engines.schedule import SamplerConfig, Schedule
from exporter.denoiser import Denoiser, DenoiserConfig
from tests.bench import torch_loop

MODEL = ModelInfo(
    name="random",
    architecture="llada",
    vocab=31,
    mask_id=30,
    eos_id=0,
    max_length=64,
    digest="0" * 64,
)


class _Eager:
    """The module as a backend, through its own forward."""

    precision: Precision = FULL_PRECISION

    def __init__(self, module: Denoiser) -> None:
        self.module = module

    @torch.inference_mode()
    def logits(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Floats:
        tensors = (torch.from_numpy(np.ascontiguousarray(one)) for one in (ids, mask, positions))
        return self.module(*tensors).numpy()

    def serve(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Served:
        return served_from_logits(self.logits(ids, mask, positions, progress))


def test_the_torch_loop_gives_the_answers_of_our_sampler() -> None:
    torch.manual_seed(3)
    module = Denoiser(
        DenoiserConfig(
            hidden=32, layers=2, heads=4, kv_heads=2, ffn=48, vocab=31, mask_id=30, max_length=64
        )
    ).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    rng = np.random.default_rng(5)
    for sampler in (
        SamplerConfig(steps=6, gen_length=12, block_length=12),
        SamplerConfig(steps=8, gen_length=12, block_length=6),
    ):
        prompts = [tuple(rng.integers(1, 30, size=n).tolist()) for n in (5, 9, 9, 2)]
        schedule = Schedule.uniform("fp32", 3)
        ours = generate(
            [Request(prompt=prompt, sampler=sampler, schedule=schedule) for prompt in prompts],
            {"fp32": _Eager(module)},
            MODEL,
        )
        theirs = torch_loop.generate(module, prompts, sampler, MODEL.eos_id)
        assert [answer.ids for answer in ours] == theirs
