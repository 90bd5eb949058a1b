"""LayerNorms over a token's width or over each of its heads, in the dtype of their input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Norm(nn.Module):
    """LayerNorm over the last dimension; without parameters where not ``affine``."""

    def __init__(self, width: int, *, epsilon: float, affine: bool) -> None:
        super().__init__()
        self.width, self.epsilon = width, epsilon
        self.weight = nn.Parameter(torch.empty(width)) if affine else None
        self.bias = nn.Parameter(torch.empty(width)) if affine else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ones and zeros."""
        if self.weight is not None and self.bias is not None:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: (T, width)."""
        weight = None if self.weight is None else self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, (self.width,), weight, bias, self.epsilon)


class HeadNorm(nn.Module):
    """A GroupNorm whose groups are the heads: each head of a token is normalised alone; one weight and bias a head."""

    def __init__(self, num_heads: int, head_width: int, *, epsilon: float) -> None:
        super().__init__()
        self.num_heads, self.head_width, self.epsilon = num_heads, head_width, epsilon
        self.weight = nn.Parameter(torch.empty(num_heads))
        self.bias = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ones and zeros."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: (T, num_heads * head_width)."""
        heads = F.layer_norm(x.view(-1, self.num_heads, self.head_width), (self.head_width,), eps=self.epsilon)
        return torch.addcmul(self.bias.to(x.dtype)[:, None], heads, self.weight.to(x.dtype)[:, None]).flatten(1)
