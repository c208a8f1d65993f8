"""Which blocks of a denoiser lose most when they are quantized, measured one at a time.

For each block a recipe that quantizes this block alone is made and its divergence from full
precision is measured on a few calibration traces.  The most sensitive block comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from engines.backend import Backend
from engines.trace import Trace
from exporter.folder import Recipe
from tuner.sensitivity import divergence


def rank_blocks(
    blocks: int,
    base: Recipe,
    engine_of: Callable[[Recipe], Backend],
    traces: Sequence[Trace],
) -> tuple[int, ...]:
    """Return block numbers, the one whose quantization diverges most first; ties to the lowest.

    Args:
        blocks: Of the denoiser.
        base: Whose windows, clip and quantizer are used.  Blocks that it keeps in fp32 are not
            ranked: it may have no integers of theirs.
        engine_of: The quantized engine of a recipe.
        traces: Full-precision trajectories to compare on.
    """
    harm = {}
    for block in sorted(set(range(blocks)) - set(base.keep)):
        others = tuple(other for other in range(blocks) if other != block)
        harm[block] = divergence(traces, engine_of(replace(base, keep=others)))
    return tuple(sorted(harm, key=lambda block: (-harm[block], block)))
