"""The torch model as a `Backend`: the reference for parity, and what calibration watches.

It runs the very sampler that serves, so calibration sees the states that engines will see.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engines.backend import Floats, Ids, Mask, Served, served_from_logits
from engines.precision import FULL_PRECISION, Precision
from exporter.denoiser import Denoiser
from exporter.names import sites_of_blocks

# Called after a pass with the largest magnitude at each site [B, S] and the progress [B].
Observer = Callable[[Floats, Floats], None]

# The layer whose input is the site.  Of q, k and v it is k: the last block computes its queries
# at the asked positions alone.
_LAYER_OF_SITE = {
    "attn_in": "k_proj",
    "attn_out": "attn_out",
    "ff_in": "ff_gate",
    "ff_down": "ff_down",
}


class TorchBackend:
    """A denoiser in float32.

    Attributes:
        precision: Full precision.
    """

    def __init__(self, denoiser: Denoiser, observe: Observer | None = None) -> None:
        self.precision: Precision = FULL_PRECISION
        self._denoiser = denoiser
        self._observe = observe
        self._largest: dict[str, NDArray[np.float32]] = {}
        self._mask: Tensor = torch.zeros(0)
        self._sites = sites_of_blocks(denoiser.config.layers)
        if observe is not None:
            for site in self._sites:
                block, _, name = site.rpartition(".")
                layer = denoiser.get_submodule(f"{block}.{_LAYER_OF_SITE[name]}")
                last = block == f"blocks.{denoiser.config.layers - 1}" and name != "attn_in"
                layer.register_forward_pre_hook(partial(self._watch, site, last))

    def logits(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Floats:
        self._mask = torch.from_numpy(np.ascontiguousarray(mask))
        with torch.inference_mode():
            logits = self._denoiser(
                torch.from_numpy(np.ascontiguousarray(ids)),
                self._mask,
                torch.from_numpy(np.ascontiguousarray(positions)),
            )
        if self._observe is not None:
            self._observe(np.stack([self._largest[site] for site in self._sites], 1), progress)
        out: Floats = logits.numpy()
        return out

    def serve(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Served:
        return served_from_logits(self.logits(ids, mask, positions, progress))

    def _watch(self, site: str, asked_only: bool, layer: nn.Module, inputs: tuple[Tensor]) -> None:
        """Note the largest magnitude of each row's input; padding does not count.

        Behind the last block's attention there are only asked positions, none of them padding.
        """
        largest = inputs[0].abs().amax(-1)
        if not asked_only:
            largest = largest.masked_fill(~self._mask, 0.0)
        self._largest[site] = largest.amax(-1).numpy()
