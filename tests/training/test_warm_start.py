"""Starting from a checkpoint: all of it, tables or the rest alone, and with a vocabulary that has grown."""

from __future__ import annotations

import json
import logging
import shutil

import numpy as np
import polars as pl
import pytest
import torch

from genrec.training.checkpoint import CheckpointError
from genrec.training.row_match import copy_rows, match_rows
from genrec.training.train import train

ITEM = "embeddings.collections.dim16.embeddings.table_item.weight"
NEARLY_STILL = ("TrainerArgs.max_train_iters = 1", "OptimizerArgs.learning_rate = 1e-12")
WITH_AVERAGE = "TrainerArgs.ema_decay = 0.5"


@pytest.fixture
def make_grown(tiny_dataset, tmp_path):
    """``make_grown(new=[900], gone=[1019], name="ml-100k")``: the tiny dataset with other items; old ones move."""

    def make(*, new=(), gone=(), name="ml-100k"):
        directory = tmp_path / "grown"
        shutil.copytree(tiny_dataset, directory)
        path = directory / "vocabulary" / "item.parquet"
        old = pl.read_parquet(path)["original_id"].to_list()
        ids = sorted({*old, *new} - set(gone))
        pl.DataFrame(
            {"original_id": ids, "genres": [[1]] * len(ids)}, schema_overrides={"genres": pl.List(pl.Int64)}
        ).write_parquet(path)
        metadata = json.loads((directory / "metadata.json").read_text())
        (directory / "metadata.json").write_text(json.dumps({**metadata, "num_items": len(ids), "name": name}))
        return directory, [(old.index(i), ids.index(i)) for i in old if i in ids], len(ids)

    return make


@pytest.fixture
def trained(tmp_path, tiny_config):
    train(tiny_config(tmp_path / "first", WITH_AVERAGE))
    return tmp_path / "first"


def start(trained, *bindings):
    return (f"TrainerArgs.ckpt_load_dir = {str(trained)!r}", *NEARLY_STILL, WITH_AVERAGE, *bindings)


def is_table(name):
    return ".embeddings.table_" in name


def assert_close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("parts", ["all", "embedding", "dense"])
def test_parts(tmp_path, tiny_config, last_tensors, trained, parts):
    train(tiny_config(tmp_path / "fresh", *NEARLY_STILL, WITH_AVERAGE))
    train(tiny_config(tmp_path / "second", *start(trained, f"TrainerArgs.ckpt_load_parts = {parts!r}")))
    first, fresh, second = (last_tensors(tmp_path / name) for name in ("first", "fresh", "second"))
    assert second.keys() == first.keys()
    for name in (name for name in second if name.startswith("model.")):
        taken = parts == "all" or is_table(name) == (parts == "embedding")
        assert_close(second[name], (first if taken else fresh)[name])
    steps = {name: int(value) for name, value in second.items() if name.endswith(".step")}
    for name, step in steps.items():
        taken = parts == "all" or is_table(name) == (parts == "embedding")
        assert step == (7 if taken else 1), name


@pytest.mark.parametrize("parts", ["embedding", "dense"])
def test_an_average_starts_at_the_weights_of_a_checkpoint_without(tmp_path, tiny_config, last_tensors, parts):
    train(tiny_config(tmp_path / "first"))
    train(tiny_config(tmp_path / "second", *start(tmp_path / "first", f"TrainerArgs.ckpt_load_parts = {parts!r}")))
    second = last_tensors(tmp_path / "second")
    for name in (name for name in second if name.startswith("average.")):
        assert_close(second[name], second[name.replace("average.", "model.", 1)])


def test_rows_are_found_by_what_they_stand_for(tmp_path, tiny_config, last_tensors, trained, make_grown, caplog):
    directory, pairs, num_items = make_grown(new=[900, 1007, 5000, 5001], gone=[1003, 1019])
    where = f"DatasetArgs.dataset_path = {str(directory)!r}"
    train(tiny_config(tmp_path / "fresh", where, *NEARLY_STILL, WITH_AVERAGE))
    with caplog.at_level(logging.INFO, logger="genrec"):
        train(tiny_config(tmp_path / "second", where, *start(trained)))
    assert (
        "table 'item': 18 of its 21 rows are in the checkpoint, 3 start anew; 2 rows of the checkpoint" in caplog.text
    )
    first, fresh, second = (last_tensors(tmp_path / name) for name in ("first", "fresh", "second"))
    there, here = (torch.tensor(rows) for rows in zip(*pairs, strict=True))
    new = torch.tensor([row for row in range(num_items) if row not in here.tolist()])
    assert (num_items, len(new)) == (21, 3)
    assert_close(second[f"model.{ITEM}"][here], first[f"model.{ITEM}"][there])
    assert_close(second[f"model.{ITEM}"][new], fresh[f"model.{ITEM}"][new])
    # Moments have had one more step, of a gradient that is zero in rows that it didn't read.
    decay = 0.999
    name = f"optimizer.{ITEM}.exp_avg_sq"
    assert bool((second[name][here] >= decay * first[name][there] * (1 - 1e-6)).all())
    assert bool((first[name][there] > 0).any())
    for other in (name for name in second if name.startswith("model.") and name != f"model.{ITEM}"):
        assert_close(second[other], first[other])


@pytest.mark.parametrize("parts", ["all", "dense"])
def test_another_datasets_rows_are_refused_and_its_other_weights_can_be_had(
    tmp_path, tiny_config, last_tensors, trained, make_grown, parts
):
    directory, _, _ = make_grown(new=[900], name="ml-1m")
    other = (f"DatasetArgs.dataset_path = {str(directory)!r}", "DatasetArgs.dataset_name = 'ml-1m'")
    config = tiny_config(tmp_path / "second", *other, *start(trained, f"TrainerArgs.ckpt_load_parts = {parts!r}"))
    if parts == "all":
        with pytest.raises(CheckpointError, match=r"another dataset, whose table 'item' has other rows: .*\"dense\""):
            train(config)
        return
    train(config)
    first, second = (last_tensors(tmp_path / name) for name in ("first", "second"))
    assert_close(second["model.head.output.weight"], first["model.head.output.weight"])


def test_a_run_that_continues_needs_its_own_vocabulary(tiny_config, trained, make_grown):
    directory, _, _ = make_grown(new=[900])
    with pytest.raises(CheckpointError, match=r"is of another model: .*table_item\.weight is \(20, 16\) there and"):
        train(
            tiny_config(
                trained,
                WITH_AVERAGE,
                f"DatasetArgs.dataset_path = {str(directory)!r}",
                "TrainerArgs.max_train_iters = 9",
            )
        )


def test_match_rows():
    match = match_rows(np.array([10, 12, 15]), np.array([15, 10, 11]))
    assert sorted(zip(match.there.tolist(), match.here.tolist(), strict=True)) == [(0, 1), (2, 0)]
    assert len(match_rows(np.array([1]), np.array([2])).here) == 0


@pytest.mark.parametrize(("offsets", "shape"), [((0, 0), (3, 4)), ((1, 0), (2, 4)), ((0, 2), (3, 2)), ((2, 1), (1, 2))])
def test_copy_rows_into_parts(offsets, shape):
    there = torch.arange(8.0).view(2, 4)
    match = match_rows(np.array([7, 9]), np.array([9, 8, 7]))
    whole = torch.full((3, 4), -1.0)
    copy_rows(whole, there, match)
    assert whole.tolist() == [there[1].tolist(), [-1.0] * 4, there[0].tolist()]
    part = torch.full(shape, -1.0)
    copy_rows(part, there, match, offsets=offsets)
    rows, columns = (slice(start, start + size) for start, size in zip(offsets, shape, strict=True))
    assert torch.equal(part, whole[rows, columns])
    moments = torch.full((shape[0],), -1.0)  # one a row
    copy_rows(moments, there[:, 0], match, offsets=offsets[:1])
    assert torch.equal(moments, whole[rows, 0])
