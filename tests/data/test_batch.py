"""Batch: moving keeps every field; an empty batch is a batch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from genrec.data.batch import Batch, jagged_features


def make(lengths, num_contexts=1, width=0):
    lengths = np.array(lengths, dtype=np.int64)
    contexts = {f"context{i}": np.arange(len(lengths)) for i in range(num_contexts)}
    features = contexts | {"item": np.arange(lengths.sum()), "action": np.arange(lengths.sum()) % 5}
    widths = {"item_genres": width} if width else {}
    features |= {name: np.arange(lengths.sum() * width) for name in widths}
    return Batch(
        features=jagged_features(features, lengths, num_contexts=num_contexts, widths=widths),
        timestamps=torch.arange(lengths.sum()),
        num_candidates=torch.zeros(len(lengths), dtype=torch.int64),
        num_labelled=torch.from_numpy(lengths),
        labels=torch.arange(lengths.sum()) % 5,
        user_ids=torch.arange(len(lengths)),
        batch_size=len(lengths),
        max_num_events=int(lengths.max(initial=0)),
        item_feature_name="item",
        action_feature_name="action",
        contextual_feature_names=tuple(contexts),
        item_feature_widths=widths,
    )


def test_features_of_users():
    features = make([2, 0, 3]).features
    assert features.keys() == ["context0", "item", "action"]
    assert features["context0"].lengths().tolist() == [1, 1, 1]
    assert features["item"].offsets().tolist() == [0, 2, 2, 5]
    assert features["item"].values().tolist() == [0, 1, 2, 3, 4]


def test_item_features_have_a_width_and_are_no_tokens():
    batch = make([2, 0, 3], num_contexts=2, width=4)
    assert batch.features["item_genres"].lengths().tolist() == [8, 0, 12]
    assert batch.features["item_genres"].values().tolist() == list(range(20))
    assert batch.num_tokens == make([2, 0, 3], num_contexts=2).num_tokens == 2 * 3 + 2 * 5
    assert make([], width=4).num_tokens == 0


@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [2, 0, 3]])
@pytest.mark.parametrize("num_contexts", [0, 2])
@pytest.mark.parametrize("width", [0, 3])
def test_to_keeps_every_field(lengths, num_contexts, width):
    batch = make(lengths, num_contexts, width)
    moved = batch.to(torch.device("cpu"))
    assert moved.features.stride() == len(lengths) == batch.batch_size
    for field in dataclasses.fields(Batch):
        one, other = getattr(batch, field.name), getattr(moved, field.name)
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other) and one.dtype == torch.int64
        elif field.name == "features":
            assert one.keys() == other.keys() and torch.equal(one.values(), other.values())
            assert torch.equal(one.lengths(), other.lengths()) and one.lengths().dtype == torch.int64
        else:
            assert one == other


def test_to_moves_every_tensor():
    moved = make([2, 1]).to(torch.device("meta"))
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 5 and all(t.is_meta for t in tensors) and moved.features.values().is_meta


@pytest.mark.parametrize("lengths", [[], [0], [3, 0, 2]])
def test_values_of_each_feature_are_known_without_counting(lengths):
    """Counted on a device, each step would wait for it."""
    features = make(lengths, width=2).features
    per_feature = features.lengths().view(len(features.keys()), -1).sum(dim=1).tolist()
    assert features.length_per_key_or_none() == per_feature
    assert features.to(torch.device("cpu")).length_per_key_or_none() == per_feature
