"""Ranks that share the heads of every layer train what one rank trains (gloo, float32)."""

from __future__ import annotations

import shutil

import polars
import pytest
import torch
from polars.testing import assert_frame_equal

from genrec.training.checkpoint import newest_checkpoint, read_tensors
from genrec.training.metrics_log import read_lines
from genrec.training.scoring import main as evaluate_main
from genrec.training.train import main as train_main

# Windows as long as the longest user: of each epoch's two steps with six sequences the second has one, so that where
# two parts of the data are read the second part is empty.
WHOLE_USERS = (
    "DatasetArgs.max_history_seqlen = 40",
    "TrainerArgs.max_train_iters = 20",
    "TrainerArgs.eval_interval = 10",
    "TrainerArgs.eval_batch_size = 4",
    "NetworkArgs.num_attention_heads = 4",
)
NO_DROPOUT = "NetworkArgs.hidden_dropout = 0.0"
DELAYED = (
    "MixedPrecisionArgs.mixed_precision_dtype = 'fp8'",
    "MixedPrecisionArgs.backend = 'emulated'",
    "MixedPrecisionArgs.linear_recipe = 'delayed'",
    "MixedPrecisionArgs.amax_history_len = 3",
    "NetworkArgs.kv_channels = 16",
)
NIGHTLY = pytest.mark.nightly


def losses(output_dir):
    return [line["loss"] for line in read_lines(output_dir / "metrics.jsonl") if line["event"] == "train"]


def evaluations(output_dir):
    lines = read_lines(output_dir / "metrics.jsonl")
    return {(n["event"], n["step"], n["protocol"]): n["metrics"] for n in lines if n["event"] in ("valid", "test")}


def peers(number):
    return f"TensorModelParallelArgs.tensor_model_parallel_size = {number}"


def tensors(output_dir):
    return read_tensors(newest_checkpoint(output_dir / "checkpoints"), prefixes=("",))


def assert_close(actual, expected, *, bound):
    """By norm of each tensor; counts are equal."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].shape == tensor.shape, name
        distance = (actual[name].double() - tensor.double()).norm()
        assert distance <= bound * tensor.double().norm(), (name, distance)


@pytest.mark.parametrize(
    ("num_ranks", "num_peers", "style", "more"),
    [
        (2, 2, "recsys_examples", ("TrainerArgs.grad_clip_norm = 0.1", "TrainerArgs.ema_decay = 0.9")),
        (4, 2, "dlrm_v3", (NO_DROPOUT,)),
        pytest.param(4, 2, "recsys_examples", (NO_DROPOUT,), marks=NIGHTLY),
        pytest.param(4, 2, "research", (NO_DROPOUT,), marks=NIGHTLY),
        pytest.param(4, 4, "recsys_examples", (NO_DROPOUT,), marks=NIGHTLY),
        pytest.param(4, 4, "dlrm_v3", (NO_DROPOUT,), marks=NIGHTLY),
        pytest.param(4, 4, "research", (NO_DROPOUT,), marks=NIGHTLY),
        pytest.param(2, 2, "dlrm_v3", (), marks=NIGHTLY),
        pytest.param(2, 2, "research", (), marks=NIGHTLY),
    ],
)
def test_ranks_equal_one_rank(tmp_path, arguments, on_forked_ranks, num_ranks, num_peers, style, more):
    """With dropout too where all ranks read the same data: its masks don't depend on how many share the layers."""
    settings = (*WHOLE_USERS, f"NetworkArgs.layer_style = {style!r}", *more)
    one, several, table = tmp_path / "one", tmp_path / "several", tmp_path / "several.parquet"
    assert train_main("ranking", arguments(one, *settings, "TrainerArgs.train_batch_size = 6")) == 0
    batch = f"TrainerArgs.train_batch_size = {6 * num_peers // num_ranks}"
    score = ["--checkpoint", str(one), "--scores", str(table), "--gin-bindings", peers(num_peers)]
    commands = [("train", arguments(several, *settings, batch, peers(num_peers))), ("evaluate", score)]
    finished = on_forked_ranks(num_ranks, commands)
    assert finished.returncode == 0, finished.stderr
    assert "UserWarning" not in finished.stderr
    torch.testing.assert_close(losses(several), losses(one), rtol=1e-5, atol=0)
    assert len(losses(one)) == 20
    for place, metrics in evaluations(one).items():
        for name in ("logloss", "ne"):  # AUC counts pairs, of which rounding may turn one round
            assert evaluations(several)[place][name] == pytest.approx(metrics[name], rel=1e-4), place
    assert evaluate_main(["--checkpoint", str(one), "--scores", str(tmp_path / "one.parquet")]) == 0
    assert_frame_equal(polars.read_parquet(table), polars.read_parquet(tmp_path / "one.parquet"), rel_tol=1e-5)


@pytest.mark.parametrize(
    ("more", "bound"),
    [((), 1e-5), pytest.param(DELAYED, 1e-3, marks=NIGHTLY)],
    ids=["float32", "delayed scaling"],
)
def test_a_checkpoint_fits_any_number_of_peers(tmp_path, arguments, on_forked_ranks, more, bound):
    """Four steps on two peers, then four on two, one, or two on four peers and two on two again: as eight on one."""

    def command(name, num_peers, steps):
        iters = f"TrainerArgs.max_train_iters = {steps}"
        settings = (*WHOLE_USERS[2:], "TrainerArgs.ema_decay = 0.9", "NetworkArgs.layer_style = 'dlrm_v3'", *more)
        return "train", arguments(tmp_path / name, *settings, peers(num_peers), iters)

    def on_ranks(number, *commands):
        finished = on_forked_ranks(number, commands)
        assert finished.returncode == 0, finished.stderr

    on_ranks(2, command("stopped", 2, 4), command("whole", 2, 8))
    for name in ("one", "four"):
        shutil.copytree(tmp_path / "stopped", tmp_path / name)
    assert train_main("ranking", command("alone", 1, 8)[1]) == 0
    assert train_main("ranking", command("one", 1, 8)[1]) == 0
    on_ranks(4, command("four", 4, 6))
    on_ranks(2, command("stopped", 2, 8), command("four", 2, 8))

    alone = tensors(tmp_path / "alone")
    assert any(name.startswith("optimizer.encoder") and name.endswith("uvqk.weight.exp_avg_sq") for name in alone)
    for name in ("whole", "stopped", "one", "four"):
        assert_close(tensors(tmp_path / name), alone, bound=bound)
        torch.testing.assert_close(losses(tmp_path / name), losses(tmp_path / "alone"), rtol=bound, atol=0)
    whole, stopped = tensors(tmp_path / "whole"), tensors(tmp_path / "stopped")
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)
    scores = ["--checkpoint", str(tmp_path / "four"), "--scores", str(tmp_path / "scores.parquet")]
    assert evaluate_main(scores) == 2  # it asks for two ranks
    assert evaluate_main([*scores, "--gin-bindings", peers(1)]) == 0


@pytest.mark.nightly
def test_parts_of_a_checkpoint_start_a_run(tmp_path, arguments, on_forked_ranks):
    """Tables alone, or all but them; on two peers as on one."""
    four = ("TrainerArgs.max_train_iters = 4", "TrainerArgs.ema_decay = 0.9", *WHOLE_USERS[2:])
    assert train_main("ranking", arguments(tmp_path / "first", *four)) == 0
    for part in ("embedding", "dense", "all"):
        load = (f"TrainerArgs.ckpt_load_dir = {str(tmp_path / 'first')!r}", f"TrainerArgs.ckpt_load_parts = {part!r}")
        settings = (*four, *load, "TrainerArgs.seed = 7")
        assert train_main("ranking", arguments(tmp_path / f"{part} one", *settings)) == 0
        finished = on_forked_ranks(2, [("train", arguments(tmp_path / f"{part} two", *settings, peers(2)))])
        assert finished.returncode == 0, finished.stderr
        assert_close(tensors(tmp_path / f"{part} two"), tensors(tmp_path / f"{part} one"), bound=1e-5)


def test_first_weights_are_those_of_one_rank(tmp_path, arguments, on_forked_ranks):
    """Bit for bit, with a learning rate that leaves them."""
    still = ("OptimizerArgs.learning_rate = 1e-300", "OptimizerArgs.weight_decay = 0.0", *WHOLE_USERS[2:])
    settings = (*still, "OptimizerArgs.embedding_weight_decay = 0.0", "TrainerArgs.max_train_iters = 1")
    assert train_main("ranking", arguments(tmp_path / "one", *settings)) == 0
    finished = on_forked_ranks(4, [("train", arguments(tmp_path / "four", *settings, peers(4)))])
    assert finished.returncode == 0, finished.stderr
    one, four = tensors(tmp_path / "one"), tensors(tmp_path / "four")
    weights = [name for name in one if name.startswith("model.")]
    assert [name for name in weights if not torch.equal(one[name], four[name])] == []
    assert one.keys() == four.keys()


def test_what_cannot_be_is_refused(tmp_path, arguments, on_forked_ranks, capsys):
    assert train_main("ranking", arguments(tmp_path / "run", peers(2))) == 2
    assert "tensor_model_parallel_size = 2 needs a multiple of 2 ranks, and this run has 1" in capsys.readouterr().err
    finished = on_forked_ranks(3, [("train", arguments(tmp_path / "run", peers(2)))])
    assert finished.returncode == 2
    assert (
        finished.stderr.count("error: ") == 1 and "needs a multiple of 2 ranks, and this run has 3" in finished.stderr
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=NIGHTLY)])
def test_loss_gone_nan_is_located_once(tmp_path, arguments, on_forked_ranks, num_ranks):
    """All peers replay the step; on four ranks gradients are summed over the data's two parts alone."""
    sgd = ("OptimizerArgs.optimizer_str = 'sgd'", "OptimizerArgs.learning_rate = 1e30")
    command = ("train", arguments(tmp_path / "run", *sgd, "TrainerArgs.nonfinite = 'locate'", peers(2)))
    finished = on_forked_ranks(num_ranks, [command])
    assert finished.returncode == 3
    assert finished.stderr.count("error: ") == 1, finished.stderr
    assert "the first value that is not finite on rank 0 is" in finished.stderr


SHARDED = (
    *WHOLE_USERS,
    NO_DROPOUT,
    "OptimizerArgs.embedding_weight_decay = 0.0",
    "OptimizerArgs.embedding_learning_rate = 0.01",
)


@pytest.mark.parametrize(
    ("num_ranks", "num_peers", "optimizer"),
    [
        (2, 2, "rowwise_adagrad"),
        (4, 2, "sgd"),
        pytest.param(4, 2, "rowwise_adagrad", marks=NIGHTLY),
        pytest.param(4, 4, "sgd", marks=NIGHTLY),
    ],
)
def test_tables_sharded_over_all_ranks(tmp_path, arguments, on_forked_ranks, num_ranks, num_peers, optimizer):
    """Peers look up the same rows, and the gradients that they send are the same: TorchRec's mean is one rank's."""
    by_columns = "" if optimizer == "rowwise_adagrad" else ", 'age': 'column_wise'"
    types = f"DatasetArgs.sharding_types = {{'item': 'row_wise', 'action': 'table_wise'{by_columns}}}"
    settings = (*SHARDED, types, f"OptimizerArgs.embedding_optimizer_str = {optimizer!r}")
    one, several = tmp_path / "one", tmp_path / "several"
    on_one = arguments(one, *settings, "TrainerArgs.train_batch_size = 6")
    batch = f"TrainerArgs.train_batch_size = {6 * num_peers // num_ranks}"
    on_several = arguments(several, *settings, batch, peers(num_peers))

    def train(command, ranks, *more):
        finished = on_forked_ranks(ranks, [("train", [*command, *(w for b in more for w in ("--gin-bindings", b))])])
        assert finished.returncode == 0, finished.stderr

    train(on_one, 1)
    train(on_several, num_ranks)
    torch.testing.assert_close(losses(several), losses(one), rtol=1e-5, atol=0)
    assert_close(tensors(several), tensors(one), bound=1e-4)
    for place, metrics in evaluations(one).items():
        for name in ("logloss", "ne"):
            assert evaluations(several)[place][name] == pytest.approx(metrics[name], rel=1e-4), place
    if num_peers < num_ranks:  # another batch of a rank is another configuration
        return
    # Each continues where the other has stopped.
    one.rename(tmp_path / "kept")
    several.rename(one)
    (tmp_path / "kept").rename(several)
    train(on_one, 1, "TrainerArgs.max_train_iters = 23")
    train(on_several, num_ranks, "TrainerArgs.max_train_iters = 23")
    assert len(losses(one)) == 23
    torch.testing.assert_close(losses(several), losses(one), rtol=2e-5, atol=0)
