"""Dense weights in parts (FSDP2) train as whole ones do (DDP, one rank), and checkpoints fit all of them (gloo)."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

from genrec.hstu.jagged import JaggedSequence
from genrec.model.ranking import RankingOutput
from genrec.training.checkpoint import newest_checkpoint, read_tensors
from genrec.training.metrics_log import read_lines
from genrec.training.train import main as train_main

# Seven users are seven windows: of an epoch's two batches of six the second has one, and all ranks but the first none;
# of batches of four it has three, for four ranks. Of weights with 1, 8, 16 or more rows three ranks have unequal parts,
# some ranks none.
RUN = (
    "DatasetArgs.max_history_seqlen = 40",
    "NetworkArgs.hidden_dropout = 0.0",
    "OptimizerArgs.adam_eps = 1e-3",  # or Adam makes a whole step of a rounding error where that is all there is
    "TrainerArgs.max_train_iters = 20",
    "TrainerArgs.eval_interval = 10",
    "TrainerArgs.eval_batch_size = 4",
)
KINDS = ("ddp", "fsdp2")
FSDP2 = "TrainerArgs.dense_parallel = 'fsdp2'"
FP8 = (
    "MixedPrecisionArgs.mixed_precision_dtype = 'fp8'",
    "MixedPrecisionArgs.backend = 'emulated'",
    "MixedPrecisionArgs.enable_fp8_for_prediction_head = True",
    "RankingArgs.prediction_head_arch = [16, 1]",
)
DELAYED = (*FP8, "MixedPrecisionArgs.linear_recipe = 'delayed'", "MixedPrecisionArgs.amax_history_len = 3")
# One step: in the next a last digit, which a sum over ranks rounds otherwise, may be a digit of bfloat16 or of FP8.
BFLOAT16 = ("NetworkArgs.dtype_str = 'bfloat16'", "TrainerArgs.max_train_iters = 1")
TABLE_BIAS = ("NetworkArgs.relative_bias = 'table'",)  # which is used in float32
SHARDED = (
    "DatasetArgs.sharding_types = {'item': 'row_wise'}",
    "OptimizerArgs.embedding_optimizer_str = 'sgd'",
    "OptimizerArgs.embedding_weight_decay = 0.0",
)
ACCUMULATED = ("TrainerArgs.accumulate_steps = 2",)
RECOMPUTED = ("NetworkArgs.recompute_input_layernorm = True", "NetworkArgs.recompute_input_silu = True")


def batch_size(size):
    return f"TrainerArgs.train_batch_size = {size}"


def losses(output_dir):
    return [line["loss"] for line in read_lines(output_dir / "metrics.jsonl") if line["event"] == "train"]


def evaluations(output_dir):
    return [line["metrics"] for line in read_lines(output_dir / "metrics.jsonl") if line["event"] in ("valid", "test")]


def tensors(output_dir):
    return read_tensors(newest_checkpoint(output_dir / "checkpoints"), prefixes=("",))


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize(
    ("num_ranks", "size"), [(4, 4), *(pytest.param(n, 6, marks=pytest.mark.nightly) for n in (2, 3))]
)
def test_losses_and_metrics_are_those_of_one_rank(tmp_path, arguments, on_forked_ranks, num_ranks, size):
    several = ("train", arguments(tmp_path / "several", *RUN, FSDP2, batch_size(size // num_ranks)))
    finished = on_forked_ranks(num_ranks, [several])
    assert finished.returncode == 0, finished.stderr
    assert train_main("ranking", arguments(tmp_path / "one", *RUN, batch_size(size))) == 0
    assert len(losses(tmp_path / "one")) == 20
    torch.testing.assert_close(losses(tmp_path / "several"), losses(tmp_path / "one"), rtol=1e-5, atol=0)
    torch.testing.assert_close(tensors(tmp_path / "several"), tensors(tmp_path / "one"), rtol=1e-4, atol=1e-6)
    for own, expected in zip(evaluations(tmp_path / "several"), evaluations(tmp_path / "one"), strict=True):
        assert own == pytest.approx(expected, rel=1e-4)


# What is computed differently from the plain case, or touches weights beside the optimizer.
CLIPPED_AVERAGE = (
    "TrainerArgs.grad_clip_norm = 0.05",
    "TrainerArgs.ema_decay = 0.9",
    "TrainerArgs.deterministic = True",
)
SKIPPED_ENDS = ("MixedPrecisionArgs.skip_first_last_layer = True", "NetworkArgs.num_layers = 3")
SETTINGS = {
    "average": (*CLIPPED_AVERAGE, "OptimizerArgs.optimizer_str = 'adam'"),
    "bfloat16": (*BFLOAT16, *RECOMPUTED, *ACCUMULATED, "OptimizerArgs.optimizer_str = 'sgd'"),
    "float32 bias": (*BFLOAT16, *TABLE_BIAS),
    "delayed": (*BFLOAT16, *DELAYED, *SKIPPED_ENDS, *ACCUMULATED),
    "sharded tables": (*SHARDED, "TrainerArgs.nonfinite = 'skip'"),
}
MORE_SETTINGS = {
    "sgd": ("OptimizerArgs.optimizer_str = 'sgd'", *RECOMPUTED, *ACCUMULATED),
    "bfloat16 adam": (*BFLOAT16, *CLIPPED_AVERAGE),
    "tensorwise": (*BFLOAT16, *FP8, *ACCUMULATED),
    "sharded, delayed": (*SHARDED, *BFLOAT16, *DELAYED),
}


@pytest.mark.parametrize("settings", [SETTINGS, pytest.param(MORE_SETTINGS, marks=pytest.mark.nightly)], ids=len)
def test_weights_moments_and_averages_are_those_of_ddp(tmp_path, arguments, on_forked_ranks, settings):
    """Three ranks, dropout included, which each rank draws for its own users."""
    steps = ("TrainerArgs.max_train_iters = 3", "TrainerArgs.eval_interval = 2", "NetworkArgs.hidden_dropout = 0.1")
    commands = [
        ("train", arguments(tmp_path / name / kind, *RUN, *steps, *bindings, f"TrainerArgs.dense_parallel = {kind!r}"))
        for name, bindings in settings.items()
        for kind in KINDS
    ]
    finished = on_forked_ranks(3, commands, timeout_s=280)
    assert finished.returncode == 0, finished.stderr
    for name in settings:
        ddp, fsdp2 = tmp_path / name / "ddp", tmp_path / name / "fsdp2"
        assert losses(fsdp2)[0] == losses(ddp)[0], name  # the same weights, gathered without loss
        torch.testing.assert_close(losses(fsdp2), losses(ddp), rtol=1e-5, atol=0, msg=lambda t, n=name: f"{n}: {t}")
        torch.testing.assert_close(
            tensors(fsdp2), tensors(ddp), rtol=1e-4, atol=1e-6, msg=lambda t, n=name: f"{n}: {t}"
        )
        if "average" in name:  # which evaluation puts in the weights' place
            for own, expected in zip(evaluations(fsdp2), evaluations(ddp), strict=True):
                assert own == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_stopped_and_continued_is_not_stopped(tmp_path, arguments, on_forked_ranks, num_ranks):
    """Bit for bit: weights, moments, average, amaxes and scales."""
    every = (batch_size(1), "TrainerArgs.accumulate_steps = 2", "TrainerArgs.ema_decay = 0.9", *DELAYED, FSDP2)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    steps = {n: f"TrainerArgs.max_train_iters = {n}" for n in (2, 5)}
    commands = [
        arguments(whole, *every, steps[5]),
        arguments(parts, *every, steps[2]),
        arguments(parts, *every, steps[5]),
    ]
    finished = on_forked_ranks(num_ranks, [("train", command) for command in commands])
    assert finished.returncode == 0, finished.stderr
    assert_equal(tensors(parts), tensors(whole))


# Reads a checkpoint if there is one, saves what was read again, trains on and saves after every second step.
RESHARD = """
import json, sys
from pathlib import Path
from genrec.configs.loading import load_experiment
from genrec.training import restore
from genrec.training.checkpoint import read_host
from genrec.training.loop import grouped
from genrec.training.run import Run
from genrec.training.process_group import process_group

value = json.loads(sys.argv[1])
with process_group("cpu") as ranks:
    config = load_experiment("ranking", gin_files=[value["gin"]], gin_bindings=value["bindings"])
    run = Run(config, ranks=ranks)
    run.place()
    step = run.train_step(total_steps=20)
    run.model.train()
    before = 0
    if value["source"]:
        source = Path(value["source"])
        restore.restore_tensors(source, run.state)
        host = read_host(source, rank=0)
        run.loader.load_state_dict(host["loader"])
        before = host["step"]
        run.checkpoints.save(before)
    for number, batches in zip(range(before + 1, before + 1 + value["steps"]), grouped(run.loader, 1)):
        assert step(batches, step=number).applied
        if number % 2 == 0:
            run.checkpoints.save(number)
"""


@pytest.mark.parametrize(
    "chain",
    [
        [(2, "ddp"), (3, "fsdp2"), (1, "ddp"), (2, "fsdp2")],
        pytest.param([(1, "fsdp2"), (4, "fsdp2"), (2, "fsdp2"), (3, "ddp"), (3, "fsdp2")], marks=pytest.mark.nightly),
    ],
    ids=len,
)
def test_checkpoints_fit_any_ranks_whole_or_in_parts(tmp_path, tiny_gin, script_on_ranks, chain):
    """A chain of loads: what was read is bit for bit what was saved, and the next steps are those of one rank alone."""

    def run(name, num_ranks, kind, *, steps, source=None):
        settings = (
            f"TrainerArgs.output_dir = {str(tmp_path / name)!r}",
            batch_size(12 // num_ranks),
            f"TrainerArgs.dense_parallel = {kind!r}",
            "TrainerArgs.ema_decay = 0.9",
            "TrainerArgs.keep_checkpoints = 9",
        )
        value = {"gin": str(tiny_gin), "bindings": [*RUN, *settings], "steps": steps, "source": source}
        finished = script_on_ranks(num_ranks, RESHARD, value)
        assert finished.returncode == 0, finished.stderr

    def checkpoint(name, step):
        return tmp_path / name / "checkpoints" / f"step_{step:08d}"

    def read(name, step):
        return read_tensors(checkpoint(name, step), prefixes=("",))

    run("alone", 1, "ddp", steps=2 * len(chain))
    run("0", *chain[0], steps=2)
    for link, place in enumerate(chain[1:], start=1):
        before, own = str(link - 1), str(link)
        run(own, *place, steps=2, source=str(checkpoint(before, 2 * link)))
        assert_equal(read(own, 2 * link), read(before, 2 * link))
        torch.testing.assert_close(read(own, 2 * link + 2), read("alone", 2 * link + 2), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("part", ["dense", *(pytest.param(p, marks=pytest.mark.nightly) for p in ("all", "embedding"))])
def test_a_start_from_the_weights_of_another_run(tmp_path, arguments, on_forked_ranks, part):
    """Into whole weights and into parts, of which the steps that follow are the same."""
    steps = ("TrainerArgs.max_train_iters = 2",)
    assert train_main("ranking", arguments(tmp_path / "first", *RUN, *steps, batch_size(12))) == 0
    load = (f"TrainerArgs.ckpt_load_dir = {str(tmp_path / 'first')!r}", f"TrainerArgs.ckpt_load_parts = {part!r}")
    settings = (*RUN, *steps, *load, batch_size(6), "TrainerArgs.seed = 7")
    commands = [
        ("train", arguments(tmp_path / kind, *settings, f"TrainerArgs.dense_parallel = {kind!r}")) for kind in KINDS
    ]
    finished = on_forked_ranks(2, commands)
    assert finished.returncode == 0, finished.stderr
    ddp, fsdp2 = (tensors(tmp_path / kind) for kind in KINDS)
    torch.testing.assert_close(fsdp2, ddp, rtol=1e-4, atol=1e-6)


# Rank 1 alone meets what is not finite, at the second step: in its loss, in one gradient, or in a weight of FP8.
NOT_FINITE = """
import json, os, sys
import torch
from genrec.training import train
from genrec.training.dense_parallel import own_part
from genrec.training.step import TrainStep

attempt = TrainStep.attempt
how, arguments = json.loads(sys.argv[1])

def spoiled(self, batches, *, step, **options):
    handle = None
    if step == 2 and how == "gradient":
        layer = self._bare.encoder.block.layers[1].output
        spoil = lambda m, i, o: o.register_hook(lambda g: g * float("inf")) if os.environ["RANK"] == "1" else None
        handle = layer.register_forward_hook(lambda *a: (spoil(*a), None)[1])
    elif step == 2 and how == "weight":
        part = own_part(self._bare.encoder.block.layers[1].uvqk.weight)
        kept = part.clone()
        if os.environ["RANK"] == "1":
            part[0, 0] = float("inf")
    tensors = [own_part(p) for p in self._bare.parameters()]
    tensors += [own_part(v) for o in self.optimizers for s in o.state.values() for v in s.values()]
    before = [t.clone() for t in tensors]
    try:
        result = attempt(self, batches, step=step, **options)
        assert result.applied == (step != 2)
    finally:
        assert all(torch.equal(a, b) for a, b in zip(before, tensors)) == (step == 2)
    if handle is not None:
        handle.remove()
    elif step == 2:
        part.copy_(kept)
    return result

TrainStep.attempt = spoiled
sys.exit(train.main("ranking", arguments))
"""


@pytest.mark.parametrize(
    ("how", "nonfinite"),
    [pytest.param("gradient", "skip", marks=pytest.mark.nightly), ("weight", "skip"), ("gradient", "locate")],
)
def test_what_is_not_finite_on_one_rank_reaches_no_part(tmp_path, arguments, script_on_ranks, how, nonfinite):
    settings = (f"TrainerArgs.nonfinite = {nonfinite!r}", "TrainerArgs.max_train_iters = 3", batch_size(6), FSDP2)
    command = arguments(tmp_path / "run", *RUN, *DELAYED, *settings)
    finished = script_on_ranks(2, NOT_FINITE, [how, command])
    if nonfinite == "skip":
        assert finished.returncode == 0, finished.stderr
        assert "1 of 3 steps were left out" in finished.stderr
    else:
        assert finished.returncode == 3, finished.stderr
        assert "not finite on rank 1 is the gradient of the output of encoder.block.layers.1.output" in finished.stderr


def test_a_gradient_that_only_the_sum_over_ranks_makes_infinite_is_named(tmp_path, arguments, script_on_ranks):
    settings = ("TrainerArgs.nonfinite = 'locate'", "TrainerArgs.max_train_iters = 3", batch_size(6), FSDP2)
    finished = script_on_ranks(2, TOO_LARGE, arguments(tmp_path / "run", *RUN, *settings))
    assert finished.returncode == 3, finished.stderr
    assert "every gradient is finite, but not their global norm: the largest magnitude is" in finished.stderr
    assert "in the gradient of head.output.bias" in finished.stderr


# The head's last bias, of one number, which the first rank holds: its square is beyond float32.
TOO_LARGE = """
import json, sys
from genrec.model.ranking import RankingModel
from genrec.training import train

forward = RankingModel.forward
factor = 1e25

def scaled(self, batch):
    bias = self.head.output.bias
    if bias.requires_grad and not hasattr(bias, "spoiled"):
        bias.spoiled = bias.register_hook(lambda gradient: gradient * factor)
    return forward(self, batch)

RankingModel.forward = scaled
sys.exit(train.main("ranking", json.loads(sys.argv[1])))
"""


def test_one_rank_holds_all_and_says_so_once(tmp_path, arguments, capsys):
    told = {}
    for kind in KINDS:
        steps = ("TrainerArgs.max_train_iters = 2", f"TrainerArgs.dense_parallel = {kind!r}")
        assert train_main("ranking", arguments(tmp_path / kind, *RUN, *steps)) == 0
        told[kind] = capsys.readouterr().err.count("dense_parallel 'fsdp2' has no effect on one rank")
    assert told == {"ddp": 0, "fsdp2": 1}
    assert_equal(tensors(tmp_path / "fsdp2"), tensors(tmp_path / "ddp"))


def test_pytrees_show_what_modules_pass_on():
    """Before PyTorch 2.12 FSDP2 sees no other dataclass, and would drop weights that a backward is to use."""
    x = torch.ones(2, 3)
    sequence = JaggedSequence(values=x, offsets=torch.tensor([0, 2]), max_seqlen=2)
    leaves, spec = pytree.tree_flatten(sequence)
    assert any(leaf is x for leaf in leaves) and pytree.tree_unflatten(leaves, spec) == sequence
    output = RankingOutput(loss_per_target=x[:, 0], logits=x, labels=x[:, 0])
    assert any(leaf is x for leaf in pytree.tree_leaves(output))
