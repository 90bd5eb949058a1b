"""Dropout that is quick on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from genrec.hstu.parallel import Split, TensorParallel


def dropout(x: Tensor, *, p: float, training: bool) -> Tensor:
    """``F.dropout``, with another mask from the same generator on a CPU.

    There, torch draws each Bernoulli variable alone and serially, which took a seventh of a training step; a uniform
    number compared with p costs a third of that.
    """
    if not training or p == 0.0 or x.device.type != "cpu":
        return F.dropout(x, p=p, training=training)
    keep = torch.rand(x.shape, dtype=torch.float32).ge_(p)
    return x * keep.mul_(1.0 / (1.0 - p)).to(x.dtype) if p < 1.0 else x * 0.0


def shared_dropout(x: Tensor, *, p: float, training: bool, split: Split, tp: TensorParallel) -> Tensor:
    """``dropout`` of a tensor that this rank has its part of, with the mask that the whole would have.

    Peers draw the mask of the whole from equal generators, which leaves them equal, and each takes its part: so masks
    don't depend on how many peers there are.
    """
    if not training or p == 0.0 or tp.size == 1:
        return dropout(x, p=p, training=training)
    ones = torch.ones((), dtype=x.dtype, device=x.device).expand(split.whole_shape(x, tp))
    keep = split.part(dropout(ones.contiguous(), p=p, training=True) != 0, tp).to(x.dtype)
    return x * keep * (1.0 / (1.0 - p)) if p < 1.0 else x * 0.0
