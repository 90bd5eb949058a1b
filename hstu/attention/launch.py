"""Launches of the attention kernels. The host reads no tensor, so it never waits for the device.

Heads of other widths than 32, 64, 128 and 256 are copied into the next of these, completed with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from genrec.hstu.attention import hopper_backward, hopper_forward, triton_jit
from genrec.hstu.attention.descriptors import has_whole_rows, triton_descriptor
from genrec.hstu.attention.quantization import QuantizedBatch, ScoreTensors
from genrec.hstu.attention.request import Request, as_blocks, block_of, device_of, strides
from genrec.hstu.attention.triton_forward import forward_kernel
from genrec.hstu.attention.triton_key_grad import key_grad_kernel
from genrec.hstu.attention.triton_query_grad import query_grad_kernel
from genrec.hstu.attention.triton_schedule import SCHEDULE_ROWS, schedule_kernel
from genrec.hstu.attention.tuning import KernelTile, Tiles, check_fp8

# Programs add to this many copies of a bias's gradient, so that not all queue for the same few numbers.
_BIAS_SUMS = 64
_SCHEDULE_BLOCK, _SCHEDULE_OTHERS = 16, 256


def make_schedule(q: Tensor, request: Request) -> Tensor:
    """(SCHEDULE_ROWS, B + 1) int32, of ``schedule_kernel``: in which order tiles are taken."""
    schedule = torch.empty(SCHEDULE_ROWS, request.num_users + 1, dtype=torch.int32, device=q.device)
    with device_of(q):
        schedule_kernel[(request.num_users // _SCHEDULE_BLOCK + 1,)](
            *(request.offsets.contiguous(), schedule, request.num_users, q.shape[0]),
            BLOCK=_SCHEDULE_BLOCK,
            OTHERS=_SCHEDULE_OTHERS,
        )
    return schedule


def forward(q: Tensor, k: Tensor, v: Tensor, request: Request, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """The output (T, H, d_v), and the schedule that :func:`backward` takes."""
    schedule = make_schedule(q, request)
    output = torch.empty(*v.shape[:2], block_of(v.shape[2]), dtype=v.dtype, device=v.device)
    if v.numel() > 0 and hopper_forward.why_not(q, k, v, request) is None:
        hopper_forward.forward(q, k, v, output, schedule, request)
    elif v.numel() > 0:
        q, k, padded = (as_blocks(x) for x in (q, k, v))
        with device_of(q):
            forward_kernel[request.grid(q, tiles.forward.rows)](
                *(q, k, padded, output),
                *_descriptors(k, padded, tiles.forward.keys, tiles),
                *(None,) * 4,
                schedule,
                *request.pointers(),
                *strides(q, k, padded, output),
                *_scalars(q, request),
                **_constants(request, q.shape[2], padded.shape[2], tiles.forward, tiles.tanh),
            )
    return _narrowed(output, v.shape[2]), schedule


def forward_fp8(
    batch: QuantizedBatch, v: Tensor, schedule: Tensor, request: Request, tiles: Tiles, *, scales: str
) -> Tensor:
    """The output (T, H, d_v) of quantized q, k and v, in the dtype of ``v``; scales: of the mode."""
    check_fp8(tiles)
    width = batch.v_tiles.values.shape[2]
    output = torch.empty(*v.shape[:2], width, dtype=v.dtype, device=v.device)
    if v.numel() > 0 and hopper_forward.why_not_fp8(v, batch, request, scales) is None:
        hopper_forward.forward_fp8(batch, output, schedule, request, scales)
    elif v.numel() > 0:
        query, key, value = batch.q, batch.k, batch.v_tiles
        with device_of(v):
            forward_kernel[request.grid(v, tiles.forward.rows)](
                *(query.values, key.values, value.values, output),
                *_descriptors(key.values, None, tiles.forward.keys, tiles),
                *(query.descale, key.descale, value.descale, batch.weight_scale),
                schedule,
                *request.pointers(),
                *strides(query.values, key.values, value.values, output),
                *_scalars(v, request),
                **_constants(request, query.values.shape[2], width, tiles.forward, tiles.tanh, scales),
            )
    return _narrowed(output, v.shape[2])


def backward(
    grad_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Tensor,
    request: Request,
    tiles: Tiles,
    fp8: ScoreTensors | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of v, q and k side by side, as the layer's projection has them: (T, H * (d_v + 2 * d_qk)).

    Then those of the bias's weights, of no elements where there is no bias. Each gradient of q, k and v is summed in
    one program, in the same order every time; with ``tiles.fused`` that of q, and those of a bias always, are summed
    with atomics, in any order.
    """
    num_rows, num_heads = q.shape[:2]
    dims = (v.shape[2], q.shape[2], q.shape[2])
    bias_grads = [torch.empty(0, dtype=torch.float32, device=q.device) for _ in range(2)]
    if request.bias is not None:
        weights = (request.bias.position_weight, request.bias.time_weight)
        sizes = [(_BIAS_SUMS, weight.shape[0]) for weight in weights]
        bias_grads = [torch.zeros(size, dtype=torch.float32, device=q.device) for size in sizes]
    grads = torch.empty(num_rows, num_heads * sum(block_of(dim) for dim in dims), dtype=q.dtype, device=q.device)
    if grads.numel() > 0:
        dv, dq, dk = grads.split([num_heads * block_of(dim) for dim in dims], dim=1)
        parts = (dv, dq, dk)
        inputs = [as_blocks(x) for x in (q, k, v, grad_output)]
        with device_of(q):
            _launch_backward(inputs, parts, bias_grads, schedule, request, tiles, fp8)
        grads = _narrowed_grads(grads, num_heads, dims)
    else:
        grads = grads.new_empty(num_rows, num_heads * sum(dims))
    if request.bias is not None:
        bias_grads = [grad.sum(dim=0) for grad in bias_grads]
    return grads, bias_grads[0], bias_grads[1]


def _launch_backward(
    inputs: list[Tensor],
    parts: tuple[Tensor, Tensor, Tensor],
    bias_grads: list[Tensor],
    schedule: Tensor,
    request: Request,
    tiles: Tiles,
    fp8: ScoreTensors | None,
) -> None:
    """inputs: q, k, v and the output's gradient; parts: where those of v, q and k go; of blocks' widths all."""
    q, k, v, grad_output = inputs
    dv, dq, dk = parts
    qk_dim = q.shape[2]
    of_scores = _score_tensors(fp8)
    scales = "none" if fp8 is None else fp8.scales
    if hopper_backward.why_not(q, k, v, grad_output, request, scales) is None:
        hopper_backward.backward(q, k, v, grad_output, parts, schedule, request, fp8)
        return
    batch = (*request.pointers(), *strides(q, k, v, grad_output), dq.stride(0), *_scalars(q, request))
    is_fused = tiles.fused and request.bias is None
    dq_sum = torch.zeros(q.shape, dtype=torch.float32, device=q.device) if is_fused else None
    dq_sum_tiles = None if dq_sum is None else _descriptor(dq_sum, tiles.key_grad.rows)
    assert dq_sum is None or dq_sum_tiles is not None, "fresh rows of 32 float32 and more suit TMA"
    key_grad_kernel[request.grid(q, tiles.key_grad.keys)](
        *(q, k, v, grad_output, *of_scores, None, None, dk, dv),
        *_descriptors(q, grad_output, tiles.key_grad.rows, tiles),
        dq_sum_tiles,
        schedule,
        *batch,
        **_constants(request, qk_dim, v.shape[2], tiles.key_grad, tiles.tanh, scales),
    )
    if dq_sum is not None:
        torch.mul(dq_sum.flatten(1), request.alpha / (2 * request.scaling_seqlen), out=dq)
        return
    query_grad_kernel[request.grid(q, tiles.query_grad.rows)](
        *(q, k, v, grad_output, *of_scores, None, dq, *bias_grads),
        *_descriptors(k, v, tiles.query_grad.keys, tiles),
        schedule,
        *batch,
        **_constants(request, qk_dim, v.shape[2], tiles.query_grad, tiles.tanh, scales),
        SUMS=_BIAS_SUMS,
    )


def backward_fp8(
    grad_output: Tensor, schedule: Tensor, request: Request, tiles: Tiles, fp8: ScoreTensors, *, qk_dim: int
) -> Tensor:
    """The first result of :func:`backward`, where FP8 operands are all that products take: ``fp8.products``.

    qk_dim: the width of q before it was quantized.
    """
    if tiles.fused:
        raise ValueError("tiles with fused = True don't go with FP8 where scales are a user's or coarser")
    num_rows, num_heads, v_dim = grad_output.shape
    dims = (v_dim, qk_dim, qk_dim)
    grads = grad_output.new_empty(num_rows, num_heads * sum(block_of(dim) for dim in dims))
    if grads.numel() == 0:
        return grads.new_empty(num_rows, num_heads * sum(dims))
    dv, dq, dk = grads.split([num_heads * block_of(dim) for dim in dims], dim=1)
    with device_of(grads):
        if hopper_backward.why_not_fp8(grad_output, qk_dim, request) is None:
            hopper_backward.backward_fp8((dv, dq, dk), schedule, request, fp8)
        else:
            _launch_backward_fp8((dv, dq, dk), schedule, request, tiles, fp8)
    return _narrowed_grads(grads, num_heads, dims)


def _launch_backward_fp8(
    parts: tuple[Tensor, Tensor, Tensor], schedule: Tensor, request: Request, tiles: Tiles, fp8: ScoreTensors
) -> None:
    """parts: where the gradients of v, q and k go."""
    dv, dq, dk = parts
    q, v, products = fp8.q.values, fp8.v.values, fp8.products
    assert products is not None
    of_scores = _score_tensors(fp8)
    batch = (*request.pointers(), *(0,) * 8, dq.stride(0), *_scalars(q, request))
    constants = (request, q.shape[2], v.shape[2])
    key_grad_kernel[request.grid(q, tiles.key_grad.keys)](
        *(products.q, None, None, products.grad, *of_scores, products.weight_scale, products.score_scale, dk, dv),
        *(None, None, None, schedule, *batch),
        **_constants(*constants, tiles.key_grad, tiles.tanh, fp8.scales),
    )
    query_grad_kernel[request.grid(q, tiles.query_grad.rows)](
        *(None, products.k, None, None, *of_scores, products.score_scale, dq, None, None),
        *(None, None, schedule, *batch),
        **_constants(*constants, tiles.query_grad, tiles.tanh, fp8.scales),
        SUMS=_BIAS_SUMS,
    )


def _score_tensors(fp8: ScoreTensors | None) -> list[Any]:
    """As kernels take them, values first."""
    if fp8 is None:
        return [None] * 8
    tensors = (fp8.q, fp8.k, fp8.v, fp8.grad)
    return [x.values for x in tensors] + [x.descale for x in tensors]


def _scalars(q: Tensor, request: Request) -> tuple[float, ...]:
    """The numbers that kernels take."""
    weights = (0, 0)
    if request.bias is not None:
        weights = (request.bias.position_weight.shape[0], request.bias.time_weight.shape[0])
    return (*request.sizes(q), *weights, *request.factors())


def _constants(
    request: Request, qk_dim: int, v_dim: int, tile: KernelTile, tanh: str, scales: str = "none"
) -> dict[str, Any]:
    """What kernels are compiled for. Widths are blocks'."""
    return {
        "QK_DIM": qk_dim,
        "V_DIM": v_dim,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        **request.mask_constants(),
        "BIAS": request.bias is not None,
        "SCALES": scales,
        "TANH": "exact" if triton_jit.INTERPRETED else tanh,
        "PRECISION": "ieee",  # matters for float32 alone, which would be rounded to TF32
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _narrowed(x: Tensor, dim: int) -> Tensor:
    """The first ``dim`` numbers of each head, without gaps."""
    return x if x.shape[2] == dim else x[:, :, :dim].contiguous()


def _narrowed_grads(grads: Tensor, num_heads: int, dims: Sequence[int]) -> Tensor:
    """(T, H * sum of dims) of gradients side by side in blocks' widths."""
    if all(dim == block_of(dim) for dim in dims):
        return grads
    parts = grads.split([num_heads * block_of(dim) for dim in dims], dim=1)
    kept = [part.unflatten(1, (num_heads, -1))[..., :dim] for part, dim in zip(parts, dims, strict=True)]
    return torch.cat([part.flatten(1) for part in kept], dim=1)


def _descriptors(first: Tensor, second: Tensor | None, rows: int, tiles: Tiles) -> list[Any]:
    """TMA descriptors for tiles of that many rows of one head; None, for plain loads, where TMA can't take them."""
    return [_descriptor(x, rows) if tiles.tma and x is not None else None for x in (first, second)]


def _descriptor(x: Tensor, rows: int) -> Any:
    if not has_whole_rows(x):
        return None
    found = triton_descriptor(x, rows)
    return found.for_triton() if triton_jit.INTERPRETED else found
