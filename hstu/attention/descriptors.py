"""TMA descriptors, by which the hardware copies tiles, and what it takes for them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from genrec.hstu.attention.compiled import Descriptor
from genrec.hstu.attention.triton_jit import INTERPRETED, GluonDescriptor, TensorDescriptor, gl, gluon

_ELEMENTS = {}
if gluon is not None:
    _ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}


def is_hopper(x: Tensor) -> bool:
    """Whether ``x`` lies on a GPU of compute capability 9.0, and kernels are compiled, not interpreted."""
    return x.is_cuda and not INTERPRETED and _capability(x.device) == (9, 0)


def has_whole_rows(x: Tensor) -> bool:
    """Whether TMA can take tiles of one head's rows of ``x`` (T, H, d).

    Heads must lie side by side, rows start at multiples of 16 bytes.
    """
    num_heads, dim = x.shape[1:]
    row, head, number = x.stride()
    is_dense = number == 1 and (num_heads == 1 or head == dim) and row >= num_heads * dim
    return is_dense and (row * x.element_size()) % 16 == 0 and x.data_ptr() % 16 == 0


def descriptor(x: Tensor, rows: int) -> Descriptor:
    """Of ``x`` (T, H, d), for tiles of ``rows`` rows of one head, in Gluon."""
    num_rows, num_heads, dim = x.shape
    return Descriptor(x, [num_rows, num_heads * dim], [x.stride(0), 1], [rows, dim], _gluon_descriptor)


def matrix_descriptor(x: Tensor, rows: int, columns: int) -> Descriptor:
    """Of a matrix, for tiles of ``rows`` by ``columns``, in Gluon."""
    return Descriptor(x, list(x.shape), list(x.stride()), [rows, columns], _gluon_descriptor)


def triton_descriptor(x: Tensor, rows: int) -> Descriptor:
    """:func:`descriptor` for kernels in Triton."""
    num_rows, num_heads, dim = x.shape
    return Descriptor(x, [num_rows, num_heads * dim], [x.stride(0), 1], [rows, dim], TensorDescriptor)


def _gluon_descriptor(base: Tensor, shape: list[int], strides: list[int], block_shape: list[int]) -> Any:
    layout = gl.NVMMASharedLayout.get_default_for(block_shape, _ELEMENTS[base.dtype])
    return GluonDescriptor(base, shape, strides, block_shape, layout)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
