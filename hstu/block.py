"""A stack of HSTU layers."""

from __future__ import annotations

from torch import nn

from genrec.configs.schema import MixedPrecisionArgs, NetworkArgs
from genrec.hstu.jagged import JaggedSequence
from genrec.hstu.layer import HSTULayer


class HSTUBlock(nn.Module):
    """``num_layers`` layers, one after the other."""

    def __init__(
        self, network: NetworkArgs, *, max_seqlen_tokens: int, precision: MixedPrecisionArgs | None = None
    ) -> None:
        super().__init__()
        layers = [
            HSTULayer(network, max_seqlen_tokens=max_seqlen_tokens, precision=precision)
            for _ in range(network.num_layers)
        ]
        self.layers = nn.ModuleList(layers)

    def forward(self, sequence: JaggedSequence) -> JaggedSequence:
        """The same tokens, ``num_layers`` layers on."""
        for layer in self.layers:
            sequence = layer(sequence)
        return sequence
