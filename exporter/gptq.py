"""GPTQ: weights rounded one input after another, each error made good by the inputs that follow.

For a layer y = x W' the damage of rounding W to Q is tr(E H E'), with E = Q - W and H the sum of
x' x over calibration tokens.  Inputs are rounded in order; the error of one is spread over those
not yet rounded so that the damage grows least, by the Cholesky factor of the inverse of H:

    H + damping = (U'U)^-1       error = (w_i - q_i) / U_ii       w_j -= error U_ij  for j > i

Columns are updated at once inside a block of 128, and all that follow a block by one product.
Scales are those of `exporter.quantize`, by channel or by group of 32 inputs; a group's are taken
when it is reached, from the weights as they are then.  Each may be shrunk, to cut off the largest
weights, where that lowers the squared error weighted by the diagonal of H.

What is rounded to the nearest with plain scales is kept for an output channel where it does less
damage: greedy rounding has no guarantee of its own.

Source: Frantar et al., GPTQ (2022).  Pure numpy; memory is that of a few copies of W and H in
double precision, a weight at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engines.errors import InputError
from engines.precision import WEIGHT_GROUP
from exporter.hadamard import rotated, rotated_hessian
from exporter.quantize import (
    INTEGERS,
    SMALLEST_RANGE,
    Rounded,
    Rounding,
    largest_integer,
    to_nearest,
)

# Shares of the mean of the diagonal that are added to it, until the factor exists.
DAMPING = (0.01, 0.1, 1.0)

# Shares of a group's largest magnitude that may become its largest integer.
SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)

_BLOCK = 128


def gptq(
    weight: NDArray[np.float32],
    hessian: NDArray[np.float64],
    bits: int,
    by_channel: bool,
    name: str = "weight",
) -> Rounded:
    """Return (integers [in, out], scales [out] or [groups, out]), as `to_nearest` does.

    Args:
        weight: [out, in].
        hessian: Sum of x' x over calibration tokens [in, in]; its scale does not matter.
        bits: 4, 8 or 16.
        by_channel: One scale a channel; else one for each 32 of its inputs.
        name: What an error calls the weight.

    Raises:
        InputError: The Hessian is not finite, or has no factor even with the most damping.
        ValueError: Its shape does not fit the weight.
    """
    inputs = weight.shape[1]
    if hessian.shape != (inputs, inputs):
        raise ValueError(f"{name}: need a Hessian [{inputs}, {inputs}], got {hessian.shape}")
    return _gptq(weight, hessian, _factor(hessian, name), bits, by_channel)


def damage(
    weight: NDArray[np.float32], hessian: NDArray[np.float64], rounded: Rounded
) -> NDArray[np.float64]:
    """Return what rounding costs each output channel [out]: the diagonal of E H E'."""
    integers, scales = rounded
    spread = scales if scales.ndim == 1 else np.repeat(scales, WEIGHT_GROUP, 0)[: len(integers)]
    error = (integers * spread.astype(np.float64)).T - weight
    cost: NDArray[np.float64] = ((error @ hessian) * error).sum(1)
    return cost


def rounding_from_hessians(
    hessians: Callable[[str], NDArray[np.float64]], rotate: bool
) -> Rounding:
    """Return the rounding that a family is made with.

    Args:
        hessians: Of a site, by its name; of activations as they are, not rotated.
        rotate: Round the rotated weight, for rotated activations.
    """
    last: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}

    def rounding(
        name: str, site: str, weight: NDArray[np.float32], bits: int, by_channel: bool
    ) -> Rounded:
        if site not in last:  # weights that share a site come after each other
            last.clear()
            hessian = rotated_hessian(hessians(site)) if rotate else hessians(site)
            last[site] = hessian, _factor(hessian, f"{name} (site {site})")
        hessian, factor = last[site]
        weight = rotated(weight) if rotate else weight
        return _gptq(weight, hessian, factor, bits, by_channel)

    return rounding


def _gptq(
    weight: NDArray[np.float32],
    hessian: NDArray[np.float64],
    factor: NDArray[np.float64],
    bits: int,
    by_channel: bool,
) -> Rounded:
    """Return what `gptq` does, by the Hessian and its factor."""
    outputs, inputs = weight.shape
    importance = np.diag(hessian).copy()
    importance[importance <= 0] = 1.0  # inputs that were always 0: each rounded to the nearest
    group = inputs if by_channel else WEIGHT_GROUP
    largest = largest_integer(bits)
    left = weight.T.astype(np.float64)
    integers = np.zeros((inputs, outputs), INTEGERS[bits])
    scales = np.ones((-(-inputs // group), outputs), np.float32)
    for start in range(0, inputs, _BLOCK):
        stop = min(start + _BLOCK, inputs)
        errors = np.zeros((stop - start, outputs))
        for at in range(start, stop):
            if at % group == 0:
                # A group lies in one block, so its weights are up to date; a whole channel is
                # seen at its beginning.
                rows = slice(at, at + group)
                scales[at // group] = _scales(left[rows], importance[rows], largest)
            scale = scales[at // group]
            rounded = np.clip(np.rint(left[at] / scale), -largest, largest)
            integers[at] = rounded
            error = (left[at] - rounded * scale) / factor[at, at]
            left[at + 1 : stop] -= factor[at, at + 1 : stop, None] * error
            errors[at - start] = error
        left[stop:] -= factor[start:stop, stop:].T @ errors
    found: Rounded = (integers, scales[0] if by_channel else scales)
    return _better(weight, hessian, found, to_nearest(weight, bits, by_channel))


def _factor(hessian: NDArray[np.float64], name: str) -> NDArray[np.float64]:
    """Return U, upper, with U'U the inverse of the damped Hessian."""
    if not np.isfinite(hessian).all():
        raise InputError(
            f"the Hessian of {name} is not finite; check the checkpoint, or export with "
            f"--quantizer rtn"
        )
    size = len(hessian)
    dead = np.diag(hessian) <= 0
    for share in DAMPING:
        damped = hessian.copy()
        damped[dead] = damped[:, dead] = 0.0
        mean = float(np.diag(damped).mean()) or 1.0
        damped[np.diag_indices(size)] += share * mean
        damped[dead, dead] = mean
        try:
            # With H = V V', V upper, the inverse is (V^-1)' V^-1: one factor, from the end.
            upper = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
            factor = np.triu(np.linalg.solve(upper, np.eye(size)))
        except np.linalg.LinAlgError:
            continue
        if np.isfinite(factor).all() and (np.diag(factor) > 0).all():
            return factor
    raise InputError(
        f"the Hessian of {name} has no Cholesky factor, even with {DAMPING[-1]:g} of its mean "
        f"added to the diagonal; calibrate with more prompts, or export with --quantizer rtn"
    )


def _scales(
    part: NDArray[np.float64], importance: NDArray[np.float64], largest: int
) -> NDArray[np.float32]:
    """Return the scale of each output [out] for some inputs of all outputs [n, out]."""
    top = np.abs(part).max(0)
    plain = np.where(top > SMALLEST_RANGE, top / largest, 1.0)
    best, least = plain.astype(np.float32), np.full(len(plain), np.inf)
    for share in SHRINK:
        scale = (plain * share).astype(np.float32)
        error = np.clip(np.rint(part / scale), -largest, largest) * scale - part
        cost = importance @ (error * error)
        better = cost < least
        best[better], least[better] = scale[better], cost[better]
    return best


def _better(
    weight: NDArray[np.float32], hessian: NDArray[np.float64], one: Rounded, other: Rounded
) -> Rounded:
    """Return for each output channel the rounding that does less damage; `one` where equal."""
    worse = damage(weight, hessian, one) > damage(weight, hessian, other)
    integers, scales = (
        np.where(worse, second, first) for first, second in zip(one, other, strict=True)
    )
    return integers, scales
