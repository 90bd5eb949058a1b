"""Which ids a step reads, on all ranks together, and how often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from genrec.data.batch import Batch
from genrec.training.ranks import Ranks


@dataclass(frozen=True)
class IdCounts:
    """ids: (K,) int64, ascending, none twice. counts: (K,) how often each is read."""

    ids: Tensor
    counts: Tensor


def step_ids(batches: Sequence[Batch], features: Mapping[str, Sequence[str]], ranks: Ranks) -> dict[str, IdCounts]:
    """Of each table, the ids that all ranks read in their ``batches`` of a step; two sums over ranks.

    features: by table, those that read it. What is returned lies on the device of the rank. Ranks call alike.
    """
    counted = batches if ranks.is_first_peer else ()  # peers read the same
    own = [_read_ids(counted, names, ranks.device) for names in features.values()]
    if ranks.world_size == 1:
        return dict(zip(features, own, strict=True))
    # Sums of what is 0 on all ranks but one tell every rank how many ids the others have, then which.
    num_tables = len(features)
    sizes = [[len(found.ids) if rank == ranks.rank else 0 for found in own] for rank in range(ranks.world_size)]
    totals = ranks.sum_counts([size for of_rank in sizes for size in of_rank])
    everyone = torch.zeros(2, sum(totals), dtype=torch.int64, device=ranks.device)
    parts = everyone.split(totals, dim=1)  # rank after rank, in each table after table
    for place, found in enumerate(own, start=ranks.rank * num_tables):
        parts[place].copy_(torch.stack([found.ids, found.counts]))
    if everyone.numel():
        with ranks.progress.collective("all-reduce", "ids of dynamic tables"):
            ranks.sum(everyone)
    return {table: _added(torch.cat(parts[at::num_tables], dim=1)) for at, table in enumerate(features)}


def _read_ids(batches: Sequence[Batch], features: Sequence[str], device: torch.device) -> IdCounts:
    kjts = [batch.features for batch in batches if batch.batch_size]
    values = [kjt[name].values() for kjt in kjts for name in features] or [torch.empty(0, dtype=torch.int64)]
    ids, counts = torch.cat(values).to(device).unique(return_counts=True)
    return IdCounts(ids, counts)


def _added(found: Tensor) -> IdCounts:
    """found: (2, M) ids and counts of all ranks."""
    ids, place = found[0].unique(return_inverse=True)
    return IdCounts(ids, torch.zeros_like(ids).index_add_(0, place, found[1]))
