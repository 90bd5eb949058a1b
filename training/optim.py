"""Optimizers of dense weights and of embedding tables, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from genrec.configs.schema import OptimizerArgs, TrainerArgs


def build_optimizers(model: nn.Module, args: OptimizerArgs) -> tuple[Optimizer, ...]:
    """One optimizer for the dense weights, one for the embedding tables; a parameter is in exactly one group of one.

    Sharded tables (training/tables.py) are in none: theirs runs inside their backward.
    Weight decay of the dense part is for matrices only, never for biases and norms; embedding_weight_decay is for whole
    tables, at every step also for rows that the step didn't read. It is decoupled with "adamw", and an L2 term of the
    gradient otherwise.
    """
    tables = embedding_parameters(model)
    elsewhere = {id(p) for p in (*tables, *sharded_parameters(model).values())}
    dense = [p for p in model.parameters() if p.requires_grad and id(p) not in elsewhere]
    matrices, vectors = [p for p in dense if p.ndim > 1], [p for p in dense if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    table_groups = [{"params": tables, "weight_decay": args.embedding_weight_decay}]
    dense_optimizer = _optimizer(args.optimizer_str, groups, learning_rate=args.learning_rate, args=args)
    if not tables:
        return (dense_optimizer,)
    rate = table_learning_rate(args)
    return dense_optimizer, _optimizer(table_optimizer(args), table_groups, learning_rate=rate, args=args)


def table_optimizer(args: OptimizerArgs) -> str:
    """The optimizer of embedding tables."""
    return args.embedding_optimizer_str or args.optimizer_str


def table_learning_rate(args: OptimizerArgs) -> float:
    """The full learning rate of embedding tables."""
    return args.learning_rate if args.embedding_learning_rate is None else args.embedding_learning_rate


def embedding_parameters(model: nn.Module) -> list[Parameter]:
    """The weights of all tables that this rank holds whole; other embeddings (of positions) are dense weights."""
    collections = [module for module in model.modules() if isinstance(module, EmbeddingCollection)]
    return [parameter for collection in collections for parameter in collection.parameters()]


def sharded_parameters(model: nn.Module) -> dict[str, Parameter]:
    """This rank's parts of sharded tables, by name in ``model``."""
    modules = {name: module for name, module in model.named_modules() if isinstance(module, ShardedModule)}
    return {f"{at}.{name}": p for at, module in modules.items() for name, p in module.named_parameters()}


class Scheduled(Protocol):
    """What has learning rates to schedule."""

    @property
    def param_groups(self) -> Collection[Any]:
        """Each with its "lr"."""


class LearningRateSchedule:
    """Every group's own learning rate times a factor that depends on the step alone, so there is no state to save.

    The factor rises linearly over warmup_steps to 1, then stays ("constant") or falls to min_lr_ratio at total_steps
    along a line or half a cosine, in such a way that the last step still moves the weights: the end lies a step beyond.
    """

    def __init__(self, optimizers: Sequence[Scheduled], trainer: TrainerArgs, *, total_steps: int) -> None:
        self.groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.rates = [group["lr"] for group in self.groups]
        self.trainer = trainer
        self.total_steps = total_steps

    def __call__(self, step: int) -> float:
        """Sets the learning rates of optimizer step ``step`` (1, 2, ...); returns the dense one."""
        factor = self.factor(step)
        for group, rate in zip(self.groups, self.rates, strict=True):
            group["lr"] = rate * factor
        return float(self.groups[0]["lr"])

    def factor(self, step: int) -> float:
        """The share of the full learning rate at ``step``: 1 at the last warm-up step, then as the schedule says."""
        warmup, least = self.trainer.warmup_steps, self.trainer.min_lr_ratio
        if step < warmup:
            return step / warmup
        if self.trainer.lr_schedule == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, self.total_steps + 1 - warmup))
        remaining = 1 - progress if self.trainer.lr_schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return least + (1 - least) * remaining


def _optimizer(name: str, groups: list[dict[str, Any]], *, learning_rate: float, args: OptimizerArgs) -> Optimizer:
    """The named optimizer. PyTorch's own run fused: one pass over the weights, on the CPU too.

    Its fused SGD knows no DTensors, which FSDP2's weights are: of them it takes all of a group at a time.
    """
    if name == "sgd":
        parts = any(isinstance(p, DTensor) for group in groups for p in group["params"])
        return SGD(groups, lr=learning_rate, fused=not parts, foreach=parts)
    if name == "rowwise_adagrad":
        return RowWiseAdagrad(groups, lr=learning_rate, eps=args.adam_eps)
    optimizer_type = {"adam": Adam, "adamw": AdamW}[name]
    betas = (args.adam_beta1, args.adam_beta2)
    return optimizer_type(groups, lr=learning_rate, betas=betas, eps=args.adam_eps, fused=True)
