"""A stack of HSTU layers."""

from __future__ import annotations

from torch import nn

from genrec.configs.schema import MixedPrecisionArgs, NetworkArgs
from genrec.hstu.jagged import JaggedSequence
from genrec.hstu.layer import HSTULayer

FIRST_LAYER = "first layer (skip_first_last_layer)"
LAST_LAYER = "last layer (skip_first_last_layer)"


class HSTUBlock(nn.Module):
    """``num_layers`` layers, one after the other."""

    def __init__(
        self, network: NetworkArgs, *, max_seqlen_tokens: int, precision: MixedPrecisionArgs | None = None
    ) -> None:
        super().__init__()
        skips = precision is not None and precision.skip_first_last_layer
        ends = {0: FIRST_LAYER, network.num_layers - 1: LAST_LAYER} if skips else {}
        layers = [
            HSTULayer(network, max_seqlen_tokens=max_seqlen_tokens, precision=precision, why_not=ends.get(index, ""))
            for index in range(network.num_layers)
        ]
        self.layers = nn.ModuleList(layers)

    def forward(self, sequence: JaggedSequence) -> JaggedSequence:
        """The same tokens, ``num_layers`` layers on."""
        for layer in self.layers:
            sequence = layer(sequence)
        return sequence
