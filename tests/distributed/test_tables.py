"""Tables shared by ranks train as whole ones do; a checkpoint of any ranks and any sharding fits any other."""

from __future__ import annotations

import itertools

import pytest
import torch

from genrec.training.checkpoint import newest_checkpoint, read_tensors
from genrec.training.metrics_log import read_lines
from genrec.training.train import main as train_main

# Seven users are seven windows, one batch an epoch of which four ranks get 2, 2, 2 and 1.
SGD = ("OptimizerArgs.optimizer_str = 'adam'", "OptimizerArgs.embedding_optimizer_str = 'sgd'")
ADAGRAD = ("OptimizerArgs.optimizer_str = 'adam'", "OptimizerArgs.embedding_optimizer_str = 'rowwise_adagrad'")
RUN = (
    "DatasetArgs.max_history_seqlen = 40",
    "NetworkArgs.hidden_dropout = 0.0",
    "OptimizerArgs.embedding_weight_decay = 0.0",
    "OptimizerArgs.embedding_learning_rate = 0.1",
    "TrainerArgs.eval_batch_size = 4",
)


def global_batch(num_ranks, size=12):
    return f"TrainerArgs.train_batch_size = {size // num_ranks}"


def sharding(item, action="data_parallel"):
    return f"DatasetArgs.sharding_types = {{'item': {item!r}, 'action': {action!r}}}"


def losses(output_dir):
    return [line["loss"] for line in read_lines(output_dir / "metrics.jsonl") if line["event"] == "train"]


def tensors(output_dir):
    return read_tensors(newest_checkpoint(output_dir / "checkpoints"), prefixes=("model.", "optimizer."))


# Trains with one command line after the other.
TRAIN = """
import json, sys
import torch
from genrec.training import train

torch.distributed.init_process_group("gloo")
for arguments in json.loads(sys.argv[1]):
    if code := train.main("ranking", arguments):
        sys.exit(code)
torch.distributed.destroy_process_group()
"""
TYPES = ["row_wise", "table_wise", "column_wise", "model_parallel"]


def can_be(kind, num_ranks, optimizer):
    """Row-wise Adagrad has no columns apart. (16 columns on three ranks are two shards.)"""
    return kind != "column_wise" or optimizer == SGD


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_losses_are_those_of_one_rank(tmp_path, arguments, script_on_ranks, num_ranks):
    steps = ("TrainerArgs.max_train_iters = 6", "TrainerArgs.eval_interval = 3")
    runs = {
        f"{kind}_{name}": (*RUN, *optimizer, *steps, sharding(kind, "table_wise"))
        for kind in TYPES
        for name, optimizer in (("sgd", SGD), ("adagrad", ADAGRAD))
        if can_be(kind, num_ranks, optimizer)
    }
    commands = [arguments(tmp_path / name, *bindings, global_batch(num_ranks)) for name, bindings in runs.items()]
    finished = script_on_ranks(num_ranks, TRAIN, commands, timeout_s=280)
    assert finished.returncode == 0, finished.stderr
    for name, optimizer in (("sgd", SGD), ("adagrad", ADAGRAD)):
        one = (*RUN, *optimizer, *steps, global_batch(1), sharding("row_wise"))
        assert train_main("ranking", arguments(tmp_path / f"one_{name}", *one)) == 0
    for name in runs:
        one, several = tmp_path / f"one_{name.rpartition('_')[2]}", tmp_path / name
        torch.testing.assert_close(losses(several), losses(one), rtol=1e-5, atol=0)
        # Adam makes a whole step out of a gradient's rounding error where that is all there is.
        torch.testing.assert_close(tensors(several), tensors(one), rtol=1e-4, atol=1e-5)


# Jobs of a number of ranks: train two steps and save; or read a checkpoint, save it again, and train a third step.
MATRIX = """
import json, sys
from pathlib import Path
import torch
from genrec.configs.loading import load_experiment
from genrec.training import restore
from genrec.training.checkpoint import read_host
from genrec.training.loop import grouped
from genrec.training.optim import LearningRateSchedule
from genrec.training.run import Run
from genrec.training.sharding import process_group, replicate
from genrec.training.step import TrainStep

value = json.loads(sys.argv[1])

def work(job, ranks):
    config = load_experiment("ranking", gin_files=[value["gin"]], gin_bindings=job["bindings"])
    run = Run(config, ranks=ranks)
    run.place()
    scheduled = [*run.optimizers, *([] if run.tables is None else [run.tables])]
    step = TrainStep(
        replicate(run.model, ranks), run.optimizers, trainer=config.trainer, ranks=ranks, tables=run.tables,
        set_learning_rates=LearningRateSchedule(scheduled, config.trainer, total_steps=9),
    )
    run.model.train()
    numbers = (1, 2)
    if job["source"]:
        source = Path(job["source"])
        restore.restore_tensors(source, run.state)
        run.loader.load_state_dict(read_host(source, rank=0)["loader"])
        run.save(2)
        numbers = (3,)
    for number, batches in zip(numbers, grouped(run.loader, 1)):
        assert step(batches, step=number).applied
    run.save(number)

with process_group("cpu") as ranks:
    for job in value["jobs"]:
        work(job, ranks)
"""


def run_matrix(tmp_path, tiny_gin, script_on_ranks, optimizer, *, pairs):
    """Saves on every number of ranks with every sharding; then loads the ``pairs`` of (from, to) places."""
    kinds = ["data_parallel", "row_wise", "table_wise", "column_wise"]
    places = [(n, kind) for kind in kinds for n in (1, 2, 3, 4) if can_be(kind, n, optimizer)]

    def job(place, name, source=None):
        num_ranks, kind = place
        bindings = [*RUN, *optimizer, sharding(kind), global_batch(num_ranks), "TrainerArgs.max_train_iters = 9"]
        return {"bindings": [*bindings, f"TrainerArgs.output_dir = {str(tmp_path / name)!r}"], "source": source}

    def run(jobs):
        for num_ranks in (1, 2, 3, 4):
            own = [one for place, one in jobs if place[0] == num_ranks]
            value = {"gin": str(tiny_gin), "jobs": own}
            finished = script_on_ranks(num_ranks, MATRIX, value, timeout_s=280)
            assert finished.returncode == 0, finished.stderr

    def checkpoint(name, step):
        return tmp_path / name / "checkpoints" / f"step_{step:08d}"

    names = {place: f"saved_{place[1]}_{place[0]}" for place in places}
    run([(place, job(place, names[place])) for place in places])
    loads = {(a, b): f"loaded_{a[1]}_{a[0]}_{b[1]}_{b[0]}" for a, b in pairs(places)}
    run([(b, job(b, name, str(checkpoint(names[a], 2)))) for (a, b), name in loads.items()])
    read = lambda name, step: read_tensors(checkpoint(name, step), prefixes=("model.", "optimizer."))  # noqa: E731
    one = places[0]
    expected = read(loads[one, one], 3)
    for (a, _), name in loads.items():
        before, again, after = read(names[a], 2), read(name, 2), read(name, 3)
        before, again = ({k: v for k, v in t.items() if not k.endswith(".step")} for t in (before, again))
        torch.testing.assert_close(again, before, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-5, msg=lambda t, name=name: f"{name}: {t}")


def rotated(places):
    """Every place reads what some other saved, every kind from every kind, and the first from itself."""
    return [(places[0], places[0]), *((places[(i * 7 + 3) % len(places)], b) for i, b in enumerate(places))]


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD], ids=["sgd", "adagrad"])
def test_checkpoints_fit_any_ranks_and_sharding(tmp_path, tiny_gin, script_on_ranks, optimizer):
    run_matrix(tmp_path, tiny_gin, script_on_ranks, optimizer, pairs=rotated)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD], ids=["sgd", "adagrad"])
def test_all_pairs_of_checkpoints(tmp_path, tiny_gin, script_on_ranks, optimizer):
    run_matrix(tmp_path, tiny_gin, script_on_ranks, optimizer, pairs=lambda places: itertools.product(places, places))
