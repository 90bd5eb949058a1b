"""How ranks share the dense weights (TrainerArgs.dense_parallel): whole on each under DDP, in parts under FSDP2.

=========  ==================================  ====================================  ==============================
           a rank holds                        to compute                            gradients
=========  ==================================  ====================================  ==============================
"ddp"      weights and moments, whole          they are there                        averaged over ranks, whole
"fsdp2"    its rows of each weight, moments    a layer's are gathered, and dropped   averaged, each rank its rows
           and gradient                        again after its forward and backward
=========  ==================================  ====================================  ==============================

Embedding tables are in neither part of FSDP2. Sharded ones are TorchRec's. Those that every rank holds whole stay so:
a step reads few of their rows, and gathering all of them would cost what the sum of their gradients costs. Their
gradients are averaged here once backward has ended.

Within forward and backward modules see plain whole weights under both; outside, FSDP2's parameters are DTensors.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.types import ShardedModule

from genrec.hstu.jagged import JaggedSequence
from genrec.hstu.layer import HSTULayer
from genrec.hstu.linear import is_fp8
from genrec.model.ranking import RankingModel, RankingOutput
from genrec.model.row_map import RowMap
from genrec.training.optim import embedding_parameters, sharded_parameters
from genrec.training.ranks import Ranks

LOG = logging.getLogger(__name__)

# FSDP2 finds by them when to gather and when to drop weights, in what goes into and out of a module: before
# PyTorch 2.12 it looks into pytrees alone, and a dataclass has to be declared as one.
for _passed in (JaggedSequence, RankingOutput):
    torch.export.register_dataclass(_passed)


def shard_dense(model: RankingModel, ranks: Ranks) -> None:
    """Let each of several ranks hold its part of every dense weight of ``model``, in place; before optimizers are made.

    Parameters must be equal on all ranks, wherever they lie; they end on the rank's device. Rows are split as evenly as
    ``torch.chunk`` does, so that a rank may have none of a small weight.
    """
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    for layer in [module for module in model.modules() if isinstance(module, HSTULayer)]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=_gathering(layer, model.dtype))
    # Its own weights too are dropped after the forward: whoever lists parameters between steps gets this rank's parts.
    fully_shard(model, mesh=mesh, reshard_after_forward=True, ignored_params=_of_tables(model))
    parameters = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole, own = (sum(p.numel() for p in held) for held in (parameters, map(own_part, parameters)))
    LOG.info("rank 0 holds %s of %s dense weights (FSDP2), the others as many or fewer", f"{own:,}", f"{whole:,}")


def replicate(model: nn.Module, ranks: Ranks) -> nn.Module:
    """``model`` under DDP; itself where there is one rank, or where FSDP2 has its dense weights.

    Sharded tables are left to themselves: TorchRec exchanges their gradients, averaged like DDP's; and the maps of
    dynamic tables, which are equal on all ranks (training/dynamic_tables.py).
    """
    if ranks.data_size == 1 or isinstance(model, FSDPModule):
        return model
    apart = [*sharded_parameters(model), *row_map_buffers(model)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, apart)
    return DistributedDataParallel(model, process_group=ranks.data_group, gradient_as_bucket_view=True)


def row_map_buffers(model: nn.Module) -> list[str]:
    """The names in ``model`` of the buffers of dynamic tables' maps."""
    maps = [(at, module) for at, module in model.named_modules() if isinstance(module, RowMap)]
    return [f"{at}.{name}" for at, row_map in maps for name, _ in row_map.named_buffers()]


def unwrap(model: nn.Module) -> nn.Module:
    """The model itself, without DDP around it."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def loss_scale(ranks: Ranks, num_targets: int) -> float:
    """The factor of a rank's summed loss so that the averaged gradient is that of the mean over all targets."""
    return ranks.data_size / num_targets


@contextlib.contextmanager
def no_gradient_sync(model: nn.Module) -> Iterator[None]:
    """Within it, backward only adds to the rank's own gradients; the next backward outside averages them over ranks.

    Until then FSDP2 keeps the rank's gradients whole, as DDP does.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        with model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext():
            yield


def left_to_average(model: nn.Module) -> list[Parameter]:
    """The parameters whose gradients ``average_gradients`` has to average: beside FSDP2, tables that are whole."""
    return embedding_parameters(model) if isinstance(model, FSDPModule) else []


def average_gradients(parameters: Sequence[Parameter], ranks: Ranks) -> None:
    """Average over ranks, in place; ranks call alike."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    sums = [dist.all_reduce(gradient.div_(ranks.world_size), async_op=True) for gradient in gradients]
    for work in sums:
        work.wait()


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``, as its own memory: some rows, maybe none, of a DTensor; else all of it."""
    part = tensor.detach()
    return part.to_local() if isinstance(part, DTensor) else part


def total_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """() the norm of all of them together, of DTensors the whole, on ``device``, 0 of none; ranks call alike where
    there are DTensors.
    """
    whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    parts = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    norm = torch.nn.utils.get_total_norm(whole).to(device)  # PyTorch's of none is on the host
    if not parts:
        return norm
    of_parts = torch.nn.utils.get_total_norm(parts)
    assert isinstance(of_parts, DTensor)
    return torch.linalg.vector_norm(torch.stack([norm, of_parts.full_tensor()]))


def clip_gradients(parameters: Sequence[Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients down to ``max_norm`` where their ``total_norm``, ``norm``, is above it."""
    for is_part in (False, True):
        alike = [p for p in parameters if isinstance(p, DTensor) == is_part]
        torch.nn.utils.clip_grads_with_norm_(alike, max_norm, norm)


def _gathering(layer: HSTULayer, dtype: torch.dtype) -> MixedPrecisionPolicy:
    """In which dtype a layer's weights are gathered: in the network's where all would be cast to it at use anyway.

    That halves what ranks exchange, and what is cast isn't kept for backward. FP8 quantizes straight from float32, and
    relative biases are used in float32.
    """
    keeps_float32 = layer.relative_bias is not None or any(is_fp8(module) for module in layer.modules())
    if keeps_float32 or dtype == torch.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _of_tables(model: nn.Module) -> set[Parameter]:
    """All parameters of embedding tables, also those inside of TorchRec's modules that these list otherwise."""
    inside = [part for module in model.modules() if isinstance(module, ShardedModule) for part in module.modules()]
    hidden = [p for part in inside for p in part._parameters.values() if p is not None]
    return {*embedding_parameters(model), *sharded_parameters(model).values(), *hidden}
