"""Tables in host memory that a GPU reads, with a cache and without: they train, save and load as those of the card."""

from __future__ import annotations

import pytest
import torch

from genrec.configs.loading import load_experiment
from genrec.configs.schema import UnavailableError
from genrec.model import table_init
from genrec.training import pieces
from genrec.training.metrics_log import read_lines
from genrec.training.run import Run
from genrec.training.step import TrainStep
from genrec.training.train import train

pytestmark = pytest.mark.gpu

ON_GPU = (
    "TrainerArgs.device = 'cuda'",
    "TrainerArgs.embedding_cache_load_factor = 0.1",
    "NetworkArgs.kernel_backend = 'pytorch'",
    "NetworkArgs.hidden_dropout = 0.0",
    "OptimizerArgs.embedding_weight_decay = 0.0",
    "OptimizerArgs.embedding_learning_rate = 0.1",
)
PLACEMENTS = ("hbm", "uvm", "uvm_caching")
WHOLE = "DatasetArgs.sharding_types = {'item': 'data_parallel'}"


def optimizer(name):
    return f"OptimizerArgs.embedding_optimizer_str = {name!r}"


def placed(placement, kind="row_wise"):
    return (
        f"DatasetArgs.sharding_types = {{'item': {kind!r}, 'action': 'table_wise'}}",
        f"DatasetArgs.table_placements = {{'item': {placement!r}}}",
    )


def losses(output_dir):
    return [line["loss"] for line in read_lines(output_dir / "metrics.jsonl") if line["event"] == "train"]


def state(tensors):
    return {name: tensor for name, tensor in tensors.items() if name.startswith(("model", "optimizer"))}


@pytest.mark.parametrize("name", ["sgd", "rowwise_adagrad"])
def test_any_placement_trains_as_a_whole_table(tmp_path, tiny_config, last_tensors, name):
    train(tiny_config(tmp_path / "whole", *ON_GPU, optimizer(name), WHOLE))
    for kind, placement in [("row_wise", p) for p in PLACEMENTS] + [
        ("table_wise", "uvm"),
        ("column_wise", "uvm_caching"),
    ]:
        run = tmp_path / f"{kind}_{placement}"
        train(tiny_config(run, *ON_GPU, optimizer(name), *placed(placement, kind)))
        torch.testing.assert_close(losses(run), losses(tmp_path / "whole"), rtol=1e-5, atol=0)
        expected = state(last_tensors(tmp_path / "whole"))
        torch.testing.assert_close(state(last_tensors(run)), expected, rtol=1e-4, atol=1e-5)


def test_adam_trains_in_host_memory_as_on_the_card(tmp_path, tiny_config, last_tensors):
    for placement in PLACEMENTS:
        train(tiny_config(tmp_path / placement, *ON_GPU, optimizer("adam"), *placed(placement)))
        torch.testing.assert_close(losses(tmp_path / placement), losses(tmp_path / "hbm"), rtol=1e-5, atol=0)
        expected = state(last_tensors(tmp_path / "hbm"))
        torch.testing.assert_close(state(last_tensors(tmp_path / placement)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["rowwise_adagrad", "adam"])
def test_ten_and_ten_steps_are_twenty_in_a_cache(tmp_path, tiny_config, last_tensors, name):
    """What the cache holds is saved, and what is loaded is not hidden by what the cache held; in pieces too."""
    settings = (*ON_GPU, optimizer(name), *placed("uvm_caching"), "TrainerArgs.ckpt_save_interval = 5")
    train(tiny_config(tmp_path / "one", *settings, "TrainerArgs.max_train_iters = 20"))
    for steps in (10, 20):
        train(tiny_config(tmp_path / "two", *settings, f"TrainerArgs.max_train_iters = {steps}"))
    one, two = state(last_tensors(tmp_path / "one")), state(last_tensors(tmp_path / "two"))
    # Gradients of tables that are not sharded are summed in any order on a GPU.
    torch.testing.assert_close(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-5, atol=0)
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)


def test_placements_load_each_others_checkpoints(tmp_path, tiny_config, last_tensors):
    """One step that moves nothing shows what was loaded."""
    train(tiny_config(tmp_path / "uvm_caching", *ON_GPU, optimizer("rowwise_adagrad"), *placed("uvm_caching")))
    expected = state(last_tensors(tmp_path / "uvm_caching"))
    still = ("OptimizerArgs.learning_rate = 1e-12", "TrainerArgs.max_train_iters = 1")
    source = "uvm_caching"
    for number, placement in enumerate(("hbm", "uvm", "uvm_caching", "whole")):
        places = (WHOLE,) if placement == "whole" else placed(placement)
        load = f"TrainerArgs.ckpt_load_dir = {str(tmp_path / source)!r}"
        run = tmp_path / f"{number}_{placement}"
        moving = [binding for binding in ON_GPU if "embedding_learning_rate" not in binding]
        rate = "OptimizerArgs.embedding_learning_rate = 1e-12"
        train(tiny_config(run, *moving, rate, *still, optimizer("rowwise_adagrad"), *places, load))
        item = "model.embeddings.collections.dim16.embeddings.table_item.weight"
        torch.testing.assert_close(state(last_tensors(run))[item], expected[item], rtol=0, atol=1e-6)
        source = run.name


def test_large_tables_in_host_memory(tmp_path, tiny_config, last_tensors, monkeypatch):
    """Made block by block, saved piece by piece: the same as a whole one, that is not larger than its limits."""
    monkeypatch.setattr(table_init, "BLOCKWISE_NUMBERS", 64)
    monkeypatch.setattr(table_init, "BLOCK_NUMBERS", 3 * 16)
    monkeypatch.setattr(pieces, "PIECE_NUMBERS", 7 * 16)
    settings = (*ON_GPU, optimizer("rowwise_adagrad"))
    train(tiny_config(tmp_path / "whole", *settings, WHOLE))
    for placement in ("uvm", "uvm_caching"):
        for steps in (3, 6):
            length = f"TrainerArgs.max_train_iters = {steps}"
            train(tiny_config(tmp_path / placement, *settings, *placed(placement), length))
        torch.testing.assert_close(losses(tmp_path / placement), losses(tmp_path / "whole"), rtol=1e-5, atol=0)
        expected = state(last_tensors(tmp_path / "whole"))
        torch.testing.assert_close(state(last_tensors(tmp_path / placement)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_is_not_finite_never_reaches_a_table_in_host_memory(tmp_path, tiny_config, monkeypatch, placement):
    attempt, moved = TrainStep.attempt, []

    def spoiled(self, batches, *, step, **options):
        head = self._bare.head.register_forward_hook(lambda m, i, o: o * (float("nan") if step == 2 else 1.0))
        before = table(self)
        result = attempt(self, batches, step=step, **options)
        head.remove()
        moved.append(not torch.equal(before, table(self)))
        return result

    def table(step):
        (weight,) = [t for name, t in step.tables.weights().items() if "item" in name]  # with the cache written back
        return weight.local_shards()[0].tensor.detach().clone()

    monkeypatch.setattr(TrainStep, "attempt", spoiled)
    skip = ("TrainerArgs.nonfinite = 'skip'", "TrainerArgs.max_train_iters = 3")
    train(tiny_config(tmp_path, *ON_GPU, optimizer("rowwise_adagrad"), *skip, *placed(placement)))
    assert moved == [True, False, True]


@pytest.mark.parametrize("name", ["rowwise_adagrad", "adam"])
def test_rows_leave_the_cache_and_come_back(tmp_path, last_tensors, name):
    """500 rows, of which FBGEMM's cache has room for 64: two sets of 32."""

    def run(placement, steps):
        bindings = (
            f"TrainerArgs.output_dir = {str(tmp_path / placement)!r}",
            "TrainerArgs.device = 'cuda'",
            "TrainerArgs.log_interval = 1",
            f"TrainerArgs.max_train_iters = {steps}",
            "TrainerArgs.embedding_cache_load_factor = 0.1",
            "NetworkArgs.kernel_backend = 'pytorch'",
            "NetworkArgs.hidden_dropout = 0.0",
            optimizer(name),
            "OptimizerArgs.embedding_learning_rate = 0.1",
            "item/EmbeddingArgs.sharding_type = 'row_wise'",
            f"item/EmbeddingArgs.placement = {placement!r}",
        )
        train(load_experiment("ranking", gin_files=["debug_synthetic.gin"], gin_bindings=bindings))

    run("hbm", 20)
    run("uvm", 20)
    for steps in (10, 20):  # saved and loaded half way
        run("uvm_caching", steps)
    for placement in ("uvm", "uvm_caching"):
        torch.testing.assert_close(losses(tmp_path / placement), losses(tmp_path / "hbm"), rtol=1e-5, atol=0)
        expected = state(last_tensors(tmp_path / "hbm"))
        torch.testing.assert_close(state(last_tensors(tmp_path / placement)), expected, rtol=1e-4, atol=1e-5)


def test_a_small_budget_moves_the_table_to_the_host(tmp_path, tiny_config, monkeypatch):
    """By the planner, with nothing forced; and what has no place at all is told in one sentence."""
    place, found = Run.place, {}

    def recording(self):
        place(self)
        found.update({row.table: row.kernel for row in self.placements})

    monkeypatch.setattr(Run, "place", recording)
    asked = (*ON_GPU, optimizer("rowwise_adagrad"), "DatasetArgs.sharding_types = {'item': 'row_wise'}")
    train(tiny_config(tmp_path / "large", *asked))
    assert found["item"] == "fused"
    small = "TrainerArgs.embedding_hbm_gib = 0.000001"  # 1,073 bytes; the table has 1,360 with moments
    train(tiny_config(tmp_path / "small", *asked, small))
    assert found["item"] == "fused_uvm_caching"
    with pytest.raises(UnavailableError, match=r"and the one rank has .* GiB of that .*embedding_hbm_gib"):
        train(tiny_config(tmp_path / "none", *asked, "TrainerArgs.embedding_hbm_gib = 0.00000001"))
