"""Large shards cut into pieces of rows for a checkpoint, so that copies to the host are of a piece at a time.

torch.distributed.checkpoint copies each stored chunk whole, when it writes it from a GPU (or from host memory that a
GPU reads) and when any part of it is read: a shard that fills half of the host would need the other half too::

    shard of rows 0 to 9, 4 rows a piece     chunks of rows 0 to 3, 4 to 7, 8 to 9 in the checkpoint, no copy here
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharding_spec import ShardMetadata

PIECE_NUMBERS = 2**26  # 256 MiB of float32


def in_pieces(tensor: Tensor) -> Tensor:
    """``tensor``, or where it is a ShardedTensor with large shards, the same memory as one with smaller shards."""
    if not isinstance(tensor, ShardedTensor):
        return tensor
    metadata = tensor.metadata()
    cut = {_place(shard): list(_pieces(shard)) for shard in metadata.shards_metadata}
    if all(len(pieces) == 1 for pieces in cut.values()):
        return tensor
    own = [
        Shard(shard.tensor.detach()[first : first + piece.shard_sizes[0]], piece)
        for shard in tensor.local_shards()
        for piece in cut[_place(shard.metadata)]
        for first in (piece.shard_offsets[0] - shard.metadata.shard_offsets[0],)
    ]
    whole = dataclasses.replace(
        metadata,
        shards_metadata=[piece for pieces in cut.values() for piece in pieces],
        tensor_properties=dataclasses.replace(metadata.tensor_properties, requires_grad=False),
    )
    # Knows all ranks' shards, so it asks none.
    return ShardedTensor._init_from_local_shards_and_global_metadata(own, whole, process_group=tensor._process_group)


def _pieces(shard: ShardMetadata) -> Iterator[ShardMetadata]:
    """Of the metadata of a shard, (rows, columns) or (rows,)."""
    (first, *columns), (num_rows, *widths) = shard.shard_offsets, shard.shard_sizes
    size = max(1, PIECE_NUMBERS // max(1, torch.Size(widths).numel()))
    for start in range(0, max(1, num_rows), size):
        rows = min(size, num_rows - start)
        yield ShardMetadata(
            shard_offsets=[first + start, *columns], shard_sizes=[rows, *widths], placement=shard.placement
        )


def _place(shard: ShardMetadata) -> tuple[int, ...]:
    return (*shard.shard_offsets, *shard.shard_sizes)
