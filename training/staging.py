"""Copies of a rank's tensors in host memory, to be written while training changes the tensors themselves.

torch.distributed.checkpoint's own DefaultStager cannot copy a ShardedTensor, which TorchRec's tables are (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensorBase
from torch.distributed.tensor import DTensor


class Staging:
    """The memory for one copy, taken at the first and used for each one after; in the way of no other thread.

    With a GPU it is page-locked, since only into such memory copies are fast.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._device = device
        self._memory: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of ``tensors`` as it is now: whole tensors, or shards of the same shape and place.

        The copy before is overwritten.
        """
        before, self._memory = self._memory, {}
        copies = {name: self._copy(name, tensor, before) for name, tensor in tensors.items()}
        if self._on_gpu:
            torch.cuda.current_stream(self._device).synchronize()
        return copies

    def _copy(self, name: str, tensor: Tensor, before: dict[str, Tensor]) -> Tensor:
        if isinstance(tensor, ShardedTensor):
            shards = [
                Shard(self._copy_part(f"{name}[{number}]", shard.tensor, before), _on_host(shard.metadata))
                for number, shard in enumerate(tensor.local_shards())
            ]
            # The base class's, which doesn't ask that shards lie where the metadata of the whole say.
            copied: Any = ShardedTensorBase._init_from_local_shards_and_global_metadata(
                shards, sharded_tensor_metadata=tensor.metadata()
            )
            copied._process_group = tensor._process_group  # of which every operator on it asks
            return copied
        if isinstance(tensor, DTensor):
            part = self._copy_part(name, tensor.to_local(), before)
            return DTensor(part, tensor._spec, requires_grad=False)
        return self._copy_part(name, tensor, before)

    def _copy_part(self, name: str, tensor: Tensor, before: dict[str, Tensor]) -> Tensor:
        memory = before.pop(name, None)
        if memory is None or (memory.shape, memory.dtype) != (tensor.shape, tensor.dtype):
            memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self._on_gpu)
        memory.copy_(tensor.detach(), non_blocking=True)
        self._memory[name] = memory
        return memory


def _on_host(shard: ShardMetadata) -> ShardMetadata:
    """The place of a shard's copy: of the same rows and columns, but in host memory."""
    assert shard.placement is not None
    return ShardMetadata(list(shard.shard_offsets), list(shard.shard_sizes), f"rank:{shard.placement.rank()}/cpu")
