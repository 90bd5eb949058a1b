"""What the Gluon kernels of forward and backward serve alike: Hopper GPUs, widths of heads, no bias."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from genrec.hstu.attention.descriptors import is_hopper
from genrec.hstu.attention.request import Request
from genrec.hstu.attention.triton_jit import gluon

HALF_PRECISION = (torch.bfloat16, torch.float16)


def why_not_here(x: Tensor, qk_dim: int, v_dim: int, request: Request, widths: Iterable[int]) -> str | None:
    """Why they can't serve heads of these widths on the device of ``x``; None if they can.

    widths: those that there are tiles of.
    """
    if gluon is None:
        return "Triton with Gluon is not installed"
    if not is_hopper(x):
        return "it needs a GPU of compute capability 9.0"
    if qk_dim not in widths or v_dim != qk_dim:
        return f"heads of q and v share a width of {', '.join(map(str, widths))}, not {qk_dim} and {v_dim}"
    return None if request.bias is None else "it has no relative bias"
