"""Which rank holds what of which embedding table: the configured sharding types, TorchRec's planner, the plan shown.

====================  ====================================================================
data_parallel         every rank holds the whole table, DDP sums its gradients
row_wise              each rank holds some rows
table_wise            one rank holds the table
column_wise           each rank holds some columns
model_parallel        one of those three, as the planner finds best
auto                  data_parallel up to AUTO_REPLICATED_NUMBERS numbers, else model_parallel
====================  ====================================================================

On one rank there is nothing to share, and every table is whole.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder, ShardingPlan

from genrec.configs.schema import ConfigError, ExperimentConfig, UnavailableError
from genrec.model.embedding import TableSpec, module_name
from genrec.training.optim import table_optimizer
from genrec.training.sharding import Ranks

AUTO_REPLICATED_NUMBERS = 2**24  # 64 MiB of float32
GIB = 2**30
SHARDED_TYPES = ("row_wise", "table_wise", "column_wise")
NUMBERS_ALIGNED = 4  # FBGEMM's kernels read rows 16 bytes at a time
# Moments in numbers: for each weight, for each row.
MOMENTS = {"sgd": (0, 0), "rowwise_adagrad": (0, 1), "adam": (2, 0), "adamw": (2, 0)}


@dataclass(frozen=True)
class TablePlacement:
    """Where a table lies. asked: its configured sharding type. gib: of weights and moments on each rank."""

    table: str
    num_rows: int
    dim: int
    asked: str
    sharding: str
    kernel: str
    gib: tuple[float, ...]


def allowed_types(table: TableSpec, config: ExperimentConfig, *, device_type: str, world_size: int) -> tuple[str, ...]:
    """The sharding types that the planner may choose for ``table``; ("data_parallel",) where it stays whole.

    Raises ConfigError for a table that can't be sharded as asked, UnavailableError where this device can't.
    """
    wanted = table.sharding_type
    optimizer = table_optimizer(config.optimizer)
    cpu_adam = device_type == "cpu" and optimizer in ("adam", "adamw")
    size = table.num_embeddings * table.embedding_dim
    if world_size == 1 or wanted == "data_parallel":
        return ("data_parallel",)
    if wanted == "auto" and (size <= AUTO_REPLICATED_NUMBERS or cpu_adam):
        return ("data_parallel",)
    if cpu_adam:
        raise UnavailableError(
            f"table {table.name!r} has sharding type {wanted!r}, and FBGEMM has no {optimizer!r} for sharded tables on"
            " a CPU: OptimizerArgs.embedding_optimizer_str 'sgd' and 'rowwise_adagrad' are there, or 'data_parallel'"
        )
    if table.embedding_dim % NUMBERS_ALIGNED:
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


def _faults(table: TableSpec, optimizer: str, *, world_size: int) -> dict[str, str]:
    """Sharding type to why ``table`` can't have it."""
    faults = {}
    num_rows, dim = table.num_embeddings, table.embedding_dim
    if num_rows <= -(-num_rows // world_size) * (world_size - 1):
        faults["row_wise"] = (
            f"its {num_rows} rows, in equal parts but for the last, leave one of {world_size} without any"
        )
    if optimizer == "rowwise_adagrad":
        # A shard's row would have a moment of its own, the mean over the shard's columns: another optimizer.
        faults["column_wise"] = "its optimizer 'rowwise_adagrad' has one moment a row, which columns would not share"
    elif _num_column_shards(table, world_size) == 1:
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
    sharded = {name: types for name, types in allowed.items() if types != ("data_parallel",)}
    if sharded:
        _check_combinations(config, next(iter(sharded)))
    return sharded


def _check_combinations(config: ExperimentConfig, table: str) -> None:
    """A fused optimizer steps in each backward, reads only the rows of a batch, and hides their gradients."""
    trainer, optimizer = config.trainer, config.optimizer
    because = f"is not available with a sharded table ({table!r}), whose optimizer is part of its backward"
    refused = {
        f"TrainerArgs.accumulate_steps = {trainer.accumulate_steps}": trainer.accumulate_steps > 1,
        f"TrainerArgs.grad_clip_norm = {trainer.grad_clip_norm}": trainer.grad_clip_norm is not None,
        f"TrainerArgs.ema_decay = {trainer.ema_decay}": trainer.ema_decay is not None,
        f"OptimizerArgs.embedding_weight_decay = {optimizer.embedding_weight_decay}": optimizer.embedding_weight_decay
        > 0,
    }
    for name, asked in refused.items():
        if asked:
            raise UnavailableError(f"{name} {because}: 'data_parallel' tables have it")


def plan_tables(
    model: nn.Module,
    tables: Sequence[TableSpec],
    sharded: dict[str, tuple[str, ...]],
    sharder: ModuleSharder[Any],
    *,
    ranks: Ranks,
) -> ShardingPlan:
    """TorchRec's plan for the ``sharded`` tables. Raises UnavailableError if they don't fit."""
    world_size, device = ranks.world_size, ranks.device
    kernels = [EmbeddingComputeKernel.FUSED]
    if device.type == "cuda":
        kernels += [EmbeddingComputeKernel.FUSED_UVM_CACHING, EmbeddingComputeKernel.FUSED_UVM]
    constraints = {
        module_name(table.name): ParameterConstraints(
            sharding_types=list(sharded[table.name]),
            compute_kernels=[kernel.value for kernel in kernels],
            min_partition=table.embedding_dim // _num_column_shards(table, world_size),
        )
        for table in tables
        if table.name in sharded
    }
    capacity = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    with quiet_torchrec():
        topology = Topology(world_size, device.type, hbm_cap=capacity, local_world_size=_local_world_size(world_size))
        planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
        try:
            return planner.plan(model, [sharder])
        except PlannerError as error:
            reason = str(error).strip().splitlines()[0]
            raise UnavailableError(f"TorchRec finds no place for the sharded tables: {reason}") from error


def placements(
    tables: Sequence[TableSpec], plan: ShardingPlan | None, config: ExperimentConfig, *, world_size: int
) -> list[TablePlacement]:
    """Where every table lies, sharded or not."""
    modules = [] if plan is None else list(plan.plan.values())
    by_table = {
        name: p for module in modules if isinstance(module, EmbeddingModuleShardingPlan) for name, p in module.items()
    }
    per_weight, per_row = MOMENTS[table_optimizer(config.optimizer)]
    rows = []
    for table in tables:
        parameter = by_table.get(module_name(table.name))
        numbers = [0] * world_size
        if parameter is None:
            sharding, kernel = "data_parallel", "dense"
            whole = table.num_embeddings * (table.embedding_dim * (1 + per_weight) + per_row)
            numbers = [whole] * world_size
        else:
            sharding, kernel = parameter.sharding_type, parameter.compute_kernel
            for shard in parameter.sharding_spec.shards:
                num_rows, num_columns = shard.shard_sizes
                numbers[shard.placement.rank()] += num_rows * (num_columns * (1 + per_weight) + per_row)
        gib = tuple(4 * number / GIB for number in numbers)
        shape = (table.num_embeddings, table.embedding_dim)
        rows.append(TablePlacement(table.name, *shape, table.sharding_type, sharding, kernel, gib))
    return rows


def placement_table(rows: Sequence[TablePlacement]) -> Table:
    """``rows`` to show, with the sum of each rank."""
    ranks = range(len(rows[0].gib))
    table = Table("table", "rows", "dim", "asked for", "sharding", "kernel", *(f"GiB, rank {rank}" for rank in ranks))
    for row in rows:
        gib = (f"{value:.4g}" for value in row.gib)
        table.add_row(row.table, f"{row.num_rows:,}", str(row.dim), row.asked, row.sharding, row.kernel, *gib)
    table.add_row("sum", "", "", "", "", "", *(f"{sum(row.gib[rank] for row in rows):.4g}" for rank in ranks))
    return table


def _num_column_shards(table: TableSpec, world_size: int) -> int:
    """The most equal shards of columns, at most one a rank, that FBGEMM can read."""
    fitting = [n for n in range(1, world_size + 1) if table.embedding_dim % (n * NUMBERS_ALIGNED) == 0]
    return max(fitting, default=1)


def _local_world_size(world_size: int) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


@contextlib.contextmanager
def quiet_torchrec() -> Iterator[None]:
    """Within it TorchRec is silent on what is its own business: how it builds topologies and estimates memory."""
    logger = logging.getLogger("torchrec")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
