"""The denoiser as a torch module: one bidirectional transformer for the shapes of LLaDA and Dream.

Both are pre-norm transformers with RMSNorm, rotary positions, gated SiLU feed-forward and no
causal mask.  They differ in numbers (grouped keys and values, biases on q, k, v), so one module
serves both, `export`, `train` and the parity check alike.  Whatever the graph should hold is
written here in plain tensor operations with dynamic batch and length.

Positions are gathered as early as they can be, before the queries of the last block: neither
that block's feed-forward layer nor the LM head is computed where nobody reads it, and logits
[B, L, V] are never moved.

Knows nothing about files, ONNX or quantization.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Added to the scores of masked keys.  Finite in float16 too, so a row whose keys are all masked
# gives a uniform softmax instead of NaN; exp(-3e4) is 0 in every type.
MASKED_SCORE = -3e4


@dataclass(frozen=True, kw_only=True)
class DenoiserConfig:
    """Sizes of a denoiser; checked once.

    Attributes:
        hidden: Width of the residual stream.
        layers: Number of blocks.
        heads: Query heads; `hidden / heads` is the head's width, an even number.
        kv_heads: Key and value heads; divides `heads`.
        ffn: Width of the gated feed-forward layer.
        vocab: Rows of the embedding and of the LM head.
        mask_id: The id that stands for "not yet decided"; never predicted.
        max_length: Tokens that positions were trained for.
        rope_theta: Base of the rotary frequencies.
        norm_eps: Added under RMSNorm's root.
        qkv_bias: Whether q, k and v have biases (Dream) or not (LLaDA).
        tied: Whether the LM head is the embedding.
        shifted: Whether the logits at a position are those computed one position before (Dream,
            which comes from an autoregressive model).
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    mask_id: int
    max_length: int
    rope_theta: float = 500000.0
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    tied: bool = False
    shifted: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} >= 1 must hold, got {getattr(self, name)}")
        if self.hidden % self.heads or self.head_width % 2:
            raise ValueError(
                f"heads must divide hidden into even widths, got {self.hidden=}, {self.heads=}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads, got {self.heads=}, {self.kv_heads=}")
        if not 0 <= self.mask_id < self.vocab:
            raise ValueError(f"0 <= mask_id < vocab must hold, got {self.mask_id=}, {self.vocab=}")

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads


class RMSNorm(nn.Module):
    """Root-mean-square normalization with a gain, over the last axis, in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # 16 bits cannot hold the squares, and not every runtime widens them by itself.
        wide, gain = x.float(), self.weight.float()
        return F.rms_norm(wide, (x.shape[-1],), gain, self.eps).to(x.dtype)


def rotary_frequencies(config: DenoiserConfig) -> Tensor:
    """Return the angle a position adds to each pair of a head's numbers [D / 2], radians."""
    half = torch.arange(0, config.head_width, 2, dtype=torch.float32) / config.head_width
    return torch.as_tensor(config.rope_theta**-half)


def rotate(x: Tensor, angles: Tensor, heads: int) -> Tensor:
    """Return x [B, L, heads * D] turned by rotary angles [B, L, D / 2], rotate-half layout.

    While a graph is exported this is ONNX's own operator, one node instead of eight; the parity
    check holds the two forms equal.
    """
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    if torch.compiler.is_exporting():
        return torch.onnx.ops.rotary_embedding(x, cos, sin, num_heads=heads)
    first, second = x.unflatten(2, (heads, -1)).chunk(2, dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.flatten(2)


def take(x: Tensor, rows: Tensor) -> Tensor:
    """Return x [B, L, H] at rows [B, M] of its first two axes flattened: [B, M, H], one Gather."""
    return F.embedding(rows, x.flatten(0, 1))


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Return attention [B, M, heads * D] of queries [B, M, ..] over keys and values [B, L, ..].

    `bias` [B, 1, 1, L] is added to the scores.  Exported as ONNX's Attention, which wants the
    bias with one row a query; the type of its softmax is the runtime's own, TensorRT refuses to be
    told one.
    """
    if torch.compiler.is_exporting():
        bias = bias.expand(q.shape[0], 1, q.shape[1], k.shape[1])
        mixed: Tensor = torch.onnx.ops.attention(
            q, k, v, bias, q_num_heads=heads, kv_num_heads=kv_heads
        )[0]
        return mixed
    q = q.unflatten(2, (heads, -1)).transpose(1, 2)
    k = k.unflatten(2, (kv_heads, -1)).transpose(1, 2).repeat_interleave(heads // kv_heads, dim=1)
    v = v.unflatten(2, (kv_heads, -1)).transpose(1, 2).repeat_interleave(heads // kv_heads, dim=1)
    # Written out: the fused kernel's backward is slow on CPU, and training runs there.
    scores = q @ (k * (1.0 / math.sqrt(q.shape[-1]))).transpose(2, 3) + bias
    return (torch.softmax(scores, dim=-1) @ v).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """Attention over all unmasked keys, then the gated feed-forward layer."""

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        hidden, width = config.hidden, config.head_width
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.attn_norm = RMSNorm(hidden, config.norm_eps)
        self.q_proj = nn.Linear(hidden, config.heads * width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, config.kv_heads * width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, config.kv_heads * width, bias=config.qkv_bias)
        self.attn_out = nn.Linear(config.heads * width, hidden, bias=False)
        self.ff_norm = RMSNorm(hidden, config.norm_eps)
        self.ff_gate = nn.Linear(hidden, config.ffn, bias=False)
        self.ff_up = nn.Linear(hidden, config.ffn, bias=False)
        self.ff_down = nn.Linear(config.ffn, hidden, bias=False)

    def forward(
        self, x: Tensor, angles: Tensor, bias: Tensor, asked: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Return the stream after this block: [B, L, H], or [B, M, H] at the asked positions.

        Args:
            x: The stream [B, L, H].
            angles: Rotary angles [B, L, D / 2].
            bias: Added to the attention scores [B, 1, 1, L].
            asked: Rows of the flattened stream [B, M] and rotary angles [B, M, D / 2] of the
                positions wanted: only their queries are computed.
        """
        normed = self.attn_norm(x)
        k = rotate(self.k_proj(normed), angles, self.kv_heads)
        v = self.v_proj(normed)
        if asked is not None:
            rows, angles = asked
            x, normed = take(x, rows), take(normed, rows)
        q = rotate(self.q_proj(normed), angles, self.heads)
        x = x + self.attn_out(attend(q, k, v, bias, self.heads, self.kv_heads))
        normed = self.ff_norm(x)
        gate = self.ff_gate(normed)
        out: Tensor = x + self.ff_down(gate * torch.sigmoid(gate) * self.ff_up(normed))
        return out


class Denoiser(nn.Module):
    """ids [B, L] and key mask [B, L] to logits at the asked positions [B, M, V]."""

    frequencies: Tensor

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        self.register_buffer("frequencies", rotary_frequencies(config), persistent=False)

    def forward(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """Return logits [B, M, V], the mask token's so low that it is never predicted.

        Args:
            ids: Token ids [B, L], int64.
            mask: True where a token is to be attended to [B, L], bool.
            positions: Where logits are wanted [B, M], int64, each in [0, L).
        """
        batch, length = ids.shape
        if self.config.shifted:
            positions = (positions - 1).clamp(min=0)
        x = self.embed(ids)
        places = torch.arange(length, device=ids.device)[None].expand(batch, -1)
        angles = places[:, :, None].float() * self.frequencies
        bias = (1.0 - mask[:, None, None, :].to(x.dtype)) * MASKED_SCORE
        for block in self.blocks[:-1]:
            x = block(x, angles, bias)
        rows = torch.arange(batch, device=ids.device)[:, None] * length + positions
        asked = (rows, positions[:, :, None].float() * self.frequencies)
        logits: Tensor = self.head(self.norm(self.blocks[-1](x, angles, bias, asked)))
        # Finite, so that the entropy 0 * log 0 of the mask token is 0 and not NaN.
        is_mask = torch.arange(logits.shape[-1], device=ids.device) == self.config.mask_id
        never = is_mask.to(logits.dtype) * MASKED_SCORE
        return (logits + never).float()
