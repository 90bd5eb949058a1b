"""Quantization to FP8: values times a scale, by tensor or by block, each scale as Transformer Engine computes it.

A scale brings the largest magnitude (amax) of what it covers to the format's largest value; the quantized tensor keeps
the scale's inverse, which takes the values back. Definitions follow Transformer Engine 2.20, each named where it is
used; they are facts about its kernels, which can't be run without a GPU, so tests hold them against numbers worked out
by hand.

What is common to all: scales are float32; the amax of a tensor ignores NaN, as CUDA's fmaxf does (so a NaN stays one
NaN and doesn't take its block along); casts saturate. Infinities come out as ±max: whether inputs are finite is for
others to watch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from genrec.hstu.precision.formats import FP8Format, saturating_cast

BLOCK = 128  # "blockwise": 1 x 128 of inputs and gradients, 128 x 128 of weights
MXFP8_BLOCK = 32


@dataclass(frozen=True)
class Quantized:
    """A matrix in FP8.

    values: (R, C) float8. scale_inv: float32, (1,) where ``block`` is None, else one for each block of (rows, cols):
    (ceil(R / rows), ceil(C / cols)). Blocks at the lower and right edge may be smaller: (3, 200) in blocks of (1, 128)
    has scale_inv (3, 2), for columns 0 to 127 and 128 to 199 of each row.
    """

    values: Tensor
    scale_inv: Tensor
    block: tuple[int, int] | None

    def dequantize(self) -> Tensor:
        """(R, C) float64, exact: a value has at most 4 bits, a scale 24."""
        values = self.values.double()
        if self.block is None:
            return values * self.scale_inv.double()
        return values * _spread(self.scale_inv.double(), self.block, values.shape)

    def t(self) -> Quantized:
        """The transposed matrix, sharing memory."""
        if self.block is None:
            return Quantized(self.values.t(), self.scale_inv, None)
        return Quantized(self.values.t(), self.scale_inv.t(), (self.block[1], self.block[0]))


def tensor_amax(x: Tensor) -> Tensor:
    """(1,) float32: the largest magnitude in ``x``, 0 if it has no elements (nvte_compute_amax, current_scaling.cu)."""
    if x.numel() == 0:
        return torch.zeros(1, device=x.device)
    return _magnitudes(x).amax().reshape(1)


def quantize_tensorwise(x: Tensor, fmt: FP8Format, *, amax: Tensor | None = None) -> Quantized:
    """One scale, max / amax of the tensor itself: "current scaling". amax: (1,), where ``x`` is a part of a tensor.

    Float8CurrentScaling: nvte_compute_scale_from_amax (recipe/current_scaling.cu, recipe_common.cuh).
    """
    return quantize_with_scale(x, _scale_from_amax(tensor_amax(x) if amax is None else amax, fmt), fmt)


def quantize_with_scale(x: Tensor, scale: Tensor, fmt: FP8Format) -> Quantized:
    """One scale, given: (1,) float32. For delayed scaling, and the last step of current scaling (Float8Quantizer)."""
    return Quantized(saturating_cast(x.float() * scale, fmt), scale.reciprocal(), None)


def quantize_blockwise(x: Tensor, fmt: FP8Format, block: tuple[int, int] = (1, BLOCK)) -> Quantized:
    """A scale a block: max / amax rounded down to a power of two, so that nothing saturates.

    Float8BlockScaling with its default of power-of-two scales: compute_scale_from_types (recipe/recipe_common.cuh), as
    called by quantize_transpose_vector_blockwise.cu and quantize_transpose_square_blockwise.cu (transpose/). Where
    max / amax overflows float32 the scale is 2^127: there it is the largest value of the input's dtype, rounded down,
    which is the same in float32 and bfloat16; float16 has no amax so small.
    """
    scale = _power_of_two_below(_scale_from_amax(_block_amax(x, block), fmt))
    values = saturating_cast(x.float() * _spread(scale, block, x.shape), fmt)
    return Quantized(values, scale.reciprocal(), block)


def quantize_mxfp8(x: Tensor, fmt: FP8Format) -> Quantized:
    """A scale for 32 values of a row, whose inverse is amax / max rounded up to a power of two, of 2^-127 to 2^127.

    MXFP8BlockScaling (cast/mxfp8/quantize_mxfp8.cuh): the inverse is stored as E8M0, a biased exponent without a
    mantissa, by float_to_e8m0 (util/ptx_arch_spec.cuh) of amax times the float32 1 / max. An infinite amax gives 2^127,
    zero gives 2^-127. E8M0: Open Compute Project, "Microscaling Formats (MX) Specification" 1.0.
    """
    block = (1, MXFP8_BLOCK)
    exponent = _e8m0_above(_block_amax(x, block) * (1.0 / fmt.max)) - 127
    scale, scale_inv = _power_of_two(-exponent), _power_of_two(exponent)
    return Quantized(saturating_cast(x.float() * _spread(scale, block, x.shape), fmt), scale_inv, block)


def _magnitudes(x: Tensor) -> Tensor:
    """|x| in float32 with 0 for NaN."""
    return torch.nan_to_num(x.detach().abs().float(), nan=0.0, posinf=math.inf)


def _block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """(ceil(R / rows), ceil(C / cols)): amax by block; what is missing at the edges counts as zero."""
    rows, cols = block
    padded = F.pad(_magnitudes(x), (0, -x.shape[1] % cols, 0, -x.shape[0] % rows))
    return padded.view(padded.shape[0] // rows, rows, padded.shape[1] // cols, cols).amax((1, 3))


def _spread(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """(R, C): for each element the scale of its block."""
    by_row = scales.repeat_interleave(block[0], 0)[: shape[0]] if block[0] > 1 else scales
    return by_row.repeat_interleave(block[1], 1)[:, : shape[1]] if block[1] > 1 else by_row


def _scale_from_amax(amax: Tensor, fmt: FP8Format) -> Tensor:
    """max / amax in float32; float32's largest value where that overflows; 1 where amax is zero or not finite.

    compute_scale_from_amax (recipe/recipe_common.cuh).
    """
    # Both operands are tensors: torch turns a number over a tensor into a product with the reciprocal, which rounds
    # twice.
    scale = torch.full_like(amax, fmt.max) / amax
    scale = torch.where(scale.isinf(), torch.finfo(torch.float32).max, scale)
    return torch.where(amax.isfinite() & (amax > 0), scale, 1.0)


def _power_of_two_below(scale: Tensor) -> Tensor:
    """The float32 ``scale`` without its mantissa: rounded down to a power of two."""
    return (scale.view(torch.int32) & -0x800000).view(torch.float32)


def _e8m0_above(x: Tensor) -> Tensor:
    """int32: the biased exponent (0 is 2^-127, 254 is 2^127) of the least power of two from ``x`` up; x >= 0."""
    bits = x.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # Subnormals have exponent 0 and stand for mantissa * 2^-149: up to 0x400000 they lie at or below 2^-127.
    above = torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    return (exponent + above).clamp(max=254)


def _power_of_two(exponent: Tensor) -> Tensor:
    """float32 2^exponent, exponent int32 of -127 to 127; the least is a subnormal."""
    bits = torch.where(exponent == -127, 0x400000, (exponent + 127) << 23)
    return bits.view(torch.float32)
