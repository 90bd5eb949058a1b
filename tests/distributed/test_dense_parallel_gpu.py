"""FSDP2 on one GPU: a mesh of one rank (NCCL) gathers, drops and sums as several would, with Transformer Engine's FP8.

Several GPUs: ``torchrun --nproc_per_node 2 benchmarks/dense_parallel.py``.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu

# Trains four steps with weights whole and in parts, saves, and reads each one's checkpoint into the other.
CODE = """
import json, sys
import torch
from genrec.configs.loading import load_experiment
from genrec.training import restore
from genrec.training.dense_parallel import shard_dense
from genrec.training.evaluator import Evaluator
from genrec.training.loop import grouped
from genrec.training.optim import LearningRateSchedule
from genrec.training.run import Run
from genrec.training.process_group import process_group
from genrec.training.state import collect_tensors
from genrec.training.step import TrainStep

class InParts(Run):
    def place_dense(self):
        shard_dense(self.model, self.ranks)
        Evaluator.place_dense(self)

value = json.loads(sys.argv[1])

def build(kind, ranks):
    config = load_experiment("ranking", gin_files=[value["gin"]], gin_bindings=value["bindings"])
    run = kind(config, ranks=ranks)
    run.place()
    return run

def train(run):
    rates = LearningRateSchedule(run.optimizers, run.config.trainer, total_steps=9)
    step = TrainStep(
        run.model, run.optimizers, trainer=run.config.trainer, ranks=run.ranks, set_learning_rates=rates,
        average=run.average,
    )
    run.model.train()
    losses = []
    for number, batches in zip(range(1, 5), grouped(run.loader, run.config.trainer.accumulate_steps)):
        result = step(batches, step=number)
        assert result.applied
        losses.append(result.loss_sum)
    return losses + [e.metrics["logloss"] for e in run.evaluate_splits(("valid",))]

def whole(run):
    tensors = collect_tensors(run.state)
    return {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).cpu() for n, t in tensors.items()}

with process_group(value["device"]) as ranks:
    runs = [build(kind, ranks) for kind in (Run, InParts)]
    losses = [train(run) for run in runs]
    torch.testing.assert_close(losses[1], losses[0], rtol=value["rtol"], atol=0)
    for run, other in (runs, runs[::-1]):
        run.output_dir.mkdir(parents=True, exist_ok=True)
        run.checkpoints.save(4)
        again = build(type(other), ranks)
        restore.restore_tensors(run.checkpoints.store.newest(), again.state)
        saved, read = whole(run), whole(again)
        assert saved.keys() == read.keys()
        assert [name for name in saved if not torch.equal(saved[name], read[name])] == []
"""
FP8 = (
    "MixedPrecisionArgs.mixed_precision_dtype = 'fp8'",
    "MixedPrecisionArgs.enable_fp8_for_prediction_head = True",
    "RankingArgs.prediction_head_arch = [16, 1]",
)
PRECISIONS = {
    "float32": ("NetworkArgs.dtype_str = 'float32'",),
    "bfloat16": ("NetworkArgs.dtype_str = 'bfloat16'", "TrainerArgs.grad_clip_norm = 0.05"),
    "tensorwise": (*FP8, "NetworkArgs.dtype_str = 'bfloat16'", "MixedPrecisionArgs.linear_recipe = 'tensorwise'"),
    "delayed": (*FP8, "NetworkArgs.dtype_str = 'bfloat16'", "MixedPrecisionArgs.linear_recipe = 'delayed'"),
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_parts_train_as_whole_weights_do(tiny_gin, script_on_ranks, precision):
    every = ("TrainerArgs.accumulate_steps = 2", "TrainerArgs.ema_decay = 0.9", "TrainerArgs.device = 'cuda'")
    steady = ("NetworkArgs.hidden_dropout = 0.0", "OptimizerArgs.adam_eps = 1e-3")
    value = {
        "gin": str(tiny_gin),
        "device": "cuda",
        "bindings": [*every, *steady, *PRECISIONS[precision]],
        "rtol": 1e-5 if precision == "float32" else 1e-2,
    }
    finished = script_on_ranks(1, CODE, value)
    assert finished.returncode == 0, finished.stderr
