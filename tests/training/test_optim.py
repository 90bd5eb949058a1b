"""Parameter groups, the optimizers' steps, and learning-rate schedules."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from genrec.configs.schema import OptimizerArgs, TrainerArgs
from genrec.training.optim import LearningRateSchedule, build_optimizers, embedding_parameters

ARGS = OptimizerArgs(optimizer_str="adamw", learning_rate=0.1, weight_decay=0.5, embedding_weight_decay=0.25)
TRAINER = TrainerArgs(train_batch_size=1, eval_batch_size=1, warmup_steps=4, min_lr_ratio=0.1)
ROWS, DIM = 5, 3


class Model(nn.Module):
    """Every kind of parameter: a table, a matrix, a bias, a norm, and an embedding that is not a table."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingConfig(name="item", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["item"])
        self.tables = EmbeddingCollection([config])
        self.position = nn.Embedding(2, DIM)
        self.linear = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)

    @property
    def table(self) -> nn.Parameter:
        return self.tables.embeddings["item"].weight


def zero_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def test_each_parameter_is_in_one_group() -> None:
    model = Model()
    dense, embedding = build_optimizers(model, ARGS)
    grouped = [p for optimizer in (dense, embedding) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, grouped)) == sorted(map(id, model.parameters()))
    assert [id(p) for p in embedding_parameters(model)] == [id(model.table)]


def test_decay_is_for_matrices_and_tables() -> None:
    model = Model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    zero_gradients(model)
    for optimizer in build_optimizers(model, ARGS):
        optimizer.step()
    decayed = {"linear.weight": 0.5, "position.weight": 0.5, "tables.embeddings.item.weight": 0.25}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] * (1 - 0.1 * decayed.get(name, 0.0)))


def test_tables_have_their_own_optimizer_and_rate() -> None:
    model = Model()
    args = dataclasses.replace(ARGS, embedding_optimizer_str="sgd", embedding_learning_rate=2.0)
    before = model.table.detach().clone()
    zero_gradients(model)
    model.table.grad.fill_(1.0)
    dense, embedding = build_optimizers(model, args)
    embedding.step()
    torch.testing.assert_close(model.table.detach(), before - 2.0 * (1.0 + 0.25 * before))
    assert isinstance(dense, torch.optim.AdamW) and isinstance(embedding, torch.optim.SGD)


def test_rowwise_adagrad_by_hand() -> None:
    model = Model()
    args = dataclasses.replace(ARGS, embedding_optimizer_str="rowwise_adagrad", embedding_weight_decay=0.0)
    expected = model.table.detach().clone()
    gradient = torch.arange(ROWS * DIM, dtype=torch.float32).reshape(ROWS, DIM)
    _, embedding = build_optimizers(model, args)
    total = torch.zeros(ROWS, 1)
    for _ in range(3):
        total += gradient.square().mean(1, keepdim=True)
        expected -= 0.1 * gradient / (total.sqrt() + args.adam_eps)
        model.table.grad = gradient.clone()
        embedding.step()
    torch.testing.assert_close(model.table.detach(), expected)
    assert embedding.state[model.table]["sum"].shape == (ROWS, 1)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "rowwise_adagrad"])
def test_state_round_trip_is_exact(name: str) -> None:
    args = dataclasses.replace(ARGS, optimizer_str="adam", embedding_optimizer_str=name)
    models = [Model(), Model()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [build_optimizers(model, args) for model in models]

    def step(index: int) -> None:
        for optimizer in optimizers[index]:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.cos(parameter.detach())
            optimizer.step()

    step(0)
    models[1].load_state_dict(models[0].state_dict())
    for source, target in zip(*optimizers, strict=True):
        target.load_state_dict(copy.deepcopy(source.state_dict()))
    step(0)
    step(1)
    for left, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", {1: 0.25, 3: 0.75, 4: 1.0, 5: 1.0, 104: 1.0}),
        ("linear", {1: 0.25, 4: 1.0, 54: 0.55, 104: 0.1, 200: 0.1}),
        ("cosine", {1: 0.25, 4: 1.0, 54: 0.55, 104: 0.1, 200: 0.1}),
    ],
)
def test_schedule(schedule: str, factors: dict[int, float]) -> None:
    args = dataclasses.replace(ARGS, embedding_learning_rate=0.2)
    optimizers = build_optimizers(Model(), args)
    rates = LearningRateSchedule(optimizers, dataclasses.replace(TRAINER, lr_schedule=schedule), total_steps=103)
    for step, factor in factors.items():
        assert rates(step) == pytest.approx(0.1 * factor)
        assert [group["lr"] for group in optimizers[1].param_groups] == pytest.approx([0.2 * factor])


def test_schedule_without_warmup_or_room_to_fall() -> None:
    trainer = dataclasses.replace(TRAINER, warmup_steps=0, lr_schedule="cosine")
    assert LearningRateSchedule(build_optimizers(Model(), ARGS), trainer, total_steps=10).factor(1) < 1
    short = dataclasses.replace(TRAINER, warmup_steps=10, lr_schedule="linear")
    assert LearningRateSchedule(build_optimizers(Model(), ARGS), short, total_steps=5).factor(5) == 0.5
