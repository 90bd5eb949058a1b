"""FBGEMM's CUTLASS kernels for HSTU attention (package fbgemm-gpu-hstu) behind our function, where they are installed.

Their mask is ours with ``contextual_mask="history"``. Their windows and attention both ways know neither contexts nor
targets. They leave rows that belong to no user unwritten, so those are made zero here, on the way in and out. Builds
before July 2026 divide by the longest user's length and not by N; the arguments' names tell which build it is.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from genrec.configs.schema import UnavailableError, find_cutlass_module
from genrec.hstu.attention.bias import RelativeBias
from genrec.hstu.attention.mask import MaskRules

DTYPES = (torch.bfloat16, torch.float16)
DIMS = (32, 64, 128, 256)
CAPABILITIES = (8, 9)
NOT_INSTALLED = "needs FBGEMM's HSTU attention (package fbgemm-gpu-hstu), which is not installed"


def cutlass_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    offsets: Tensor,
    max_seqlen: int,
    scaling_seqlen: int,
    alpha: float,
    num_contexts: Tensor | None,
    num_targets: Tensor | None,
    rules: MaskRules,
    bias: RelativeBias | None,
) -> Tensor:
    """q, k, v: (T, H, d) -> (T, H, d). Rows beyond ``offsets[-1]`` and their gradients are zero.

    Raises UnavailableError for what these kernels don't have. What the tensors hold is not checked.
    """
    reason = why_not(q, k, v, num_contexts=num_contexts, num_targets=num_targets, rules=rules, bias=bias)
    if reason is not None:
        raise _refusal(reason)
    num_users = offsets.shape[0] - 1
    # Without users or tokens there is nothing to launch.
    end = offsets[-1] if num_users > 0 and max_seqlen > 0 else 0
    is_token = (torch.arange(q.shape[0], device=q.device) < end)[:, None, None]
    q, k, v = (torch.where(is_token, x, 0.0).contiguous() for x in (q, k, v))
    if num_users == 0 or max_seqlen == 0 or q.numel() == 0:
        return q + k + v
    function, parameters = _load()
    left = rules.max_attn_len if rules.max_attn_len > 0 else -1
    arguments = {
        **_offset_arguments(parameters, offsets.int().contiguous()),
        "max_seqlen_q": max_seqlen,
        "max_seqlen_k": max_seqlen,
        "num_contexts": None if num_contexts is None else num_contexts.int().contiguous(),
        "num_targets": None if num_targets is None else num_targets.int().contiguous(),
        "target_group_size": rules.target_group_size,
        "window_size": (left, 0 if rules.causal else left),
        "alpha": alpha,
    }
    divides_by_longest = "scaling_seqlen" not in parameters
    if not divides_by_longest:
        arguments["scaling_seqlen"] = scaling_seqlen
    try:
        output: Tensor = function(q, k, v, **arguments)
    except RuntimeError as error:
        if "does not support" in str(error):
            raise _refusal(f"this build was made without it ({str(error).splitlines()[0]})") from error
        raise
    if divides_by_longest and scaling_seqlen != max_seqlen:
        output = output * (max_seqlen / scaling_seqlen)
    return torch.where(is_token, output, 0.0)


def why_not(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    num_contexts: Tensor | None,
    num_targets: Tensor | None,
    rules: MaskRules,
    bias: RelativeBias | None,
) -> str | None:
    """Why these kernels can't serve the request; None if they can."""
    if bias is not None:
        return "it has no relative bias that is made from positions and times"
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"q, k and v must share bfloat16 or float16, not {q.dtype}, {k.dtype}, {v.dtype}"
    if q.shape[2] != v.shape[2] or q.shape[2] not in DIMS:
        return f"heads are {', '.join(map(str, DIMS))} wide, the same for q and v, not {q.shape[2]} and {v.shape[2]}"
    if num_contexts is not None and rules.contextual_mask != "history":
        return "contexts see all of the history there (contextual_mask = 'history')"
    if rules.max_attn_len > 0 and not (num_contexts is None and num_targets is None):
        return "it has no window (max_attn_len) together with contexts or targets"
    if not rules.causal and not (num_contexts is None and num_targets is None):
        return "it has no contexts or targets without a causal mask"
    return _why_not_on(q.device)


def _why_not_on(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, and q is on {device.type!r}"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major in CAPABILITIES else f"it has kernels for compute capability 8 and 9, not {major}.{minor}"


def _refusal(reason: str) -> UnavailableError:
    return UnavailableError(f"kernel_backend 'cutlass' can't serve this attention: {reason}; 'auto' and 'pytorch' can")


@functools.cache
def _load() -> tuple[Callable[..., Any], frozenset[str]]:
    """The differentiable function and its arguments' names. Importing it loads the kernels."""
    name = find_cutlass_module()
    assert name is not None
    function: Callable[..., Any] = importlib.import_module(name).hstu_attn_varlen_func
    return function, frozenset(inspect.signature(function).parameters)


def _offset_arguments(parameters: frozenset[str], offsets: Tensor) -> dict[str, Tensor | None]:
    """Where users begin and end, under the names of this build; queries and keys are the same tokens."""
    if "seq_offsets_q" in parameters:
        return {"seq_offsets_q": offsets, "seq_offsets_k": offsets}
    arguments: dict[str, Tensor | None] = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    if "seqused_q" in parameters:  # how much of each sequence is in use: all
        arguments |= {"seqused_q": None, "seqused_k": None}
    return arguments
