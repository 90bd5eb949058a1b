"""The ranking model under DDP, where a rank may have nothing to do."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from genrec.model.ranking import RankingModel


def _backward_on_rank(rank: int, directory: str) -> None:
    model, batches = torch.load(Path(directory) / "inputs.pt", weights_only=False)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=len(batches))
    replica = DistributedDataParallel(model)
    (len(batches) * replica(batches[rank]).loss_per_target.sum()).backward()
    torch.save([parameter.grad for parameter in model.parameters()], Path(directory) / f"{rank}.pt")
    dist.barrier()
    del replica  # holds the group: freed after its end, it waits for the other rank for ever
    gc.collect()
    dist.destroy_process_group()


@pytest.mark.parametrize("idle", [{"users": [], "lengths": []}, {"users": [8], "lengths": [3], "labelled": [0]}])
def test_a_rank_without_targets_gives_the_one_rank_gradients(idle, make_config, make_batch, metadata, tmp_path) -> None:
    torch.manual_seed(0)
    model = RankingModel(make_config(), metadata=metadata)
    busy = make_batch([1, 2], lengths=[5, 9])
    torch.save((model, [busy, make_batch(**idle)]), tmp_path / "inputs.pt")
    mp.spawn(_backward_on_rank, args=(str(tmp_path),), nprocs=2)
    model(busy).loss_per_target.sum().backward()
    for rank in range(2):
        gradients = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-6)
