"""The torch model as a `Backend`: the reference for parity, and what calibration watches.

It runs the very sampler that serves, so calibration sees the states that engines will see.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor, nn

from engines.backend import Floats, Ids, Mask, Served, served_from_logits
from engines.precision import FULL_PRECISION, Precision
from exporter.denoiser import Denoiser
from exporter.hadamard import block_of_width, hadamard
from exporter.names import sites_of_blocks

# Called after a pass with the largest magnitude at each site [B, S] and the progress [B].
Observer = Callable[[Floats, Floats], None]

# The layer whose input is the site.  Of q, k and v it is k: the last block computes its queries
# at the asked positions alone.
LAYER_OF_SITE = {
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

    def __init__(
        self, denoiser: Denoiser, observe: Observer | None = None, rotate: bool = False
    ) -> None:
        """A denoiser, and who is told the magnitudes at its sites, as they are or rotated."""
        self.precision: Precision = FULL_PRECISION
        self._denoiser = denoiser
        self._observe = observe
        self._rotate = rotate

    def logits(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Floats:
        keys = torch.from_numpy(np.ascontiguousarray(mask))
        with torch.inference_mode(), ExitStack() as watching:
            largest: dict[str, Tensor] = {}
            if self._observe is not None:
                self._watch(watching, keys, largest)
            logits = self._denoiser(
                torch.from_numpy(np.ascontiguousarray(ids)),
                keys,
                torch.from_numpy(np.ascontiguousarray(positions)),
            )
        if self._observe is not None:
            sites = sites_of_blocks(self._denoiser.config.layers)
            self._observe(torch.stack([largest[site] for site in sites], 1).numpy(), progress)
        out: Floats = logits.numpy()
        return out

    def serve(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Served:
        return served_from_logits(self.logits(ids, mask, positions, progress))

    def _watch(self, watching: ExitStack, mask: Tensor, largest: dict[str, Tensor]) -> None:
        """Note the largest magnitude of each row's input at each site, as long as `watching`.

        Padding does not count.  Behind the last block's attention there are only asked positions,
        none of them padding.
        """
        layers = self._denoiser.config.layers
        for site in sites_of_blocks(layers):
            block, _, name = site.rpartition(".")
            asked_only = block == f"blocks.{layers - 1}" and name != "attn_in"

            def note(
                layer: nn.Module,
                inputs: tuple[Tensor],
                site: str = site,
                asked_only: bool = asked_only,
            ) -> None:
                values = rotated_tensor(inputs[0]) if self._rotate else inputs[0]
                each = values.abs().amax(-1)
                largest[site] = (each if asked_only else each.masked_fill(~mask, 0.0)).amax(-1)

            layer = self._denoiser.get_submodule(f"{block}.{LAYER_OF_SITE[name]}")
            watching.callback(layer.register_forward_pre_hook(note).remove)


def rotated_tensor(values: Tensor) -> Tensor:
    """Return values [..., width] times the rotation of `exporter.hadamard`."""
    block = block_of_width(values.shape[-1])
    matrix = torch.from_numpy(hadamard(block)).to(values)
    out: Tensor = (values.unflatten(-1, (-1, block)) @ matrix).flatten(-2)
    return out
