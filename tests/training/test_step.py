from __future__ import annotations

import copy
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from genrec.data.format import DataError
from genrec.training.feed import StepInput
from genrec.training.ranks import Attempt, Ranks
from genrec.training.step import NonFiniteError
from genrec.training.tables import ShardedTables

NO_DROPOUT = "NetworkArgs.hidden_dropout = 0.0"


def weights(train_step):
    return {name: tensor.clone() for name, tensor in train_step.model.state_dict().items()}


def optimizer_states(train_step):
    return copy.deepcopy([optimizer.state_dict()["state"] for optimizer in train_step.optimizers])


def assert_unchanged(train_step, weights_before, states_before):
    torch.testing.assert_close(weights(train_step), weights_before, rtol=0, atol=0)
    torch.testing.assert_close(optimizer_states(train_step), states_before, rtol=0, atol=0)


@pytest.mark.parametrize("lengths", [[1], [8], [0, 1, 8, 3], [0, 2, 0], [5, 5, 5]])
def test_step_on_users_of_any_length_changes_the_weights(make_step, make_batch, lengths):
    train_step = make_step()
    before = weights(train_step)
    result = train_step([make_batch(lengths)], step=1)
    assert result.applied
    assert (result.num_targets, result.num_users) == (sum(lengths), len(lengths))
    assert result.num_tokens == len(lengths) + 2 * sum(lengths)
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights(train_step).items())


@pytest.mark.parametrize(("lengths", "candidates"), [([2, 3], [2, 1]), ([0, 4], [0, 4]), ([1], [1])])
def test_step_on_candidates_with_and_without_history(make_step, make_batch, lengths, candidates):
    result = make_step()([make_batch(lengths, num_candidates=candidates)], step=1)
    assert result.applied
    assert result.num_targets == sum(candidates)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_step_without_targets_counts_and_changes_nothing(make_step, make_batch, lengths):
    """Not by weight decay or momentum either."""
    train_step = make_step()
    train_step([make_batch([3])], step=1)  # so that the optimizers have momentum
    before = weights(train_step), optimizer_states(train_step)
    result = train_step([make_batch(lengths)], step=2)
    assert (result.loss_sum, result.num_targets, result.applied, result.finite) == (0.0, 0, False, True)
    assert_unchanged(train_step, *before)


@pytest.mark.parametrize("empty", [[], [0, 0]])
def test_empty_micro_batch_beside_a_full_one(make_step, make_batch, empty):
    """What a rank without users does beside others: its backward must reach every weight and add nothing."""
    alone, beside = make_step(NO_DROPOUT), make_step(NO_DROPOUT)
    alone([make_batch([3, 2])], step=1)
    beside([make_batch(empty), make_batch([3, 2])], step=1)
    torch.testing.assert_close(weights(beside), weights(alone), rtol=0, atol=0)


def test_backward_of_an_empty_batch_reaches_every_weight(make_step, make_batch):
    """DDP waits for each of them."""
    model = make_step().model
    model(make_batch([])).loss_per_target.sum().backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not missing


def test_accumulation_equals_the_big_batch(make_step, make_batch):
    """Micro-batches of 7 and 2 targets: the mean is over all nine, not over the two means."""
    big, accumulated = make_step(NO_DROPOUT), make_step(NO_DROPOUT)
    whole = make_batch([4, 3, 2])
    items, actions, ages = (whole.features[name].values() for name in ("item", "action", "age"))
    parts = [make_batch([4, 3]), make_batch([2])]
    for part, events, users in ((parts[0], slice(0, 7), slice(0, 2)), (parts[1], slice(7, 9), slice(2, 3))):
        part.features.values()[:] = torch.cat([ages[users], items[events], actions[events]])
        part.labels[:] = whole.labels[events]
    for step in range(1, 4):
        one, other = big([whole], step=step), accumulated(parts, step=step)
        assert one.loss_sum == pytest.approx(other.loss_sum, rel=1e-5)
        assert (one.num_targets, one.num_users) == (other.num_targets, other.num_users)
    torch.testing.assert_close(weights(big), weights(accumulated), rtol=1e-3, atol=1e-4)


def test_clipping_limits_the_global_norm(make_step, make_batch):
    """With plain SGD and learning rate 1 the step is as long as the clipped gradient."""
    sgd = (
        "OptimizerArgs.optimizer_str = 'sgd'",
        "OptimizerArgs.learning_rate = 1.0",
        "OptimizerArgs.weight_decay = 0.0",
    )
    train_step = make_step(*sgd, "OptimizerArgs.embedding_weight_decay = 0.0", "TrainerArgs.grad_clip_norm = 0.01")
    before = weights(train_step)
    train_step([make_batch([5, 8])], step=1)
    moved = torch.cat([(tensor - before[name]).flatten() for name, tensor in weights(train_step).items()])
    assert float(moved.norm()) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_non_finite_never_reaches_the_weights(make_step, make_batch, where, nonfinite):
    train_step = make_step(f"TrainerArgs.nonfinite = {nonfinite!r}")
    train_step([make_batch([3])], step=1)
    before = weights(train_step), optimizer_states(train_step)
    if where == "loss":
        handle = train_step.model.head.register_forward_hook(lambda module, inputs, logits: logits * float("nan"))
    else:
        handle = next(train_step.model.head.parameters()).register_hook(lambda gradient: gradient / 0.0)
    if nonfinite == "stop":
        with pytest.raises(NonFiniteError, match="not finite at step 2"):
            train_step([make_batch([3])], step=2)
    else:
        result = train_step([make_batch([3])], step=2)
        assert (result.applied, result.finite) == (False, False)
    assert_unchanged(train_step, *before)
    handle.remove()
    assert train_step([make_batch([3])], step=3).applied  # and nothing of it stays in the gradients
    assert all(tensor.isfinite().all() for tensor in weights(train_step).values())


@dataclass(frozen=True)
class WatchedRanks(Ranks):
    """One rank that notes what it asks the others, who add ``others`` to its loss and its count of bad ranks."""

    asked: list[str] = field(default_factory=list)
    others: tuple[float, float] = (0.0, 0.0)

    def sum(self, tensor):
        self.asked.append("after backward")
        return tensor + torch.tensor(self.others, dtype=tensor.dtype)

    def sum_counts(self, counts):
        self.asked.append("before forward")
        return super().sum_counts(counts)


def watched(train_step, **changes):
    train_step.ranks = WatchedRanks(rank=0, world_size=1, device=torch.device("cpu"), **changes)
    return train_step


@pytest.mark.parametrize("clips", ["None", "1.0"])
@pytest.mark.parametrize("num_batches", [1, 3])
def test_a_step_asks_the_other_ranks_twice(make_step, make_batch, clips, num_batches):
    train_step = watched(make_step(f"TrainerArgs.grad_clip_norm = {clips}"))
    train_step([make_batch([3])] * num_batches, step=1)
    assert train_step.ranks.asked == ["before forward", "after backward"]
    train_step([make_batch([])], step=2)
    assert train_step.ranks.asked[2:] == ["before forward"]


@pytest.mark.parametrize("others", [(0.0, 1.0), (float("nan"), 0.0), (float("inf"), 1.0)])
def test_what_is_not_finite_on_another_rank_is_left_out_here(make_step, make_batch, others):
    train_step = watched(make_step("TrainerArgs.nonfinite = 'skip'"), others=others)
    before = weights(train_step), optimizer_states(train_step)
    result = train_step([make_batch([3])], step=1)
    assert (result.applied, result.finite) == (False, False)
    assert_unchanged(train_step, *before)


def test_an_error_of_the_loader_is_raised_before_anything_is_computed(make_step):
    def read():
        raise DataError("damaged")

    train_step = watched(make_step())
    before = weights(train_step), optimizer_states(train_step)
    with pytest.raises(DataError, match=r"^damaged$"):
        train_step.attempt(StepInput.of(Attempt.of(read), ranks=train_step.ranks), step=1)
    assert train_step.ranks.asked == ["before forward"]
    assert_unchanged(train_step, *before)


def test_lookups_that_are_no_steps_do_not_count_as_such():
    """Adam corrects its moments by the count, which FBGEMM keeps, and raises in each lookup."""
    kernel = SimpleNamespace(iter_cpu=torch.tensor([7]), iter=torch.tensor([7]))
    tables = object.__new__(ShardedTables)
    tables.num_steps, tables.kernels = 3, [kernel]
    tables.begin_step()
    assert (int(kernel.iter_cpu), int(kernel.iter)) == (3, 3)
