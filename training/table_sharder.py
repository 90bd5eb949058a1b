"""What TorchRec shards, and the optimizer that then runs inside of the tables' backward."""

from __future__ import annotations

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.modules.embedding_modules import EmbeddingCollection

from genrec.configs.schema import OptimizerArgs
from genrec.model.table_collections import ShardableTables
from genrec.training.optim import table_learning_rate, table_optimizer

OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
    "adamw": EmbOptimType.ADAM,  # without weight decay, which sharded tables don't have, the same
}


class TableSharder(EmbeddingCollectionSharder):
    """Shards the tables that are meant to be, and no other EmbeddingCollection."""

    @property
    def module_type(self) -> type[EmbeddingCollection]:
        """The modules that TorchRec looks for."""
        return ShardableTables


def table_sharder(args: OptimizerArgs, *, prefetches: bool = False) -> TableSharder:
    """The sharder for the tables' optimizer. prefetches: into the caches of tables in host memory."""
    fused = {
        "prefetch_pipeline": prefetches,
        "optimizer": OPTIMIZERS[table_optimizer(args)],
        "learning_rate": table_learning_rate(args),
        "eps": args.adam_eps,
        "beta1": args.adam_beta1,
        "beta2": args.adam_beta2,
    }
    return TableSharder(fused_params=fused)
