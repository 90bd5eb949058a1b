"""The prediction head: a small MLP from a token's state to logits."""

from __future__ import annotations

import itertools

from torch import Tensor, nn

from genrec.configs.schema import MixedPrecisionArgs
from genrec.hstu.linear import make_linear

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU}


class PredictionHead(nn.Module):
    """Linear layers of ``layer_sizes``, an activation (of ACTIVATIONS) between them, none after the last.

    Hidden layers run in the dtype of the states; the last always in float32, because logits rounded to bfloat16's 8
    bits tie and cost AUC, and that layer is a few columns wide. ``precision`` is of the hidden layers.
    """

    def __init__(
        self,
        input_size: int,
        *,
        layer_sizes: tuple[int, ...],
        activation: str,
        bias: bool,
        precision: MixedPrecisionArgs | None = None,
    ) -> None:
        super().__init__()
        sizes = (input_size, *layer_sizes)
        hidden: list[nn.Module] = []
        for size_in, size_out in itertools.pairwise(sizes[:-1]):
            hidden += [make_linear(size_in, size_out, bias=bias, precision=precision), ACTIVATIONS[activation]()]
        self.hidden = nn.Sequential(*hidden)
        self.output = make_linear(sizes[-2], sizes[-1], bias=bias)

    def forward(self, states: Tensor) -> Tensor:
        """states: (N, D) -> logits (N, layer_sizes[-1]) float32."""
        logits: Tensor = self.output(self.hidden(states).float())
        return logits
