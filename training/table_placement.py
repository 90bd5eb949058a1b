"""Where each embedding table lies, and the table that shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

from genrec.configs.schema import ExperimentConfig
from genrec.model.table_specs import TableSpec, module_name
from genrec.training.table_budget import GIB, table_bytes

MAX_RANKS_SHOWN = 8


@dataclass(frozen=True)
class TablePlacement:
    """Where a table lies. asked: its configured sharding type and placement.

    gib: of weights, moments and cache in each rank's own memory; host_gib: of a GPU's tables in host memory.
    """

    table: str
    num_rows: int
    dim: int
    asked: str
    sharding: str
    kernel: str
    gib: tuple[float, ...]
    host_gib: tuple[float, ...]


def placements(
    tables: Sequence[TableSpec], plan: ShardingPlan | None, config: ExperimentConfig, *, world_size: int
) -> list[TablePlacement]:
    """Where every table lies, sharded or not."""
    modules = [] if plan is None else list(plan.plan.values())
    by_table = {
        name: p for module in modules if isinstance(module, EmbeddingModuleShardingPlan) for name, p in module.items()
    }
    rows = []
    for table in tables:
        parameter = by_table.get(module_name(table.name))
        shape = (table.num_embeddings, table.embedding_dim)
        asked = table.sharding_type if table.placement == "auto" else f"{table.sharding_type}, {table.placement}"
        own, host = [0] * world_size, [0] * world_size
        if parameter is None:
            sharding, kernel = "data_parallel", "dense"
            own = [table_bytes(*shape, kernel, config)[0]] * world_size
        else:
            sharding, kernel = parameter.sharding_type, parameter.compute_kernel
            for shard in parameter.sharding_spec.shards:
                num_rows, num_columns = shard.shard_sizes
                num_bytes = table_bytes(num_rows, num_columns, kernel, config)
                own[shard.placement.rank()] += num_bytes[0]
                host[shard.placement.rank()] += num_bytes[1]
        gib, host_gib = (tuple(number / GIB for number in numbers) for numbers in (own, host))
        rows.append(TablePlacement(table.name, *shape, asked, sharding, kernel, gib, host_gib))
    return rows


def placement_table(rows: Sequence[TablePlacement]) -> Table:
    """``rows`` to show, with the sum of each rank; of many ranks the least and the most."""
    num_ranks = len(rows[0].gib)
    heads = [f"GiB, rank {rank}" for rank in range(num_ranks)]
    if num_ranks > MAX_RANKS_SHOWN:
        heads = [f"GiB, least of {num_ranks} ranks", "GiB, most"]
    table = Table("table", "rows", "dim", "asked for", "sharding", "kernel", *heads)
    for row in rows:
        cells = _cells(row.gib, row.host_gib)
        table.add_row(row.table, f"{row.num_rows:,}", str(row.dim), row.asked, row.sharding, row.kernel, *cells)
    own, host = ([sum(column) for column in zip(*values, strict=True)] for values in _by_row(rows))
    table.add_row("sum", "", "", "", "", "", *_cells(own, host))
    return table


def _by_row(rows: Sequence[TablePlacement]) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    return [row.gib for row in rows], [row.host_gib for row in rows]


def _cells(gib: Sequence[float], host_gib: Sequence[float]) -> list[str]:
    pairs = list(zip(gib, host_gib, strict=True))
    if len(pairs) > MAX_RANKS_SHOWN:
        pairs = [min(pairs, key=sum), max(pairs, key=sum)]
    return [f"{own:.4g} and {host:.4g} of the host" if host else f"{own:.4g}" for own, host in pairs]
