"""Optimizers of dense weights and of embedding tables, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from genrec.configs.schema import OptimizerArgs, TrainerArgs


def build_optimizers(model: nn.Module, args: OptimizerArgs) -> tuple[Optimizer, ...]:
    """One optimizer for the dense weights, one for the embedding tables; a parameter is in exactly one group of one.

    Weight decay of the dense part is for matrices only, never for biases and norms; embedding_weight_decay is for whole
    tables, at every step also for rows that the step didn't read. It is decoupled with "adamw", and an L2 term of the
    gradient otherwise.
    """
    tables = embedding_parameters(model)
    is_table = {id(table) for table in tables}
    dense = [p for p in model.parameters() if p.requires_grad and id(p) not in is_table]
    matrices, vectors = [p for p in dense if p.ndim > 1], [p for p in dense if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    table_groups = [{"params": tables, "weight_decay": args.embedding_weight_decay}]
    table_rate = args.learning_rate if args.embedding_learning_rate is None else args.embedding_learning_rate
    table_optimizer = args.embedding_optimizer_str or args.optimizer_str
    return (
        _optimizer(args.optimizer_str, groups, learning_rate=args.learning_rate, args=args),
        _optimizer(table_optimizer, table_groups, learning_rate=table_rate, args=args),
    )


def embedding_parameters(model: nn.Module) -> list[Parameter]:
    """The weights of all TorchRec embedding tables in ``model``; its other embeddings (positions) are dense weights."""
    collections = [module for module in model.modules() if isinstance(module, EmbeddingCollection)]
    return [parameter for collection in collections for parameter in collection.parameters()]


class LearningRateSchedule:
    """Every group's own learning rate times a factor that depends on the step alone, so there is no state to save.

    The factor rises linearly over warmup_steps to 1, then stays ("constant") or falls to min_lr_ratio at total_steps
    along a line or half a cosine, in such a way that the last step still moves the weights: the end lies a step beyond.
    """

    def __init__(self, optimizers: Sequence[Optimizer], trainer: TrainerArgs, *, total_steps: int) -> None:
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
    """The named optimizer. PyTorch's own run fused: one pass over the weights, on the CPU too."""
    if name == "sgd":
        return SGD(groups, lr=learning_rate, fused=True)
    if name == "rowwise_adagrad":
        return RowWiseAdagrad(groups, lr=learning_rate, eps=args.adam_eps)
    optimizer_type = {"adam": Adam, "adamw": AdamW}[name]
    betas = (args.adam_beta1, args.adam_beta2)
    return optimizer_type(groups, lr=learning_rate, betas=betas, eps=args.adam_eps, fused=True)
