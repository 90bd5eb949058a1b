from __future__ import annotations

import os
import random
import shutil

import numpy as np
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from genrec.configs.schema import ConfigError, UserError
from genrec.data.format import DataError
from genrec.training.checkpoint import resolve_checkpoint
from genrec.training.evaluation import evaluate
from genrec.training.metrics import RankingMetrics
from genrec.training.ranks import Ranks
from genrec.training.score_table import ScoreTable, labelled_events
from genrec.training.scoring import load_checkpoint_config, main, score
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


@pytest.mark.parametrize("leaking", ["NetworkArgs.contextual_mask = 'history'", "NetworkArgs.is_causal = False"])
def test_history_that_sees_ahead_is_never_scored_sequentially(tiny_config, tmp_path, leaking):
    """Sequential scores are read off the history, which here would know the event's own label."""
    config = tiny_config(tmp_path, leaking, "DatasetArgs.max_num_candidates = 2", "TrainerArgs.max_train_iters = 1")
    assert {line["protocol"] for line in train(config)} == {"frozen"}
    checkpoint = resolve_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"--protocol sequential is not possible .* frozen is"):
        score(config, checkpoint, split="test", protocol="sequential", scores_path=None)


@pytest.mark.parametrize("num_candidates", [0, 2])
def test_a_sequential_score_knows_nothing_of_its_own_or_later_ratings(
    tiny_config, tiny_dataset, tmp_path, num_candidates
):
    candidates = f"DatasetArgs.max_num_candidates = {num_candidates}"
    config = tiny_config(tmp_path / "out", candidates, "TrainerArgs.max_train_iters = 2")
    train(config)
    changed = tmp_path / "changed"
    shutil.copytree(tiny_dataset, changed)
    (path,) = (changed / "test").glob("*.parquet")
    rows = pq.read_table(path)
    actions = [[*user[:-1], 4 - user[-1]] for user in rows["action"].to_pylist()]
    column = rows.schema.get_field_index("action")
    pq.write_table(rows.set_column(column, rows.schema.field(column), [actions]), path)
    tables = []
    for name, directory in (("one", tiny_dataset), ("two", changed)):
        moved = load_checkpoint_config(
            resolve_checkpoint(tmp_path / "out"), gin_bindings=[f"DatasetArgs.dataset_path = {str(directory)!r}"]
        )
        scores = tmp_path / f"{name}.parquet"
        score(moved, resolve_checkpoint(tmp_path / "out"), split="test", protocol="sequential", scores_path=scores)
        tables.append(polars.read_parquet(scores))
    assert not tables[0]["label"].equals(tables[1]["label"])
    np.testing.assert_array_equal(tables[0]["score"].to_numpy(), tables[1]["score"].to_numpy())


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_scores_need_the_original_ids(tiny_config, tiny_dataset, tmp_path, damage):
    copy = tmp_path / "data"
    shutil.copytree(tiny_dataset, copy)
    path = f"DatasetArgs.dataset_path = {str(copy)!r}"
    config = tiny_config(tmp_path / "out", path, "TrainerArgs.max_train_iters = 1")
    train(config)
    vocabulary = copy / "vocabulary" / "item.parquet"
    vocabulary.unlink() if damage == "missing" else vocabulary.write_bytes(b"PAR1 no longer")
    with pytest.raises(DataError, match="original ids, cannot be read"):
        score(
            config,
            resolve_checkpoint(tmp_path / "out"),
            split="test",
            protocol="sequential",
            scores_path=tmp_path / "scores.parquet",
        )


def test_an_id_outside_its_table_is_told_with_the_split(tiny_config, tmp_path, write_tiny_dataset):
    data = write_tiny_dataset(tmp_path / "data")
    path = data / "valid" / "00000.parquet"
    table = pq.read_table(path)
    items = table["item"].to_pylist()
    items[0][0] = 20
    table = table.set_column(table.schema.get_field_index("item"), "item", pa.array(items, pa.list_(pa.int64())))
    pq.write_table(table, path)
    with pytest.raises(DataError, match=r"^valid split: feature 'item' has id 20 but table 'item' has 20 rows"):
        train(tiny_config(tmp_path / "out", f"DatasetArgs.dataset_path = {str(data)!r}"))


@pytest.mark.parametrize("below", ["file/scores.parquet", "folder", "pipe"])
def test_scores_that_cannot_be_written_are_refused_before_evaluating(tiny_config, tmp_path, monkeypatch, below):
    train(tiny_config(tmp_path / "out"))
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    checkpoint = resolve_checkpoint(tmp_path / "out")
    config = load_checkpoint_config(checkpoint, gin_bindings=[])
    monkeypatch.setattr("genrec.training.scoring.Evaluator", None)  # not even built
    with pytest.raises(UserError, match=r"^--scores .* cannot be written: .* is (not )?a (folder|regular file)$"):
        score(config, checkpoint, split="test", protocol="frozen", scores_path=tmp_path / below)
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("kind", [PermissionError, polars.exceptions.ComputeError])
def test_scores_that_the_system_refuses_say_why(tiny_config, tmp_path, monkeypatch, kind):
    """Errors of polars have a message and no number."""

    def refuse(table, path):
        path.write_text("half of it")
        raise kind("Permission denied (os error 13): here")

    train(tiny_config(tmp_path / "out", "TrainerArgs.max_train_iters = 1"))
    checkpoint = resolve_checkpoint(tmp_path / "out")
    config = load_checkpoint_config(checkpoint, gin_bindings=[])
    monkeypatch.setattr(polars.DataFrame, "write_parquet", refuse)
    with pytest.raises(UserError, match=r"cannot be written: Permission denied \(os error 13\): here$"):
        score(config, checkpoint, split="test", protocol="frozen", scores_path=tmp_path / "scores.parquet")
    assert not list(tmp_path.glob("*scores.parquet*"))
