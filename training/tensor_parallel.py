"""A model that ranks share between them: what each has a part of, in training and in checkpoints.

The model is built whole on every rank, from one seed, then cut (hstu/parallel.py), so its first weights don't depend on
how many ranks share it. A checkpoint holds whole tensors: a rank writes its part, and takes its part of what it reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata

from genrec.configs.schema import ConfigError
from genrec.hstu.layer import HSTULayer
from genrec.hstu.linear import Linear
from genrec.hstu.norm import HeadNorm, Norm
from genrec.hstu.parallel import Split, TensorParallel, summed
from genrec.model.heads import PredictionHead
from genrec.training.checkpoint_names import weight_of
from genrec.training.process_group import COLLECTIVE_TIMEOUT
from genrec.training.ranks import Ranks

BROADCAST_BYTES = 64 * 2**20  # of gradients that go together


def with_peers(ranks: Ranks, tensor_parallel_size: int) -> Ranks:
    """``ranks`` as a grid, neighbours being peers: on one host, where they talk fastest. Ranks call alike.

    Raises ConfigError for a number of ranks that is no multiple of ``tensor_parallel_size``.
    """
    size, world_size = tensor_parallel_size, ranks.world_size
    check_num_ranks(world_size, tensor_parallel_size=size)
    if size == 1:
        return ranks
    rows = [list(range(first, first + size)) for first in range(0, world_size, size)]
    columns = [list(range(first, world_size, size)) for first in range(size)]
    # Every rank makes every group, in one order.
    peers = [dist.new_group(row, timeout=COLLECTIVE_TIMEOUT) for row in rows]
    data = [dist.new_group(column, timeout=COLLECTIVE_TIMEOUT) for column in columns]
    place, row = ranks.rank % size, ranks.rank // size
    tensor = TensorParallel(rank=place, size=size, group=peers[row])
    return dataclasses.replace(ranks, tensor=tensor, data_group=data[place])


def check_num_ranks(world_size: int, *, tensor_parallel_size: int) -> None:
    """Raises ConfigError where the ranks can't be parted into groups of ``tensor_parallel_size`` peers."""
    size = tensor_parallel_size
    if world_size % size:
        raise ConfigError(
            f"TensorModelParallelArgs.tensor_model_parallel_size = {size} needs a multiple of {size} ranks, and this "
            f"run has {world_size}: start as many with torchrun --nproc_per_node (--check: --ranks), or bind 1"
        )


class TensorParallelWeights:
    """Cuts ``model`` in place; from then on this rank holds its part of some weights. splits: by name of the weight."""

    def __init__(self, model: nn.Module, tp: TensorParallel) -> None:
        self.tp = tp
        for module in model.modules():
            if isinstance(module, (HSTULayer, PredictionHead)):
                module.share_out(tp)
        self.splits: dict[str, Split] = {
            f"{at}.{name}": split
            for at, module in model.named_modules()
            if isinstance(module, (Linear, Norm, HeadNorm))
            for name, split in module.splits.items()
        }

    def broadcast_gradients(self, model: nn.Module) -> None:
        """Give all peers one gradient of each weight that they hold whole: that of the first.

        Theirs are sums of the same numbers, but on a GPU not always in the same order (atomic additions), and weights
        that drift apart would not be the same weights any more.
        """
        _, whole = self._gradients(model)
        assert self.tp.group is not None
        dist._broadcast_coalesced(self.tp.group, whole, BROADCAST_BYTES, 0)

    def gradient_norm(self, model: nn.Module) -> Tensor:
        """The norm of all gradients, (), each part of a weight and each whole weight counted once."""
        parts, whole = self._gradients(model)
        squares = summed(torch.nn.utils.get_total_norm(parts).double().square(), self.tp)
        return (squares + torch.nn.utils.get_total_norm(whole).double().square()).sqrt().float()

    def _gradients(self, model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """Of parts, and of weights held whole."""
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        parts = [gradient for name, gradient in gradients.items() if name in self.splits]
        return parts, [gradient for name, gradient in gradients.items() if name not in self.splits]

    def cut(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A checkpoint's tensors by name, those of which this rank has a part cut to it; what can't be cut is left."""
        cut = {}
        for name, tensor in tensors.items():
            split = self.splits.get(weight_of(name))
            fits = split is not None and split.fits(tensor, self.tp)
            cut[name] = split.part(tensor, self.tp) if split is not None and fits else tensor
        return cut

    def joined(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's tensors by name in a checkpoint, the parts as parts of the whole that peers write together."""
        joined = {}
        for name, tensor in tensors.items():
            split = self.splits.get(weight_of(name))
            joined[name] = tensor if split is None or not tensor.dim() else _as_part(tensor.detach(), split, self.tp)
        return joined


def _as_part(part: Tensor, split: Split, tp: TensorParallel) -> ShardedTensor:
    """``part`` as what this rank has of a whole tensor: a shard for each of its blocks."""
    assert tp.group is not None
    global_ranks = dist.get_process_group_ranks(tp.group)
    size = split.whole_shape(part, tp)
    places = []
    for rank, global_rank in enumerate(global_ranks):
        for offset in split.offsets(part, TensorParallel(rank, tp.size)):
            offsets, sizes = [0] * part.dim(), list(part.shape)
            offsets[split.dim], sizes[split.dim] = offset, part.shape[split.dim] // split.num_blocks
            places.append(ShardMetadata(offsets, sizes, placement=f"rank:{global_rank}/{part.device}"))
    own = places[tp.rank * split.num_blocks : (tp.rank + 1) * split.num_blocks]
    blocks = part.chunk(split.num_blocks, split.dim)
    shards = [
        Shard(block.clone(memory_format=torch.contiguous_format), place)
        for block, place in zip(blocks, own, strict=True)
    ]
    properties = TensorProperties(dtype=part.dtype, layout=part.layout)
    whole: ShardedTensor = ShardedTensor._init_from_local_shards_and_global_metadata(
        shards,
        ShardedTensorMetadata(places, torch.Size(size), properties),
        process_group=tp.group,
        sharding_spec=EnumerableShardingSpec(places),
    )
    return whole
