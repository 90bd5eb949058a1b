from __future__ import annotations

import random

import numpy as np
import polars
import pytest
import torch

from genrec.training.evaluation import ScoreTable, evaluate, labelled_events
from genrec.training.metrics import RankingMetrics
from genrec.training.scoring import load_checkpoint_config, main, score
from genrec.training.sharding import Ranks
from genrec.training.state import random_state
from genrec.training.train import train

ONE_RANK = Ranks(rank=0, world_size=1, device=torch.device("cpu"))


def evaluate_batches(model, batches, table=None):
    return evaluate(
        model,
        batches,
        split="test",
        protocol="frozen",
        ranks=ONE_RANK,
        make_metrics=lambda: RankingMetrics(1, ["AUC", "LogLoss"]),
        table=table,
    )


@pytest.mark.parametrize(
    ("lengths", "candidates"),
    [([], []), ([0, 0], [0, 0]), ([1], [1]), ([8], [3]), ([2, 0, 5], [2, 0, 1])],
)
@pytest.mark.parametrize("frozen", [False, True])
def test_evaluate_users_of_any_length(make_step, make_batch, lengths, candidates, frozen):
    """Empty batches, users with no history or nothing at all, one event, as many as fit."""
    batch = make_batch(lengths, num_candidates=candidates if frozen else None)
    table = ScoreTable()
    evaluation = evaluate_batches(make_step().model, [batch], table)
    assert evaluation.num_targets == len(table.gathered(ONE_RANK, item_vocabulary=None)) == len(batch.labels)
    assert set(evaluation.metrics) == {"auc", "logloss"}


def test_labelled_events(make_batch):
    #       user 0: events 0 1 2, user 1: none, user 2: events 3 4 5 6
    assert labelled_events(make_batch([3, 0, 4], num_candidates=[1, 0, 2])).tolist() == [2, 5, 6]
    assert labelled_events(make_batch([])).tolist() == []


def test_evaluation_leaves_generators_and_mode(make_step, make_batch):
    model = make_step().model
    model.train()
    before = random_state()

    def batches():
        yield make_batch([3, 4])
        torch.rand(3), np.random.rand(3), random.random()

    evaluate_batches(model, batches())
    assert random_state() == before
    assert model.training


def test_checkpoint_can_be_moved_and_given_other_data(tmp_path, tiny_config, write_tiny_dataset):
    train(tiny_config(tmp_path / "run"))
    best = (tmp_path / "run" / "checkpoints" / "step_00000006").rename(tmp_path / "best")
    data = write_tiny_dataset(tmp_path / "data", train_lengths=(4, 4))
    assert main(["--checkpoint", str(best), "--gin-bindings", f"DatasetArgs.dataset_path = {str(data)!r}"]) == 0


def rank_auc(labels, scores):
    """AUC from the ranks of the scores, ties sharing the mean rank."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positives = labels.sum()
    return (ranks[labels == 1].sum() - positives * (positives + 1) / 2) / (positives * (len(labels) - positives))


@pytest.mark.parametrize("bindings", [(), ("TrainerArgs.ema_decay = 0.9",)])
@pytest.mark.parametrize(("split", "protocol"), [("test", "sequential"), ("valid", "frozen")])
def test_scores_of_a_checkpoint_equal_trainings_last(tmp_path, tiny_config, tiny_dataset, bindings, split, protocol):
    results = train(tiny_config(tmp_path / "run", *bindings))
    last = next(line for line in results if (line["event"], line["protocol"]) == (split, protocol))
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000006"
    path = tmp_path / "scores.parquet"
    config = load_checkpoint_config(checkpoint, gin_bindings=())
    evaluation = score(config, checkpoint, split=split, protocol=protocol, scores_path=path)
    assert evaluation.metrics == last["metrics"]

    table = polars.read_parquet(path)
    assert table.columns == ["user_id", "item_id", "timestamp", "label", "score"]
    assert rank_auc(table["label"].to_numpy(), table["score"].to_numpy()) == pytest.approx(
        last["metrics"]["auc"], abs=1e-12
    )
    rows = polars.read_parquet(tiny_dataset / split)
    expected = rows.select("user_id", polars.col("item", "action", "timestamp").list.tail(3)).explode(
        "item", "action", "timestamp"
    )
    expected = expected.with_columns(polars.col("item") + 1000).sort("user_id", "timestamp")
    assert table["user_id"].to_list() == expected["user_id"].to_list()
    assert table["item_id"].to_list() == expected["item"].to_list()
    assert table["timestamp"].to_list() == expected["timestamp"].to_list()
    assert table["label"].to_list() == (expected["action"] >= 3).to_list()
