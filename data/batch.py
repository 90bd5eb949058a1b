"""Batch: what the loader hands to the model, for some users at once.

Two users, two contextual features, with actions; user A has events i0 i1 i2, user B has i3::

    features        age: [33 | 51]  gender: [0 | 1]  item: [i0 i1 i2 | i3]  action: [r0 r1 r2 | r3]
    timestamps      [t0 t1 t2 | t3]           one an event
    num_candidates  [1, 1]                    the last events of each user that are candidates
    num_labelled    [1, 1]                    the last events of each user that carry a label
    labels          [y2 | y3]                 (num_labelled.sum(),)

Features of items (genres) have a fixed number of values an event, padded with id 0: with a width of 2, user A has 6
values of item_genres. They are no tokens of their own.

Training on every event has no candidates and a label for each event. Evaluation in the "sequential" protocol has no
candidates either, and labels for the last events only; "frozen" has as many candidates as labels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


@dataclass(frozen=True)
class Batch:
    """Features and labels of ``batch_size`` users (zero users is a legal batch). All integer tensors are int64.

    features: KeyedJaggedTensor over contextual features (one value a user each), item and, if any, action and item
    features. item_feature_widths: key of an item feature to its values an event.
    timestamps: (E,) seconds, E = events of all users. num_candidates, num_labelled, user_ids: (B,).
    labels: (num_labelled.sum(),) label bit masks (multi-task) or classes (k-class).
    max_num_events: the longest user's events, on the host.
    """

    features: KeyedJaggedTensor
    timestamps: Tensor
    num_candidates: Tensor
    num_labelled: Tensor
    labels: Tensor
    user_ids: Tensor
    batch_size: int
    max_num_events: int
    item_feature_name: str
    action_feature_name: str | None
    contextual_feature_names: tuple[str, ...]
    item_feature_widths: dict[str, int] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequences: a context or an event is one, with actions an event is two."""
        num_events = self.timestamps.shape[0]
        return self.features.values().shape[0] - num_events * sum(self.item_feature_widths.values())

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """A copy on ``device``."""
        return self._map(lambda t: t.to(device=device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """A copy in page-locked host memory."""
        return self._map(lambda t: t.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory alive until ``stream`` has used it."""
        for value in vars(self).values():
            if isinstance(value, (Tensor, KeyedJaggedTensor)):
                value.record_stream(stream)

    def _map(self, function: Callable[[Any], Any]) -> Batch:
        tensors = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        tensor_types = (Tensor, KeyedJaggedTensor)
        return dataclasses.replace(self, **{k: function(v) for k, v in tensors.items() if isinstance(v, tensor_types)})


def jagged_features(
    features: Mapping[str, np.ndarray],
    lengths: np.ndarray,
    *,
    num_contexts: int,
    widths: Mapping[str, int] | None = None,
) -> KeyedJaggedTensor:
    """The first ``num_contexts`` features have one value a user, the others one an event; all int64.

    lengths: (B,) events of each user. widths: values an event of the features that have another number than one.
    """
    ones, names = np.ones_like(lengths), list(features)
    event_lengths = [lengths * (widths or {}).get(name, 1) for name in names[num_contexts:]]
    return KeyedJaggedTensor(
        keys=names,
        # Known here; counted on a device, they would be waited for.
        length_per_key=[len(values) for values in features.values()],
        values=torch.from_numpy(np.concatenate(list(features.values()))),
        lengths=torch.from_numpy(np.concatenate([ones] * num_contexts + event_lengths)),
        # Given, because a batch of zero users has no lengths to tell it from.
        stride=len(lengths),
    )
