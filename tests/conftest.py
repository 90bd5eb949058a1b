"""For all tests: a tiny prepared dataset and gin files for it, for the whole path; the gpu marker's skip.

Tests marked gpu are skipped without a CUDA device, here in one place: a test states its need with the marker alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read as kernels are defined, so before genrec is imported

from genrec.configs import availability
from genrec.data.format import DatasetMetadata, ItemFeature
from genrec.hstu.attention import interface

NUM_ITEMS, NUM_ACTIONS, NUM_AGES, HOLDOUT = 20, 5, 4, 3
# Training events of each user; with max_history_seqlen = 8: one event, fewer, exactly as many, more, many more.
TRAIN_LENGTHS = (1, 5, 8, 9, 20, 30, 3)

TINY_GIN = """
TrainerArgs.train_batch_size = 4
TrainerArgs.eval_batch_size = 2
TrainerArgs.max_train_iters = 6
TrainerArgs.eval_interval = 0
TrainerArgs.log_interval = 1
TrainerArgs.pipeline_type = 'none'
TrainerArgs.device = 'cpu'
DatasetArgs.dataset_name = 'ml-100k'
DatasetArgs.max_history_seqlen = 8
DatasetArgs.shuffle = True
NetworkArgs.dtype_str = 'float32'
NetworkArgs.num_layers = 2
NetworkArgs.hidden_size = 16
NetworkArgs.num_attention_heads = 2
NetworkArgs.kv_channels = 8
RankingArgs.prediction_head_arch = [8, 1]
OptimizerArgs.optimizer_str = 'adamw'
OptimizerArgs.learning_rate = 1e-2
OptimizerArgs.weight_decay = 0.01
OptimizerArgs.embedding_weight_decay = 0.1
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked gpu where there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _split_table(split: str, train_lengths: Sequence[int], item_shift: int) -> pa.Table:
    events = {name: [] for name in ("item", "action", "timestamp")}
    held_out = {"train": 0, "valid": HOLDOUT, "test": 2 * HOLDOUT}[split]
    lengths = [length + held_out for length in train_lengths]
    for user, length in enumerate(lengths):
        generator = np.random.default_rng(user)  # a user's events are the same in every split
        items, actions = generator.integers(0, [NUM_ITEMS, NUM_ACTIONS], size=(100, 2))[:length].T
        events["item"].append(items + item_shift)
        events["action"].append(actions)
        events["timestamp"].append(1_000_000 + 60 * np.arange(length))
    return pa.table(
        {
            "user_id": pa.array([100 + 7 * user for user in range(len(lengths))], pa.int64()),
            "context_age": pa.array([user % NUM_AGES for user in range(len(lengths))], pa.int64()),
            **{name: pa.array(values, pa.list_(pa.int64())) for name, values in events.items()},
            "num_targets": pa.array([n if split == "train" else HOLDOUT for n in lengths], pa.int64()),
            "num_events": pa.array(lengths, pa.int64()),
        }
    )


@pytest.fixture
def no_cutlass(monkeypatch: pytest.MonkeyPatch) -> None:
    """FBGEMM's HSTU attention is not installed, whatever this machine has."""
    for module in (availability, interface):
        monkeypatch.setattr(module, "find_cutlass_module", lambda: None)


@pytest.fixture(scope="session")
def write_tiny_dataset() -> Callable[..., Path]:
    """``write_tiny_dataset(directory, train_lengths=..., item_shift=0)``; a shift takes ids out of their table."""

    def write(directory: Path, *, train_lengths: Sequence[int] = TRAIN_LENGTHS, item_shift: int = 0) -> Path:
        tables = {split: _split_table(split, train_lengths, item_shift) for split in ("train", "valid", "test")}
        for split, table in tables.items():
            (directory / split).mkdir(parents=True)
            pq.write_table(table, directory / split / "00000.parquet", write_page_checksum=True)
        (directory / "vocabulary").mkdir()
        genres = pa.array([[1, 2][: item % 3] for item in range(NUM_ITEMS)], pa.list_(pa.int64()))
        originals = pa.table({"original_id": pa.array(1000 + np.arange(NUM_ITEMS)), "genres": genres})
        pq.write_table(originals, directory / "vocabulary" / "item.parquet")
        metadata = DatasetMetadata(
            name="ml-100k",
            source="test",
            source_hash="0",
            split={"rule": "leave_last", "holdout": HOLDOUT},
            tie_rule="source order",
            contextual_features={"age": NUM_AGES},
            num_items=NUM_ITEMS,
            num_actions=NUM_ACTIONS,
            label_bits=(("rating >= 4", 3), ("rating >= 5", 4)),
            positive_class=3,
            num_users=len(train_lengths),
            num_events=sum(train_lengths) + 2 * HOLDOUT * len(train_lengths),
            num_targets={split: sum(table["num_targets"].to_pylist()) for split, table in tables.items()},
            num_rows={split: table.num_rows for split, table in tables.items()},
            item_features={"genres": ItemFeature(num_values=3, max_per_item=2, names=("(none)", "Comedy", "Drama"))},
        )
        (directory / "metadata.json").write_text(metadata.to_json())
        return directory

    return write


@pytest.fixture(scope="session")
def tiny_dataset(tmp_path_factory: pytest.TempPathFactory, write_tiny_dataset: Callable[..., Path]) -> Path:
    """A prepared dataset of seven users."""
    return write_tiny_dataset(tmp_path_factory.mktemp("data") / "prepared")


@pytest.fixture
def tiny_gin(tmp_path: Path, tiny_dataset: Path) -> Path:
    """A gin file of a few steps on ``tiny_dataset`` that writes to ``tmp_path / "run"``."""
    path = tmp_path / "tiny.gin"
    places = f"DatasetArgs.dataset_path = {str(tiny_dataset)!r}\nTrainerArgs.output_dir = {str(tmp_path / 'run')!r}\n"
    path.write_text(TINY_GIN + places)
    return path
