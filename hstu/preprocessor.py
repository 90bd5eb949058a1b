"""From embeddings to tokens: interleave, project, concatenate, encode, drop out, pad.

A user with contexts x, y and events 1, 2 (item i, action a) becomes ``x y i1 a1 i2 a2``; without actions ``x y i1 i2``.
Candidates are the last events of a user and are laid out like the others, as targets: each sees contexts, history and,
of the candidates, its own group of ``target_group_size`` tokens alone. So that a candidate's item token sees no action
of a candidate, neither its own nor another's, the configuration allows two groupings with actions: groups of 1, and
groups of 2 (an item and its action) with ``is_causal``. The mask itself takes any.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from genrec.configs.schema import MixedPrecisionArgs, NetworkArgs
from genrec.hstu.dropout import dropout
from genrec.hstu.jagged import JaggedSequence, owners
from genrec.hstu.layer import relative_bias_kind
from genrec.hstu.linear import make_linear
from genrec.hstu.position import NUM_TIME_ROWS, PositionEncoding, event_time_buckets
from genrec.hstu.precision.recipes import num_pad_rows, row_multiple

BEFORE_FIRST_LAYER = "before the first layer (skip_first_last_layer)"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class HSTUInputs:
    """Embeddings of B users' E events and C contexts.

    item: (E, D_item); action: (E, D_action) or None; event_offsets: (B + 1,) int64; timestamps: (E,) int64 seconds;
    num_candidates: (B,) int64 events at each user's end; context: (C, D_context) and context_offsets: (B + 1,) int64,
    or None. max_num_events, max_num_contexts: the most that one user has, or an upper bound, on the host.
    """

    item: Tensor
    action: Tensor | None
    event_offsets: Tensor
    timestamps: Tensor
    num_candidates: Tensor
    context: Tensor | None
    context_offsets: Tensor | None
    max_num_events: int
    max_num_contexts: int

    @property
    def tokens_per_event(self) -> int:
        """2 with actions, else 1."""
        return 1 if self.action is None else 2


class HSTUPreprocessor(nn.Module):
    """Embeddings -> JaggedSequence of width ``hidden_size`` in ``dtype_str``."""

    def __init__(
        self,
        network: NetworkArgs,
        *,
        item_dim: int,
        action_dim: int | None,
        context_dim: int | None,
        max_seqlen_tokens: int,
        precision: MixedPrecisionArgs | None = None,
    ) -> None:
        super().__init__()
        self.max_seqlen_tokens = max_seqlen_tokens
        self.fuse_actions = network.action_fusion == "add"
        self.dropout = network.hidden_dropout if network.embedding_dropout is None else network.embedding_dropout
        self.dtype = DTYPES[network.dtype_str]
        self.row_multiple = row_multiple(precision)
        self.pads_in_eval = precision is not None and precision.fp8_during_eval
        self.keeps_timestamps = relative_bias_kind(network) != "none"
        self.time_reference = network.time_encoding_reference if network.use_time_encoding else None
        why_not = BEFORE_FIRST_LAYER if precision is not None and precision.skip_first_last_layer else ""
        self.item_mlp = _projection(item_dim, network.hidden_size, precision, why_not)
        # Items and actions of one width share a projection, as in recsys-examples.
        own_action = action_dim is not None and action_dim != item_dim
        self.action_mlp = _projection(action_dim, network.hidden_size, precision, why_not) if own_action else None
        self.shares_projection = not own_action
        self.context_mlp = _projection(context_dim, network.hidden_size, precision, why_not)
        self.encoding = PositionEncoding(network)

    def forward(self, inputs: HSTUInputs) -> JaggedSequence:
        """Raises ValueError where a user is longer than ``max_seqlen_tokens``, which the attention divides by."""
        layout = _Layout.of(inputs)
        max_seqlen = inputs.max_num_contexts + inputs.max_num_events * inputs.tokens_per_event
        if max_seqlen > self.max_seqlen_tokens:
            raise ValueError(
                f"a user has up to {max_seqlen} tokens, but the encoder was built for max_seqlen_tokens = "
                f"{self.max_seqlen_tokens}"
            )
        sequence = JaggedSequence(
            values=self._tokens(inputs, layout),
            offsets=layout.offsets,
            max_seqlen=max_seqlen,
            num_contexts=layout.num_contexts,
            num_targets=inputs.num_candidates * inputs.tokens_per_event,
            timestamps=layout.spread(inputs.timestamps, contexts=0) if self.keeps_timestamps else None,
        )
        values = self.encoding(sequence, time_buckets=self._time_buckets(inputs, layout)).to(self.dtype)
        values = dropout(values, p=self.dropout, training=self.training)
        sequence = replace(sequence, num_padding=self.num_padding(values.shape[0]))
        return replace(sequence, values=sequence.padded(values))

    def num_padding(self, num_tokens: int) -> int:
        """Padding rows for so many tokens: what FP8 needs where it is on, else none."""
        return num_pad_rows(num_tokens, self.row_multiple) if self.training or self.pads_in_eval else 0

    def _tokens(self, inputs: HSTUInputs, layout: _Layout) -> Tensor:
        """(T, hidden_size) projected embeddings in token order."""
        events, actions = self._projected_events(inputs)
        if actions is not None:
            actions = actions + events if self.fuse_actions else actions
            events = torch.stack([events, actions], dim=1).flatten(0, 1)
        if inputs.context is None:
            return events
        return layout.place(events, _project(self.context_mlp, inputs.context))

    def _projected_events(self, inputs: HSTUInputs) -> tuple[Tensor, Tensor | None]:
        """Items and actions (E, hidden_size), None without actions.

        A projection that both share runs once, on both: delayed scaling takes one amax of a linear in a pass.
        """
        if inputs.action is None:
            return _project(self.item_mlp, inputs.item), None
        if self.shares_projection and self.item_mlp is not None:
            items, actions = self.item_mlp(torch.cat([inputs.item, inputs.action])).chunk(2)
            return items, actions
        return _project(self.item_mlp, inputs.item), _project(self.action_mlp, inputs.action)

    def _time_buckets(self, inputs: HSTUInputs, layout: _Layout) -> Tensor | None:
        if self.time_reference is None:
            return None
        buckets = event_time_buckets(
            inputs.timestamps, inputs.event_offsets, inputs.num_candidates, reference=self.time_reference
        )
        # Contexts have no time: they take the last row, which else means more than 8 years.
        return layout.spread(buckets, contexts=NUM_TIME_ROWS - 1)


@dataclass(frozen=True)
class _Layout:
    """Where tokens go. offsets: (B + 1,) of tokens; event_rows, context_rows: a row each, None without contexts."""

    offsets: Tensor
    tokens_per_event: int
    num_contexts: Tensor | None
    event_rows: Tensor | None
    context_rows: Tensor | None

    @staticmethod
    def of(inputs: HSTUInputs) -> _Layout:
        size = inputs.tokens_per_event
        event_token_offsets = inputs.event_offsets * size
        if inputs.context is None:
            return _Layout(event_token_offsets, size, None, None, None)
        assert inputs.context_offsets is not None
        num_event_tokens, num_contexts = inputs.item.shape[0] * size, inputs.context.shape[0]
        device = inputs.event_offsets.device
        # An event token comes after its user's contexts and those of all users before; a context token after the events
        # of the users before.
        event_users = owners(event_token_offsets, num_rows=num_event_tokens)
        event_rows = torch.arange(num_event_tokens, device=device) + inputs.context_offsets[1:][event_users]
        context_users = owners(inputs.context_offsets, num_rows=num_contexts)
        context_rows = torch.arange(num_contexts, device=device) + event_token_offsets[:-1][context_users]
        offsets = event_token_offsets + inputs.context_offsets
        lengths = inputs.context_offsets[1:] - inputs.context_offsets[:-1]
        return _Layout(offsets, size, lengths, event_rows, context_rows)

    def place(self, events: Tensor, contexts: Tensor) -> Tensor:
        """Rows of event tokens and of contexts, each to its place."""
        assert self.event_rows is not None and self.context_rows is not None
        tokens = events.new_empty((events.shape[0] + contexts.shape[0], *events.shape[1:]))
        return tokens.index_copy_(0, self.event_rows, events).index_copy_(0, self.context_rows, contexts)

    def spread(self, per_event: Tensor, *, contexts: int) -> Tensor:
        """(T,) the value of each token's event, and ``contexts`` for contexts."""
        per_token = per_event.repeat_interleave(self.tokens_per_event) if self.tokens_per_event > 1 else per_event
        if self.context_rows is None:
            return per_token
        return self.place(per_token, per_token.new_full(self.context_rows.shape, contexts))


def _projection(
    in_features: int | None, hidden_size: int, precision: MixedPrecisionArgs | None, why_not: str
) -> nn.Module | None:
    """The MLP that brings an embedding to ``hidden_size``; None where it already has that width, or doesn't exist."""
    if in_features is None or in_features == hidden_size:
        return None
    return nn.Sequential(
        make_linear(in_features, hidden_size, bias=True, precision=precision, why_not=why_not),
        nn.ReLU(),
        make_linear(hidden_size, hidden_size, bias=True, precision=precision, why_not=why_not),
    )


def _project(mlp: nn.Module | None, x: Tensor) -> Tensor:
    return x if mlp is None else mlp(x)
