"""The one attention function, and the choice of the backend that serves it."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor

from genrec.configs.schema import ATTENTION_QUANTIZATIONS, KERNEL_BACKENDS, UnavailableError, find_cutlass_module
from genrec.hstu.attention.bias import RelativeBias
from genrec.hstu.attention.blocked import blocked_attention
from genrec.hstu.attention.cutlass import NOT_INSTALLED, cutlass_attention
from genrec.hstu.attention.mask import MaskRules
from genrec.hstu.attention.operators import triton_attention, why_not

_ATTENTION = {"pytorch": blocked_attention, "triton": triton_attention}

_logger = logging.getLogger(__name__)


def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    offsets: Tensor,
    max_seqlen: int,
    scaling_seqlen: int,
    alpha: float | None = None,
    num_contexts: Tensor | None = None,
    num_targets: Tensor | None = None,
    target_group_size: int = 1,
    causal: bool = True,
    contextual_mask: str = "prefix",
    max_attn_len: int = 0,
    bias: RelativeBias | None = None,
    backend: str = "auto",
    quantization: str = "bf16",
) -> Tensor:
    """O_i = sum_j M_ij SiLU(alpha q_i.k_j + bias_ij) / N v_j over the tokens of each user.

    q, k: (T, H, d_qk), v: (T, H, d_v), strided views welcome; returns (T, H, d_v) in their dtype. offsets: (B + 1,),
    user b owns rows [offsets[b], offsets[b + 1]); rows beyond offsets[-1] come out zero, with zero gradients.
    max_seqlen: the longest user's tokens, on the host; scaling_seqlen: N. alpha: None is 1 / sqrt(d_qk). num_contexts,
    num_targets: (B,) tokens at each user's start and end, None for none; :mod:`genrec.hstu.attention.mask` says who
    sees whom. quantization: ``hstu_attn_quantization_mode``; :mod:`genrec.hstu.attention.quantization` has the modes.

    Raises UnavailableError for a backend or quantization that isn't there, ValueError for arguments that can't be.
    """
    check_available(backend, quantization, has_bias=bias is not None)
    _check_shapes(q, k, v, offsets, num_contexts, num_targets, scaling_seqlen, max_seqlen)
    rules = MaskRules(
        causal=causal,
        contextual_mask=contextual_mask,
        max_attn_len=max_attn_len,
        target_group_size=target_group_size,
    )
    chosen = _choose(backend, q, k, v, quantization)
    attention: Callable[..., Tensor] = (
        functools.partial(cutlass_attention, max_seqlen=max_seqlen)
        if chosen == "cutlass"
        else functools.partial(_ATTENTION[chosen], quantization=quantization)
    )
    return attention(
        q,
        k,
        v,
        offsets=offsets,
        scaling_seqlen=scaling_seqlen,
        alpha=1.0 / math.sqrt(q.shape[2]) if alpha is None else alpha,
        num_contexts=num_contexts,
        num_targets=num_targets,
        rules=rules,
        bias=bias,
    )


def check_available(backend: str, quantization: str = "bf16", *, has_bias: bool = False) -> None:
    """Raise UnavailableError unless these go together and are installed, ValueError for names that are not known."""
    _check_name("kernel_backend", backend, known=KERNEL_BACKENDS)
    _check_name("hstu_attn_quantization_mode", quantization, known=ATTENTION_QUANTIZATIONS)
    if has_bias and quantization != "bf16":
        raise UnavailableError(
            f"hstu_attn_quantization_mode {quantization!r} does not go with a relative bias on the scores: 'bf16' does"
        )
    if backend == "cutlass":
        _check_cutlass(quantization)


def _check_cutlass(quantization: str) -> None:
    if find_cutlass_module() is None:
        raise UnavailableError(f"kernel_backend 'cutlass' {NOT_INSTALLED}: 'auto', 'pytorch' and 'triton' are here")
    if quantization != "bf16":
        raise UnavailableError(
            f"kernel_backend 'cutlass' serves hstu_attn_quantization_mode 'bf16' alone in this version, not "
            f"{quantization!r}: 'auto', 'pytorch' and 'triton' have it"
        )


def check_device(backend: str, device_type: str) -> None:
    """Raise UnavailableError where the named backend has no kernels for ``device_type`` ("cpu" or "cuda")."""
    if backend in ("triton", "cutlass") and device_type != "cuda":
        raise UnavailableError(
            f"NetworkArgs.kernel_backend = {backend!r} needs a GPU, and this run is on {device_type!r}: 'auto' and "
            "'pytorch' run anywhere"
        )


def _check_name(field: str, name: str, *, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ValueError(f"{field} {name!r} is not one of {', '.join(known)}")


def _choose(backend: str, q: Tensor, k: Tensor, v: Tensor, quantization: str) -> str:
    """The backend that serves the request: the one named, or for "auto" the fastest of our own that can."""
    if backend in ("pytorch", "cutlass"):  # cutlass_attention says itself what it doesn't serve
        return backend
    reason = why_not(q, k, v, quantization=quantization)
    if backend == "triton" and reason is not None:
        raise UnavailableError(
            f"kernel_backend 'triton' can't serve this attention: {reason}; 'auto' and 'pytorch' can"
        )
    is_slower = not q.is_cuda or (q.dtype == torch.float32 and quantization == "bf16")
    if backend == "auto" and reason is None and is_slower:
        reason = "it is slower there"
    chosen = "triton" if reason is None else "pytorch"
    if backend == "auto":
        does = ", which emulates FP8" if chosen == "pytorch" and quantization != "bf16" else ""
        _log_choice(chosen + does, f"; triton: {reason}" if reason is not None and q.is_cuda else "")
    return chosen


@functools.cache
def _log_choice(backend: str, why: str) -> None:
    """Once per process, backend and reason."""
    _logger.info("attention backend: %s (kernel_backend 'auto'%s)", backend, why)


def _check_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    num_contexts: Tensor | None,
    num_targets: Tensor | None,
    scaling_seqlen: int,
    max_seqlen: int,
) -> None:
    are_heads = q.ndim == v.ndim == 3 and 0 not in (*q.shape[1:], *v.shape[1:])
    if not are_heads or q.shape != k.shape or q.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} must be (T, H, d_qk) twice and (T, H, d_v), "
            "with H and d from 1 on"
        )
    if offsets.ndim != 1 or offsets.shape[0] < 1:
        raise ValueError(f"offsets must be (B + 1,), not {tuple(offsets.shape)}")
    num_users = offsets.shape[0] - 1
    if any(x is not None and x.shape != (num_users,) for x in (num_contexts, num_targets)):
        raise ValueError(f"num_contexts and num_targets must have one entry for each of {num_users} users")
    if scaling_seqlen < 1:
        raise ValueError(f"scaling_seqlen {scaling_seqlen} must be at least 1")
    if max_seqlen < 0:
        raise ValueError(f"max_seqlen {max_seqlen} is negative")
