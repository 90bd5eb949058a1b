"""Tables too large for a whole copy start the same on any number of ranks, and their checkpoints fit all of them."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from genrec.model import table_init
from genrec.training import pieces
from genrec.training.checkpoint import newest_checkpoint, read_tensors
from genrec.training.metrics_log import read_lines
from genrec.training.train import main as train_main

# The tiny dataset's tables as large ones: blocks of three rows, pieces of two.
LIMITS = {"BLOCKWISE_NUMBERS": 64, "BLOCK_NUMBERS": 3 * 16}
PIECE_NUMBERS = 2 * 16
TRAIN = f"""
import json, sys
import torch
from genrec.model import table_init
from genrec.training import pieces, train

for name, value in {LIMITS!r}.items():
    setattr(table_init, name, value)
pieces.PIECE_NUMBERS = {PIECE_NUMBERS}
torch.distributed.init_process_group("gloo")
for arguments in json.loads(sys.argv[1]):
    if code := train.main("ranking", arguments):
        sys.exit(code)
torch.distributed.destroy_process_group()
"""
RUN = (
    "DatasetArgs.max_history_seqlen = 40",
    "NetworkArgs.hidden_dropout = 0.0",
    "OptimizerArgs.embedding_optimizer_str = 'rowwise_adagrad'",
    "OptimizerArgs.embedding_weight_decay = 0.0",
    "OptimizerArgs.embedding_learning_rate = 0.1",
    "TrainerArgs.eval_batch_size = 4",
)


@pytest.fixture
def small_limits(monkeypatch):
    for name, value in LIMITS.items():
        monkeypatch.setattr(table_init, name, value)
    monkeypatch.setattr(pieces, "PIECE_NUMBERS", PIECE_NUMBERS)


def test_large_tables_start_alike_and_load_anywhere(tmp_path, arguments, script_on_ranks, small_limits):
    """One rank with whole tables, two and three that share them; then three start from two's checkpoint."""

    def command(name, num_ranks, source=None, **sharding_types):
        bindings = (
            f"TrainerArgs.train_batch_size = {12 // num_ranks}",
            "TrainerArgs.max_train_iters = 3",
            f"DatasetArgs.sharding_types = {sharding_types}",
            *([] if source is None else [f"TrainerArgs.ckpt_load_dir = {str(tmp_path / source)!r}"]),
        )
        return arguments(tmp_path / name, *RUN, *bindings)

    assert train_main("ranking", command("one", 1)) == 0
    assert train_main("ranking", command("one_again", 1, source="one")) == 0
    shared = {"item": "row_wise", "action": "table_wise"}
    for num_ranks, commands in {
        2: [command("two", 2, **shared)],
        3: [command("three", 3, **shared), command("three_again", 3, source="two", **shared)],
    }.items():
        finished = script_on_ranks(num_ranks, TRAIN, commands, timeout_s=200)
        assert finished.returncode == 0, finished.stderr
    for name, like in {"two": "one", "three": "one", "three_again": "one_again"}.items():
        torch.testing.assert_close(curve(tmp_path / name), curve(tmp_path / like), rtol=1e-5, atol=0)
        torch.testing.assert_close(tensors(tmp_path / name), tensors(tmp_path / like), rtol=1e-4, atol=1e-5)
    entries = FileSystemReader(newest_checkpoint(tmp_path / "two" / "checkpoints")).read_metadata().state_dict_metadata
    item = entries["model.embeddings.collections.dim16.embeddings.table_item.weight"]
    assert sorted((c.offsets[0], c.sizes[0]) for c in item.chunks) == [(row, 2) for row in range(0, 20, 2)]


def curve(output_dir):
    return [line["loss"] for line in read_lines(output_dir / "metrics.jsonl") if line["event"] == "train"]


def tensors(output_dir):
    return read_tensors(newest_checkpoint(output_dir / "checkpoints"), prefixes=("model.", "optimizer."))
