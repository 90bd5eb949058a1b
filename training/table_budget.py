"""How much memory shared tables may take on each rank, and the sentence where they don't fit.

A table's bytes on its rank or ranks, of R rows and D columns, float32, moments with M numbers a weight and r a row:

================  ===========================================  ============================
kernel            in the device's own memory                   in host memory, as managed
================  ===========================================  ============================
fused             weights and moments: 4 R (D (1 + M) + r)
fused_uvm         moments of rows: 4 R r                       4 R D (1 + M)
fused_uvm_caching the same, c R cached rows, their addresses:  4 R D (1 + M)
                  4 c R D + (4 + 16 c) R
================  ===========================================  ============================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from genrec.configs.schema import ExperimentConfig, UnavailableError
from genrec.model.table_specs import TableSpec
from genrec.training.memory import MOMENTS, activation_memory, weight_memory
from genrec.training.optim import table_optimizer

GIB = 2**30
RESERVED_SHARE = 0.1  # of a card: CUDA's context, workspaces, buffers of what is looked up, fragments
UNLIMITED = 2**60
CACHE_BYTES_PER_ROW, CACHE_BYTES_PER_SLOT = 4, 16


@dataclass(frozen=True)
class TableBudget:
    """Bytes of each rank for shared tables.

    device_bytes: of a GPU's own memory, or of a CPU's host memory. host_bytes: of the host's, for UVM. field: of
    TrainerArgs, by which device_bytes is set. source: where it comes from, to be told.
    """

    device_bytes: int
    host_bytes: int
    field: str
    source: str


def table_bytes(num_rows: int, dim: int, kernel: str, config: ExperimentConfig) -> tuple[int, int]:
    """(in the device's own memory, in host memory) of a table or of a shard of one, moments included."""
    per_weight, per_row = MOMENTS[table_optimizer(config.optimizer)]
    weights, of_rows = 4 * num_rows * dim * (1 + per_weight), 4 * num_rows * per_row
    if kernel == "fused_uvm":
        return of_rows, weights
    if kernel == "fused_uvm_caching":
        share = config.trainer.embedding_cache_load_factor
        slot = 4 * dim + CACHE_BYTES_PER_SLOT
        return of_rows + num_rows * CACHE_BYTES_PER_ROW + int(share * num_rows) * slot, weights
    return weights + of_rows, 0


def table_budget(
    config: ExperimentConfig, model: nn.Module, *, device: torch.device, max_num_tokens: int
) -> TableBudget:
    """The budget of this rank. model: with its shared tables not yet sharded; max_num_tokens: of a sequence.

    Raises UnavailableError for a budget of GPU memory on a CPU.
    """
    trainer = config.trainer
    host = UNLIMITED if trainer.embedding_host_gib is None else int(trainer.embedding_host_gib * GIB)
    if device.type == "cpu":
        if trainer.embedding_hbm_gib is not None:
            raise UnavailableError(
                f"TrainerArgs.embedding_hbm_gib = {trainer.embedding_hbm_gib} is of a GPU's memory, and a CPU has host"
                " memory alone: TrainerArgs.embedding_host_gib is there"
            )
        return TableBudget(host, host, "embedding_host_gib", f"TrainerArgs.embedding_host_gib = {host / GIB:g}")
    field = "embedding_hbm_gib"
    if trainer.embedding_hbm_gib is not None:
        own = int(trainer.embedding_hbm_gib * GIB)
        return TableBudget(own, host, field, f"TrainerArgs.{field} = {trainer.embedding_hbm_gib:g}")
    free, total = torch.cuda.mem_get_info(device)
    needed = sum(weight_memory(config, model, world_size=1).values()) + activation_memory(config, max_num_tokens)
    left = max(0, int(free - RESERVED_SHARE * total - needed))
    rest = f"{_gib(needed)} for the rest of the model and a full batch"
    source = f"{_gib(free)} free on the card, less {RESERVED_SHARE:.0%} of all it has and {rest}"
    return TableBudget(left, host, field, source)


def does_not_fit(
    tables: Sequence[TableSpec],
    kernels: Mapping[str, Sequence[str]],
    config: ExperimentConfig,
    budget: TableBudget,
    *,
    num_ranks: int,
) -> str:
    """Why ``tables``, all shared, have no place, and what to change. kernels: by table, those allowed, best first."""

    def sizes(table: TableSpec) -> list[tuple[int, int]]:
        return [
            table_bytes(table.num_embeddings, table.embedding_dim, kernel, config) for kernel in kernels[table.name]
        ]

    total = sum(sum(sizes(table)[0]) for table in tables)
    on_device = sum(min(own for own, _ in sizes(table)) for table in tables)
    ranks = f"each of {num_ranks} ranks has" if num_ranks > 1 else "the one rank has"
    needed = f"with their moments the shared tables take {_gib(total)}"
    had = f"{ranks} {_gib(budget.device_bytes)} of memory for them ({budget.source})"
    changes = [f"a larger TrainerArgs.{budget.field}"]
    if budget.field == "embedding_hbm_gib":
        needed += f", at least {_gib(on_device)} of it in the GPUs' own memory"
        had = f"{ranks} {_gib(budget.device_bytes)} of that ({budget.source})"
        if budget.host_bytes < UNLIMITED:
            had += f" and {_gib(budget.host_bytes)} of host memory"
            changes.append("a larger TrainerArgs.embedding_host_gib")
    kept = [t for t in tables if list(kernels[t.name]) == ["fused"] and not t.is_dynamic]
    if kept and budget.field == "embedding_hbm_gib":
        largest = max(kept, key=lambda table: sizes(table)[0])
        changes.append(f"placement 'uvm_caching' for table {largest.name!r} ({_gib(sizes(largest)[0][0])})")
    if any(list(kernels[table.name]) == ["fused_uvm_caching"] for table in tables):
        changes.append("a smaller TrainerArgs.embedding_cache_load_factor")
    if num_ranks > 1 and any(table.sharding_type == "table_wise" for table in tables):
        changes.append("sharding type 'row_wise' in place of 'table_wise'")
    changes.append("more ranks")
    return f"{needed}, and {had}: {', '.join(changes[:-1])} or {changes[-1]} may make them fit"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.4g} GiB"
