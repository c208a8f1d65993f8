"""The other side of `generate_speedup`: the same model and sampler rule, written in torch.

LLaDA's own loop with what PyTorch offers for speed: inference_mode, scaled_dot_product_attention,
fused RMSNorm, rotary angles computed once, no mask where no row is padded, and the LM head at the
positions of the answer alone.  float32, greedy, one block after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from engines.schedule import SamplerConfig
from exporter.denoiser import Denoiser


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _answer_logits(
    model: Denoiser, ids: Tensor, mask: Tensor | None, cos: Tensor, sin: Tensor, answer: Tensor
) -> Tensor:
    """Return logits [B, G, V] at the positions of the answer [B, G]."""
    config = model.config
    batch, length = ids.shape
    x = model.embed(ids)
    for block in model.blocks:
        normed = block.attn_norm(x)
        q, k, v = (
            layer(normed).view(batch, length, -1, config.head_width).transpose(1, 2)
            for layer in (block.q_proj, block.k_proj, block.v_proj)
        )
        mixed = F.scaled_dot_product_attention(
            _turn(q, cos, sin),
            _turn(k, cos, sin),
            v,
            attn_mask=mask,
            enable_gqa=config.kv_heads != config.heads,
        )
        x = x + block.attn_out(mixed.transpose(1, 2).reshape(batch, length, -1))
        normed = block.ff_norm(x)
        x = x + block.ff_down(F.silu(block.ff_gate(normed)) * block.ff_up(normed))
    x = x.gather(1, answer[:, :, None].expand(-1, -1, x.shape[2]))
    logits = model.head(model.norm(x))
    logits[:, :, config.mask_id] = -torch.inf
    return logits


@torch.inference_mode()
def generate(
    model: Denoiser, prompts: Sequence[Sequence[int]], sampler: SamplerConfig, eos_id: int
) -> list[tuple[int, ...]]:
    """Return the answer [G] to each prompt; rows are padded on the right."""
    mask_id, gen = model.config.mask_id, sampler.gen_length
    lengths = torch.tensor([len(prompt) + gen for prompt in prompts])
    longest = int(lengths.max())
    ids = torch.full((len(prompts), longest), eos_id)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
        ids[row, len(prompt) : len(prompt) + gen] = mask_id
    places = torch.arange(longest)
    mask = None
    if int(lengths.min()) != longest:
        mask = (places < lengths[:, None])[:, None, None, :]
    angles = places[:, None] * model.frequencies[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos(), angles.sin()
    answer = (lengths - gen)[:, None] + torch.arange(gen)
    undecided = torch.ones(len(prompts), gen, dtype=torch.bool)
    per_block = sampler.steps // sampler.blocks
    for step, count in enumerate(sampler.commits):
        end = (step // per_block + 1) * sampler.block_length
        logits = _answer_logits(model, ids, mask, cos, sin, answer)
        probability, token = F.softmax(logits, dim=-1).max(dim=-1)
        probability = torch.where(undecided, probability, -1.0)
        probability[:, end:] = -1.0
        chosen = probability.topk(count, dim=1).indices
        undecided.scatter_(1, chosen, False)
        ids.scatter_(1, answer.gather(1, chosen), token.gather(1, chosen))
    return [tuple(row) for row in ids.gather(1, answer).tolist()]
