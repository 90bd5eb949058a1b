"""Any number of ranks computes what one rank computes on the same global batches (gloo, float32)."""

from __future__ import annotations

import polars
import pyarrow.parquet as pq
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
def unequal_files(tmp_path, write_tiny_dataset):
    """The binding of a dataset whose seven users lie in files of one, four and two."""
    directory = write_tiny_dataset(tmp_path / "prepared")
    for path in sorted(directory.glob("*/00000.parquet")):
        users = pq.read_table(path)
        for number, (start, count) in enumerate(((0, 1), (1, 4), (5, 2))):
            pq.write_table(users.slice(start, count), path.with_name(f"{number:05d}.parquet"))
    return f"DatasetArgs.dataset_path = {str(directory)!r}"


# Of 4 sequences a step every second step has three, which leaves the last of four ranks without. Of 16 every step has
# seven.
@pytest.mark.parametrize(
    ("num_ranks", "global_batch", "balanced"), [(2, 6, False), (3, 6, True), (4, 4, False), (4, 16, False)]
)
def test_ranks_equal_one_rank(tmp_path, arguments, on_forked_ranks, unequal_files, num_ranks, global_batch, balanced):
    one, several, table = tmp_path / "one", tmp_path / "several", tmp_path / "several.parquet"
    settings = (*WHOLE_USERS, unequal_files)
    assert train_main("ranking", arguments(one, *settings, f"TrainerArgs.train_batch_size = {global_batch}")) == 0
    batch = f"TrainerArgs.train_batch_size = {global_batch // num_ranks}"
    shuffler = f"TrainerArgs.enable_balanced_shuffler = {balanced}"
    finished = on_forked_ranks(
        num_ranks,
        [
            ("train", arguments(several, *settings, batch, shuffler)),
            # The one-rank checkpoint, so that the metrics must be equal to the last digit that counts.
            ("evaluate", ["--checkpoint", str(one), "--scores", str(table)]),
        ],
    )
    assert finished.returncode == 0, finished.stderr
    torch.testing.assert_close(losses(several), losses(one), rtol=1e-5, atol=0)
    assert len(losses(one)) == 20
    (balance,) = [line for line in read_lines(several / "metrics.jsonl") if line["event"] == "balance"]
    assert balance["enabled"] == balanced and 1 <= balance["balanced"] <= balance["sliced"] <= num_ranks
    assert ("balanced batches: the costliest rank has" in finished.stderr) == balanced
    assert "the costliest rank has" in (several / "report.html").read_text()

    assert evaluate_main(["--checkpoint", str(one), "--scores", str(tmp_path / "one.parquet")]) == 0
    assert_frame_equal(polars.read_parquet(table), polars.read_parquet(tmp_path / "one.parquet"), rel_tol=1e-6)
    for place, metrics in evaluations(one).items():
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
