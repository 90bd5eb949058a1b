"""An FP8 linear in plain PyTorch: quantize as the recipe says, multiply in float64 what the FP8 values stand for.

It runs on any machine, and says what Transformer Engine's linear should give, up to the order of accumulation. Operands
of the three products, each quantized along the dimension that the product sums over:

    product                     left operand    right operand    sums over
    y  = Q(x) Q(W)^T + b        x by rows       W by rows        in_features
    dx = Q(dy) Q(W)             dy by rows      W by columns     out_features
    dW = Q(dy)^T Q(x)           dy by columns   x by columns     tokens

"tensorwise" and "delayed" have one scale a tensor, so that both orientations hold the same values; so do the 128 x 128
blocks of "blockwise" weights. Elsewhere ("blockwise" x and dy in 1 x 128, all of "mxfp8" in 1 x 32) each orientation is
quantized from the tensor itself, as by Transformer Engine's Float8BlockQuantizer and MXFP8Quantizer.

How rows of zeros change nothing. Quantization is easy: zeros don't raise an amax, and a block they share or fill keeps
its scale or holds zeros. The products need more care. Of e4m3 values with one scale a sum of 2^17 products is exact in
float64, whatever its order; e5m2 gradients and scales by block span more bits than float64 has. So tokens are taken in
chunks of a fixed number, the last filled up with zeros: each chunk is one product of the same shape, however many
tokens there are, sums over tokens add the chunks in order, and a chunk of zeros adds zero.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from genrec.hstu.parallel import ALONE, TensorParallel, largest
from genrec.hstu.precision.delayed import DelayedState, update_states
from genrec.hstu.precision.recipes import LinearRecipe
from genrec.hstu.precision.region import Region
from genrec.hstu.precision.scaling import (
    BLOCK,
    Quantized,
    quantize_blockwise,
    quantize_mxfp8,
    quantize_tensorwise,
    tensor_amax,
)

CHUNK = 128  # tokens


def emulated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    recipe: LinearRecipe,
    state: DelayedState | None,
    region: Region,
    parts: Collection[str] = (),
    tp: TensorParallel = ALONE,
) -> Tensor:
    """y = Q(x) Q(W)^T + b, with FP8 products in backward too.

    x: (T, in_features), T may be 0; weight: (out_features, in_features) float32, quantized straight from float32; bias:
    (out_features,), rounded to the dtype of ``x`` before it is added, as Transformer Engine does. ``state`` is that of
    this linear, for recipes that have one. ``parts``: the roles ("input", "weight", "grad_output") whose tensors are
    parts of what the ranks of ``tp`` have together: one scale a tensor is then that of the whole.

    Returns (T, out_features), rounded to float32 and then to the dtype of ``x``. So are dx and dW, being products like
    this one, before dW takes the dtype of the weight; db is the float64 sum of the unquantized dy. Rows of zeros at the
    end of x and dy change no bit of the other rows, dW and db.

    With delayed scaling, amaxes are recorded, and ``state`` joins the region, only where a gradient is wanted:
    evaluation never feeds training.
    """
    assert (state is not None) == recipe.has_state
    parameters = [weight] if bias is None else [weight, bias]
    training = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *parameters))
    closes_backward = state is not None and training and region.record(state)
    quantizer = _Quantizer(recipe, state, record=training, parts=parts, tp=tp)
    output: Tensor = _EmulatedLinear.apply(x, weight, bias, quantizer, region if closes_backward else None)
    return output


class _Quantizer:
    """Quantizes the tensors of one call of a linear."""

    def __init__(
        self,
        recipe: LinearRecipe,
        state: DelayedState | None,
        *,
        record: bool,
        parts: Collection[str],
        tp: TensorParallel,
    ) -> None:
        self.recipe, self.state, self.record, self.parts, self.tp = recipe, state, record, parts, tp

    def __call__(self, x: Tensor, role: str, *, columns: bool) -> tuple[Quantized, Quantized | None]:
        """``x`` (R, C) by rows, and, if wanted, by columns: its transpose (C, R)."""
        rows = self._rows(x, role)
        if not columns:
            return rows, None
        both = rows.block is None or rows.block[0] == rows.block[1]
        return rows, rows.t() if both else self._rows(x.t(), role)

    def _rows(self, x: Tensor, role: str) -> Quantized:
        if self.state is not None:
            return self.state.quantize(x, role, record=self.record)  # amaxes are reduced over all ranks later
        fmt = self.recipe.backward_format if role == "grad_output" else self.recipe.forward_format
        if self.recipe.name == "tensorwise":
            amax = tensor_amax(x)
            return quantize_tensorwise(x, fmt, amax=largest(amax, self.tp) if role in self.parts else amax)
        if self.recipe.name == "blockwise":
            return quantize_blockwise(x, fmt, (BLOCK, BLOCK) if role == "weight" else (1, BLOCK))
        assert self.recipe.name == "mxfp8"
        return quantize_mxfp8(x, fmt)


class _EmulatedLinear(torch.autograd.Function):
    """Keeps x and W for backward as they are needed there: by columns, in FP8."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, quantizer: _Quantizer, region: Region | None
    ) -> Tensor:
        """region: the pass whose backward ends with that of this linear, if any."""
        x_rows, x_columns = quantizer(x, "input", columns=ctx.needs_input_grad[1])
        weight_rows, weight_columns = quantizer(weight, "weight", columns=ctx.needs_input_grad[0])
        ctx.quantizer, ctx.region = quantizer, region
        ctx.parameter_dtypes = (weight.dtype, None if bias is None else bias.dtype)
        _save(ctx, x_columns, weight_columns)
        y = _product_by_token(x_rows, weight_rows)
        if bias is not None:
            y += bias.to(x.dtype)
        return y.float().to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """gradients: that of the output, (T, out_features)."""
        (dy,) = gradients
        x_columns, weight_columns = _saved(ctx)
        dx = dw = db = None
        if x_columns is not None or weight_columns is not None:
            dy_rows, dy_columns = ctx.quantizer(dy, "grad_output", columns=x_columns is not None)
            if weight_columns is not None:
                dx = _product_by_token(dy_rows, weight_columns).float().to(dy.dtype)
            if x_columns is not None:
                assert dy_columns is not None
                dw = _product_over_tokens(dy_columns, x_columns).float().to(dy.dtype).to(ctx.parameter_dtypes[0])
        if ctx.needs_input_grad[2]:
            db = _sum_over_tokens(dy).to(ctx.parameter_dtypes[1])
        if ctx.region is not None:
            update_states(ctx.region.states, ("grad_output",))
        return dx, dw, db, None, None


def _save(ctx: Any, *operands: Quantized | None) -> None:
    ctx.blocks = [None if operand is None else operand.block for operand in operands]
    tensors = [(None, None) if operand is None else (operand.values, operand.scale_inv) for operand in operands]
    ctx.save_for_backward(*(tensor for pair in tensors for tensor in pair))


def _saved(ctx: Any) -> list[Quantized | None]:
    tensors = ctx.saved_tensors
    return [
        None if values is None else Quantized(values, scale_inv, block)
        for values, scale_inv, block in zip(tensors[::2], tensors[1::2], ctx.blocks, strict=True)
    ]


def _product_by_token(a: Quantized, b: Quantized) -> Tensor:
    """a (T, K), b (N, K) -> (T, N) float64: each row of a with all rows of b."""
    left, right, scale = _operands(a, b)
    chunks = _chunks(left)
    product = left.new_empty(CHUNK * len(chunks), right.shape[0])
    for chunk, rows in zip(chunks, product.split(CHUNK), strict=False):
        torch.mm(chunk, right.t(), out=rows)
    return product[: left.shape[0]].mul_(scale)


def _product_over_tokens(a: Quantized, b: Quantized) -> Tensor:
    """a (M, T), b (N, T) -> (M, N) float64."""
    left, right, scale = _operands(a, b)
    total = left.new_zeros(left.shape[0], right.shape[0])
    for left_chunk, right_chunk in zip(_chunks(left.t()), _chunks(right.t()), strict=True):
        total += left_chunk.t() @ right_chunk
    return total.mul_(scale)


def _sum_over_tokens(x: Tensor) -> Tensor:
    """(T, N) -> (N,) float64."""
    total = x.new_zeros(x.shape[1], dtype=torch.float64)
    for chunk in _chunks(x.double()):
        total += chunk.sum(0)
    return total


def _operands(a: Quantized, b: Quantized) -> tuple[Tensor, Tensor, Tensor]:
    """Both in float64, and what is left to multiply their product with.

    Scales by block are powers of two, which cost no bit; a scale by tensor is any number, and waits until the sum is
    taken.
    """
    if a.block is None and b.block is None:
        return a.values.double(), b.values.double(), a.scale_inv.double() * b.scale_inv.double()
    return a.dequantize(), b.dequantize(), a.scale_inv.new_ones((), dtype=torch.float64)


def _chunks(x: Tensor) -> list[Tensor]:
    """x (T, K) as contiguous (CHUNK, K), the last filled up with zeros; none for T = 0."""
    num_chunks = -(-x.shape[0] // CHUNK)
    filled = x.new_zeros(num_chunks * CHUNK, x.shape[1])
    filled[: x.shape[0]] = x
    return list(filled.view(num_chunks, CHUNK, x.shape[1]).unbind())
