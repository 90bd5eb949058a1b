"""Ranking losses, one number a target, in float32 whatever the network's dtype.

Labels are int64: a bit mask for several tasks (bit i is task i's 0 or 1), a class for k-class cross entropy. The mean
over targets is the trainer's, since only it knows how many there are on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def label_bits(labels: Tensor, num_tasks: int) -> Tensor:
    """(N,) bit masks -> (N, num_tasks) zeros and ones, int64; column i is bit i."""
    return (labels.unsqueeze(1) >> torch.arange(num_tasks, device=labels.device)) & 1


def multi_task_loss(logits: Tensor, labels: Tensor, task_weights: Sequence[float]) -> Tensor:
    """Binary cross entropy on each label bit, weighted and summed over tasks.

    logits: (N, tasks), labels: (N,) bit masks, task_weights: one a task -> (N,) float32.
    """
    bits = label_bits(labels, logits.shape[1]).float()
    losses = F.binary_cross_entropy_with_logits(logits.float(), bits, reduction="none")
    return (losses * torch.tensor(task_weights, dtype=torch.float32, device=logits.device)).sum(dim=1)


def class_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy over k classes. logits: (N, k), labels: (N,) classes -> (N,) float32."""
    return F.cross_entropy(logits.float(), labels, reduction="none")
