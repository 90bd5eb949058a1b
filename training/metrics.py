"""Ranking metrics over all targets of an evaluation, exact for any number of ranks.

Scores, labels and users of every target are kept and gathered, so a metric never depends on how targets were spread
over batches or ranks. AUC counts pairs in integers: it is exact, half a point for a tie, and the same in any order.
(torchmetrics' own BinaryAUROC adds up in float32 and answers 0 where there is only one class.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from genrec.configs.schema import RANKING_METRICS, ConfigError

SMALLEST_PROBABILITY = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class TaskTargets:
    """One task's N targets.

    scores: (N,) float64 probabilities; labels: (N,) int64 0 or 1; hits: (N,) bool, whether the prediction is right;
    user_ids: (N,) int64.
    """

    scores: Tensor
    labels: Tensor
    hits: Tensor
    user_ids: Tensor


class RankingMetrics(Metric):
    """``names`` (of RANKING_METRICS) for each of ``num_tasks`` tasks.

    A value that is undefined (no targets, one class only, a score that is NaN) is NaN. GAUC is the mean of users' AUC
    weighted by their targets, over users with both classes. NE is log loss divided by the entropy of the base rate.

    Raises:
        ConfigError: an unknown name.
    """

    full_state_update = False
    scores: list[Tensor]
    labels: list[Tensor]
    hits: list[Tensor]
    user_ids: list[Tensor]

    def __init__(self, num_tasks: int, names: Sequence[str]) -> None:
        super().__init__()
        unknown = [name for name in names if name not in METRICS]
        if unknown:
            known = ", ".join(RANKING_METRICS)
            raise ConfigError(f"RankingArgs.eval_metrics names {unknown[0]!r}, allowed are {known}")
        self.num_tasks = num_tasks
        self.names = tuple(names)
        for state in ("scores", "labels", "hits", "user_ids"):
            self.add_state(state, default=[], dist_reduce_fx="cat")

    def update(self, scores: Tensor, labels: Tensor, user_ids: Tensor, hits: Tensor | None = None) -> None:
        """Takes in N more targets.

        scores: (N, tasks) probabilities of a positive; labels: (N, tasks) 0 or 1; user_ids: (N,). hits: (N, tasks)
        bool, what accuracy counts; None: whether the score is on the label's side of 0.5.
        """
        assert scores.shape == labels.shape == (user_ids.shape[0], self.num_tasks)
        self.scores.append(scores.detach().double())
        self.labels.append(labels.long())
        self.hits.append(((scores > 0.5) == (labels > 0)) if hits is None else hits)
        self.user_ids.append(user_ids.long())

    def compute(self) -> dict[str, float]:
        """``{"auc": ..}`` over all ranks' targets; the names of further tasks end in _task1, _task2, ..."""
        self.ensure_filled()
        scores, labels, hits, user_ids = map(dim_zero_cat, (self.scores, self.labels, self.hits, self.user_ids))
        results: dict[str, float] = {}
        for task in range(self.num_tasks):
            targets = TaskTargets(scores[:, task], labels[:, task], hits[:, task], user_ids)
            undefined = not len(user_ids) or bool(targets.scores.isnan().any())
            suffix = "" if task == 0 else f"_task{task}"
            for name in self.names:
                results[name.lower() + suffix] = math.nan if undefined else METRICS[name](targets)
        return results

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Gathers all ranks' targets; every rank takes part, also one that has none."""
        self.ensure_filled()
        super().sync(*args, **kwargs)

    def ensure_filled(self) -> None:
        """Gives a rank without targets zero rows of the right width and dtype, since a gather needs equal ones."""
        if isinstance(self.scores, list) and not self.scores:
            empty = torch.empty(0, self.num_tasks, dtype=torch.float64, device=self.device)
            self.update(empty, empty.long(), torch.empty(0, dtype=torch.int64, device=self.device))


def auc_by_group(scores: Tensor, labels: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """AUC within each group, in the order of the sorted group ids.

    The share of (positive, negative) pairs in which the positive scores higher, a tie counting one half.

    scores: (N,), labels: (N,) int64 0 or 1, groups: (N,) int64 -> AUC (G,) float64, NaN for a group with one class
    only, and sizes (G,) int64.
    """
    order = scores.argsort(stable=True)
    order = order[groups[order].argsort(stable=True)]
    scores, labels, groups = scores[order], labels[order], groups[order]
    _, group = groups.unique_consecutive(return_inverse=True)
    starts_run = torch.ones_like(group, dtype=torch.bool)  # a run: equal scores within one group
    starts_run[1:] = (group[1:] != group[:-1]) | (scores[1:] != scores[:-1])
    run = starts_run.cumsum(0) - 1
    group_of_run = group[starts_run]
    positives, negatives = _sum_by(run, labels), _sum_by(run, 1 - labels)
    group_positives, group_negatives = _sum_by(group, labels), _sum_by(group, 1 - labels)
    below_group = group_negatives.cumsum(0) - group_negatives
    below = negatives.cumsum(0) - negatives - below_group[group_of_run]
    half_points = _sum_by(group_of_run, positives * (2 * below + negatives))
    auc = half_points.double() / (2 * group_positives * group_negatives).double()
    return auc, group_positives + group_negatives


def _sum_by(index: Tensor, values: Tensor) -> Tensor:
    """Sums of ``values`` (N,) int64 at each ``index`` (N,), which holds every number from 0 up to its largest."""
    size = int(index[-1]) + 1 if index.numel() else 0
    return torch.zeros(size, dtype=torch.int64, device=values.device).index_add_(0, index, values)


def _auc(targets: TaskTargets) -> float:
    auc, _ = auc_by_group(targets.scores, targets.labels, torch.zeros_like(targets.user_ids))
    return float(auc)


def _gauc(targets: TaskTargets) -> float:
    auc, sizes = auc_by_group(targets.scores, targets.labels, targets.user_ids)
    both_classes = ~auc.isnan()
    weights = sizes[both_classes].double()
    return float((auc[both_classes] * weights).sum() / weights.sum())  # 0 / 0, NaN, where no user has both


def _log_loss(targets: TaskTargets) -> float:
    probabilities = targets.scores.clamp(SMALLEST_PROBABILITY, 1 - SMALLEST_PROBABILITY)
    return float(torch.where(targets.labels > 0, -probabilities.log(), -torch.log1p(-probabilities)).mean())


def _normalised_entropy(targets: TaskTargets) -> float:
    rate = float(targets.labels.double().mean())
    if rate in (0.0, 1.0):
        return math.nan
    return _log_loss(targets) / -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))


def _accuracy(targets: TaskTargets) -> float:
    return float(targets.hits.double().mean())


METRICS: dict[str, Callable[[TaskTargets], float]] = {
    "AUC": _auc,
    "GAUC": _gauc,
    "NE": _normalised_entropy,
    "LogLoss": _log_loss,
    "Accuracy": _accuracy,
}
