"""HSTU attention's forward pass on Hopper GPUs: tiles, what can be served, and launches of the kernel in Gluon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from genrec.hstu.attention.descriptors import descriptor, has_whole_rows, matrix_descriptor
from genrec.hstu.attention.hopper_forward_kernel import forward_kernel
from genrec.hstu.attention.hopper_support import HALF_PRECISION, why_not_here
from genrec.hstu.attention.quantization import BLOCK, QuantizedBatch
from genrec.hstu.attention.request import Request, device_of, strides
from genrec.hstu.attention.tuning import check_number, tunable

GROUP_ROWS = 64  # what one warp group's matrix instruction takes


@dataclass(frozen=True)
class HopperTile:
    """Warp groups a program has, keys a tile, tiles of keys and of values in shared memory, and registers a thread.

    early: S(i + 1) starts before SiLU(S(i)), not after it, which takes registers for both. query_in_registers: queries
    are kept there, for less traffic in shared memory.
    """

    groups: int
    keys: int
    key_stages: int
    value_stages: int
    registers: int
    early: bool = False
    query_in_registers: bool = False

    def __post_init__(self) -> None:
        check_number("groups", self.groups, 1, 2)
        check_number("keys", self.keys, 16, 128, power_of_two=True)
        # With one, a program would wait for a tile that it loads later.
        check_number("key_stages", self.key_stages, 2, 8)
        check_number("value_stages", self.value_stages, 2, 8)
        check_number("registers", self.registers, 24, 255)


# By the width of heads, the best of those tried on an H200 with Triton 3.6 at L = 4096. More registers a thread mean
# fewer programs a multiprocessor; with too few for all that is in flight, the compiler makes the products wait.
HALF_PRECISION_TILES = {
    64: HopperTile(groups=1, keys=64, key_stages=2, value_stages=2, registers=128),
    128: HopperTile(groups=2, keys=128, key_stages=3, value_stages=3, registers=248),
    256: HopperTile(groups=2, keys=64, key_stages=3, value_stages=2, registers=248, early=True),
}
# Of users with few tokens, without 128, where the Triton kernel is a tenth faster than the best of these.
SHORT_TILES = {width: HALF_PRECISION_TILES[width] for width in (64, 256)}
FP8_TILES = {
    64: HopperTile(groups=1, keys=64, key_stages=3, value_stages=3, registers=112),
    128: HopperTile(groups=1, keys=64, key_stages=3, value_stages=3, registers=160, query_in_registers=True),
    256: HopperTile(groups=2, keys=64, key_stages=4, value_stages=4, registers=248),
}
tunable("hopper_forward", HALF_PRECISION_TILES)
tunable("hopper_forward_short", SHORT_TILES)
tunable("hopper_forward_fp8", FP8_TILES)
# "block" and "row": each tile's product with values has a scale of its own, so it needs registers beside the sum's,
# which at a width of 256 no thread has. Slower than half precision: they are here for their accuracy.
FP8_BLOCK_TILES = {
    64: HopperTile(groups=2, keys=128, key_stages=3, value_stages=3, registers=240),
    128: HopperTile(groups=2, keys=64, key_stages=4, value_stages=4, registers=248),
}


def why_not(q: Tensor, k: Tensor, v: Tensor, request: Request) -> str | None:
    """Why :func:`forward` can't serve the request here; None if it can."""
    if q.dtype not in HALF_PRECISION or not q.dtype == k.dtype == v.dtype:
        return f"q, k and v must share bfloat16 or float16, not {q.dtype}, {k.dtype}, {v.dtype}"
    if not all(has_whole_rows(x) for x in (q, k, v)):
        return "TMA takes heads that lie side by side, in rows that start at multiples of 16 bytes"
    return _why_not_here(q, v, request, _half_precision_tiles(q, request))


def why_not_fp8(v: Tensor, batch: QuantizedBatch, request: Request, scales: str) -> str | None:
    """Why :func:`forward_fp8` can't serve the request; None if it can. v: before it was quantized."""
    if v.dtype not in HALF_PRECISION:
        return f"the output is bfloat16 or float16, not {v.dtype}"
    return _why_not_here(batch.q.values, v, request, _fp8_tiles(scales))


def _why_not_here(q: Tensor, v: Tensor, request: Request, tiles: dict[int, HopperTile]) -> str | None:
    reason = why_not_here(q, q.shape[2], v.shape[2], request, tiles)
    return "the batch has no users" if reason is None and request.num_users == 0 else reason


def forward(q: Tensor, k: Tensor, v: Tensor, output: Tensor, schedule: Tensor, request: Request) -> None:
    """Fill ``output`` (T, H, d) from q, k and v of that shape, for a request of which :func:`why_not` says None."""
    tile = _half_precision_tiles(q, request)[q.shape[2]]
    _launch(q, k, descriptor(v, tile.keys), (output,) * 4, output, schedule, request, tile, "none")


def forward_fp8(batch: QuantizedBatch, output: Tensor, schedule: Tensor, request: Request, scales: str) -> None:
    """Fill ``output`` (T, H, d); scales: of the mode. For what :func:`why_not_fp8` says None of."""
    value = batch.v_tiles.values
    dim = value.shape[2]
    tile = _fp8_tiles(scales)[dim]
    values = matrix_descriptor(value.view(-1, BLOCK), dim, tile.keys)
    descales = (batch.q.descale, batch.k.descale, batch.v_tiles.descale, batch.weight_scale)
    _launch(batch.q.values, batch.k.values, values, descales, output, schedule, request, tile, scales)


def _half_precision_tiles(q: Tensor, request: Request) -> dict[int, HopperTile]:
    return SHORT_TILES if request.has_short_users(q) else HALF_PRECISION_TILES


def _fp8_tiles(scales: str) -> dict[int, HopperTile]:
    return FP8_TILES if scales == "user" else FP8_BLOCK_TILES


def _launch(
    q: Tensor,
    k: Tensor,
    values: Any,
    descales: tuple[Tensor, ...],
    output: Tensor,
    schedule: Tensor,
    request: Request,
    tile: HopperTile,
    scales: str,
) -> None:
    """values: the descriptor of v or of its tiles; descales: of q, k, v and the weights, never read if "none"."""
    with device_of(q):
        forward_kernel[request.grid(q, GROUP_ROWS * tile.groups)](
            *(descriptor(q, GROUP_ROWS), descriptor(k, tile.keys), values, output, *descales, schedule),
            *(*request.users(), *strides(output), *request.sizes(q), *request.factors()),
            DIM=q.shape[2],
            KEYS=tile.keys,
            GROUPS=tile.groups,
            K_STAGES=tile.key_stages,
            V_STAGES=tile.value_stages,
            EARLY=tile.early,
            QUERY_IN_REGISTERS=tile.query_in_registers,
            REGISTERS=tile.registers,
            SCALES=scales,
            **request.mask_constants(),
            num_warps=4,
            maxnreg=tile.registers,
        )
