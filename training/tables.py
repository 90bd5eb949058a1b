"""Embedding tables shared by several ranks: TorchRec's sharded modules in the model, and their optimizer.

TorchRec's DistributedModelParallel puts sharded modules in the place of ``ShardableTables``. Their optimizer is part of
their backward, so their gradients wait at a gate (model/gate.py) until the step is known to be finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedModule, ShardingEnv, ShardingPlan

from genrec.configs.schema import ExperimentConfig
from genrec.model.gate import GradientGate
from genrec.model.ranking import RankingModel
from genrec.model.table_collections import ShardableTables
from genrec.model.table_init import BlockwiseInit
from genrec.training.optim import table_optimizer
from genrec.training.process_group import ensure_process_group
from genrec.training.ranks import Ranks
from genrec.training.table_plan import quiet_torchrec
from genrec.training.table_sharder import table_sharder


class ShardedTables:
    """The sharded tables of ``model``, which this shards in place: weights as they were, each rank its part.

    gate: where their gradients wait.
    """

    def __init__(
        self,
        model: RankingModel,
        plan: ShardingPlan,
        *,
        config: ExperimentConfig,
        ranks: Ranks,
    ) -> None:
        """plan: of ``plan_tables``, the same on all ranks. Ranks call alike."""
        # FBGEMM's caches are then told to keep what a later step has prefetched (training/pipeline.py).
        # With dynamic tables no step is prefetched.
        asked = config.trainer.pipeline_type == "prefetch" and not model.embeddings.row_maps
        prefetches = asked and ranks.device.type == "cuda"
        sources = first_weights(model)
        ensure_process_group(ranks)
        with quiet_torchrec():
            parallel = DistributedModelParallel(
                model,
                env=ShardingEnv.from_process_group(dist.group.WORLD),
                device=ranks.device,
                plan=plan,
                sharders=[table_sharder(config.optimizer, prefetches=prefetches)],
                init_data_parallel=False,
                init_parameters=False,
            )
        self._optimizer = parallel.fused_optimizer
        self.optimizer_name = table_optimizer(config.optimizer)
        self.num_steps = 0
        self.model = model
        self.plan = plan
        self.kernels = table_kernels(model)
        self.gate = model.embeddings.gate = GradientGate()
        for name, tensor in self.weights().items():
            source = sources.pop(name)
            for shard in tensor.local_shards():
                if isinstance(source, BlockwiseInit):
                    source.fill(shard.tensor, offsets=shard.metadata.shard_offsets)
                else:
                    copy_part(shard.tensor, source, offsets=shard.metadata.shard_offsets)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """With the learning rates."""
        return list(self._optimizer.param_groups)

    def step(self) -> None:
        """Let the gradients reach the tables, with the learning rate that is set."""
        self._optimizer.zero_grad()  # which hands the learning rate to the kernels
        self.gate.release()
        self.num_steps += 1

    def set_num_steps(self, num_steps: int) -> None:
        """Continue after ``num_steps`` steps."""
        self.num_steps = num_steps

    def begin_step(self) -> None:
        """Before the forward of a step: Adam corrects its moments by FBGEMM's count, in which each lookup is a step, an
        evaluation's too, and which no checkpoint holds.
        """
        for kernel in self.kernels:
            if int(kernel.iter_cpu) != self.num_steps:
                kernel.iter_cpu.fill_(self.num_steps)
                kernel.iter.fill_(self.num_steps)

    def weights(self) -> dict[str, ShardedTensor]:
        """By name in the model; the shards of this rank are the tables' own memory."""
        return {name: t for name, t in self.model.state_dict().items() if isinstance(t, ShardedTensor)}

    def moments(self) -> dict[str, dict[str, ShardedTensor]]:
        """Of each of ``weights``, by key; as with ``weights``, the optimizer's own memory."""
        state = self._optimizer.state_dict()["state"]
        return {
            name: {key.rpartition(".")[2]: value for key, value in values.items() if isinstance(value, ShardedTensor)}
            for name, values in state.items()
        }


def table_kernels(model: nn.Module) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    """FBGEMM's kernels of this rank's parts, which TorchRec keeps out of sight of ``model.modules()``."""
    lookups = [lookup for m in model.modules() if isinstance(m, ShardedModule) for lookup in getattr(m, "_lookups", ())]
    found = [m for lookup in lookups for m in lookup.modules()]
    return [m for m in found if isinstance(m, SplitTableBatchedEmbeddingBagsCodegen)]


def first_weights(model: RankingModel) -> dict[str, Tensor | BlockwiseInit]:
    """Of the tables to be sharded, by name of their weight: whole, or how to make any part of a large one."""
    found: dict[str, Tensor | BlockwiseInit] = {}
    for at, module in model.named_modules():
        if isinstance(module, ShardableTables):
            for table, embedding in module.embeddings.items():
                weight = module.inits.get(table, embedding.weight.detach())
                found[f"{at}.embeddings.{table}.weight"] = weight
    return found


def copy_part(part: Tensor, whole: Tensor, *, offsets: Sequence[int]) -> None:
    """Fill ``part``, which starts at ``offsets`` of ``whole``."""
    for axis, offset in enumerate(offsets):
        whole = whole.narrow(axis, offset, part.shape[axis])
    part.copy_(whole)
