"""Estimates of a rank's memory, from the configuration and shapes of weights; what is said where it is too small."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import nn

from genrec.configs.schema import ExperimentConfig, UserError
from genrec.hstu.layer import HSTULayer
from genrec.hstu.preprocessor import DTYPES
from genrec.model.row_map import BYTES_OF_ROW, row_maps
from genrec.model.table_collections import ShardableTables
from genrec.training.optim import embedding_parameters, table_optimizer

# Numbers that an optimizer keeps for each weight, and for each row, which are next to nothing beside a row's weights.
MOMENTS = {"sgd": (0, 0), "rowwise_adagrad": (0, 1), "adam": (2, 0), "adamw": (2, 0)}


@contextlib.contextmanager
def enough_memory() -> Iterator[None]:
    """What PyTorch says within it of memory that is not there, or can't be counted, becomes a UserError."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        if "allocate" not in reason and "overflow" not in reason:
            raise
        raise UserError(
            f"the model does not fit into memory, --check shows what its parts take (PyTorch: {reason})"
        ) from error


def weight_memory(config: ExperimentConfig, model: nn.Module, *, world_size: int) -> dict[str, int]:
    """Bytes of weights, gradients, optimizer state and average on one of ``world_size`` ranks; not of tables that ranks
    share, of which table_budget.py speaks.
    """
    in_parts = config.trainer.dense_parallel == "fsdp2" and world_size > 1
    left_out = {id(p) for m in model.modules() if isinstance(m, ShardableTables) for p in m.parameters()}
    tables = {id(p): p.numel() for p in embedding_parameters(model) if id(p) not in left_out}
    num_tables = sum(tables.values())
    num_dense = sum(p.numel() for p in model.parameters() if id(p) not in left_out) - num_tables
    if in_parts:
        num_dense = math.ceil(num_dense / world_size)
    num_weights = num_tables + num_dense
    states = MOMENTS[config.optimizer.optimizer_str][0] * num_dense
    states += MOMENTS[table_optimizer(config.optimizer)][0] * num_tables
    sizes = {"weights": 4 * num_weights, "gradients": 4 * num_weights, "optimizer state": 4 * states}
    if config.trainer.ema_decay is not None:
        sizes["average of the weights"] = 4 * num_weights
    maps = row_maps(model)
    if maps:
        sizes["maps of dynamic tables"] = BYTES_OF_ROW * sum(row_map.capacity for row_map in maps.values())
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
