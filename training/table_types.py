"""Which sharding types and kernels a table may have, from what is configured; the planner chooses among them.

====================  ====================================================================
data_parallel         every rank holds the whole table, DDP sums its gradients
row_wise              each rank holds some rows
table_wise            one rank holds the table
column_wise           each rank holds some columns
model_parallel        one of those three, as the planner finds best
auto                  data_parallel up to AUTO_REPLICATED_NUMBERS numbers, else model_parallel
====================  ====================================================================

A table of any type but ``data_parallel`` is one of TorchRec's sharded tables, with an optimizer fused into backward: on
one rank too, of which it is then the only shard, unless fused optimizers can't serve there and nothing asks for UVM.

==================  ======================================================================
placement           kernels that the planner may choose
==================  ======================================================================
hbm                 fused: in the device's own memory
uvm                 fused_uvm: in host memory, which the GPU reads row by row
uvm_caching         fused_uvm_caching: in host memory, with a cache of rows on the GPU
auto                any of them; on a CPU, and for a dynamic table, fused
==================  ======================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchrec.distributed.embedding_types import EmbeddingComputeKernel

from genrec.configs.schema import ConfigError, ExperimentConfig, UnavailableError
from genrec.model.table_specs import TableSpec
from genrec.training.optim import table_optimizer

WHOLE = ("data_parallel",)
AUTO_REPLICATED_NUMBERS = 2**24  # 64 MiB of float32
SHARDED_TYPES = ("row_wise", "table_wise", "column_wise")
NUMBERS_ALIGNED = 4  # FBGEMM's kernels read rows 16 bytes at a time
KERNELS = {
    "hbm": (EmbeddingComputeKernel.FUSED,),
    "uvm": (EmbeddingComputeKernel.FUSED_UVM,),
    "uvm_caching": (EmbeddingComputeKernel.FUSED_UVM_CACHING,),
    "auto": (
        EmbeddingComputeKernel.FUSED,
        EmbeddingComputeKernel.FUSED_UVM_CACHING,
        EmbeddingComputeKernel.FUSED_UVM,
    ),
}
UVM_PLACEMENTS = ("uvm", "uvm_caching")


def allowed_types(table: TableSpec, config: ExperimentConfig, *, device_type: str, world_size: int) -> tuple[str, ...]:
    """The sharding types that the planner may choose for ``table``; ("data_parallel",) where it stays whole.

    Raises ConfigError for a table that can't be sharded as asked, UnavailableError where this device can't.
    """
    wanted, in_uvm = table.sharding_type, table.placement in UVM_PLACEMENTS
    optimizer = table_optimizer(config.optimizer)
    cpu_adam = device_type == "cpu" and optimizer in ("adam", "adamw")
    size = table.num_embeddings * table.embedding_dim
    _check_placement(table, device_type=device_type)
    if wanted == "data_parallel":
        return WHOLE
    if wanted == "auto" and not in_uvm and (size <= AUTO_REPLICATED_NUMBERS or cpu_adam):
        return WHOLE
    aligned = table.embedding_dim % NUMBERS_ALIGNED == 0
    if world_size == 1 and not in_uvm and (cpu_adam or not aligned or any(_refused(config).values())):
        return WHOLE  # nothing has to be shared
    if cpu_adam:
        raise UnavailableError(
            f"table {table.name!r} has sharding type {wanted!r}, and FBGEMM has no {optimizer!r} for sharded tables on"
            " a CPU: OptimizerArgs.embedding_optimizer_str 'sgd' and 'rowwise_adagrad' are there, or 'data_parallel'"
        )
    if not aligned:
        raise ConfigError(
            f"table {table.name!r} has sharding type {wanted!r} and {table.embedding_dim} columns, which must be a"
            f" multiple of {NUMBERS_ALIGNED}, or the table 'data_parallel'"
        )
    faults = _faults(table, optimizer, world_size=world_size)
    if wanted in faults:
        raise ConfigError(f"table {table.name!r} cannot be {wanted!r}: {faults[wanted]}; it can be {_others(faults)}")
    if wanted in SHARDED_TYPES:
        return (wanted,)
    return tuple(kind for kind in SHARDED_TYPES if kind not in faults)


def _check_placement(table: TableSpec, *, device_type: str) -> None:
    if table.placement in UVM_PLACEMENTS and table.is_dynamic:
        raise UnavailableError(
            f"table {table.name!r} has placement {table.placement!r} and is dynamic: rows that change hands start anew,"
            " which would not reach those that a GPU has copies of; 'auto' and 'hbm', there the same, are available"
        )
    if table.placement in UVM_PLACEMENTS and device_type == "cpu":
        raise UnavailableError(
            f"table {table.name!r} has placement {table.placement!r}, and a CPU has host memory alone: 'auto' and"
            " 'hbm', there the same, are available"
        )
    if table.placement != "auto" and table.sharding_type == "data_parallel":
        raise ConfigError(
            f"table {table.name!r} has placement {table.placement!r} and sharding type 'data_parallel', by which every"
            f" rank holds all of it in its own memory: give it {', '.join(map(repr, SHARDED_TYPES))} or"
            " 'model_parallel', on one rank too"
        )


def allowed_kernels(table: TableSpec, *, device_type: str) -> list[str]:
    """The kernels that the planner may choose for ``table``, the best first."""
    on_device = device_type == "cpu" or table.is_dynamic
    return [kernel.value for kernel in (KERNELS["hbm"] if on_device else KERNELS[table.placement])]


def _faults(table: TableSpec, optimizer: str, *, world_size: int) -> dict[str, str]:
    """Sharding type to why ``table`` can't have it; on one rank all are the same, one shard."""
    faults: dict[str, str] = {}
    if world_size == 1:
        return faults
    num_rows, dim = table.num_embeddings, table.embedding_dim
    if num_rows <= -(-num_rows // world_size) * (world_size - 1):
        faults["row_wise"] = (
            f"its {num_rows} rows, in equal parts but for the last, leave one of {world_size} without any"
        )
    if optimizer == "rowwise_adagrad":
        # A shard's row would have a moment of its own, the mean over the shard's columns: another optimizer.
        faults["column_wise"] = "its optimizer 'rowwise_adagrad' has one moment a row, which columns would not share"
    elif num_column_shards(table, world_size) == 1:
        faults["column_wise"] = f"its {dim} columns can't be cut into equal multiples of {NUMBERS_ALIGNED}"
    return faults


def _others(faults: Mapping[str, str]) -> str:
    return ", ".join(repr(kind) for kind in SHARDED_TYPES if kind not in faults)


def sharded_tables(
    tables: Sequence[TableSpec], config: ExperimentConfig, *, device_type: str, world_size: int
) -> dict[str, tuple[str, ...]]:
    """The tables that are sharded, with their allowed types. Raises as ``allowed_types``, and for what they can't be
    combined with.
    """
    allowed = {t.name: allowed_types(t, config, device_type=device_type, world_size=world_size) for t in tables}
    sharded = {name: types for name, types in allowed.items() if types != WHOLE}
    if sharded:
        _check_combinations(config, next(iter(sharded)))
    return sharded


def _check_combinations(config: ExperimentConfig, table: str) -> None:
    """A fused optimizer steps in each backward, reads only the rows of a batch, and hides their gradients."""
    for name, asked in _refused(config).items():
        if asked:
            raise UnavailableError(
                f"{name} is not available with a sharded table ({table!r}), whose optimizer is part of its backward:"
                " 'data_parallel' tables have it"
            )


def _refused(config: ExperimentConfig) -> dict[str, bool]:
    """What fused optimizers can't do, and whether it is asked for."""
    trainer, optimizer = config.trainer, config.optimizer
    decay = optimizer.embedding_weight_decay
    return {
        f"TrainerArgs.accumulate_steps = {trainer.accumulate_steps}": trainer.accumulate_steps > 1,
        f"TrainerArgs.grad_clip_norm = {trainer.grad_clip_norm}": trainer.grad_clip_norm is not None,
        f"TrainerArgs.ema_decay = {trainer.ema_decay}": trainer.ema_decay is not None,
        f"OptimizerArgs.embedding_weight_decay = {decay}": decay > 0,
    }


def num_column_shards(table: TableSpec, world_size: int) -> int:
    """The most equal shards of columns, at most one a rank, that FBGEMM can read."""
    fitting = [n for n in range(1, world_size + 1) if table.embedding_dim % (n * NUMBERS_ALIGNED) == 0]
    return max(fitting, default=1)
