"""What the operators of attention share: who must see them, what they take for a mask, gradients out of one buffer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from genrec.hstu.attention.mask import MaskRules


def is_watched(x: Tensor) -> bool:
    """Whether somebody must see the operators: a compiler, an exporter, a dispatch mode, a subclass of Tensor."""
    looks_on = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    return looks_on or type(x) not in (Tensor, nn.Parameter)


def masking_of(rules: MaskRules) -> tuple[bool, str, int, int]:
    """The fields of ``rules`` in their order: operators take no dataclasses."""
    return (rules.causal, rules.contextual_mask, rules.max_attn_len, rules.target_group_size)


def split_gradients(grads: Tensor, num_heads: int, qk_dim: int, v_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the gradients of q, k and v, (T, H, d) each, of (T, H * (d_v + 2 * d_qk)) in the order v, q, k."""
    dims = (v_dim, qk_dim, qk_dim)
    parts = grads.split([num_heads * dim for dim in dims], dim=1)
    dv, dq, dk = (part.view(-1, num_heads, dim) for part, dim in zip(parts, dims, strict=True))
    return dq, dk, dv
