"""Ranking metrics against slow, independent definitions, and at several ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

from genrec.configs.schema import RANKING_METRICS, ConfigError
from genrec.training.metrics import RankingMetrics, auc_by_group

# Few distinct scores and users, so that ties and single-class users are common.
TARGETS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1), st.integers(0, 3)), max_size=30)


def slow_auc(scores: list[float], labels: list[int]) -> float:
    targets = list(zip(scores, labels, strict=True))
    pairs = [(p, n) for p, label in targets if label for n, other in targets if not other]
    return sum(1.0 if p > n else 0.5 if p == n else 0.0 for p, n in pairs) / len(pairs) if pairs else math.nan


def slow_metrics(scores: list[float], labels: list[int], users: list[int]) -> dict[str, float]:
    count = len(labels)
    losses = [-math.log(s if y else 1 - s) for s, y in zip(scores, labels, strict=True)]
    log_loss = sum(losses) / count if count else math.nan
    rate = sum(labels) / count if count else 0.0
    entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate) if 0 < rate < 1 else math.nan
    total = weight = 0.0
    for user in set(users):
        own = [i for i in range(count) if users[i] == user]
        auc = slow_auc([scores[i] for i in own], [labels[i] for i in own])
        if not math.isnan(auc):
            total, weight = total + len(own) * auc, weight + len(own)
    return {
        "auc": slow_auc(scores, labels),
        "gauc": total / weight if weight else math.nan,
        "ne": log_loss / entropy,
        "logloss": log_loss,
        "accuracy": sum((s > 0.5) == y for s, y in zip(scores, labels, strict=True)) / count if count else math.nan,
    }


def random_targets(count: int, *, tasks: int = 1, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = (torch.rand(count, tasks, generator=generator) * 50).round().clamp(1, 49) / 50
    labels = (torch.rand(count, tasks, generator=generator) < scores).long()
    return scores, labels, torch.randint(0, 7, (count,), generator=generator)


@settings(max_examples=100, deadline=None)
@given(TARGETS)
@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_matches_slow_definitions(targets: list[tuple[int, int, int]]) -> None:
    scores, labels, users = ([t[i] for t in targets] for i in range(3))
    probabilities = [(score + 1) / 6 for score in scores]
    metrics = RankingMetrics(1, RANKING_METRICS)
    metrics.update(
        torch.tensor(probabilities, dtype=torch.float64).reshape(-1, 1),
        torch.tensor(labels, dtype=torch.int64).reshape(-1, 1),
        torch.tensor(users, dtype=torch.int64),
    )
    expected = slow_metrics(probabilities, labels, users)
    assert metrics.compute() == pytest.approx(expected, rel=1e-12, nan_ok=True)


def test_matches_torchmetrics() -> None:
    scores, labels, _ = random_targets(1000)
    auc, _ = auc_by_group(scores[:, 0], labels[:, 0], torch.zeros(1000, dtype=torch.int64))
    assert float(auc) == pytest.approx(float(binary_auroc(scores[:, 0], labels[:, 0])), abs=1e-6)


def test_batches_and_order_do_not_matter() -> None:
    scores, labels, users = random_targets(100)
    whole, parts = RankingMetrics(1, RANKING_METRICS), RankingMetrics(1, RANKING_METRICS)
    whole.update(scores, labels, users)
    for part in torch.randperm(100, generator=torch.Generator().manual_seed(1)).split([1, 60, 0, 39]):
        parts.update(scores[part], labels[part], users[part])
    assert parts.compute()["auc"] == whole.compute()["auc"]
    assert parts.compute() == pytest.approx(whole.compute(), rel=1e-14)
    parts.reset()
    parts.update(scores, labels, users)
    assert parts.compute() == whole.compute()


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_no_targets_give_nan() -> None:
    assert all(math.isnan(value) for value in RankingMetrics(2, RANKING_METRICS).compute().values())


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_gives_nan_where_undefined(label: int) -> None:
    metrics = RankingMetrics(1, RANKING_METRICS)
    metrics.update(torch.tensor([[0.25], [0.5]]), torch.full((2, 1), label), torch.tensor([1, 1]))
    values = metrics.compute()
    assert all(math.isnan(values[name]) for name in ("auc", "gauc", "ne"))
    assert math.isfinite(values["logloss"]) and math.isfinite(values["accuracy"])


def test_nan_score_gives_nan_for_its_task_only() -> None:
    scores, labels, users = random_targets(20, tasks=2)
    scores[3, 1] = math.nan
    metrics = RankingMetrics(2, ("AUC", "GAUC", "Accuracy"))
    metrics.update(scores, labels, users)
    values = metrics.compute()
    assert math.isfinite(values["auc"]) and math.isfinite(values["gauc"])
    assert all(math.isnan(values[f"{name}_task1"]) for name in ("auc", "gauc", "accuracy"))


def test_certain_and_wrong_is_a_finite_loss() -> None:
    metrics = RankingMetrics(1, ("LogLoss",))
    metrics.update(torch.tensor([[1.0], [0.0]]), torch.tensor([[0], [1]]), torch.tensor([1, 2]))
    assert 30 < metrics.compute()["logloss"] < 40


def test_hits_replace_the_threshold() -> None:
    metrics = RankingMetrics(1, ("Accuracy",))
    hits = torch.tensor([[True], [True], [False]])
    metrics.update(torch.full((3, 1), 0.9), torch.zeros(3, 1, dtype=torch.int64), torch.arange(3), hits=hits)
    assert metrics.compute()["accuracy"] == pytest.approx(2 / 3)


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="'RMSE', allowed are AUC, GAUC, NE, LogLoss, Accuracy"):
        RankingMetrics(1, ("AUC", "RMSE"))


def _evaluate_on_rank(rank: int, bounds: list[int], directory: str) -> None:
    world_size = len(bounds) - 1
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size)
    part = slice(bounds[rank], bounds[rank + 1])
    scores, labels, users = random_targets(bounds[-1], tasks=2)
    metrics = RankingMetrics(2, RANKING_METRICS)
    if part.start < part.stop:  # a rank without data never calls update
        metrics.update(scores[part], labels[part], users[part])
    first = metrics.compute()
    assert len(metrics.scores) == 1  # the rank's own again
    torch.save(first, Path(directory) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("bounds", [[0, 37, 50], [0, 0, 31, 50], [0, 50, 50], [0, 0, 0]])
def test_ranks_equal_one(bounds: list[int], tmp_path: Path) -> None:
    mp.spawn(_evaluate_on_rank, args=(bounds, str(tmp_path)), nprocs=len(bounds) - 1)
    scores, labels, users = random_targets(bounds[-1], tasks=2)
    alone = RankingMetrics(2, RANKING_METRICS)
    alone.update(scores, labels, users)
    for rank in range(len(bounds) - 1):
        together = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert together == pytest.approx(alone.compute(), rel=0, abs=0, nan_ok=True)
