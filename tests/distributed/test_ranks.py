"""Any number of ranks computes what one rank computes on the same global batches (gloo, float32)."""

from __future__ import annotations

import polars
import pytest
import torch
from polars.testing import assert_frame_equal

from genrec.training.checkpoint import newest_checkpoint, read_tensors
from genrec.training.metrics_log import read_lines
from genrec.training.scoring import main as evaluate_main
from genrec.training.train import main as train_main

# Windows as long as the longest user: seven users are seven sequences, so that of each epoch's two steps with six
# sequences a step the second has one sequence, and all ranks but the first have an empty batch.
WHOLE_USERS = (
    "DatasetArgs.max_history_seqlen = 40",
    "NetworkArgs.hidden_dropout = 0.0",
    "TrainerArgs.max_train_iters = 20",
    "TrainerArgs.eval_interval = 10",
    "TrainerArgs.eval_batch_size = 4",
)


def losses(output_dir):
    return [line["loss"] for line in read_lines(output_dir / "metrics.jsonl") if line["event"] == "train"]


def evaluations(output_dir):
    lines = read_lines(output_dir / "metrics.jsonl")
    return {(n["event"], n["step"], n["protocol"]): n["metrics"] for n in lines if n["event"] in ("valid", "test")}


@pytest.fixture
def one_rank(tmp_path, arguments):
    """The output folder of one rank on batches of six."""
    assert train_main("ranking", arguments(tmp_path / "one", *WHOLE_USERS, "TrainerArgs.train_batch_size = 6")) == 0
    return tmp_path / "one"


@pytest.mark.parametrize(("num_ranks", "balanced"), [(2, False), (3, True)])
def test_ranks_equal_one_rank(tmp_path, arguments, on_forked_ranks, one_rank, num_ranks, balanced):
    several = tmp_path / "several"
    batch = f"TrainerArgs.train_batch_size = {6 // num_ranks}"
    shuffler = f"TrainerArgs.enable_balanced_shuffler = {balanced}"
    table = tmp_path / "several.parquet"
    finished = on_forked_ranks(
        num_ranks,
        [
            ("train", arguments(several, *WHOLE_USERS, batch, shuffler)),
            # The one-rank checkpoint, so that the metrics must be equal to the last digit that counts.
            ("evaluate", ["--checkpoint", str(one_rank), "--scores", str(table)]),
        ],
    )
    assert finished.returncode == 0, finished.stderr
    torch.testing.assert_close(losses(several), losses(one_rank), rtol=1e-5, atol=0)
    assert len(losses(one_rank)) == 20
    (balance,) = [line for line in read_lines(several / "metrics.jsonl") if line["event"] == "balance"]
    assert balance["enabled"] == balanced and 1 <= balance["balanced"] <= balance["sliced"] <= num_ranks
    assert ("balanced batches: the costliest rank has" in finished.stderr) == balanced
    assert "the costliest rank has" in (several / "report.html").read_text()

    assert evaluate_main(["--checkpoint", str(one_rank), "--scores", str(tmp_path / "one.parquet")]) == 0
    assert_frame_equal(polars.read_parquet(table), polars.read_parquet(tmp_path / "one.parquet"), rel_tol=1e-6)
    for place, metrics in evaluations(one_rank).items():
        assert evaluations(several)[place] == pytest.approx(metrics, rel=1e-4), place


DELAYED = (
    "MixedPrecisionArgs.mixed_precision_dtype = 'fp8'",
    "MixedPrecisionArgs.backend = 'emulated'",
    "MixedPrecisionArgs.linear_recipe = 'delayed'",
    "MixedPrecisionArgs.amax_history_len = 3",
)


@pytest.mark.parametrize("precision", [(), DELAYED], ids=["float32", "delayed scaling"])
def test_accumulation_over_ranks_and_resume(tmp_path, arguments, on_forked_ranks, precision):
    """Two ranks, two micro-batches: stopped and continued equals not stopped, bit for bit, dropout included."""
    accumulation = ("TrainerArgs.accumulate_steps = 2", "TrainerArgs.ema_decay = 0.9", *precision)
    bindings = ("TrainerArgs.train_batch_size = 1", *accumulation)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    commands = [
        ("train", arguments(whole, *bindings, "TrainerArgs.max_train_iters = 8")),
        ("train", arguments(parts, *bindings, "TrainerArgs.max_train_iters = 3")),
        ("train", arguments(parts, *bindings, "TrainerArgs.max_train_iters = 8")),
    ]
    finished = on_forked_ranks(2, commands)
    assert finished.returncode == 0, finished.stderr
    tensors = [read_tensors(newest_checkpoint(path / "checkpoints"), prefixes=("",)) for path in (whole, parts)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])

    # And one rank continues what two ranks wrote.
    assert train_main("ranking", arguments(parts, *bindings, "TrainerArgs.max_train_iters = 9")) == 0


def test_a_batch_size_makes_up_for_the_number_of_ranks(tmp_path, arguments, on_forked_ranks):
    """A run continued with the same global batches on more ranks has the losses of one that was not stopped."""

    def command(name, batch_size, steps):
        batch = f"TrainerArgs.train_batch_size = {batch_size}"
        return arguments(tmp_path / name, *WHOLE_USERS, batch, f"TrainerArgs.max_train_iters = {steps}")

    assert train_main("ranking", command("whole", 4, 8)) == 0
    assert train_main("ranking", command("parts", 4, 3)) == 0
    finished = on_forked_ranks(2, [("train", command("parts", 3, 8))])
    assert "TrainerArgs.train_batch_size was 4 and is 3" in finished.stderr and finished.returncode
    finished = on_forked_ranks(2, [("train", command("parts", 2, 8))])
    assert "of 1 ranks with 2: with other random numbers than" in finished.stderr, finished.stderr
    torch.testing.assert_close(losses(tmp_path / "parts"), losses(tmp_path / "whole"), rtol=1e-5, atol=0)


def test_batches_of_four_with_few_users(tmp_path, arguments, on_forked_ranks):
    """Seven users do not fill three ranks of four."""
    finished = on_forked_ranks(
        3, [("train", arguments(tmp_path / "run", *WHOLE_USERS, "TrainerArgs.train_batch_size = 4"))]
    )
    assert finished.returncode == 0, finished.stderr
    assert len(losses(tmp_path / "run")) == 20
