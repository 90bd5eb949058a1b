"""The scores of one group of users, tile by tile: alpha q k^T + bias, and who sees whom."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from genrec.hstu.attention.bias import RelativeBias, position_index, time_index
from genrec.hstu.attention.groups import UserGroup
from genrec.hstu.attention.mask import MaskRules, visible
from genrec.hstu.attention.plan import AttentionPlan, Tile


class Scratch:
    """Score buffers of the largest tile's size, reused: fresh memory for each tile costs more than its arithmetic."""

    def __init__(self, plan: AttentionPlan, like: Tensor, *, buffers: int) -> None:
        self.dtype = torch.promote_types(like.dtype, torch.float32)
        size = plan.max_tile_elements(like.shape[1])
        self._buffers = [like.new_empty(size, dtype=self.dtype) for _ in range(buffers)]

    def view(self, index: int, *, batch: int, rows: int, keys: int) -> Tensor:
        """(batch, rows, keys) of buffer ``index``."""
        return self._buffers[index][: batch * rows * keys].view(batch, rows, keys)


@dataclass(frozen=True)
class BiasGrads:
    """Running gradients of the weights of a relative bias."""

    position: Tensor
    time: Tensor

    @staticmethod
    def zeros(bias: RelativeBias, *, dtype: torch.dtype) -> BiasGrads:
        """Nothing yet."""
        position = torch.zeros_like(bias.position_weight, dtype=dtype)
        return BiasGrads(position=position, time=torch.zeros_like(bias.time_weight, dtype=dtype))


@dataclass(frozen=True)
class GroupScores:
    """How a group's scores are made: (G * H, rows, keys) a tile."""

    group: UserGroup
    rules: MaskRules
    bias: RelativeBias | None
    alpha: float

    def compute(self, query: Tensor, key: Tensor, tile: Tile, scratch: Scratch) -> Tensor:
        """Scores of a tile before any mask, in scratch buffer 0. query, key: the group's, (G * H, width, d_qk)."""
        rows, keys = query[:, tile.rows], key[:, tile.keys]
        scores = scratch.view(0, batch=rows.shape[0], rows=rows.shape[1], keys=keys.shape[1])
        torch.baddbmm(scores, rows, keys.transpose(1, 2), beta=0, alpha=self.alpha, out=scores)
        if self.bias is not None:
            places, gaps = self._bias_indices(self.bias, tile)
            values = self.bias.position_weight[places] + self.bias.time_weight[gaps]
            self.group.by_user(scores).add_(values.to(scores.dtype).unsqueeze(1))
        return scores

    def hide(self, weights: Tensor, tile: Tile) -> None:
        """Set to zero, in place, what a row must not see."""
        if tile.mask == "triangle":
            weights[:, :, tile.row_start - tile.key_stop :].tril_()
        elif tile.mask == "general":
            rows, columns = self._places(tile)
            lengths, targets = self.group.lengths, self.group.num_targets
            contexts = self.group.num_contexts
            seen = visible(rows, columns, lengths=lengths, num_contexts=contexts, num_targets=targets, rules=self.rules)
            self.group.by_user(weights).masked_fill_(~seen.unsqueeze(1), 0)

    def add_bias_grads(self, grad_scores: Tensor, tile: Tile, grads: BiasGrads, *, scale: float) -> None:
        """Add a tile's share to the gradients of the bias, which all heads share."""
        assert self.bias is not None
        by_pair = self.group.by_user(grad_scores).sum(dim=1).mul_(scale)
        places, gaps = self._bias_indices(self.bias, tile)
        grads.position.index_add_(0, places.expand_as(by_pair).flatten(), by_pair.flatten())
        grads.time.index_add_(0, gaps.expand_as(by_pair).flatten(), by_pair.flatten())

    def _places(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Places of the tile's rows (rows, 1) and keys (1, keys)."""
        device = self.group.lengths.device
        rows = torch.arange(tile.row_start, tile.row_stop, device=device)
        return rows[:, None], torch.arange(tile.key_start, tile.key_stop, device=device)[None, :]

    def _bias_indices(self, bias: RelativeBias, tile: Tile) -> tuple[Tensor, Tensor]:
        """Position and time weight of every pair of the tile, broadcastable to (G, rows, keys)."""
        rows, columns = self._places(tile)
        num_weights = bias.position_weight.shape[0]
        history_end = self.group.lengths - self.group.num_targets
        places = position_index(rows, columns, history_end=history_end, num_weights=num_weights)
        source = self.group.source.view(self.group.num_users, self.group.width)
        gaps = time_index(
            bias.query_times[source[:, tile.rows, None]],
            bias.key_times[source[:, None, tile.keys]],
            num_weights=bias.time_weight.shape[0],
        )
        return places, gaps
