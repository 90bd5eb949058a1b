"""What a checkpoint holds: model, optimizers, average and FP8 state as named tensors; random states as JSON values.

Names (checkpoint_names.py) and shapes don't depend on how tables and dense weights are sharded, so any checkpoint fits
any number of ranks.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from genrec.hstu.precision.state import precision_tensors
from genrec.model.row_map import row_maps
from genrec.training.average import WeightAverage
from genrec.training.checkpoint_names import (
    AVERAGE,
    MODEL,
    OPTIMIZER,
    PRECISION,
    ROW_MAP,
    VOCABULARY,
    checkpoint_name,
)
from genrec.training.dense_parallel import own_part
from genrec.training.pieces import PIECE_NUMBERS, in_pieces
from genrec.training.tables import ShardedTables
from genrec.training.tensor_parallel import TensorParallelWeights

# FBGEMM's names of moments that PyTorch's optimizers call otherwise.
ADAM_KEYS = {"momentum1": "exp_avg", "momentum2": "exp_avg_sq"}
MOMENT_KEYS = {"rowwise_adagrad": {"momentum1": "sum"}, "adam": ADAM_KEYS, "adamw": ADAM_KEYS}


@dataclass(frozen=True)
class TrainingState:
    """What training changes. vocabulary: table to the keys of its rows (data/vocabulary.py), which it does not.

    tensor_parallel: of which weights, and so moments and averages, this rank holds a part alone.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer] = ()
    average: WeightAverage | None = None
    tables: ShardedTables | None = None
    vocabulary: Mapping[str, np.ndarray] | None = None
    tensor_parallel: TensorParallelWeights | None = None

    @property
    def weights(self) -> dict[str, Tensor]:
        """All of the model, by name in a checkpoint; of sharded tables and with FSDP2, each rank's own memory."""
        return {checkpoint_name(name): tensor for name, tensor in self.model.state_dict().items()}

    @property
    def sharded_weights(self) -> dict[str, ShardedTensor]:
        """Those of sharded tables; reading into them fills the tables."""
        return {name: tensor for name, tensor in self.weights.items() if isinstance(tensor, ShardedTensor)}


def fsdp_weights(model: nn.Module) -> dict[str, DTensor]:
    """The weights of which each rank holds a part (training/dense_parallel.py), by name in a checkpoint."""
    return {checkpoint_name(n): p for n, p in model.named_parameters() if isinstance(p, DTensor)}


def row_map_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint keeps of the maps of dynamic tables, by name there."""
    maps = row_maps(model).items()
    return {f"{ROW_MAP}{table}.{key}": value for table, row_map in maps for key, value in row_map.state.items()}


def collect_tensors(state: TrainingState) -> dict[str, Tensor]:
    """Every tensor of the training state by name, for ``CheckpointStore.save``."""
    model, average = state.model, state.average
    tensors = {f"{MODEL}{name}": value for name, value in state.weights.items()}
    names: dict[Tensor, str] = {parameter: checkpoint_name(name) for name, parameter in model.named_parameters()}
    for optimizer in state.optimizers:
        for parameter, values in optimizer.state.items():
            for key, value in values.items():
                if value is not None:  # plain SGD keeps an empty place for its momentum
                    # Row-wise Adagrad's (rows, 1), which sharded tables keep as (rows,).
                    tensor = value.flatten() if key == "sum" else torch.as_tensor(value)
                    tensors[f"{OPTIMIZER}{names[parameter]}.{key}"] = tensor
    if state.tables is not None:
        tensors |= {f"{OPTIMIZER}{name}": value for name, value in sharded_moments(state.tables).items()}
        steps = torch.tensor(float(state.tables.num_steps))
        tensors |= {
            f"{OPTIMIZER}{checkpoint_name(n)}.step": steps.clone() for n, m in state.tables.moments().items() if m
        }
    if average is not None:
        tensors |= {f"{AVERAGE}{name}": value for name, value in average.tensors.items()}
    if state.tensor_parallel is not None:
        tensors = state.tensor_parallel.joined(tensors)
    tensors |= row_map_tensors(model)
    for table, keys in (state.vocabulary or {}).items():
        tensors[f"{VOCABULARY}{table}"] = torch.from_numpy(keys)
    tensors = {name: in_pieces(tensor) for name, tensor in tensors.items()}
    # Cloned, since Transformer Engine's are columns of what it works with, and a checkpoint wants whole memory.
    return tensors | {f"{PRECISION}{name}": value.clone() for name, value in precision_tensors(model).items()}


def sharded_moments(tables: ShardedTables) -> dict[str, ShardedTensor]:
    """The moments of sharded tables, named as PyTorch's optimizers name them; reading into them fills them, too."""
    keys = MOMENT_KEYS.get(tables.optimizer_name, {})
    return {
        f"{checkpoint_name(name)}.{keys.get(key, key)}": value
        for name, moments in tables.moments().items()
        for key, value in moments.items()
    }


def first_not_finite(model: nn.Module) -> str | None:
    """The first weight that is not finite on this rank, by name."""
    # By parts, so that large tables in host memory need no copy, and no kernel more than 32 bits to count.
    parts = [
        (name, part)
        for name, weight in model.named_parameters()
        for part in own_part(weight).detach().reshape(-1).split(PIECE_NUMBERS)
        if part.numel()
    ]
    amaxes = torch._foreach_norm([part for _, part in parts], float("inf"))
    finite = torch.stack([amax.float() for amax in amaxes]).isfinite().tolist()
    return next((name for (name, _), sound in zip(parts, finite, strict=True) if not sound), None)


def random_state() -> dict[str, Any]:
    """The states of the global random generators (torch, CUDA, numpy, python) as JSON values."""
    numpy_state: Any = np.random.get_state(legacy=False)
    numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
    return {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": torch.cuda.get_rng_state().numpy().tobytes().hex() if _uses_cuda() else None,
        "numpy": numpy_state,
        "python": random.getstate(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Undo what was drawn since ``random_state``."""
    torch.set_rng_state(_bytes_tensor(state["torch"]))
    if state["cuda"] is not None and _uses_cuda():
        torch.cuda.set_rng_state(_bytes_tensor(state["cuda"]))
    numpy_state = {**state["numpy"], "state": dict(state["numpy"]["state"])}
    numpy_state["state"]["key"] = np.array(numpy_state["state"]["key"], dtype=np.uint32)
    np.random.set_state(numpy_state)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))


def _bytes_tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _uses_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
