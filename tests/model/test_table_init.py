"""Large tables' first weights depend on nothing but seed, table and row."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from genrec.model import table_init
from genrec.model.embedding import FeatureEmbeddings
from genrec.model.table_collections import ShardableTables
from genrec.model.table_init import BlockwiseInit, is_blockwise
from genrec.model.table_specs import TableSpec

ROWS, DIM = 1000, 16


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(table_init, "BLOCK_NUMBERS", 37 * DIM)
    monkeypatch.setattr(table_init, "BLOCKWISE_NUMBERS", 500 * DIM)


def make(table="item", *, std=None, seed=3):
    return BlockwiseInit(table, ROWS, DIM, std=std, seed=seed)


@pytest.mark.parametrize("std", [None, 0.02])
def test_any_part_is_that_of_the_whole(std):
    whole = make(std=std).whole()
    edges = (0, 1, 36, 37, 38, 500, 999, 1000)
    for first, end in itertools.pairwise(edges):
        for column, width in ((0, DIM), (4, 8), (12, 4)):
            part = torch.full((end - first, width), math.nan)
            make(std=std).fill(part, offsets=(first, column))
            assert torch.equal(part, whole[first:end, column : column + width])
    make(std=std).fill(torch.empty(0, DIM), offsets=(ROWS, 0))


def test_values_are_as_torchrec_draws_them():
    limit = 1 / math.sqrt(ROWS)
    uniform = make().whole()
    assert uniform.min() >= -limit and uniform.max() < limit
    assert abs(float(uniform.mean())) < limit / 50 and float(uniform.std()) == pytest.approx(limit / 3**0.5, rel=0.02)
    normal = make(std=0.5).whole()
    assert abs(float(normal.mean())) < 0.02 and float(normal.std()) == pytest.approx(0.5, rel=0.02)
    rows = torch.unique(uniform, dim=0)
    assert len(rows) == ROWS  # no block is that of another


def test_seeds_and_tables_differ():
    own = make().whole()
    assert torch.equal(own, make().whole())
    assert not torch.equal(own, make(seed=4).whole()) and not torch.equal(own, make("other").whole())


def test_no_other_draw_depends_on_them():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    make().whole()
    assert torch.equal(torch.rand(3), expected)


SPECS = [TableSpec("small", ("a",), 20, DIM), TableSpec("large", ("b",), ROWS, DIM), TableSpec("wide", ("c",), 500, 32)]


def build(*, sharded=(), device=None):
    torch.manual_seed(1)
    model = FeatureEmbeddings(SPECS, layout=None, sharded=sharded, seed=3, device=device)
    return model, torch.rand(3)


def weights(model):
    return {
        table: embedding.weight.detach()
        for collection in model.collections.values()
        for table, embedding in collection.embeddings.items()
    }


def test_first_weights_are_the_same_whatever_is_sharded():
    """And so is what is drawn after them; of a large table that is to be sharded, nothing is made."""
    model, drawn = build()
    assert is_blockwise(ROWS, DIM) and not is_blockwise(500, DIM)
    whole = weights(model)
    assert torch.equal(whole["table_large"], BlockwiseInit("large", ROWS, DIM, std=None, seed=3).whole())
    for sharded in (["large"], ["small"], ["large", "small", "wide"]):
        other, after = build(sharded=sharded)
        assert torch.equal(after, drawn)
        for name, weight in weights(other).items():
            if name.removeprefix("table_") in ("large", "wide") and name.removeprefix("table_") in sharded:
                assert weight.is_meta
            else:
                assert torch.equal(weight, whole[name]), name
        shards = [module for module in other.modules() if isinstance(module, ShardableTables)]
        assert {name for module in shards for name in module.inits} == {
            f"table_{table}" for table in sharded if table != "small"
        }
    assert all(weight.is_meta for weight in weights(build(device=torch.device("meta"))[0]).values())


def test_tables_train_as_others():
    """They are parameters of the same collection, in the order of the tables."""
    model, _ = build()
    assert list(model.collections["dim16"].embeddings) == ["table_small", "table_large"]
    assert all(parameter.requires_grad for parameter in model.parameters())
