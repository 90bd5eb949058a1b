"""The published MovieLens-100K, fetched as a user would."""

from __future__ import annotations

import pytest

from genrec.data.dataset import SequenceDataset
from genrec.data.loader import SequenceLoader
from genrec.data.movielens import MOVIELENS
from genrec.data.prepare import prepare


@pytest.mark.nightly
def test_ml_100k(tmp_path):
    metadata = prepare("ml-100k", output=tmp_path / "ml-100k")
    assert metadata.source_hash == MOVIELENS["ml-100k"].content_hash
    assert (metadata.num_users, metadata.num_items, metadata.num_events) == (943, 1682, 100_000)
    assert metadata.num_targets == {"train": 81_140, "valid": 9_430, "test": 9_430}
    assert not any(metadata.notes.values())
    assert {name: (v.num_values, v.max_per_item) for name, v in metadata.item_features.items()} == {
        "genres": (19, 6),
        "year": (18, 1),
    }
    test = SequenceDataset.open(tmp_path / "ml-100k", split="test")
    options = {"batch_size": 64, "mode": "sequential", "label": "mask", "max_history_seqlen": 200}
    for world_size in (1, 2, 3):
        ranks = [SequenceLoader(test, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
        positives = [int((batch.labels & 1).sum()) for rank in ranks for batch in rank]
        assert sum(positives) == 5143
