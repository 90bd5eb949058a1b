"""``--check``: what a configuration would run, without data in memory and without weights."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from genrec.configs.availability import check_available
from genrec.configs.loading import describe
from genrec.configs.schema import ExperimentConfig
from genrec.hstu.attention import tuning
from genrec.hstu.attention.interface import check_device
from genrec.hstu.layer import HSTULayer
from genrec.hstu.parallel import TensorParallel
from genrec.hstu.precision.capability import check_attention_available, check_linear_available
from genrec.hstu.preprocessor import DTYPES
from genrec.model.features import feature_layout
from genrec.model.ranking import RankingModel
from genrec.training.checkpoint import require_writable, resolve_checkpoint
from genrec.training.console import LOG_WIDTH
from genrec.training.datasets import read_run_metadata
from genrec.training.optim import embedding_parameters
from genrec.training.precision_report import model_rows, precision_table
from genrec.training.sharding import choose_device
from genrec.training.tensor_parallel import WeightParts

MIB = 2**20
# Optimizer values a weight has; row-wise Adagrad has one a row, which is next to nothing.
STATE_PER_WEIGHT = {"adam": 2, "adamw": 2, "sgd": 0, "rowwise_adagrad": 0}


def check(config: ExperimentConfig) -> None:
    """Build the model on the meta device and print configuration, precision, parameters and an estimate of memory.

    Raises UserError where the configuration cannot be run.
    """
    require_available(config)
    check_places(config)
    metadata = read_run_metadata(config)
    model = RankingModel(config, metadata=metadata, device=torch.device("meta"))
    num_peers = config.tensor_parallel.tensor_model_parallel_size
    if num_peers > 1:
        WeightParts(model, TensorParallel(size=num_peers))  # what the first of them has
    tokens = feature_layout(config, metadata).max_num_tokens
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    console.print(describe(config), markup=False, highlight=False)
    console.print(precision_table(model_rows(model, config)))
    console.print(_parameter_table(model))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))  # no process group is joined here
    weights = weight_memory(config, model, world_size=world_size)
    memory = {**weights, "activations of a full batch (about)": activation_memory(config, tokens)}
    table = Table("memory on a rank", "MiB", title=None)
    for name, size in [*memory.items(), ("sum", sum(memory.values()))]:
        table.add_row(name, f"{size / MIB:,.1f}")
    console.print(table)


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
    trainer = config.trainer
    for name, folder in (("output_dir", trainer.output_dir), ("ckpt_save_dir", trainer.ckpt_save_dir)):
        if folder:
            require_writable(Path(folder), what=f"TrainerArgs.{name} = {folder!r}")
    if trainer.ckpt_load_dir:
        resolve_checkpoint(Path(trainer.ckpt_load_dir))


def weight_memory(config: ExperimentConfig, model: nn.Module, *, world_size: int) -> dict[str, int]:
    """Bytes of weights, gradients, optimizer state and average on one of ``world_size`` ranks."""
    in_parts = config.trainer.dense_parallel == "fsdp2" and world_size > 1
    tables = embedding_parameters(model)
    num_tables = sum(p.numel() for p in tables)
    num_dense = sum(p.numel() for p in model.parameters()) - num_tables
    if in_parts:
        num_dense = math.ceil(num_dense / world_size)
    num_weights = num_tables + num_dense
    optimizer = config.optimizer
    table_optimizer = optimizer.embedding_optimizer_str or optimizer.optimizer_str
    states = STATE_PER_WEIGHT[optimizer.optimizer_str] * num_dense
    states += STATE_PER_WEIGHT[table_optimizer] * num_tables
    sizes = {"weights": 4 * num_weights, "gradients": 4 * num_weights, "optimizer state": 4 * states}
    if config.trainer.ema_decay is not None:
        sizes["average of the weights"] = 4 * num_weights
    if in_parts:  # while a layer computes, the next one is gathered, or the gradients of the one before are summed
        layers = [module for module in model.modules() if isinstance(module, HSTULayer)]
        largest = max(sum(p.numel() for p in layer.parameters()) for layer in layers)
        sizes["whole weights and gradients of two layers"] = 2 * 2 * 4 * largest
    return sizes


def activation_memory(config: ExperimentConfig, max_num_tokens: int) -> int:
    """Bytes kept for backward when every user of a train batch has the longest sequence.

    A layer keeps its input and normed input (hidden_size), u, v, q, k before and after SiLU, the attention's output and
    its gated norm (kv_channels each, for each of a rank's heads).
    """
    network, num_peers = config.network, config.tensor_parallel.tensor_model_parallel_size
    heads_width = network.num_attention_heads // num_peers * network.kv_channels
    per_token = network.num_layers * (2 * network.hidden_size + 10 * heads_width)
    bytes_each = torch.finfo(DTYPES[network.dtype_str]).bits // 8
    return config.trainer.train_batch_size * max_num_tokens * per_token * bytes_each


def _parameter_table(model: nn.Module) -> Table:
    table = Table("module", "parameters")
    rows: Sequence[tuple[str, nn.Module]] = [*model.named_children(), ("model", model)]
    for name, module in rows:
        table.add_row(name, f"{sum(p.numel() for p in module.parameters()):,}")
    return table
