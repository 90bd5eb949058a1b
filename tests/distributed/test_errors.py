"""An error on any rank is told once, in one sentence, and stops all ranks."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


def own_lines(text):
    """What our program printed; torchrun adds its own account of the ranks that ended."""
    return [line for line in text.splitlines() if line.startswith("error: ")]


def test_bad_configuration_is_told_by_rank_0(tmp_path, arguments, on_ranks):
    finished = on_ranks(2, [("train", arguments(tmp_path / "run", "TrainerArgs.train_batch_size = 0"))], timeout_s=60)
    assert finished.returncode != 0
    assert len(own_lines(finished.stderr)) == 1, finished.stderr
    assert "train_batch_size" in own_lines(finished.stderr)[0]


def test_ranks_with_different_configurations_stop(tmp_path, arguments, on_ranks):
    finished = on_ranks(2, [("train", arguments(tmp_path / "run", "TrainerArgs.seed = {rank}"))], timeout_s=60)
    assert finished.returncode != 0
    assert len(own_lines(finished.stderr)) == 1, finished.stderr
    assert "ranks [1] were started with another configuration than rank 0" in own_lines(finished.stderr)[0]


@pytest.mark.parametrize("nonfinite", ["stop", "locate"])
def test_loss_gone_nan_stops_both(tmp_path, arguments, on_ranks, nonfinite):
    """The replay of "locate" reduces amaxes of delayed scaling over ranks again."""
    bindings = (
        "OptimizerArgs.optimizer_str = 'sgd'",
        "OptimizerArgs.learning_rate = 1e30",
        f"TrainerArgs.nonfinite = {nonfinite!r}",
        "MixedPrecisionArgs.mixed_precision_dtype = 'fp8'",
        "MixedPrecisionArgs.backend = 'emulated'",
        "MixedPrecisionArgs.linear_recipe = 'delayed'",
    )
    finished = on_ranks(2, [("train", arguments(tmp_path / "run", *bindings))], timeout_s=60)
    assert finished.returncode != 0
    assert len(own_lines(finished.stderr)) == 1, finished.stderr
    assert "not finite" in own_lines(finished.stderr)[0]
    assert ("the first value that is not finite on rank" in own_lines(finished.stderr)[0]) == (nonfinite == "locate")


SLOW_RANK_0 = """
import gc, time
from torch.nn.parallel import DistributedDataParallel
from genrec.training import report

close, destroy = report.RunLog.close, torch.distributed.destroy_process_group

def close_slowly(self):
    close(self)
    time.sleep(3.0 if os.environ["RANK"] == "0" else 0.0)

def destroy_and_count():
    count = sum(isinstance(x, DistributedDataParallel) for x in gc.get_objects())
    print(f"replicas alive: {count}", file=sys.stderr, flush=True)
    destroy()

report.RunLog.close, torch.distributed.destroy_process_group = close_slowly, destroy_and_count
"""


def test_rank_0_tells_before_another_ends(tmp_path, arguments, on_ranks):
    """However slow it is: torchrun stops it when another ends. And no replica outlives its group, which may hang."""
    bindings = ("OptimizerArgs.optimizer_str = 'sgd'", "OptimizerArgs.learning_rate = 1e30")
    command = ("train", arguments(tmp_path / "run", *bindings))
    finished = on_ranks(2, [command], timeout_s=60, setup=SLOW_RANK_0)
    assert finished.returncode != 0
    assert len(own_lines(finished.stderr)) == 1, finished.stderr
    assert "replicas alive: 0" in finished.stderr and "replicas alive: 1" not in finished.stderr


FAILS_ON_RANK_0 = """
import atexit, time
from genrec.training import evaluator

def fail(*args, **kwargs):
    started = time.monotonic()
    atexit.register(lambda: print(f"ended after {time.monotonic() - started:.0f} s", file=sys.stderr))
    if os.environ["RANK"] == "0":
        raise RuntimeError("a fault of the program")

evaluator.RunData = fail
"""


def test_a_fault_of_the_program_ends_the_other_ranks_soon(tmp_path, arguments, on_ranks):
    """Python shows it once the rank has left; the others wait for no sentence about it."""
    finished = on_ranks(2, [("train", arguments(tmp_path / "run"))], timeout_s=60, setup=FAILS_ON_RANK_0)
    assert "RuntimeError: a fault of the program" in finished.stderr
    waits = [int(line.split()[2]) for line in finished.stderr.splitlines() if line.startswith("ended after")]
    assert len(waits) == 2 and max(waits) < 15, finished.stderr


NO_ROOM_FOR_THE_LOG = """
import errno
from genrec.training import report

def refuse(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

report.keep_lines = refuse
"""


def test_a_log_that_cannot_be_written_stops_both(tmp_path, arguments, on_forked_ranks):
    finished = on_forked_ranks(2, [("train", arguments(tmp_path / "run"))], timeout_s=60, setup=NO_ROOM_FOR_THE_LOG)
    (sentence,) = own_lines(finished.stderr)
    assert sentence.startswith("error: the log in ") and "No space left on device" in sentence
    assert finished.returncode == 2 and "Traceback" not in finished.stderr


def test_damaged_row_on_rank_1_stops_both(tmp_path, arguments, on_ranks, write_tiny_dataset):
    data = write_tiny_dataset(tmp_path / "bad", train_lengths=(5, 5, 5, 5))
    path = data / "train" / "00000.parquet"
    table = pq.read_table(path)
    items = table["item"].to_pylist()
    items[3][0] = 20  # of the last user, which rank 1 reads
    table = table.set_column(table.schema.get_field_index("item"), "item", pa.array(items, pa.list_(pa.int64())))
    pq.write_table(table, path)
    bindings = (
        f"DatasetArgs.dataset_path = {str(data)!r}",
        "DatasetArgs.shuffle = False",
        "TrainerArgs.train_batch_size = 2",
    )
    finished = on_ranks(2, [("train", arguments(tmp_path / "run", *bindings))], timeout_s=60)
    assert finished.returncode != 0
    assert len(own_lines(finished.stderr)) == 1, finished.stderr
    assert "rank 1: feature 'item' has id 20 but table 'item' has 20 rows" in own_lines(finished.stderr)[0]
    assert "genrec/training" not in finished.stderr  # no traceback of ours; torchrun prints one of its own
