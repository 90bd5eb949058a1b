"""Every linear of genrec is made here, so that what runs in which precision is decided in one place."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from genrec.configs.schema import MixedPrecisionArgs, UnavailableError


class Linear(nn.Linear):
    """y = x W^T + b in the dtype of ``x``. The weights stay in float32, which is what the optimizer updates."""

    def reset_parameters(self) -> None:
        """Xavier-uniform weights and zero biases, drawn from torch's global generator."""
        nn.init.xavier_uniform_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features) -> (..., out_features)."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


def make_linear(
    in_features: int, out_features: int, *, bias: bool, precision: MixedPrecisionArgs | None = None
) -> Linear:
    """A linear for ``precision``. Raises UnavailableError for a recipe that isn't there."""
    check_linear_available(precision)
    return Linear(in_features, out_features, bias=bias)


def check_linear_available(precision: MixedPrecisionArgs | None) -> None:
    """Raise UnavailableError unless this version serves the linear recipe."""
    if precision is None or precision.mixed_precision_dtype is None or precision.linear_recipe is None:
        return
    raise UnavailableError(
        f"linear_recipe {precision.linear_recipe!r} (FP8 linears) is not available in this version, which has: None"
    )
