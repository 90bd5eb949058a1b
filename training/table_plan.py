"""Which rank holds what of which shared table, and in which memory: TorchRec's planner, within the budget."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence

from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    ShardEstimator,
    ShardingOption,
    Storage,
)
from torchrec.distributed.types import CacheParams, ShardingPlan

from genrec.configs.schema import ExperimentConfig, UnavailableError
from genrec.model.table_specs import TableSpec, module_name
from genrec.training.process_group import local_world_size
from genrec.training.table_budget import TableBudget, does_not_fit, table_bytes
from genrec.training.table_sharder import table_sharder
from genrec.training.table_types import allowed_kernels, num_column_shards

# The second: where the sum over ranks is enough, but some table's sharding type doesn't divide it so.
NO_SPACE = (
    PlannerErrorType.INSUFFICIENT_STORAGE,
    PlannerErrorType.STRICT_CONSTRAINTS,
    PlannerErrorType.PARTITION,
)


def plan_tables(
    model: nn.Module,
    tables: Sequence[TableSpec],
    sharded: Mapping[str, tuple[str, ...]],
    *,
    config: ExperimentConfig,
    budget: TableBudget,
    device_type: str,
    world_size: int,
) -> ShardingPlan:
    """TorchRec's plan for the ``sharded`` tables of ``model``, of which shapes alone are read.

    Raises UnavailableError if they don't fit into ``budget``.
    """
    shared = [table for table in tables if table.name in sharded]
    kernels = {table.name: allowed_kernels(table, device_type=device_type) for table in shared}
    constraints = {
        module_name(table.name): ParameterConstraints(
            sharding_types=list(sharded[table.name]),
            compute_kernels=kernels[table.name],
            min_partition=table.embedding_dim // num_column_shards(table, world_size),
            cache_params=CacheParams(load_factor=config.trainer.embedding_cache_load_factor),
        )
        for table in shared
    }
    own = max(1, budget.device_bytes)  # the planner takes 0 for "as usual"
    memory = {"ddr_cap": own} if device_type == "cpu" else {"hbm_cap": own, "ddr_cap": max(1, budget.host_bytes)}
    batch_size = config.trainer.train_batch_size
    with quiet_torchrec():
        topology = Topology(world_size, device_type, local_world_size=local_world_size(world_size), **memory)
        estimators = [EmbeddingPerfEstimator(topology, constraints), TableStorage(topology, config=config)]
        planner = EmbeddingShardingPlanner(
            topology=topology,
            batch_size=batch_size,
            enumerator=EmbeddingEnumerator(topology, batch_size, constraints, estimator=estimators),
            storage_reservation=FixedPercentageStorageReservation(0.0),  # the budget is for tables alone
            constraints=constraints,
        )
        try:
            return planner.plan(model, [table_sharder(config.optimizer)])
        except PlannerError as error:
            if error.error_type not in NO_SPACE:
                reason = str(error).strip().splitlines()[0]
                raise UnavailableError(f"TorchRec finds no place for the shared tables: {reason}") from error
            raise UnavailableError(does_not_fit(shared, kernels, config, budget, num_ranks=world_size)) from error


class TableStorage(ShardEstimator):
    """What a shard takes of the budget (table_budget.py). TorchRec's own estimate knows nothing of our optimizers, and
    adds buffers of what is looked up, for which the budget leaves room.
    """

    def __init__(self, topology: Topology, constraints: object = None, *, config: ExperimentConfig) -> None:
        self._on_cpu = topology.compute_device == "cpu"
        self._config = config

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_map: object = None, sharder_data_map: object = None
    ) -> None:
        """Set the storage of every shard. TorchRec hands over its sharders under one name or the other."""
        for option in sharding_options:
            for shard in option.shards:
                num_rows, dim = shard.size
                own, host = table_bytes(num_rows, dim, option.compute_kernel, self._config)
                shard.storage = Storage(hbm=0, ddr=own) if self._on_cpu else Storage(hbm=own, ddr=host)


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
