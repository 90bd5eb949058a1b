"""Which tiles the attention kernels use: a table, so that no run spends its first minutes on tuning."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KernelTile:
    """Rows against keys that a program takes at a time, its warps, and how many tiles are in flight."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Tiles:
    """Tiles of the three kernels, and what they have in common.

    tanh: "approx" (one instruction a score), "approx_pair" (one for two scores, at half precision) or "exact". tma:
    whether tiles without a mask are loaded by TMA, which takes registers and instructions off the warps. fused: one
    backward kernel, which takes five products a tile and not seven, but adds dQ up in memory: no two runs are the same.
    """

    forward: KernelTile
    key_grad: KernelTile
    query_grad: KernelTile
    tanh: str = "approx"
    tma: bool = False
    fused: bool = False


# By the larger of d_qk and d_v, rounded up. Of 64, 128 and 256: the best of a sweep over simpler kernels on an H200,
# with Triton 3.6 at L = 4096. Of 32: not measured.
HALF_PRECISION_TILES = {
    32: Tiles(
        forward=KernelTile(64, 64, num_warps=4, num_stages=3),
        key_grad=KernelTile(32, 64, num_warps=4, num_stages=3),
        query_grad=KernelTile(64, 128, num_warps=4, num_stages=3),
    ),
    64: Tiles(
        forward=KernelTile(64, 64, num_warps=4, num_stages=3),
        key_grad=KernelTile(32, 64, num_warps=4, num_stages=3),
        query_grad=KernelTile(64, 128, num_warps=4, num_stages=3),
    ),
    128: Tiles(
        forward=KernelTile(64, 64, num_warps=4, num_stages=3),
        key_grad=KernelTile(32, 64, num_warps=4, num_stages=3),
        query_grad=KernelTile(128, 64, num_warps=8, num_stages=3),
    ),
    256: Tiles(
        forward=KernelTile(128, 64, num_warps=8, num_stages=2),
        key_grad=KernelTile(64, 64, num_warps=8, num_stages=2),
        query_grad=KernelTile(64, 64, num_warps=4, num_stages=2),
    ),
}
# For tests: exact in every step, so without tensor cores, where larger tiles compile for minutes.
_SMALL = KernelTile(16, 16, num_warps=4, num_stages=1)
FLOAT32_TILES = Tiles(forward=_SMALL, key_grad=_SMALL, query_grad=_SMALL, tanh="exact")
# Two gathers, an int64 difference and a float64 logarithm a score leave registers for small tiles alone. Not measured.
BIAS_TILES = Tiles(
    forward=KernelTile(64, 32, num_warps=4, num_stages=2),
    key_grad=KernelTile(32, 64, num_warps=4, num_stages=2),
    query_grad=KernelTile(64, 32, num_warps=4, num_stages=2),
)


def tiles_for(qk_dim: int, v_dim: int, dtype: torch.dtype, *, has_bias: bool) -> Tiles:
    """The tiles for heads of these widths."""
    if dtype == torch.float32:
        return FLOAT32_TILES
    if has_bias:
        return BIAS_TILES
    widest = max(qk_dim, v_dim)
    return HALF_PRECISION_TILES[min(width for width in HALF_PRECISION_TILES if width >= widest)]
