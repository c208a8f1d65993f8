"""Hessians of the sites over sampled denoising states, a few blocks of the denoiser at a time.

At a site with activations x the Hessian is the sum over tokens of (m x)' (m x), with m = 1 for a
token that is still the mask, m = 0.7 for every other (prompt included) and 0 for padding: what is
committed next is read at the masks.  Source: DLLMQuant (2025).  Behind the last block's attention
only the asked positions are computed, so only they are counted.

Sums are kept in double precision.  One run over the states fills the Hessians of as many
consecutive blocks as fit a bound on memory, at least one; asking for a block beyond them starts
another run.  So a small model is run once, and a large one once a block for each family.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engines.errors import InputError
from exporter.denoiser import Denoiser, DenoiserConfig
from exporter.framework import LAYER_OF_SITE
from exporter.states import State

# Weight of a token that is not the mask.
DECIDED_WEIGHT = 0.7

# Bytes of the Hessians that are kept at a time.
MEMORY = 1 << 30

_BATCH = 32


class Hessians:
    """The Hessian of each site, made when it is asked for.

    Args:
        denoiser: In full precision.
        states: Sampled ones.
        memory: Bytes that the Hessians kept may take; one block's are kept in any case.

    Raises:
        InputError: There is no state.
    """

    def __init__(self, denoiser: Denoiser, states: Sequence[State], memory: int = MEMORY) -> None:
        if not states:
            raise InputError("there are no calibration states; name a task that has prompts")
        self.runs = 0
        self._denoiser, self._states = denoiser, states
        self._at_once = max(1, memory // bytes_of_block(denoiser.config))
        self._kept: dict[str, NDArray[np.float64]] = {}

    def __call__(self, site: str) -> NDArray[np.float64]:
        """Return the Hessian [width, width] of a site, by its name."""
        if site not in self._kept:
            first = int(site.split(".")[1]) // self._at_once * self._at_once
            last = min(first + self._at_once, self._denoiser.config.layers)
            self._kept = {}  # before the new ones take their place
            self._kept = self._run(range(first, last))
        return self._kept[site]

    def _run(self, blocks: range) -> dict[str, NDArray[np.float64]]:
        """Return the Hessians of some blocks, from one run over all states."""
        config = self._denoiser.config
        sums: dict[str, Tensor] = {}
        weights: dict[bool, Tensor] = {}

        def note(site: str, asked_only: bool, values: Tensor) -> None:
            scaled = values.double() * weights[asked_only][..., None]
            flat = scaled.flatten(0, -2)
            sums[site] = sums.get(site, 0) + flat.T @ flat

        self.runs += 1
        with torch.inference_mode(), ExitStack() as watching:
            for block in blocks:
                for name, layer in LAYER_OF_SITE.items():
                    site = f"blocks.{block}.{name}"
                    asked_only = block == config.layers - 1 and name != "attn_in"

                    def hook(
                        layer: nn.Module,
                        inputs: tuple[Tensor],
                        site: str = site,
                        asked_only: bool = asked_only,
                    ) -> None:
                        note(site, asked_only, inputs[0])

                    module = self._denoiser.get_submodule(f"blocks.{block}.{layer}")
                    watching.callback(module.register_forward_pre_hook(hook).remove)
            for start in range(0, len(self._states), _BATCH):
                part = self._states[start : start + _BATCH]
                ids, mask, asked, counted = padded(part)
                weights[False], weights[True] = token_weights(config, ids, mask, asked, counted)
                self._denoiser(ids, mask, asked)
        return {site: value.numpy() for site, value in sums.items()}


def bytes_of_block(config: DenoiserConfig) -> int:
    """Return the bytes of one block's Hessians."""
    attention = config.heads * config.head_width
    widths = (config.hidden, attention, config.hidden, config.ffn)
    return sum(8 * width * width for width in widths)


def padded(states: Sequence[State]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ids [B, L], key mask [B, L], asked positions [B, M] and which of them count [B, M].

    The first asked position stands in where a row asks for fewer.
    """
    rows, length = len(states), max(len(state.ids) for state in states)
    most = max(len(state.asked) for state in states)
    ids, mask = np.zeros((rows, length), np.int64), np.zeros((rows, length), np.bool_)
    asked, counted = np.zeros((rows, most), np.int64), np.zeros((rows, most), np.bool_)
    for row, state in enumerate(states):
        ids[row, : len(state.ids)], mask[row, : len(state.ids)] = state.ids, True
        asked[row] = state.asked[0]
        asked[row, : len(state.asked)], counted[row, : len(state.asked)] = state.asked, True
    turned = torch.from_numpy
    return turned(ids), turned(mask), turned(asked), turned(counted)


def token_weights(
    config: DenoiserConfig, ids: Tensor, mask: Tensor, asked: Tensor, counted: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what a token counts: on the canvas [B, L], and at the asked positions [B, M]."""
    each = torch.where(ids == config.mask_id, 1.0, DECIDED_WEIGHT).double() * mask
    if config.shifted:
        asked = (asked - 1).clamp(min=0)
    return each, each.gather(1, asked) * counted
