"""The data of a run: the train loader and the evaluation loaders, of a prepared dataset or synthetic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from genrec.configs.schema import BenchmarkDatasetArgs, ConfigError, DatasetArgs, ExperimentConfig
from genrec.data.balance import SequenceCost
from genrec.data.dataset import SequenceDataset
from genrec.data.format import PROTOCOLS, SPLIT_NAMES, DataError, DatasetMetadata, check_dataset_name, read_metadata
from genrec.data.loader import SequenceLoader
from genrec.data.synthetic import SyntheticLoader
from genrec.data.vocabulary import original_item_ids, table_keys
from genrec.model.features import feature_layout

Label = Literal["mask", "class"]


def dataset_directory(dataset: DatasetArgs) -> Path:
    """Where the prepared dataset is: dataset_path, else prepared/<dataset_name> below the working directory."""
    return Path(dataset.dataset_path) if dataset.dataset_path else Path("prepared") / dataset.dataset_name


def read_run_metadata(config: ExperimentConfig) -> DatasetMetadata | None:
    """Metadata of the prepared dataset, None for synthetic data. Raises DataError, or ConfigError for another split."""
    if isinstance(config.dataset, BenchmarkDatasetArgs):
        return None
    metadata = read_metadata(dataset_directory(config.dataset))
    check_dataset_name(metadata, config.dataset.dataset_name, directory=dataset_directory(config.dataset))
    rule = metadata.split.get("rule")
    if rule != config.dataset.split:
        raise ConfigError(
            f"DatasetArgs.split = {config.dataset.split!r}, but {dataset_directory(config.dataset)} was prepared with "
            f"{rule!r}: bind that, or prepare the data again"
        )
    return metadata


def sequence_cost(config: ExperimentConfig, metadata: DatasetMetadata | None) -> SequenceCost:
    """The floating-point operations of a layer on a sequence, up to a factor.

    Per token 2 * 4 D * Hd for the projection to u, v, q, k and 2 * D * Hd for that back (3 D * Hd with "dlrm_v3"); per
    pair of tokens 4 Hd for its score and its value, of T^2 / 2 pairs where attention is causal, else of T^2.
    """
    layout, network = feature_layout(config, metadata), config.network
    widths_in = 7 if network.layer_style == "dlrm_v3" else 5
    return SequenceCost(
        linear=network.hidden_size * widths_in / (1 if network.is_causal else 2),
        tokens_per_event=1 if layout.action is None else 2,
        num_contexts=layout.max_num_contexts,
    )


class RunData:
    """Loaders for one rank over ``splits``. Raises DataError for data that is missing, damaged or empty.

    pin_memory: batches in page-locked memory, from where copies to a GPU don't block.
    """

    def __init__(
        self, config: ExperimentConfig, *, splits: Sequence[str], rank: int, world_size: int, pin_memory: bool = False
    ) -> None:
        assert config.ranking is not None, "a ranking run has RankingArgs"
        self.config = config
        self.metadata = read_run_metadata(config)
        self.rank = rank
        self.world_size = world_size
        self.pin_memory = pin_memory
        self.cost = sequence_cost(config, self.metadata)
        self.label: Label = "class" if config.ranking.is_k_class else "mask"
        self._splits: dict[str, SequenceDataset] = {}
        if isinstance(config.dataset, DatasetArgs):
            directory = dataset_directory(config.dataset)
            self._splits = {split: SequenceDataset.open(directory, split=split) for split in splits}

    @property
    def protocols(self) -> tuple[str, ...]:
        """The protocols of evaluation that the configuration can have.

        Synthetic data without candidates has nothing to freeze; and where history sees what comes after it, a score of
        a history event, which is what "sequential" reads, would know the future.
        """
        dataset = self.config.dataset
        synthetic_history = isinstance(dataset, BenchmarkDatasetArgs) and dataset.max_num_candidates == 0
        possible = {"sequential": self.config.network.history_is_causal, "frozen": not synthetic_history}
        return tuple(protocol for protocol in PROTOCOLS if possible[protocol])

    @property
    def identity(self) -> dict[str, Any] | None:
        """What tells this dataset from another: name, hash of its source, how it was split. None for synthetic data."""
        if self.metadata is None:
            return None
        return {"name": self.metadata.name, "source_hash": self.metadata.source_hash, "split": self.metadata.split}

    def vocabulary(self) -> dict[str, np.ndarray] | None:
        """The keys of each table's rows (data/vocabulary.py), for later runs; None for synthetic data."""
        if isinstance(self.config.dataset, BenchmarkDatasetArgs) or self.metadata is None:
            return None
        return table_keys(dataset_directory(self.config.dataset), self.metadata)

    def train_loader(self) -> SequenceLoader | SyntheticLoader:
        """The loader of the train split. Raises DataError where it has no batch."""
        trainer, dataset = self.config.trainer, self.config.dataset
        loader: SequenceLoader | SyntheticLoader
        if isinstance(dataset, BenchmarkDatasetArgs):
            loader = self._synthetic(dataset, "train", trainer.train_batch_size, mode="train")
        else:
            loader = self._prepared(
                dataset,
                "train",
                trainer.train_batch_size,
                mode="train",
                shuffle=dataset.shuffle,
                seed=trainer.seed,
                event_dropout=dataset.event_dropout,
                balanced=trainer.enable_balanced_shuffler,
            )
        if len(loader) == 0:
            raise DataError("the train split has no events: nothing to train on")
        return loader

    def evaluation_loader(self, split: str, protocol: str) -> SequenceLoader | SyntheticLoader:
        """A fresh loader over ``split`` ("valid", "test") in ``protocol`` ("sequential", "frozen")."""
        trainer, dataset = self.config.trainer, self.config.dataset
        if isinstance(dataset, BenchmarkDatasetArgs):
            return self._synthetic(dataset, split, trainer.eval_batch_size, mode=protocol)
        return self._prepared(dataset, split, trainer.eval_batch_size, mode=protocol)

    def _prepared(
        self,
        dataset: DatasetArgs,
        split: str,
        batch_size: int,
        *,
        mode: str,
        shuffle: bool = False,
        seed: int = 0,
        event_dropout: float = 0.0,
        balanced: bool = False,
    ) -> SequenceLoader:
        """This rank's part of a split of the prepared dataset."""
        return SequenceLoader(
            self._splits[split],
            batch_size=batch_size,
            mode=mode,
            label=self.label,
            max_history_seqlen=dataset.max_history_seqlen,
            max_num_candidates=dataset.max_num_candidates,
            contextual_features=dataset.contextual_features,
            item_features=dataset.item_features,
            dynamic_features=tuple(dataset.dynamic_tables or ()),
            rank=self.rank,
            world_size=self.world_size,
            shuffle=shuffle,
            seed=seed,
            event_dropout=event_dropout,
            num_workers=dataset.num_workers,
            balanced=balanced,
            cost=self.cost,
            pin_memory=self.pin_memory,
        )

    def _synthetic(self, dataset: BenchmarkDatasetArgs, split: str, batch_size: int, mode: str) -> SyntheticLoader:
        """Other users in each split: the seeds follow each other."""
        assert self.config.ranking is not None
        args = self.config.ranking
        return SyntheticLoader(
            dataset,
            batch_size=batch_size,
            num_label_values=args.prediction_head_arch[-1] if self.label == "class" else 2**args.num_tasks,
            mode=mode,
            rank=self.rank,
            world_size=self.world_size,
            seed=self.config.trainer.seed + SPLIT_NAMES.index(split),
            balanced=mode == "train" and self.config.trainer.enable_balanced_shuffler,
            cost=self.cost,
            pin_memory=self.pin_memory,
        )

    def item_vocabulary(self) -> np.ndarray | None:
        """Original id of each dense item id; None for synthetic data, whose ids are dense."""
        if isinstance(self.config.dataset, BenchmarkDatasetArgs):
            return None
        return original_item_ids(dataset_directory(self.config.dataset))
