"""Rotations that spread outliers: orthonormal block-Hadamard matrices of Sylvester's form.

With R = blockdiag(H, H, ...) and R R' = 1, a product is the same after both sides are rotated:

    x W' = (x R) (W R)'

A channel of x far above the others becomes a small share of each channel of its block, so few
bits lose less.  The block is the largest power of two, at most 256, that divides the width.
Source: Ashkboos et al., QuaRot (2024).  Pure numpy; knows nothing about files, graphs or torch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LARGEST_BLOCK = 256


def rotation_name(block: int) -> str:
    """Return the name of the matrix [block, block] in a family's file."""
    return f"rotation.{block}"


def block_of_width(width: int) -> int:
    """Return the size of a rotation's blocks for a width; 1 is no rotation.

    >>> [block_of_width(width) for width in (4096, 320, 40, 7)]
    [256, 64, 8, 1]
    """
    if width < 1:
        raise ValueError(f"width >= 1 must hold, got {width}")
    return min(LARGEST_BLOCK, width & -width)


def hadamard(block: int) -> NDArray[np.float32]:
    """Return the orthonormal, symmetric matrix [block, block]; block is a power of two."""
    if block < 1 or block & (block - 1):
        raise ValueError(f"block must be a power of two, got {block}")
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    scaled: NDArray[np.float32] = (matrix / np.sqrt(block)).astype(np.float32)
    return scaled


def rotated(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return values [..., width] times the rotation, in their own type."""
    block = block_of_width(values.shape[-1])
    blocks = values.reshape(*values.shape[:-1], -1, block)
    matrix = hadamard(block).astype(values.dtype)
    product: NDArray[np.float32] = (blocks @ matrix).reshape(values.shape)
    return product


def rotated_hessian(hessian: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return R' H R: the Hessian [width, width] of the rotated activations."""
    block = block_of_width(len(hessian))
    matrix = hadamard(block).astype(np.float64)

    def right(values: NDArray[np.float64]) -> NDArray[np.float64]:
        product: NDArray[np.float64] = (values.reshape(len(values), -1, block) @ matrix).reshape(
            values.shape
        )
        return product

    return right(right(hessian).T).T
