"""A small prepared dataset's metadata, configurations for it, and batches written down by hand or drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from genrec.configs.schema import (
    DatasetArgs,
    ExperimentConfig,
    NetworkArgs,
    OptimizerArgs,
    RankingArgs,
    TrainerArgs,
)
from genrec.data.batch import Batch
from genrec.data.format import DatasetMetadata, ItemFeature

# Genres and year of item i are row i % 4.
GENRES, YEARS = [[0, 0, 0], [2, 0, 0], [1, 3, 0], [1, 2, 3]], [[0], [1], [2], [1]]
CONTEXTS = {"age": 6, "gender": 2}
NUM_ITEMS, NUM_ACTIONS = 20, 5


@pytest.fixture
def metadata() -> DatasetMetadata:
    return DatasetMetadata(
        name="small",
        source="test",
        source_hash="",
        split={},
        tie_rule="",
        contextual_features=CONTEXTS,
        num_items=NUM_ITEMS,
        num_actions=NUM_ACTIONS,
        label_bits=(("rating>=4", 3), ("rating>=5", 4)),
        positive_class=3,
        num_users=0,
        num_events=0,
        num_targets={},
        num_rows={},
        item_features={
            "genres": ItemFeature(num_values=4, max_per_item=3, names=("(none)", "a", "b", "c")),
            "year": ItemFeature(num_values=3, max_per_item=1, names=("(none)", "1990", "1991")),
        },
    )


@pytest.fixture
def make_config() -> Callable[..., ExperimentConfig]:
    """``make_config(dataset={...}, network={...}, ranking={...})`` replaces fields."""

    def make(**changes: dict[str, Any]) -> ExperimentConfig:
        config = ExperimentConfig(
            task="ranking",
            trainer=TrainerArgs(train_batch_size=2, eval_batch_size=2),
            dataset=DatasetArgs(dataset_name="ml-100k", max_history_seqlen=12),
            network=NetworkArgs(
                num_layers=2,
                hidden_size=16,
                num_attention_heads=2,
                kv_channels=8,
                dtype_str="float32",
                hidden_dropout=0.0,
            ),
            optimizer=OptimizerArgs(optimizer_str="adam", learning_rate=1e-3),
            ranking=RankingArgs(prediction_head_arch=(8, 2), num_tasks=2),
        )
        parts = {name: dataclasses.replace(getattr(config, name), **fields) for name, fields in changes.items()}
        return dataclasses.replace(config, **parts)

    return make


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    """``make_batch(users, ...)`` of users by number: a user has the same events in whatever batch it is in."""

    def make(
        users: Sequence[int],
        *,
        lengths: Sequence[int],
        labelled: Sequence[int] | None = None,
        candidates: Sequence[int] | None = None,
        contexts: tuple[str, ...] = tuple(CONTEXTS),
        with_actions: bool = True,
        item_features: tuple[str, ...] = (),
    ) -> Batch:
        draws = [torch.Generator().manual_seed(user) for user in users]

        def values(high: int, counts: Sequence[int]) -> torch.Tensor:
            drawn = [torch.randint(0, high, (n,), generator=g) for n, g in zip(counts, draws, strict=True)]
            return torch.cat([torch.empty(0, dtype=torch.int64), *drawn])

        features = {name: values(CONTEXTS[name], [1] * len(users)) for name in contexts}
        features["item"] = values(NUM_ITEMS, lengths)
        if with_actions:
            features["action"] = values(NUM_ACTIONS, lengths)
        per_feature = [[1] * len(users) if name in contexts else list(lengths) for name in features]
        widths = {}
        for name in item_features:
            ids = torch.tensor({"genres": GENRES, "year": YEARS}[name])[features["item"] % 4]
            widths[f"item_{name}"] = ids.shape[1]
            features[f"item_{name}"] = ids.flatten()
            per_feature.append([ids.shape[1] * length for length in lengths])
        labelled = lengths if labelled is None else labelled
        return Batch(
            features=KeyedJaggedTensor(
                keys=list(features),
                values=torch.cat(list(features.values())),
                lengths=torch.tensor(per_feature, dtype=torch.int64).flatten(),
                stride=len(users),
            ),
            timestamps=values(1000, lengths).clone(),
            num_candidates=torch.tensor([0] * len(users) if candidates is None else candidates, dtype=torch.int64),
            num_labelled=torch.tensor(labelled, dtype=torch.int64),
            labels=values(4, labelled),
            user_ids=torch.tensor(users, dtype=torch.int64),
            batch_size=len(users),
            max_num_events=max(lengths, default=0),
            item_feature_name="item",
            action_feature_name="action" if with_actions else None,
            contextual_feature_names=contexts,
            item_feature_widths=widths,
        )

    return make
