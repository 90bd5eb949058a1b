"""What a table may be, and the sentence for what it can't."""

from __future__ import annotations

import pytest

from genrec.configs.loading import load_experiment
from genrec.configs.schema import ConfigError, UnavailableError
from genrec.model.embedding import TableSpec, embedding_tables
from genrec.training.datasets import read_run_metadata
from genrec.training.table_plan import (
    AUTO_REPLICATED_NUMBERS,
    allowed_types,
    placement_table,
    placements,
    sharded_tables,
)

NO_DECAY = "OptimizerArgs.embedding_weight_decay = 0.0"
SGD = "OptimizerArgs.embedding_optimizer_str = 'sgd'"
ADAGRAD = "OptimizerArgs.embedding_optimizer_str = 'rowwise_adagrad'"
WHOLE = ("data_parallel",)


def table(sharding_type, rows=100, dim=16):
    return TableSpec("item", ("item",), rows, dim, sharding_type)


def allowed(config, spec, *, device_type="cpu", world_size=2):
    return allowed_types(spec, config, device_type=device_type, world_size=world_size)


@pytest.fixture
def config(tiny_config, tmp_path):
    return lambda *bindings: tiny_config(tmp_path / "unused", NO_DECAY, *bindings)


@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "column_wise", "model_parallel", "auto"])
def test_one_rank_has_whole_tables(config, kind):
    assert allowed(config(), table(kind), world_size=1) == WHOLE


@pytest.mark.parametrize(
    ("kind", "bindings", "world_size", "types"),
    [
        ("data_parallel", (), 4, WHOLE),
        ("row_wise", (SGD,), 4, ("row_wise",)),
        ("column_wise", (SGD,), 4, ("column_wise",)),
        ("model_parallel", (SGD,), 4, ("row_wise", "table_wise", "column_wise")),
        ("model_parallel", (SGD,), 3, ("row_wise", "table_wise", "column_wise")),  # two of three ranks have columns
        ("model_parallel", (ADAGRAD,), 4, ("row_wise", "table_wise")),
        ("auto", (SGD,), 2, WHOLE),
    ],
)
def test_types_of_a_small_table(config, kind, bindings, world_size, types):
    assert allowed(config(*bindings), table(kind), world_size=world_size) == types


def test_auto_shares_large_tables_where_their_optimizer_allows(config):
    large = table("auto", rows=AUTO_REPLICATED_NUMBERS // 16 + 1)
    assert allowed(config(ADAGRAD), large) == ("row_wise", "table_wise")
    assert allowed(config(), large) == WHOLE  # Adam on a CPU
    assert allowed(config(), large, device_type="cuda") == ("row_wise", "table_wise", "column_wise")


@pytest.mark.parametrize(
    ("spec", "bindings", "world_size", "told"),
    [
        (table("row_wise"), (), 2, r"FBGEMM has no 'adamw' for sharded tables on a CPU: .*'rowwise_adagrad' are there"),
        (table("row_wise", dim=18), (SGD,), 2, "18 columns, which must be a multiple of 4"),
        (table("row_wise", rows=4), (SGD,), 3, "its 4 rows, .*leave one of 3 without any; it can be 'table_wise'"),
        (table("column_wise", dim=4), (SGD,), 3, "its 4 columns can't be cut .*; it can be 'row_wise', 'table_wise'"),
        (table("column_wise"), (ADAGRAD,), 2, "one moment a row, which columns would not share"),
    ],
)
def test_what_cannot_be_is_one_sentence(config, spec, bindings, world_size, told):
    with pytest.raises((ConfigError, UnavailableError), match=told) as caught:
        allowed(config(*bindings), spec, world_size=world_size)
    assert "table 'item'" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "binding",
    [
        "TrainerArgs.accumulate_steps = 2",
        "TrainerArgs.grad_clip_norm = 1.0",
        "TrainerArgs.ema_decay = 0.9",
        "OptimizerArgs.embedding_weight_decay = 0.1",
    ],
)
def test_what_a_fused_optimizer_cannot_do_is_refused_with_sharded_tables_alone(config, binding):
    asked = config(SGD, binding)
    with pytest.raises(UnavailableError, match=f"{binding} is not available with a sharded table \\('item'\\)"):
        sharded_tables([table("row_wise")], asked, device_type="cpu", world_size=2)
    assert sharded_tables([table("auto")], asked, device_type="cpu", world_size=2) == {}
    assert sharded_tables([table("row_wise")], asked, device_type="cpu", world_size=1) == {}


def test_tables_of_a_prepared_dataset_have_the_types_bound(config):
    bound = config("DatasetArgs.sharding_types = {'item': 'Row_Wise'}")
    tables = embedding_tables(bound, read_run_metadata(bound))
    assert {spec.name: spec.sharding_type for spec in tables} == {
        "age": "data_parallel",
        "item": "row_wise",
        "action": "data_parallel",
    }
    unknown = config("DatasetArgs.sharding_types = {'movie': 'row_wise'}")
    with pytest.raises(
        ConfigError, match="names 'movie', which is no table of this run: it has 'age', 'item', 'action'"
    ):
        embedding_tables(unknown, read_run_metadata(unknown))


def test_an_unknown_type_is_refused(tiny_gin):
    binding = "DatasetArgs.sharding_types = {'item': 'rows'}"
    with pytest.raises(ConfigError, match="must be one of 'data_parallel', 'model_parallel', 'row_wise'"):
        load_experiment("ranking", gin_files=[str(tiny_gin)], gin_bindings=[binding])


def test_whole_tables_are_shown_with_their_moments(config):
    (row,) = placements([table("auto", rows=2**20, dim=256)], None, config(), world_size=2)
    assert (row.asked, row.sharding, row.kernel) == ("auto", "data_parallel", "dense")
    assert row.gib == (3.0, 3.0)  # 1 GiB of weights, twice that of Adam's moments
    (row,) = placements([table("auto", rows=2**20, dim=256)], None, config(ADAGRAD), world_size=2)
    assert row.gib == pytest.approx((1.0 + 1 / 256,) * 2)
    assert placement_table([row]).row_count == 2
