"""Tables shared by ranks train as whole ones do; a checkpoint of any ranks and any sharding fits any other."""

from __future__ import annotations

import itertools
import json
import shutil

import polars
import pytest
import torch
from polars.testing import assert_frame_equal

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
    shown = [line for line in finished.stderr.splitlines() if line.startswith("│ item ") and "fused" in line]
    assert len(shown) == len(runs) and all(any(kind in line for kind in TYPES) for line in shown)
    for name, optimizer in (("sgd", SGD), ("adagrad", ADAGRAD)):
        one = (*RUN, *optimizer, *steps, global_batch(1), sharding("data_parallel"))
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
from genrec.training.run import Run
from genrec.training.process_group import process_group

value = json.loads(sys.argv[1])

def work(job, ranks):
    config = load_experiment("ranking", gin_files=[value["gin"]], gin_bindings=job["bindings"])
    run = Run(config, ranks=ranks)
    run.place()
    step = run.train_step(total_steps=9)
    run.model.train()
    numbers = (1, 2)
    if job["source"]:
        source = Path(job["source"])
        restore.restore_tensors(source, run.state)
        run.loader.load_state_dict(read_host(source, rank=0)["loader"])
        run.checkpoints.save(2)
        numbers = (3,)
    for number, batches in zip(numbers, grouped(run.loader, 1)):
        assert step(batches, step=number).applied
    run.checkpoints.save(number)

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


def test_a_checkpoint_of_one_rank_is_evaluated_on_two_that_share_tables(tmp_path, arguments, script_on_ranks):
    """And the scores are those of one rank. What only training can't have with sharded tables (Adam, an average of the
    weights) evaluation can.
    """
    run = tmp_path / "run"
    average = ("TrainerArgs.ema_decay = 0.5", "TrainerArgs.max_train_iters = 3")
    bindings = (*RUN, *average, sharding("row_wise", "table_wise"), global_batch(1))
    assert train_main("ranking", arguments(run, *bindings)) == 0
    tables = {}
    for num_ranks in (1, 2):
        path = tmp_path / f"{num_ranks}.parquet"
        finished = script_on_ranks(num_ranks, EVALUATE, ["--checkpoint", str(run), "--scores", str(path)])
        assert finished.returncode == 0, finished.stderr
        tables[num_ranks] = polars.read_parquet(path)
    assert len(tables[1]) == 21
    assert_frame_equal(tables[1], tables[2], rel_tol=1e-6)


EVALUATE = """
import json, sys
from genrec.training import scoring
sys.exit(scoring.main(json.loads(sys.argv[1])))
"""


# Rank 1's loss is not finite at the second step, which is left out: no shard of a table, moment or weight changes.
NOT_FINITE = """
import json, os, sys
import torch
from genrec.training import train
from genrec.training.step import TrainStep
from genrec.training.tables import ShardedTables

attempt, seen = TrainStep.attempt, []

def spoiled(self, batches, *, step, **options):
    spoil = step == 2 and os.environ["RANK"] == "1"
    head = self._bare.head.register_forward_hook(lambda m, i, o: o * float("nan")) if spoil else None
    tensors = [p.detach() for p in self._bare.parameters()]
    tensors += [s.tensor for m in self.tables.moments().values() for t in m.values() for s in t.local_shards()]
    before = [t.clone() for t in tensors]
    result = attempt(self, batches, step=step, **options)
    assert result.applied == (step != 2)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors)) == (step == 2)
    if head is not None:
        head.remove()
    return result

TrainStep.attempt = spoiled
sys.exit(train.main("ranking", json.loads(sys.argv[1])))
"""


def test_what_is_not_finite_never_reaches_a_sharded_table(tmp_path, arguments, script_on_ranks):
    settings = ("TrainerArgs.nonfinite = 'skip'", "TrainerArgs.max_train_iters = 3", global_batch(2))
    finished = script_on_ranks(
        2, NOT_FINITE, arguments(tmp_path / "run", *RUN, *ADAGRAD, *settings, sharding("row_wise", "row_wise"))
    )
    assert finished.returncode == 0, finished.stderr
    assert "1 of 3 steps were left out" in finished.stderr


def test_the_module_that_is_not_finite_is_found_beside_sharded_tables(tmp_path, arguments, script_on_ranks):
    settings = ("TrainerArgs.nonfinite = 'locate'", "OptimizerArgs.learning_rate = 1e30", global_batch(2))
    sgd = ("OptimizerArgs.optimizer_str = 'sgd'", "OptimizerArgs.embedding_optimizer_str = 'sgd'")
    finished = script_on_ranks(2, TRAIN, [arguments(tmp_path / "run", *RUN, *sgd, *settings, sharding("row_wise"))])
    assert finished.returncode != 0
    assert "the first value that is not finite on rank" in finished.stderr, finished.stderr


@pytest.mark.parametrize("kind", ["row_wise", "column_wise"])
def test_grown_tables_are_filled_shard_by_shard(tmp_path, tiny_dataset, arguments, script_on_ranks, kind):
    """One rank with whole tables starts from the same checkpoint with the same result."""
    bindings = (*RUN, *SGD, "TrainerArgs.max_train_iters = 2")
    assert train_main("ranking", arguments(tmp_path / "first", *bindings, global_batch(1))) == 0
    grown = tmp_path / "grown"
    shutil.copytree(tiny_dataset, grown)
    ids = [900, 901, *range(1000, 1019), 2000, 2001]
    polars.DataFrame({"original_id": ids, "genres": [[1]] * len(ids)}).write_parquet(grown / "vocabulary/item.parquet")
    metadata = json.loads((grown / "metadata.json").read_text())
    (grown / "metadata.json").write_text(json.dumps({**metadata, "num_items": len(ids)}))
    starts = (
        *bindings,
        f"DatasetArgs.dataset_path = {str(grown)!r}",
        f"TrainerArgs.ckpt_load_dir = {str(tmp_path / 'first')!r}",
    )
    assert train_main("ranking", arguments(tmp_path / "one", *starts, global_batch(1))) == 0
    two = arguments(tmp_path / "two", *starts, global_batch(2), sharding(kind))
    finished = script_on_ranks(2, TRAIN, [two])
    assert finished.returncode == 0, finished.stderr
    assert "table 'item': 19 of its 23 rows are in the checkpoint, 4 start anew; 1 rows of" in finished.stderr
    torch.testing.assert_close(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-5, atol=0)
    torch.testing.assert_close(tensors(tmp_path / "two"), tensors(tmp_path / "one"), rtol=1e-4, atol=1e-5)


def test_listed_tables_share_features_and_adam_is_refused_in_one_sentence(tmp_path, script_on_ranks):
    """recsys-examples' way to name tables: one of them is read by two features."""

    def command(name, batch, *bindings):
        settings = (
            f"TrainerArgs.output_dir = {str(tmp_path / name)!r}",
            f"TrainerArgs.train_batch_size = {batch}",
            "TrainerArgs.log_interval = 1",
            "TrainerArgs.max_train_iters = 6",
            "NetworkArgs.hidden_dropout = 0.0",
            "item/EmbeddingArgs.sharding_type = 'model_parallel'",
            "context/EmbeddingArgs.sharding_type = 'row_wise'",
            *bindings,
        )
        return ["--gin-config-file", "debug_synthetic.gin", *(w for s in settings for w in ("--gin-bindings", s))]

    adagrad = "OptimizerArgs.embedding_optimizer_str = 'rowwise_adagrad'"
    assert train_main("ranking", command("one", 24, adagrad)) == 0
    finished = script_on_ranks(3, TRAIN, [command("three", 8, adagrad)])
    assert finished.returncode == 0, finished.stderr
    assert len(losses(tmp_path / "one")) == 6
    torch.testing.assert_close(losses(tmp_path / "three"), losses(tmp_path / "one"), rtol=1e-5, atol=0)

    refused = script_on_ranks(3, TRAIN, [command("adam", 8)])
    assert refused.returncode != 0
    (told,) = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert "has sharding type 'model_parallel', and FBGEMM has no 'adam' for sharded tables on a CPU" in told
