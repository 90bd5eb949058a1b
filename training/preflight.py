"""``--check``: what a configuration would run, without data in memory and without weights."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from genrec.configs.availability import check_available
from genrec.configs.loading import describe
from genrec.configs.schema import ExperimentConfig, TrainerArgs
from genrec.hstu.attention import tuning
from genrec.hstu.attention.interface import check_device
from genrec.hstu.parallel import TensorParallel
from genrec.hstu.precision.capability import check_attention_available, check_linear_available
from genrec.model.features import feature_layout
from genrec.model.ranking import RankingModel
from genrec.model.table_specs import embedding_tables
from genrec.training.checkpoint import require_writable, resolve_checkpoint
from genrec.training.console import LOG_WIDTH
from genrec.training.datasets import read_run_metadata
from genrec.training.memory import activation_memory, enough_memory, weight_memory
from genrec.training.precision_report import model_rows, precision_table
from genrec.training.process_group import choose_device
from genrec.training.table_budget import GIB, table_budget
from genrec.training.table_placement import placement_table, placements
from genrec.training.table_plan import plan_tables
from genrec.training.table_types import sharded_tables
from genrec.training.tensor_parallel import TensorParallelWeights, check_num_ranks

MIB = 2**20


def check(config: ExperimentConfig, *, num_ranks: int = 1) -> None:
    """Build the model on the meta device and print configuration, precision, parameters, where tables would lie with
    ``num_ranks`` such machines' ranks, and an estimate of memory.

    Raises UserError where the configuration cannot be run.
    """
    require_available(config)
    num_peers = config.tensor_parallel.tensor_model_parallel_size
    check_num_ranks(num_ranks, tensor_parallel_size=num_peers)
    check_places(config)
    metadata = read_run_metadata(config)
    device = choose_device(config.trainer.device)
    tables = embedding_tables(config, metadata)
    sharded = sharded_tables(tables, config, device_type=device.type, world_size=num_ranks)
    with enough_memory():
        model = RankingModel(config, metadata=metadata, sharded=sharded, device=torch.device("meta"))
    if num_peers > 1:
        TensorParallelWeights(model, TensorParallel(size=num_peers))  # what the first of them has
    tokens = feature_layout(config, metadata).max_num_tokens
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    console.print(describe(config), markup=False, highlight=False)
    console.print(precision_table(model_rows(model, config)))
    console.print(_parameter_table(model))
    plan = None
    if sharded:
        budget = table_budget(config, model, device=device, max_num_tokens=tokens)
        plan = plan_tables(
            model, tables, sharded, config=config, budget=budget, device_type=device.type, world_size=num_ranks
        )
    placed = placements(tables, plan, config, world_size=num_ranks)
    console.print(placement_table(placed))
    memory = {
        **weight_memory(config, model, world_size=num_ranks),
        "activations of a full batch (about)": activation_memory(config, tokens),
    }
    if sharded:
        by_rank = zip(*(row.gib for row in placed if row.table in sharded), strict=True)
        memory["shared tables, on the rank with most"] = int(GIB * max(map(sum, by_rank)))
    console.print(_memory_table(memory))


def require_available(config: ExperimentConfig) -> None:
    """Raise UnavailableError for what this version, or the device that the run would use, lacks.

    Takes the attention tiles of the file that ``TrainerArgs.attention_tiles`` names; UserError where it doesn't fit.
    """
    check_available(config)
    device = choose_device(config.trainer.device)
    # Asked of this rank's own GPU, which is not the current one before the process group is joined.
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        check_linear_available(config.mixed_precision, device.type)
        check_attention_available(config.mixed_precision, config.network, device.type)
    check_device(config.network.kernel_backend, device.type)
    if config.trainer.attention_tiles:
        tuning.load(Path(config.trainer.attention_tiles))


def check_places(config: ExperimentConfig) -> None:
    """Raise UserError where a run could not write its outputs, or read the checkpoint to start from; writes nothing."""
    check_writable(config.trainer)
    if config.trainer.ckpt_load_dir:
        resolve_checkpoint(Path(config.trainer.ckpt_load_dir))


def check_writable(trainer: TrainerArgs) -> None:
    """Raise UserError where a run could not write its outputs; writes nothing."""
    for name, folder in (("output_dir", trainer.output_dir), ("ckpt_save_dir", trainer.ckpt_save_dir)):
        if folder:
            require_writable(Path(folder), what=f"TrainerArgs.{name} = {folder!r}")


def _parameter_table(model: nn.Module) -> Table:
    table = Table("module", "parameters")
    rows: Sequence[tuple[str, nn.Module]] = [*model.named_children(), ("model", model)]
    for name, module in rows:
        table.add_row(name, f"{sum(p.numel() for p in module.parameters()):,}")
    return table


def _memory_table(memory: Mapping[str, int]) -> Table:
    """memory: bytes, by what takes them."""
    table = Table("memory on a rank", "MiB")
    for name, size in [*memory.items(), ("sum", sum(memory.values()))]:
        table.add_row(name, f"{size / MIB:,.1f}")
    return table
