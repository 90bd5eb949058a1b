"""The HSTU encoder: preprocessor -> block -> postprocessor."""

from __future__ import annotations

from torch import Tensor, nn

from genrec.configs.schema import MixedPrecisionArgs, NetworkArgs
from genrec.hstu.block import HSTUBlock
from genrec.hstu.postprocessor import HSTUPostprocessor
from genrec.hstu.precision.region import fp8_region
from genrec.hstu.preprocessor import HSTUInputs, HSTUPreprocessor


class HSTUEncoder(nn.Module):
    """Embeddings of users' events -> the state of each labelled item token.

    item_dim, action_dim, context_dim: widths of the embeddings, None for what there is not. max_seqlen_tokens: contexts
    + events * (2 with actions, else 1) of the longest user that the configuration allows; with ``scaling_seqlen = -1``
    it is the N that attention divides by. Raises UnavailableError for a backend or a precision that isn't there.
    """

    def __init__(
        self,
        network: NetworkArgs,
        *,
        item_dim: int,
        action_dim: int | None,
        context_dim: int | None,
        max_seqlen_tokens: int,
        precision: MixedPrecisionArgs | None = None,
        l2_norm: bool = False,
    ) -> None:
        super().__init__()
        self.network = network
        self.preprocessor = HSTUPreprocessor(
            network,
            item_dim=item_dim,
            action_dim=action_dim,
            context_dim=context_dim,
            max_seqlen_tokens=max_seqlen_tokens,
            precision=precision,
        )
        self.block = HSTUBlock(network, max_seqlen_tokens=max_seqlen_tokens, precision=precision)
        self.postprocessor = HSTUPostprocessor(l2_norm=l2_norm)

    def forward(self, inputs: HSTUInputs, *, num_labelled: Tensor, num_states: int | None = None) -> Tensor:
        """(N, hidden_size), N = num_labelled.sum(): each user's last ``num_labelled`` (B,) events, in order.

        num_states: N where the caller knows it on the host; None reads it from the tensor, which makes a GPU wait.
        """
        with fp8_region():
            sequence = self.block(self.preprocessor(inputs))
        states: Tensor = self.postprocessor(
            sequence,
            num_labelled=num_labelled,
            has_actions=inputs.action is not None,
            num_states=num_states,
        )
        return states
