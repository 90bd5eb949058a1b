"""What all kernels are given: tensors' layouts."""

from __future__ import annotations

import pytest
import torch

from genrec.configs import availability
from genrec.hstu.attention import request


def strided(*strides, shape=(300, 4, 64)):
    """Of any size: without memory."""
    return torch.empty_strided(shape, strides, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("strides", [(4 * 64, 64, 1), (4 * 4 * 64, 64, 1), (64, 300 * 64, 1), (64, 2**29, 1)])
def test_heads_in_a_row_are_taken_as_they_lie(strides):
    x = strided(*strides)
    assert request.with_dense_heads(x) is x and request.as_blocks(x) is x


@pytest.mark.parametrize("strides", [(64, 2**30, 1), (2**24, 64, 1), (64 * 4 * 2, 64 * 2, 2), (1, 300 * 64, 300)])
def test_what_kernels_cannot_address_is_copied(strides):
    """Two of heads 2^30 numbers apart are 2^31 apart, which is no int32."""
    assert request.with_dense_heads(strided(*strides)).is_contiguous()


@pytest.mark.parametrize(("dim", "block"), [(1, 32), (32, 32), (33, 64), (64, 64), (200, 256), (256, 256)])
def test_widths_are_completed_with_zeros(dim, block):
    x = request.as_blocks(torch.ones(3, 2, dim))
    assert x.shape == (3, 2, block) and request.block_of(dim) == block
    assert (x[:, :, :dim] == 1).all() and (x[:, :, dim:] == 0).all()


def test_the_configuration_knows_how_wide_heads_may_be():
    assert availability.MAX_HEAD_DIM == request.MAX_DIM
