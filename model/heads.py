"""The prediction head: a small MLP from a token's state to logits."""

from __future__ import annotations

import itertools

from torch import Tensor, nn

from genrec.configs.schema import MixedPrecisionArgs
from genrec.hstu.dropout import dropout
from genrec.hstu.linear import Linear, make_linear
from genrec.hstu.norm import Norm
from genrec.hstu.parallel import TensorParallel

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}
NORM_EPSILON = 1e-5
HEAD_NOT_ASKED_FOR = "enable_fp8_for_prediction_head = False"
LAST_OF_HEAD = "a head's last layer is always float32"


class PredictionHead(nn.Module):
    """Linear layers of ``layer_sizes``, an activation (of ACTIVATIONS) between them, none after the last.

    Hidden layers run in the dtype of the states, in FP8 where ``precision`` has it for heads; the last always in
    float32, because logits rounded to bfloat16's 8 bits tie and cost AUC, and that layer is a few columns wide.

    layernorm, dropout_rate: a LayerNorm, then dropout, of the state before the first layer. zero_init: the last layer's
    weight starts at zero; biases always do.
    """

    def __init__(
        self,
        input_size: int,
        *,
        layer_sizes: tuple[int, ...],
        activation: str,
        bias: bool,
        layernorm: bool = False,
        dropout_rate: float = 0.0,
        zero_init: bool = False,
        precision: MixedPrecisionArgs | None = None,
    ) -> None:
        super().__init__()
        self.norm = Norm(input_size, epsilon=NORM_EPSILON, affine=True) if layernorm else None
        self.dropout_rate = dropout_rate
        sizes = (input_size, *layer_sizes)
        hidden: list[nn.Module] = []
        why_not = "" if precision is not None and precision.enable_fp8_for_prediction_head else HEAD_NOT_ASKED_FOR
        for size_in, size_out in itertools.pairwise(sizes[:-1]):
            linear = make_linear(size_in, size_out, bias=bias, precision=precision, why_not=why_not)
            hidden += [linear, ACTIVATIONS[activation]()]
        self.hidden = nn.Sequential(*hidden)
        self.output = make_linear(sizes[-2], sizes[-1], bias=bias, precision=precision, why_not=LAST_OF_HEAD)
        if zero_init:
            nn.init.zeros_(self.output.weight)

    def share_out(self, tp: TensorParallel) -> None:
        """Keep this rank's part of each pair of layers (first and second, third and fourth, ...).

        The width between them is shared; a pair whose width the ranks don't divide, and a last layer without a partner,
        stay whole on every rank.
        """
        linears = [module for module in (*self.hidden, self.output) if isinstance(module, Linear)]
        for first, second in zip(linears[::2], linears[1::2], strict=False):
            if first.out_features % tp.size == 0:
                first.share_out(tp, "rows")
                second.share_out(tp, "columns")

    def forward(self, states: Tensor) -> Tensor:
        """states: (N, D) -> logits (N, layer_sizes[-1]) float32."""
        states = states if self.norm is None else self.norm(states)
        states = dropout(states, p=self.dropout_rate, training=self.training)
        logits: Tensor = self.output(self.hidden(states).float())
        return logits
