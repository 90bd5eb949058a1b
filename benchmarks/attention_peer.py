"""The other side of the comparison: FBGEMM's CUTLASS operators for Hopper, called directly, on contiguous tensors.

They divide by the longest length. Of a wheel fbgemm-gpu-hstu of March 2026; later ones take other arguments.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention_cases import Contender, Inputs

NAME = "FBGEMM CUTLASS (hstu_varlen_*_90)"
_E4M3_MAX = 448.0


def load_peer(library: Path, runtime: Path | None) -> None:
    """Register torch.ops.fbgemm.hstu_varlen_fwd_90 and hstu_varlen_bwd_90."""
    if runtime is not None:
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(library))


def peer(inputs: Inputs) -> Contender:
    """In bfloat16 or float16."""
    q, k, v = (x.contiguous() for x in inputs.qkv)
    batch, alpha = _batch(inputs), 1 / math.sqrt(inputs.case.dim)
    forward = _forward(inputs, q, k, v)
    bwd = torch.ops.fbgemm.hstu_varlen_bwd_90

    def backward() -> tuple[Tensor, ...]:
        return tuple(bwd(inputs.grad, q, k, v, *batch, -1, 0, alpha, None, False, False, False)[:3])

    def both() -> tuple[Tensor, ...]:
        forward()
        return backward()

    return {"forward": forward, "backward": backward, "both": both}


def peer_fp8(inputs: Inputs) -> Contender:
    """Forward alone, of numbers that were quantized before, with one scale a tensor: its backward has no FP8."""
    scales = [_E4M3_MAX / x.abs().amax().float() for x in inputs.qkv]
    q, k, v = (
        (x.float() * scale).to(torch.float8_e4m3fn).contiguous() for x, scale in zip(inputs.qkv, scales, strict=True)
    )
    return {"forward": _forward(inputs, q, k, v, descales=[scale.reciprocal().view(1) for scale in scales])}


def _forward(
    inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, descales: Sequence[Tensor | None] = (None, None, None)
) -> Callable[[], tuple[Tensor, ...]]:
    batch, alpha = _batch(inputs), 1 / math.sqrt(inputs.case.dim)
    named = dict(zip(("descale_q", "descale_k", "descale_v"), descales, strict=True))
    fwd = torch.ops.fbgemm.hstu_varlen_fwd_90

    def forward() -> tuple[Tensor, ...]:
        result = fwd(
            q, k, v, *batch, window_size_left=-1, window_size_right=0, alpha=alpha, rab=None, is_delta_q=False, **named
        )
        return (result,) if isinstance(result, Tensor) else tuple(result[:1])

    return forward


def _batch(inputs: Inputs) -> tuple[Any, ...]:
    longest, offsets = max(inputs.case.lengths), inputs.offsets.int()
    contexts, targets = (None if x is None else x.int() for x in (inputs.num_contexts, inputs.num_targets))
    return (offsets, offsets, longest, longest, contexts, targets, 1)
