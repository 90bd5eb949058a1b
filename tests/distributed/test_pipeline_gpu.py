"""The pipeline types on GPUs, where they overlap: the same losses, evaluations and weights, bit for bit."""

from __future__ import annotations

import pytest
import torch

from genrec.training.checkpoint import newest_checkpoint, read_tensors
from genrec.training.metrics_log import read_lines

pytestmark = pytest.mark.gpu

TYPES = ("none", "native", "prefetch")
RUN = (
    "TrainerArgs.device = 'cuda'",
    "TrainerArgs.deterministic = True",
    "TrainerArgs.nonfinite = 'skip'",
    "TrainerArgs.max_train_iters = 12",
    "TrainerArgs.eval_interval = 5",
    "TrainerArgs.log_interval = 1",
    "NetworkArgs.kernel_backend = 'pytorch'",
    "OptimizerArgs.embedding_optimizer_str = 'sgd'",
    "OptimizerArgs.embedding_learning_rate = 0.1",
    "item/EmbeddingArgs.item_vocab_size_or_capacity = 5000",
)
# Trains with one command line after the other; the gradients of the seventh step of each are not finite.
DRIVER = """
import json, os, sys
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from genrec.training import overlap, pipeline, table_plan, train
from genrec.training.step import TrainStep

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
train.write_report = lambda *args, **kwargs: []
clip, clips = TrainStep._clip, []

def spoilt(self):
    clips.append(None)
    return clip(self) * (float("nan") if len(clips) % 12 == 7 else 1.0)

backward = TrainStep._backward

def counted(self, *args):
    # With Adam a lookup counts as a step: one more than the steps that have changed the tables, never evaluations.
    loss = backward(self, *args)
    for kernel in () if self.tables is None else self.tables.kernels:
        assert kernel.optimizer != EmbOptimType.ADAM or int(kernel.iter_cpu) == self.tables.num_steps + 1
    return loss

TrainStep._clip, TrainStep._backward = spoilt, counted
{setup}
for arguments in json.loads(sys.argv[1]):
    if code := train.main("ranking", arguments):
        sys.exit(code)
torch.distributed.destroy_process_group()
"""
# Where a later step's batch is on its way, nothing waits for the device.
NO_WAIT = """
ahead = pipeline.StepPipeline.ahead

def watched(self, source):
    torch.cuda.set_sync_debug_mode("error")
    try:
        ahead(self, source)
    finally:
        torch.cuda.set_sync_debug_mode("default")

pipeline.StepPipeline.ahead = watched
"""
# Sharded tables in host memory, of which a small cache on the device holds some 256 rows.
CACHED = """
from torchrec.distributed.types import CacheParams

constraints = table_plan.ParameterConstraints

def cached(**kwargs):
    kwargs |= {"compute_kernels": ["fused_uvm_caching"], "cache_params": CacheParams(load_factor=0.05)}
    return constraints(**kwargs)

table_plan.ParameterConstraints = cached
is_cached = overlap.has_cached_tables

def must_be(embeddings):
    assert is_cached(embeddings)
    return True

overlap.has_cached_tables = must_be
"""


def train_all(tmp_path, script_on_ranks, num_ranks, *bindings, setup=""):
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    commands = []
    for name in TYPES:
        own = (f"TrainerArgs.output_dir = {str(tmp_path / name)!r}", f"TrainerArgs.pipeline_type = {name!r}")
        words = [word for binding in (*RUN, *bindings, *own) for word in ("--gin-bindings", binding)]
        commands.append(["--gin-config-file", "debug_synthetic.gin", *words])
    return script_on_ranks(num_ranks, DRIVER.replace("{setup}", setup), commands, timeout_s=280)


def lines(output_dir):
    kept = read_lines(output_dir / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.endswith("_per_s")} for line in kept]


def tensors(output_dir):
    return read_tensors(newest_checkpoint(output_dir / "checkpoints"), prefixes=("model.", "optimizer."))


def assert_same_runs(tmp_path, finished):
    assert finished.returncode == 0, finished.stderr
    assert [line["step"] for line in lines(tmp_path / "none") if line["event"] == "skipped"] == [7]
    assert len([line for line in lines(tmp_path / "none") if line["event"] == "train"]) == 12
    for name in TYPES[1:]:
        assert lines(tmp_path / name) == lines(tmp_path / "none")
        torch.testing.assert_close(tensors(tmp_path / name), tensors(tmp_path / "none"), rtol=0, atol=0)


def test_one_gpu(tmp_path, script_on_ranks):
    finished = train_all(tmp_path, script_on_ranks, 1, setup=NO_WAIT)
    assert_same_runs(tmp_path, finished)


@pytest.mark.parametrize(
    ("sharding", "optimizer"), [("row_wise", "adam"), ("column_wise", "sgd"), ("table_wise", "rowwise_adagrad")]
)
def test_sharded_tables_on_two_gpus(tmp_path, script_on_ranks, sharding, optimizer):
    bindings = (
        f"item/EmbeddingArgs.sharding_type = {sharding!r}",
        f"OptimizerArgs.embedding_optimizer_str = {optimizer!r}",
    )
    finished = train_all(tmp_path, script_on_ranks, 2, *bindings)
    assert_same_runs(tmp_path, finished)
    assert finished.stderr.count("pipeline_type 'prefetch' is 'native' here") == 1


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
def test_cached_tables_on_two_gpus(tmp_path, script_on_ranks, optimizer):
    """Most rows are not in the cache, so that what is prefetched pushes others out."""
    finished = train_all(
        tmp_path,
        script_on_ranks,
        2,
        "item/EmbeddingArgs.sharding_type = 'row_wise'",
        f"OptimizerArgs.embedding_optimizer_str = {optimizer!r}",
        setup=CACHED,
    )
    assert_same_runs(tmp_path, finished)
    assert "is 'native' here" not in finished.stderr
