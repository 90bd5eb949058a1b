"""LayerNorms over a token's width or over each of its heads, in the dtype of their input."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from genrec.hstu.parallel import ALONE, Split, TensorParallel, share_parameter, summed


class Norm(nn.Module):
    """LayerNorm over the last dimension; without parameters where not ``affine``.

    tp: the ranks that share the width, where they do; mean and variance are then those of all of it.
    splits: how its parameters are shared.
    """

    def __init__(self, width: int, *, epsilon: float, affine: bool) -> None:
        super().__init__()
        self.width, self.epsilon = width, epsilon
        self.tp = ALONE
        self.splits: dict[str, Split] = {}
        self.weight = nn.Parameter(torch.empty(width)) if affine else None
        self.bias = nn.Parameter(torch.empty(width)) if affine else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ones and zeros."""
        if self.weight is not None and self.bias is not None:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def share_out(self, tp: TensorParallel) -> None:
        """Keep this rank's part of the width."""
        self.tp = tp
        self.width //= tp.size
        if self.weight is not None:
            self.splits = {"weight": Split(0), "bias": Split(0)}
        for name, split in self.splits.items():
            share_parameter(self, name, split, tp)

    def forward(self, x: Tensor) -> Tensor:
        """x: (T, width)."""
        weight = None if self.weight is None else self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.tp.group is None:
            return F.layer_norm(x, (self.width,), weight, bias, self.epsilon)
        normed: Tensor = _SharedLayerNorm.apply(x, weight, bias, self.epsilon, self.tp)
        return normed


class HeadNorm(nn.Module):
    """A GroupNorm whose groups are the heads: each head of a token is normalised alone; one weight and bias a head."""

    def __init__(self, num_heads: int, head_width: int, *, epsilon: float) -> None:
        super().__init__()
        self.num_heads, self.head_width, self.epsilon = num_heads, head_width, epsilon
        self.splits: dict[str, Split] = {}
        self.weight = nn.Parameter(torch.empty(num_heads))
        self.bias = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ones and zeros."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def share_out(self, tp: TensorParallel) -> None:
        """Keep this rank's heads."""
        self.num_heads //= tp.size
        self.splits = {"weight": Split(0), "bias": Split(0)}
        for name, split in self.splits.items():
            share_parameter(self, name, split, tp)

    def forward(self, x: Tensor) -> Tensor:
        """x: (T, num_heads * head_width)."""
        heads = F.layer_norm(x.view(-1, self.num_heads, self.head_width), (self.head_width,), eps=self.epsilon)
        return torch.addcmul(self.bias.to(x.dtype)[:, None], heads, self.weight.to(x.dtype)[:, None]).flatten(1)


class _SharedLayerNorm(torch.autograd.Function):
    """``F.layer_norm`` of x (T, width of all) of which each peer has (T, W), all the same W.

    Forward gathers a mean and a sum of squares about it for each row and peer, and joins them (Chan et al. 1979), which
    loses no digits where a mean is large; backward sums two numbers for each row.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, tp: TensorParallel
    ) -> Tensor:
        """weight, bias: (W,) or None. Computed in float32 at least, rounded to the dtype of ``x``."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, rstd = _joint_moments(wide, epsilon, tp)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.tp = tp
        normed = (wide - mean) * rstd
        if weight is not None and bias is not None:
            normed = torch.addcmul(bias.to(wide.dtype), normed, weight.to(wide.dtype))
        return normed.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """gradients: that of the output, (T, W)."""
        x, weight, mean, rstd = ctx.saved_tensors
        normed = (x.to(mean.dtype) - mean) * rstd
        gradient = gradients[0].to(mean.dtype)
        dweight = dbias = None
        if weight is not None:
            dweight, dbias = (gradient * normed).sum(0).to(weight.dtype), gradient.sum(0).to(weight.dtype)
            gradient = gradient * weight.to(mean.dtype)
        sums = summed(torch.stack([gradient.sum(1), (gradient * normed).sum(1)]), ctx.tp)
        first, second = (sums / (x.shape[1] * ctx.tp.size)).unsqueeze(2)
        dx = rstd * (gradient - first - normed * second)
        return dx.to(x.dtype), dweight, dbias, None, None


def _joint_moments(x: Tensor, epsilon: float, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """Mean and 1 / deviation (T, 1) of each row, over all peers."""
    own_mean = x.mean(1)
    own = torch.stack([own_mean, (x - own_mean.unsqueeze(1)).square().sum(1)])
    if x.shape[0] == 0:
        return own[0].unsqueeze(1), own[1].unsqueeze(1)
    peers = own.new_empty(tp.size * 2, x.shape[0])
    dist.all_gather_into_tensor(peers, own, group=tp.group)
    means, squares = peers.view(tp.size, 2, -1).unbind(1)  # (peers, T)
    mean = means.mean(0)
    total = squares.sum(0) + x.shape[1] * (means - mean).square().sum(0)
    rstd = (total / (x.shape[1] * tp.size) + epsilon).rsqrt()
    return mean.unsqueeze(1), rstd.unsqueeze(1)
