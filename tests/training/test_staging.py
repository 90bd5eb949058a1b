from __future__ import annotations

import pytest
import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.api import ShardedTensorBase

from genrec.training.staging import Staging


def sharded(boxes, own, *, place="cpu"):
    """A (6, 8) tensor whose shards are ``boxes`` (offsets, sizes), one a rank, of which this rank has ``own``."""
    shards = [ShardMetadata(list(o), list(s), f"rank:{rank}/{place}") for rank, (o, s) in enumerate(boxes)]
    metadata = ShardedTensorMetadata(shards, torch.Size([6, 8]), TensorProperties(dtype=torch.float32))
    parts = [
        Shard(torch.full(boxes[rank][1], 1.0), ShardMetadata(*map(list, boxes[rank]), f"rank:{rank}/cpu"))
        for rank in own
    ]
    for part, rank in zip(parts, own, strict=True):
        part.metadata = shards[rank]  # whose device a Shard compares only as it is made
    tensor = ShardedTensorBase._init_from_local_shards_and_global_metadata(parts, sharded_tensor_metadata=metadata)
    tensor._process_group = None
    return tensor


LAYOUTS = {
    "rows": ([((0, 0), (2, 8)), ((2, 0), (2, 8)), ((4, 0), (2, 8))], [1]),
    "uneven rows": ([((0, 0), (4, 8)), ((4, 0), (2, 8))], [1]),
    "columns": ([((0, 0), (6, 4)), ((0, 4), (6, 4))], [0]),
    "whole, elsewhere": ([((0, 0), (6, 8))], []),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", ["cpu", "cuda:0"])  # where the metadata say that shards lie; copies lie on the host
def test_shards_stay_in_their_place(layout, place):
    tensor = sharded(*LAYOUTS[layout], place=place)
    copy = Staging(torch.device("cpu")).copy({"table": tensor})["table"]
    assert isinstance(copy, ShardedTensor) and copy.shape == tensor.shape and copy.dtype == tensor.dtype
    boxes = [[(m.shard_offsets, m.shard_sizes) for m in one.metadata().shards_metadata] for one in (tensor, copy)]
    assert boxes[0] == boxes[1]
    assert len(copy.local_shards()) == len(tensor.local_shards())
    for one, other in zip(tensor.local_shards(), copy.local_shards(), strict=True):
        assert other.metadata.shard_offsets == one.metadata.shard_offsets
        one.tensor.zero_()
        assert other.tensor.eq(1).all() and other.tensor.device.type == "cpu"


def test_memory_is_taken_once():
    staging, weight = Staging(torch.device("cpu")), torch.ones(3, 2)
    first = staging.copy({"weight": weight, "steps": torch.tensor(1.0)})
    weight.add_(1)
    assert first["weight"].eq(1).all()
    second = staging.copy({"weight": weight, "steps": torch.tensor(2)})
    assert second["weight"].data_ptr() == first["weight"].data_ptr() and second["weight"].eq(2).all()
    assert second["steps"].dtype == torch.int64  # of another kind now, it has memory of its own
    parameter = torch.nn.Parameter(torch.ones(2).t())
    assert not staging.copy({"weight": parameter})["weight"].requires_grad
