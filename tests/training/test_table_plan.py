"""What a table may be, and the sentence for what it can't."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from genrec.configs.loading import load_experiment
from genrec.configs.schema import ConfigError, UnavailableError
from genrec.model.embedding import FeatureEmbeddings
from genrec.model.table_specs import TableSpec, embedding_tables
from genrec.training.datasets import read_run_metadata
from genrec.training.table_budget import table_budget
from genrec.training.table_placement import placement_table, placements
from genrec.training.table_plan import plan_tables
from genrec.training.table_types import AUTO_REPLICATED_NUMBERS, allowed_kernels, allowed_types, sharded_tables

NO_DECAY = "OptimizerArgs.embedding_weight_decay = 0.0"
SGD = "OptimizerArgs.embedding_optimizer_str = 'sgd'"
ADAGRAD = "OptimizerArgs.embedding_optimizer_str = 'rowwise_adagrad'"
ADAM = "OptimizerArgs.embedding_optimizer_str = 'adam'"
WHOLE = ("data_parallel",)


def table(sharding_type, rows=100, dim=16, placement="auto", name="item"):
    return TableSpec(name, (name,), rows, dim, sharding_type, placement)


def allowed(config, spec, *, device_type="cpu", world_size=2):
    return allowed_types(spec, config, device_type=device_type, world_size=world_size)


@pytest.fixture
def config(tiny_config, tmp_path):
    return lambda *bindings: tiny_config(tmp_path / "unused", NO_DECAY, *bindings)


@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "column_wise"])
def test_one_rank_has_fused_tables_where_their_optimizer_can_serve(config, kind):
    one = {"world_size": 1}
    assert allowed(config(SGD), table(kind), **one) == (kind,)
    assert allowed(config(ADAGRAD), table(kind), **one) == (kind,)  # one shard has one moment a row
    assert allowed(config(ADAGRAD), table(kind, rows=1, dim=4), **one) == (kind,)
    assert allowed(config(), table(kind), device_type="cuda", **one) == (kind,)
    # Nothing has to be shared, so what fused optimizers can't do is no reason to stop.
    assert allowed(config(), table(kind), **one) == WHOLE
    assert allowed(config(SGD), table(kind, dim=18), **one) == WHOLE
    assert allowed(config(SGD, "TrainerArgs.grad_clip_norm = 1.0"), table(kind), **one) == WHOLE
    assert allowed(config(SGD), table("auto"), **one) == WHOLE


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
        (table("row_wise", placement="uvm"), (SGD,), 1, "placement 'uvm', and a CPU has host memory alone: 'auto' and"),
        (table("auto", placement="uvm_caching"), (), 2, "placement 'uvm_caching', and a CPU has host memory alone"),
        (
            table("data_parallel", placement="hbm"),
            (),
            2,
            "'data_parallel', by which every rank holds all .* 'row_wise',",
        ),
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


@pytest.mark.parametrize("placement", ["uvm", "uvm_caching"])
def test_host_memory_of_a_gpu_is_for_fused_tables_alone(config, placement):
    gpu = {"device_type": "cuda", "world_size": 1}
    assert allowed(config(), table("auto", placement=placement), **gpu) == ("row_wise", "table_wise", "column_wise")
    with pytest.raises(ConfigError, match=f"placement '{placement}' and sharding type 'data_parallel'"):
        allowed(config(), table("data_parallel", placement=placement), **gpu)
    clipped = config(SGD, "TrainerArgs.grad_clip_norm = 1.0")
    with pytest.raises(UnavailableError, match=r"grad_clip_norm = 1\.0 is not available with a sharded table"):
        sharded_tables([table("row_wise", placement=placement)], clipped, **gpu)
    assert allowed_kernels(table("auto", placement=placement), device_type="cuda") == [f"fused_{placement}"]
    assert allowed_kernels(table("auto"), device_type="cpu") == ["fused"]


@pytest.mark.parametrize("placement", ["uvm", "uvm_caching"])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_dynamic_table_stays_in_the_devices_own_memory(config, placement, device_type):
    """Neither is it asked to move nor may the planner move it."""
    here = {"device_type": device_type, "world_size": 2}
    dynamic = dataclasses.replace(table("row_wise", placement=placement), evict_strategy="lru")
    with pytest.raises(UnavailableError, match=f"table 'item' has placement '{placement}' and is dynamic"):
        sharded_tables([dynamic], config(SGD), **here)
    dynamic = dataclasses.replace(dynamic, placement="auto")
    assert allowed(config(SGD), dynamic, **here) == ("row_wise",)
    assert allowed_kernels(dynamic, device_type=device_type) == ["fused"]


def test_tables_of_a_prepared_dataset_have_the_types_bound(config):
    bound = config(
        "DatasetArgs.sharding_types = {'item': 'Row_Wise'}", "DatasetArgs.table_placements = {'item': 'UVM_caching'}"
    )
    tables = embedding_tables(bound, read_run_metadata(bound))
    assert [spec.placement for spec in tables] == ["auto", "uvm_caching", "auto"]
    assert {spec.name: spec.sharding_type for spec in tables} == {
        "age": "data_parallel",
        "item": "row_wise",
        "action": "data_parallel",
    }
    unknown = config("DatasetArgs.sharding_types = {'movie': 'row_wise'}")
    with pytest.raises(ConfigError, match="table_placements names 'movie', which is no table of this run"):
        embedding_tables(
            misplaced := config("DatasetArgs.table_placements = {'movie': 'hbm'}"), read_run_metadata(misplaced)
        )
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


# Gigabytes of float32, in rows of 128 numbers: 24 GiB with row-wise Adagrad's moments, 5 GiB with a fifth in the cache.
BIG, MIDDLE, SMALL = (
    table("row_wise", rows=rows, dim=128, name=name)
    for rows, name in ((50_000_000, "big"), (5_000_000, "middle"), (1_000_000, "small"))
)


@pytest.fixture
def kernels(config):
    """``kernels([table(...)], hbm_gib=8)``: what TorchRec's planner chooses, by table; no GPU is asked."""

    def plan(tables, *, hbm_gib, host_gib=None, world_size=1, optimizer=ADAGRAD, bindings=()):
        host = () if host_gib is None else (f"TrainerArgs.embedding_host_gib = {host_gib}",)
        asked = config(optimizer, f"TrainerArgs.embedding_hbm_gib = {hbm_gib}", *host, *bindings)
        sharded = sharded_tables(tables, asked, device_type="cuda", world_size=world_size)
        model = FeatureEmbeddings(tables, layout=None, sharded=sharded, device=torch.device("meta"))
        made = plan_tables(
            model,
            tables,
            sharded,
            config=asked,
            budget=table_budget(asked, model, device=torch.device("cuda"), max_num_tokens=1),
            device_type="cuda",
            world_size=world_size,
        )
        rows = placements(tables, made, asked, world_size=world_size)
        for rank in range(world_size):
            assert sum(row.gib[rank] for row in rows) <= hbm_gib
        assert placement_table(rows).row_count == len(tables) + 1
        return {row.table: row.kernel for row in rows}

    return plan


def test_the_biggest_table_leaves_the_card_first(kernels):
    tables = [SMALL, BIG, MIDDLE]
    everything = {"small": "fused", "big": "fused", "middle": "fused"}
    assert kernels(tables, hbm_gib=28) == everything
    assert kernels(tables, hbm_gib=12) == everything | {"big": "fused_uvm_caching"}
    assert kernels(tables, hbm_gib=4) == everything | {"big": "fused_uvm"}  # no room for its cache
    assert kernels(tables, hbm_gib=14, world_size=2) == everything
    smaller = ("TrainerArgs.embedding_cache_load_factor = 0.01",)
    assert kernels(tables, hbm_gib=4, bindings=smaller) == everything | {"big": "fused_uvm_caching"}


def test_moments_count(kernels):
    """Adam's two numbers a weight lie with the weights, in UVM too."""
    assert kernels([MIDDLE], hbm_gib=3) == {"middle": "fused"}
    assert kernels([MIDDLE], hbm_gib=3, optimizer=ADAM) == {"middle": "fused_uvm_caching"}


def test_a_forced_table_stays_where_it_is_forced(kernels):
    forced = table("row_wise", rows=BIG.num_embeddings, dim=128, placement="hbm", name="big")
    assert kernels([forced, MIDDLE], hbm_gib=25) == {"big": "fused", "middle": "fused_uvm_caching"}
    uvm = table("row_wise", rows=1000, dim=128, placement="uvm", name="small")
    cached = table("row_wise", rows=1000, dim=128, placement="uvm_caching", name="middle")
    assert kernels([uvm, cached], hbm_gib=80) == {"small": "fused_uvm", "middle": "fused_uvm_caching"}
    with pytest.raises(UnavailableError) as caught:
        kernels([forced, MIDDLE], hbm_gib=10)
    assert str(caught.value) == (
        "with their moments the shared tables take 26.43 GiB, at least 24.05 GiB of it in the GPUs' own memory, and the"
        " one rank has 10 GiB of that (TrainerArgs.embedding_hbm_gib = 10): a larger TrainerArgs.embedding_hbm_gib,"
        " placement 'uvm_caching' for table 'big' (24.03 GiB) or more ranks may make them fit"
    )
    one_rank = table("table_wise", rows=BIG.num_embeddings, dim=128, placement="hbm", name="big")
    with pytest.raises(UnavailableError, match=r"each of 2 ranks has 20 GiB .*sharding type 'row_wise' in place of"):
        kernels([one_rank], hbm_gib=20, world_size=2)
    cached = table("row_wise", rows=BIG.num_embeddings, dim=128, placement="uvm_caching", name="big")
    with pytest.raises(UnavailableError, match=r"a smaller TrainerArgs\.embedding_cache_load_factor or more ranks"):
        kernels([cached], hbm_gib=4)
    with pytest.raises(UnavailableError, match=r"and 4 GiB of host memory: .*a larger TrainerArgs\.embedding_host_gib"):
        kernels([BIG], hbm_gib=20, host_gib=4)


def test_a_cpu_has_one_memory(config):
    model = torch.nn.Module()
    asked = config("TrainerArgs.embedding_hbm_gib = 4")
    with pytest.raises(
        UnavailableError, match=r"embedding_hbm_gib = 4\.0 is of a GPU's memory, and a CPU has host memory"
    ):
        table_budget(asked, model, device=torch.device("cpu"), max_num_tokens=1)
    budget = table_budget(
        config("TrainerArgs.embedding_host_gib = 4"), model, device=torch.device("cpu"), max_num_tokens=1
    )
    assert budget.device_bytes == budget.host_bytes == 4 * 2**30


def test_what_is_free_on_the_card_is_the_budget(config, monkeypatch):
    """Less a tenth of the card, the rest of the model with gradients and moments, and the activations of a batch."""
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * gib, 80 * gib))
    model = torch.nn.Linear(2**14, 2**14, bias=False, device="meta")  # 1 GiB, thrice that of gradient and moments
    budget = table_budget(config(), model, device=torch.device("cuda"), max_num_tokens=0)
    assert budget.device_bytes == (70 - 8 - 4) * gib
    assert budget.source.startswith("70 GiB free on the card, less 10% of all it has and 4 GiB for the rest")


def test_many_ranks_are_shown_by_the_least_and_the_most(config):
    (row,) = placements([table("row_wise")], None, config(), world_size=64)
    shown = placement_table([row])
    assert [column.header for column in shown.columns][-2:] == ["GiB, least of 64 ranks", "GiB, most"]
