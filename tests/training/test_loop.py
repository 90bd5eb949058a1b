from __future__ import annotations

import itertools

import pytest
import torch

from genrec.configs.schema import TrainerArgs, UserError
from genrec.training.average import WeightAverage
from genrec.training.dense_parallel import loss_scale, total_norm
from genrec.training.loop import grouped, total_steps
from genrec.training.ranks import Ranks


class Epochs:
    """Yields "epoch.batch" for five batches an epoch."""

    def __init__(self):
        self.epoch = -1

    def __len__(self):
        return 5

    def __iter__(self):
        self.epoch += 1
        yield from (f"{self.epoch}.{number}" for number in range(5))


def test_groups_end_with_the_epoch():
    groups = list(itertools.islice(grouped(Epochs(), 2), 5))
    assert groups == [["0.0", "0.1"], ["0.2", "0.3"], ["0.4"], ["1.0", "1.1"], ["1.2", "1.3"]]


@pytest.mark.parametrize(("accumulate", "max_iters", "steps"), [(1, None, 5), (2, None, 3), (2, 100, 100)])
def test_total_steps(accumulate, max_iters, steps):
    trainer = TrainerArgs(train_batch_size=1, eval_batch_size=1, accumulate_steps=accumulate, max_train_iters=max_iters)
    assert total_steps(trainer, Epochs()) == steps


def test_average_of_the_weights():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 1.0)
    average = WeightAverage(model, decay=0.5)
    torch.nn.init.constant_(model.weight, 3.0)
    average.update(step=1)  # decay min(0.5, 2 / 11): a short run forgets its start
    expected = 2 / 11 * 1.0 + 9 / 11 * 3.0
    with average.applied():
        assert model.weight.item() == pytest.approx(expected)
    assert model.weight.item() == 3.0
    average.update(step=100)
    assert average.tensors["weight"].item() == pytest.approx(0.5 * expected + 0.5 * 3.0)


def test_one_rank_is_alone():
    ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    assert ranks.sum(torch.tensor([2])).tolist() == [2]
    assert ranks.gather("x") == ["x"]
    assert ranks.together(lambda: 3) == 3
    assert loss_scale(ranks, 4) == 0.25

    def fail():
        raise UserError("told as it is")

    with pytest.raises(UserError, match=r"^told as it is$"):
        ranks.together(fail)


def test_the_norm_of_no_gradients_is_on_the_device():
    """Of sharded tables on a rank without users; PyTorch's would be on the host, whatever the others are on."""
    norm = total_norm([], torch.device("meta"))
    assert (norm.shape, norm.device.type) == ((), "meta")
    assert total_norm([torch.full((2,), 3.0), torch.full((2,), 4.0)], torch.device("cpu")).item() == pytest.approx(
        50**0.5
    )
