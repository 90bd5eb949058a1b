"""Dynamic tables on several ranks: the same ids have the same rows on all of them, whoever read them first."""

from __future__ import annotations

import pytest
import torch

from genrec.training.checkpoint import newest_checkpoint, read_tensors
from genrec.training.metrics_log import read_lines
from genrec.training.train import main as train_main

ADAM = ("OptimizerArgs.optimizer_str = 'adam'", "OptimizerArgs.learning_rate = 1e-3")
SGD = (*ADAM, "OptimizerArgs.embedding_optimizer_str = 'sgd'")
ADAGRAD = (*ADAM, "OptimizerArgs.embedding_optimizer_str = 'rowwise_adagrad'")
RUN = (
    "NetworkArgs.hidden_dropout = 0.0",
    "OptimizerArgs.embedding_weight_decay = 0.0",
    "OptimizerArgs.embedding_learning_rate = 0.1",
    "TrainerArgs.eval_batch_size = 4",
    "TrainerArgs.max_train_iters = 6",
)
# Fewer rows than there are items and ages, and than a step's items at times.
DYNAMIC = "DatasetArgs.dynamic_tables = {'item': 17, 'age': 3}"
PEERS = "TensorModelParallelArgs.tensor_model_parallel_size = 2"
# How ranks share the rest of the model, with tables that each has whole.
DENSE = {"fsdp2": ("TrainerArgs.dense_parallel = 'fsdp2'",), "peers": (PEERS, "NetworkArgs.num_attention_heads = 2")}
KINDS = {"data_parallel": ADAM, "row_wise": ADAGRAD, "table_wise": ADAGRAD, "column_wise": SGD}


def bindings_of(kind, num_ranks, strategy="lru"):
    return (
        *RUN,
        *KINDS[kind],
        DYNAMIC,
        f"DatasetArgs.evict_strategy = {strategy!r}",
        f"DatasetArgs.sharding_types = {{'item': {kind!r}}}",
        f"TrainerArgs.train_batch_size = {6 // num_ranks}",
    )


def losses(output_dir):
    return [line["loss"] for line in read_lines(output_dir / "metrics.jsonl") if line["event"] == "train"]


def metrics(output_dir):
    lines = [line for line in read_lines(output_dir / "metrics.jsonl") if line["event"] == "test"]
    return {line["protocol"]: line["metrics"]["logloss"] for line in lines}


def tensors(output_dir):
    newest = newest_checkpoint(output_dir / "checkpoints")
    return read_tensors(newest, prefixes=("model.", "optimizer.", "row_map."))


def assert_same(one, several):
    torch.testing.assert_close(losses(several), losses(one), rtol=1e-5, atol=0)
    torch.testing.assert_close(metrics(several), metrics(one), rtol=1e-5, atol=0)
    first, second = tensors(one), tensors(several)
    maps = [name for name in first if name.startswith("row_map.")]
    assert len(maps) == 6 and all(torch.equal(first[name], second[name]) for name in maps)
    # Adam makes a whole step out of a gradient's rounding error where that is all there is.
    torch.testing.assert_close(second, first, rtol=1e-4, atol=1e-4)


# Trains with one command line after the other; every rank's maps must be equal after each step.
TRAIN = """
import json, sys
import torch
from genrec.training import train
from genrec.training.dynamic_tables import DynamicTables

torch.distributed.init_process_group("gloo")
admit, evicted = DynamicTables.admit, [0]

def compared(self, batches, *, step):
    admit(self, batches, step=step)
    states = self._ranks.gather({table: row_map.state for table, row_map in self.maps.items()})
    assert all(torch.equal(states[0][t][k], states[self._ranks.rank][t][k]) for t in states[0] for k in states[0][t])
    evicted[0] = self.num_evicted

DynamicTables.admit = compared
for arguments in json.loads(sys.argv[1]):
    if code := train.main("ranking", arguments):
        sys.exit(code)
    assert evicted[0] > 0
torch.distributed.destroy_process_group()
"""


LONG = (pytest.mark.nightly, pytest.mark.timeout(3600))
ALL = [(kind, strategy) for kind in KINDS for strategy in ("lru", "lfu")]


@pytest.mark.parametrize(
    ("num_ranks", "runs"),
    [
        (2, [("column_wise", "lru")]),
        (3, [("data_parallel", "lfu"), ("row_wise", "lru")]),
        pytest.param(2, ALL, marks=LONG),
        pytest.param(3, ALL, marks=LONG),
        pytest.param(6, ALL, marks=LONG),
    ],
)
def test_losses_are_those_of_one_rank(tmp_path, arguments, script_on_ranks, num_ranks, runs):
    """Thirteen sequences in batches of six: all ranks but the first have nobody in the third step."""
    commands = [arguments(tmp_path / "".join(run), *bindings_of(run[0], num_ranks, run[1])) for run in runs]
    finished = script_on_ranks(num_ranks, TRAIN, commands, timeout_s=140 * len(runs))
    assert finished.returncode == 0, finished.stderr
    for kind, strategy in runs:
        one, several = tmp_path / f"one_{kind}_{strategy}", tmp_path / f"{kind}{strategy}"
        assert train_main("ranking", arguments(one, *bindings_of(kind, 1, strategy))) == 0
        assert_same(one, several)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=LONG)])
def test_ranks_that_share_the_rest_of_the_model_have_the_rows_of_one(tmp_path, arguments, script_on_ranks, num_ranks):
    """Peers read the same batches, whose ids are counted once; FSDP2 leaves the maps as they are."""
    commands, alone = [], {}
    for name, bindings in DENSE.items():
        parts = num_ranks // 2 if name == "peers" else num_ranks
        commands.append(arguments(tmp_path / name, *bindings_of("data_parallel", parts, "lfu"), *bindings))
        alone[name] = (*bindings_of("data_parallel", 1, "lfu"), *bindings[1:])
    finished = script_on_ranks(num_ranks, TRAIN, commands, timeout_s=200)
    assert finished.returncode == 0, finished.stderr
    for name, bindings in alone.items():
        one, several = tmp_path / f"one_{name}", tmp_path / name
        assert train_main("ranking", arguments(one, *bindings)) == 0
        assert_same(one, several)


# Jobs of a number of ranks: read a checkpoint where there is one, save what was read, train two steps, save again.
JOBS = """
import json, sys
from pathlib import Path
import torch
from genrec.configs.loading import load_experiment
from genrec.training import restore
from genrec.training.checkpoint import read_host
from genrec.training.loop import grouped
from genrec.training.run import Run
from genrec.training.process_group import process_group

value = json.loads(sys.argv[1])

def work(job, ranks):
    config = load_experiment("ranking", gin_files=[value["gin"]], gin_bindings=job["bindings"])
    run = Run(config, ranks=ranks)
    run.place()
    step = run.train_step(total_steps=9)
    run.model.train()
    last = 0
    if job["source"]:
        source = Path(job["source"])
        restore.restore_tensors(source, run.state)
        run.loader.load_state_dict(read_host(source, rank=0)["loader"])
        last = read_host(source, rank=0)["step"]
        run.checkpoints.save(last)
    for number, batches in zip((last + 1, last + 2), grouped(run.loader, 1)):
        if job.get("spoil") == ranks.rank:  # a step that is not finite on one rank is left out on all
            head = run.model.head.register_forward_hook(lambda m, i, o: o * float("nan"))
        before = [{k: v.clone() for k, v in m.state.items()} for m in run.dynamic.maps.values()]
        tables = [p.detach().clone() for n, p in run.model.named_parameters() if "table_" in n]
        applied = step(batches, step=number).applied
        assert applied == ("spoil" not in job)
        after = [m.state for m in run.dynamic.maps.values()]
        same = all(torch.equal(a[k], b[k]) for a, b in zip(before, after) for k in a)
        assert same != applied
        now = [p.detach() for n, p in run.model.named_parameters() if "table_" in n]
        assert applied or all(torch.equal(a, b) for a, b in zip(tables, now))
        if job.get("spoil") == ranks.rank:
            head.remove()
    run.checkpoints.save(last + 2)

with process_group("cpu") as ranks:
    for job in value["jobs"]:
        work(job, ranks)
"""


def test_checkpoints_fit_any_ranks_and_sharding(tmp_path, tiny_gin, script_on_ranks):
    """What was read is bit for bit what was saved, and the next steps are those of any other ranks."""

    def job(num_ranks, kind, name, source=None, **more):
        skip = "TrainerArgs.nonfinite = 'skip'"
        place = f"TrainerArgs.output_dir = {str(tmp_path / name)!r}"
        return {"bindings": [*bindings_of(kind, num_ranks), *ADAGRAD, skip, place], "source": source, **more}

    def run(num_ranks, *jobs):
        value = {"gin": str(tiny_gin), "jobs": jobs}
        finished = script_on_ranks(num_ranks, JOBS, value, timeout_s=120)
        assert finished.returncode == 0, finished.stderr

    def saved(name, step):
        return tmp_path / name / "checkpoints" / f"step_{step:08d}"

    def read(name, step):
        found = read_tensors(saved(name, step), prefixes=("model.", "optimizer.", "row_map."))
        return {key: value for key, value in found.items() if not key.endswith(".step")}

    run(2, job(2, "row_wise", "two"))
    two = str(saved("two", 2))
    run(3, job(3, "table_wise", "three", two), job(3, "row_wise", "spoilt", two, spoil=0))
    run(1, job(1, "data_parallel", "one", str(saved("three", 4))), job(1, "data_parallel", "one_from_two", two))
    run(2, job(2, "data_parallel", "two_again", str(saved("one", 6))))
    for name, step, source in (("three", 2, "two"), ("one", 4, "three"), ("two_again", 6, "one"), ("spoilt", 2, "two")):
        torch.testing.assert_close(
            read(name, step), read(source, step), rtol=0, atol=0, msg=lambda t, n=name: f"{n}: {t}"
        )
    torch.testing.assert_close(read("three", 4), read("one_from_two", 4), rtol=1e-4, atol=1e-5)
    assert (read("two_again", 8)["row_map.item.ids"] >= 0).all()
