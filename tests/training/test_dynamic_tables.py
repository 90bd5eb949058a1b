"""Tables whose ids get rows as they come: they train as plain ones do, and forget whom they have no row for."""

from __future__ import annotations

import importlib.resources
import json
import shutil

import numpy as np
import polars
import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor

from genrec.configs.loading import load_experiment
from genrec.configs.schema import ConfigError
from genrec.data.format import DataError
from genrec.model.ranking import RankingModel
from genrec.model.row_map import row_maps
from genrec.training.checkpoint import CheckpointError
from genrec.training.datasets import read_run_metadata
from genrec.training.loop import grouped
from genrec.training.memory import weight_memory
from genrec.training.metrics_log import read_lines
from genrec.training.ranks import Ranks
from genrec.training.run import Run
from genrec.training.scoring import main as evaluate_main
from genrec.training.staging import Staging
from genrec.training.state import collect_tensors
from genrec.training.step import NonFiniteError, TrainStep
from genrec.training.train import train

ITEM = "model.embeddings.collections.dim16.embeddings.table_item.weight"
AMPLE, SMALL = "DatasetArgs.dynamic_tables = {'item': 30}", "DatasetArgs.dynamic_tables = {'item': 16, 'age': 2}"
LFU = "DatasetArgs.evict_strategy = 'lfu'"
AVERAGE = "TrainerArgs.ema_decay = 0.5"
OPTIMIZERS = {
    "adamw": (),
    "sgd": ("OptimizerArgs.embedding_optimizer_str = 'sgd'",),
    "rowwise_adagrad": (
        "OptimizerArgs.embedding_optimizer_str = 'rowwise_adagrad'",
        "OptimizerArgs.embedding_weight_decay = 0.0",
    ),
}


@pytest.fixture
def make_run(tmp_path, tiny_config):
    """``make_run("TrainerArgs.seed = 1", ..., name="run")``: a run of one rank, started, and its train step."""

    def make(*bindings, name="run"):
        config = tiny_config(tmp_path / name, "DatasetArgs.max_history_seqlen = 40", *bindings)
        ranks = Ranks(rank=0, world_size=1, device=torch.device(config.trainer.device))
        run = Run(config, ranks=ranks)
        run.place()
        run.checkpoints.start()
        step = run.train_step(total_steps=10)
        run.model.train()
        return run, step

    yield make
    if dist.is_initialized():  # of fused tables
        dist.destroy_process_group()


def trained(run_and_step, *numbers):
    """The run after the steps ``numbers``."""
    run, step = run_and_step
    for number, batches in zip(numbers, grouped(run.loader, 1), strict=False):
        assert step(batches, step=number).applied
    return run


def tensors(run):
    found = collect_tensors(run.state).items()
    whole = {n: t.local_shards()[0].tensor if isinstance(t, ShardedTensor) else t for n, t in found}  # of one rank
    return {name: tensor.detach().clone() for name, tensor in whole.items()}


def assert_equal(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_trains_as_a_plain_table_whose_rows_are_the_ids(make_run, optimizer):
    run, step = make_run(AMPLE, "TrainerArgs.accumulate_steps = 2", *OPTIMIZERS[optimizer])
    first = tensors(run)
    batches = [group for group, _ in zip(grouped(run.loader, 2), range(6), strict=False)]
    losses = [step(group, step=number).loss_sum for number, group in enumerate(batches, start=1)]
    rows = run.dynamic.maps["item"].look_up(torch.arange(20))
    assert run.dynamic.num_evicted == 0 and rows.max() < 20

    plain, plain_step = make_run("TrainerArgs.accumulate_steps = 2", *OPTIMIZERS[optimizer])
    with torch.no_grad():
        for name, weight in plain.model.state_dict().items():
            dynamic = first[f"model.{name}"]
            weight.copy_(dynamic[rows] if f"model.{name}" == ITEM else dynamic)
    torch.manual_seed(plain.config.trainer.seed)  # of dropout, as for the other
    assert [plain_step(group, step=number).loss_sum for number, group in enumerate(batches, start=1)] == losses
    last = tensors(run)
    read = rows < 20  # an id that is never trained on has the last row, which other such ids have too
    for name, tensor in tensors(plain).items():
        if "table_item" in name and tensor.dim():
            assert_equal(last[name][rows][read], tensor[read])
        else:
            assert_equal(last[name], tensor)


@pytest.mark.parametrize("tables", [(AMPLE,), (SMALL,), (SMALL, LFU)], ids=["ample", "lru", "lfu"])
def test_ids_may_be_any_numbers(make_run, tmp_path, write_tiny_dataset, tables):
    """A plain table refuses them by name. Their order is kept, and with it all that is computed."""
    shift = 2**63 - 20  # 19 becomes the largest number
    path = f"DatasetArgs.dataset_path = {str(write_tiny_dataset(tmp_path / 'shifted', item_shift=shift))!r}"
    with pytest.raises(DataError, match=r"feature 'item' has id \d+ but table 'item' has 20 rows"):
        trained(make_run(path), 1)
    small = tensors(trained(make_run(*tables), 1, 2, 3))
    run = trained(make_run(*tables, path), 1, 2, 3)
    large = tensors(run)
    ids, large_ids = small.pop("row_map.item.ids"), large.pop("row_map.item.ids")
    assert_equal(large, small)
    assert_equal(large_ids[ids >= 0] - shift, ids[ids >= 0])
    assert run.evaluate("test", "sequential").num_targets == 21


def test_negative_ids_and_items_whose_features_are_read_keep_to_the_table(make_run, tmp_path, write_tiny_dataset):
    negative = f"DatasetArgs.dataset_path = {str(write_tiny_dataset(tmp_path / 'negative', item_shift=-1))!r}"
    with pytest.raises(DataError, match="'item' has id -1 but dynamic table 'item' takes ids from 0 on"):
        trained(make_run(AMPLE, negative), 1)
    shifted = f"DatasetArgs.dataset_path = {str(write_tiny_dataset(tmp_path / 'shifted', item_shift=30))!r}"
    with pytest.raises(DataError, match="but table 'item' has 20 rows"):
        trained(make_run(AMPLE, shifted, "DatasetArgs.item_features = ['genres']"), 1)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_row_that_changes_hands_starts_anew(make_run, make_batch, optimizer):
    run, step = make_run(AVERAGE, "DatasetArgs.dynamic_tables = {'item': 7}", *OPTIMIZERS[optimizer])
    first = tensors(run)[ITEM]
    some, others = make_batch([4], seed=1), make_batch([7], seed=2)
    step([some], step=1)
    step([some], step=2)
    before = tensors(run)
    run.dynamic.admit([others], step=3)
    admission = run.dynamic._admissions["item"]
    rows = admission.evicted
    assert len(rows) > 0 and run.dynamic.num_evicted == len(rows)
    after = tensors(run)
    kept = torch.ones(8, dtype=torch.bool)
    kept[rows] = False
    of_item = [name for name in before if "table_item" in name and before[name].dim()]
    assert len(of_item) == {"adamw": 4, "sgd": 2, "rowwise_adagrad": 3}[optimizer]
    for name in before:
        if name in of_item:
            assert_equal(after[name][kept], before[name][kept])
            assert not torch.equal(after[name][rows], before[name][rows])
        elif not name.startswith("row_map"):
            assert_equal(after[name], before[name])
    limit = 8**-0.5
    new = after[ITEM][rows]
    assert 0.5 * limit < new.abs().max() <= limit and first.abs().max() <= limit and new.unique().numel() == new.numel()
    assert_equal(after[f"average.{ITEM.removeprefix('model.')}"][rows], new)
    for name in (name for name in of_item if name.startswith("optimizer")):
        assert not after[name][rows].any()


def test_a_step_must_know_of_them(make_run):
    run, step = make_run(AMPLE)
    with pytest.raises(AssertionError, match="are to be told the ids"):
        TrainStep(
            run.model,
            run.optimizers,
            trainer=step.trainer,
            ranks=step.ranks,
            set_learning_rates=step.set_learning_rates,
        )


def test_first_weights_follow_the_configured_spread(make_run, make_batch):
    run, _ = make_run("DatasetArgs.dynamic_tables = {'item': 2}", "NetworkArgs.embedding_init_std = 1e-3")
    for step, seed in enumerate((1, 2), start=1):
        run.dynamic.admit([make_batch([2], seed=seed)], step=step)
    rows = run.dynamic._overwritten[0].rows
    new = tensors(run)[ITEM][rows]
    assert 0 < new.abs().max() < 6e-3


FUSED = ("DatasetArgs.sharding_types = {'item': 'row_wise', 'age': 'row_wise'}", *OPTIMIZERS["rowwise_adagrad"])


@pytest.mark.parametrize("more", [(AVERAGE,), FUSED], ids=["whole", "fused"])
def test_a_step_that_is_left_out_leaves_no_trace(make_run, make_batch, more):
    run, step = make_run(SMALL, "TrainerArgs.nonfinite = 'skip'", *more)
    assert (run.tables is not None) == (more == FUSED)
    step([make_batch([9, 9], seed=1)], step=1)
    before, spoiled = tensors(run), make_batch([9, 9, 9], seed=2)
    hook = run.model.head.register_forward_hook(lambda module, inputs, output: output * float("nan"))
    num_evicted = run.dynamic.num_evicted
    assert not step([spoiled], step=2).applied
    hook.remove()
    assert_equal(tensors(run), before)
    assert run.dynamic.num_evicted == num_evicted
    assert step([spoiled], step=3).applied
    assert run.dynamic.num_evicted > num_evicted
    after = tensors(run)
    assert not torch.equal(after["row_map.item.ids"], before["row_map.item.ids"])


def test_a_step_that_is_looked_into_is_left_out_too(make_run, make_batch):
    run, step = make_run(SMALL, "TrainerArgs.nonfinite = 'locate'")
    step([make_batch([9, 9], seed=1)], step=1)
    before = tensors(run)
    run.model.head.register_forward_hook(lambda module, inputs, output: output * float("nan"))
    with pytest.raises(NonFiniteError, match="the first value that is not finite is the output of head"):
        step([make_batch([9, 9, 9], seed=2)], step=2)
    assert_equal(tensors(run), before)


def test_what_a_save_in_the_background_writes_stays_as_it_was(make_run, make_batch):
    run, step = make_run(SMALL)
    step([make_batch([9, 9], seed=1)], step=1)
    before = tensors(run)
    staged = Staging(torch.device("cpu")).copy(collect_tensors(run.state))
    step([make_batch([9, 9, 9], seed=2)], step=2)
    maps = [name for name in before if name.startswith("row_map.")]
    after = tensors(run)
    assert len(maps) == 6 and not any(torch.equal(after[name], before[name]) for name in maps if "item" in name)
    assert_equal({name: staged[name] for name in maps}, {name: before[name] for name in maps})


def test_steps_without_targets_admit_nobody(make_run, make_batch):
    run, step = make_run(AMPLE)
    step([make_batch([3])], step=1)
    before = tensors(run)
    step([make_batch([3], num_candidates=[0])], step=2)
    step([make_batch([])], step=3)
    assert_equal(tensors(run), before)


@pytest.mark.parametrize("strategy", ["lru", "lfu"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_continuing_equals_not_stopping(make_run, strategy, optimizer):
    bindings = (SMALL, f"DatasetArgs.evict_strategy = {strategy!r}", *OPTIMIZERS[optimizer])
    small_batches = ("TrainerArgs.train_batch_size = 2", "DatasetArgs.max_history_seqlen = 8")
    whole = trained(make_run(*bindings, *small_batches, name="whole"), 1, 2, 3, 4, 5, 6)
    assert whole.dynamic.num_evicted > 0
    trained(make_run(*bindings, *small_batches, name="parts"), 1, 2, 3).checkpoints.save(3)
    parts = trained(make_run(*bindings, *small_batches, name="parts"), 4, 5, 6)
    assert_equal(tensors(parts), tensors(whole))


def test_evaluation_changes_nothing_and_unseen_ids_share_the_last_row(make_run, make_batch):
    run, step = make_run("DatasetArgs.dynamic_tables = {'item': 5}")
    step([make_batch([9, 9])], step=1)
    before = tensors(run)
    run.evaluate("valid", "sequential")
    assert_equal(tensors(run), before)
    features = run.model.embeddings._rows(make_batch([40], seed=5).features)
    ids, rows = make_batch([40], seed=5).features["item"].values(), features["item"].values()
    known = torch.isin(ids, before["row_map.item.ids"])
    assert known.any() and not known.all()
    assert (rows[~known] == 5).all()
    assert_equal(before["row_map.item.ids"][rows[known]], ids[known])


def test_scores_of_a_checkpoint_use_its_map(tmp_path, tiny_config, write_tiny_dataset):
    """And ids beyond the vocabulary, which have no original id, are told as they are."""
    shifted = write_tiny_dataset(tmp_path / "shifted", item_shift=18)
    train(tiny_config(tmp_path / "run", SMALL, f"DatasetArgs.dataset_path = {str(shifted)!r}"))
    path = tmp_path / "scores.parquet"
    assert evaluate_main(["--checkpoint", str(tmp_path / "run"), "--scores", str(path)]) == 0
    scores = polars.read_parquet(path)
    assert {*scores["item_id"].to_list()} <= {1018, 1019, *range(20, 38)}
    label, score = scores["label"].to_numpy(), scores["score"].to_numpy()
    lines = [line for line in read_lines(tmp_path / "run/metrics.jsonl") if line["event"] == "test"]
    (line,) = [line for line in lines if line["protocol"] == "sequential"]
    loss = -np.log(np.where(label == 1, score, 1 - score)).mean()
    assert loss == pytest.approx(line["metrics"]["logloss"], rel=1e-5)


def test_starting_from_another_run_takes_its_map(make_run):
    source = trained(make_run(SMALL, name="first"), 1, 2, 3)
    source.checkpoints.save(3)
    first = tensors(source)
    start = f"TrainerArgs.ckpt_load_dir = {str(source.output_dir)!r}"
    for parts in ("all", "embedding", "dense"):
        taken = parts != "dense"
        run, step = make_run(SMALL, start, f"TrainerArgs.ckpt_load_parts = {parts!r}", name=parts)
        second = tensors(run)
        for name in (ITEM, "row_map.item.ids", "row_map.item.counts"):
            assert torch.equal(second[name], first[name]) == taken, name
        last_step = run.dynamic.maps["item"].last_step
        # The order is kept, and all are older than what the new run reads.
        assert_equal(last_step, first["row_map.item.last_step"] - 3 if taken else torch.zeros_like(last_step))
        trained((run, step), 1)


def test_maps_of_another_meaning_are_refused(make_run, tmp_path, tiny_dataset):
    trained(make_run(SMALL, name="first"), 1).checkpoints.save(1)
    trained(make_run(name="plain"), 1).checkpoints.save(1)
    start = f"TrainerArgs.ckpt_load_dir = {str(tmp_path / 'first')!r}"
    with pytest.raises(CheckpointError, match=r"of another model: .* is \(\d+, 16\) there and \(\d+, 16\) here"):
        make_run(AMPLE, start, name="second")
    from_plain = f"TrainerArgs.ckpt_load_dir = {str(tmp_path / 'plain')!r}"
    with pytest.raises(CheckpointError, match="table 'item' is not dynamic in both, or of another capacity"):
        make_run("DatasetArgs.dynamic_tables = {'item': 19}", from_plain, name="third")
    grown = tmp_path / "grown"
    shutil.copytree(tiny_dataset, grown)
    ids = [900, *range(1000, 1020)]
    polars.DataFrame({"original_id": ids, "genres": [[1]] * 21}).write_parquet(grown / "vocabulary/item.parquet")
    metadata = json.loads((grown / "metadata.json").read_text())
    (grown / "metadata.json").write_text(json.dumps({**metadata, "num_items": 21}))
    path = f"DatasetArgs.dataset_path = {str(grown)!r}"
    with pytest.raises(CheckpointError, match="another vocabulary of table 'item', which is dynamic"):
        make_run(SMALL, start, path, name="fourth")
    make_run(SMALL, start, path, "TrainerArgs.ckpt_load_parts = 'dense'", name="fifth")


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_gpu_gives_the_rows_that_a_cpu_gives(make_run, make_batch, optimizer):
    runs = {
        device: trained(make_run(SMALL, LFU, AVERAGE, *OPTIMIZERS[optimizer], f"TrainerArgs.device = {device!r}",
                                 name=device), 1, 2, 3, 4)
        for device in ("cpu", "cuda")
    }  # fmt: skip
    maps = [{name: t.cpu() for name, t in tensors(run).items() if name.startswith("row_map")} for run in runs.values()]
    assert_equal(*maps)
    run = runs["cuda"]
    before = tensors(run)
    run.dynamic.admit([make_batch([8], seed=5)], step=5)
    assert len(run.dynamic._admissions["item"].evicted) > 0
    assert not torch.equal(tensors(run)[ITEM], before[ITEM])
    run.dynamic.undo()
    assert_equal(tensors(run), before)
    run.checkpoints.save(4)
    again, _ = make_run(SMALL, LFU, AVERAGE, *OPTIMIZERS[optimizer], "TrainerArgs.device = 'cuda'", name="cuda")
    assert_equal(tensors(again), before)


def test_a_table_that_there_is_not_is_refused(make_run):
    with pytest.raises(ConfigError, match=r"DatasetArgs\.dynamic_tables names 'movie', which is no table of this run"):
        make_run("DatasetArgs.dynamic_tables = {'movie': 3}")


def test_a_check_counts_the_maps(tmp_path, tiny_config):
    config = tiny_config(tmp_path / "run", SMALL)
    model = RankingModel(config, metadata=read_run_metadata(config), device=torch.device("meta"))
    counted = weight_memory(config, model, world_size=1)["maps of dynamic tables"]
    kept = [tensor for row_map in row_maps(model).values() for tensor in row_map.state.values()]
    # A full map has ids and rows in the order of ids besides.
    assert counted == 8 * sum(tensor.numel() for tensor in kept) + 2 * 8 * (16 + 2)
    assert "maps of dynamic tables" not in weight_memory(tiny_config(tmp_path / "plain"), model.head, world_size=1)


def test_recsys_examples_tables_train_on_more_ids_than_rows(tmp_path, caplog):
    preset = (importlib.resources.files("genrec.configs") / "debug_synthetic.gin").read_text()
    path = tmp_path / "dynamic.gin"
    path.write_text(preset.replace("item/EmbeddingArgs", "item/DynamicEmbeddingArgs"))
    bindings = (
        f"TrainerArgs.output_dir = {str(tmp_path / 'run')!r}",
        "TrainerArgs.eval_interval = 0",
        "items/RandomDistribution.high = 9223372036854775807",
        "item/DynamicEmbeddingArgs.item_vocab_size_or_capacity = 10",
        "item/DynamicEmbeddingArgs.evict_strategy = 'lfu'",
        "item/DynamicEmbeddingArgs.item_vocab_gpu_capacity_ratio = 0",
        "item/DynamicEmbeddingArgs.dist_type = 'hash_roundrobin'",
    )
    caplog.set_level("INFO")
    config = load_experiment("ranking", gin_files=[str(path)], gin_bindings=bindings)
    train(config)
    said = [record.getMessage() for record in caplog.records]
    for once in (
        "DynamicEmbeddingArgs.item_vocab_gpu_capacity_ratio, DynamicEmbeddingArgs.dist_type of table 'item' has no",
        "table 'item' is full at step",
        "table 'item' has fewer rows than step 1 reads ids",
    ):
        assert sum(line.startswith(once) for line in said) == 1, once
