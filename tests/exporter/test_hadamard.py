"""Rotations: orthonormal, symmetric, and they spread what stands out."""

from __future__ import annotations

import numpy as np
import pytest

from exporter.hadamard import (
    LARGEST_BLOCK,
    block_of_width,
    hadamard,
    rotated,
    rotated_hessian,
)

WIDTHS = (1, 7, 8, 40, 96, 256, 320, 768)


@pytest.mark.parametrize("block", [1, 2, 8, 64, 256])
def test_the_matrix_is_its_own_inverse_and_all_its_entries_are_of_one_size(block: int) -> None:
    matrix = hadamard(block)
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_allclose(matrix @ matrix, np.eye(block), atol=1e-5)
    assert len(np.unique(np.abs(matrix))) == 1


@pytest.mark.parametrize("width", WIDTHS)
def test_the_block_is_the_largest_power_of_two_that_divides_the_width(width: int) -> None:
    fitting = [2**k for k in range(20) if width % 2**k == 0 and 2**k <= LARGEST_BLOCK]
    assert block_of_width(width) == max(fitting)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_product_is_the_same_when_both_sides_are_rotated(width: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 5, width)).astype(np.float32)
    weight = rng.normal(size=(3, width)).astype(np.float32)
    np.testing.assert_allclose(rotated(x) @ rotated(weight).T, x @ weight.T, atol=1e-4)
    np.testing.assert_allclose(rotated(rotated(x)), x, atol=1e-5)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_hessian_of_rotated_activations_is_the_rotated_hessian(width: int) -> None:
    x = np.random.default_rng(1).normal(size=(30, width))
    turned = rotated(x.astype(np.float32)).astype(np.float64)
    np.testing.assert_allclose(rotated_hessian(x.T @ x), turned.T @ turned, atol=1e-3)


def test_an_outlier_becomes_an_equal_share_of_its_block() -> None:
    x = np.zeros((1, 320), np.float32)
    x[0, 70] = 80.0
    turned = np.abs(rotated(x))
    np.testing.assert_allclose(turned[0, 64:128], 10.0, rtol=1e-6)
    assert not turned[0, :64].any()
    assert not turned[0, 128:].any()


@pytest.mark.parametrize("block", [0, 3, 12, -2])
def test_a_block_that_is_no_power_of_two_is_a_mistake_of_the_caller(block: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        hadamard(block)
