"""Backward of HSTU attention on Hopper GPUs: tiles, what can be served, and launches of the kernels in Gluon.

They do what the Triton kernels do, explicitly, with the same tiles, spans and schedule. Here tiles come by TMA, several
in flight, and products (``wgmma``) run while the scores of others are worked on. TMA also brings the rows of the next
user: what a product sums over is set to zero there, in shared memory.

In FP8 (SCALES other than "none") S and dP are made of quantized operands, the ``x8`` and what a docstring names, and
tiles start at multiples of their size. With "user" scales dV, dK and dQ are made of blocks of columns of FP8 q, k and
dO, which hold zeros beyond the user's end; with the others of q, k and dO as they came.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from genrec.hstu.attention.descriptors import descriptor, has_whole_rows, matrix_descriptor
from genrec.hstu.attention.hopper_key_grad import key_grad_kernel
from genrec.hstu.attention.hopper_key_grad_split import split_key_grad_kernel
from genrec.hstu.attention.hopper_query_grad import query_grad_kernel
from genrec.hstu.attention.hopper_support import HALF_PRECISION, why_not_here
from genrec.hstu.attention.quantization import BLOCK, ScoreTensors
from genrec.hstu.attention.request import Request
from genrec.hstu.attention.tuning import LEAST_FP8_SUM, check_number, tunable


@dataclass(frozen=True)
class KeyTile:
    """Of dK and dV: rows against keys that a program takes at a time, and how many tiles of rows are in flight.

    split: one group of four warps sums dV, a second one dK, and num_warps is that of a group. Otherwise each group of
    four warps sums both, of 64 keys at most.
    """

    rows: int
    keys: int
    num_warps: int
    stages: int
    split: bool = False

    def __post_init__(self) -> None:
        check_number("rows", self.rows, 16, 128, power_of_two=True)
        check_number("keys", self.keys, 64, 128, power_of_two=True)
        check_number("num_warps", self.num_warps, 4, 4 if self.split else 8, power_of_two=True)
        check_number("stages", self.stages, 2, 8)  # with one, a tile would be overwritten while it is in use


@dataclass(frozen=True)
class QueryTile:
    """Of dQ: rows against keys that a program takes at a time, and how many tiles of keys and of values are in flight.

    held: what S and dP are made of on the side of the rows stays in registers.
    """

    rows: int
    keys: int
    num_warps: int
    key_stages: int
    value_stages: int
    held: bool = False

    def __post_init__(self) -> None:
        check_number("rows", self.rows, 64, 128, power_of_two=True)
        check_number("keys", self.keys, 16, 128, power_of_two=True)
        check_number("num_warps", self.num_warps, 4, 8, power_of_two=True)
        check_number("key_stages", self.key_stages, 2, 8)  # with one, keys would be overwritten while they are in use
        check_number("value_stages", self.value_stages, 1, 8)


@dataclass(frozen=True)
class BackwardTiles:
    """Tiles of the two kernels."""

    key: KeyTile
    query: QueryTile


# The best of some tens on an H200 with Triton 3.6, full causal sequences of 4096.
TILES = {
    64: BackwardTiles(
        key=KeyTile(64, 64, num_warps=4, stages=2),
        query=QueryTile(64, 64, num_warps=4, key_stages=2, value_stages=2),
    ),
    128: BackwardTiles(
        key=KeyTile(64, 64, num_warps=4, stages=2),
        query=QueryTile(64, 64, num_warps=4, key_stages=2, value_stages=2),
    ),
    256: BackwardTiles(
        key=KeyTile(64, 64, num_warps=4, stages=2, split=True),
        query=QueryTile(128, 64, num_warps=8, key_stages=2, value_stages=1),
    ),
}
# Of users with few tokens: 512 of 40 to 700.
SHORT_TILES = {
    64: BackwardTiles(
        key=KeyTile(32, 64, num_warps=4, stages=2),
        query=QueryTile(64, 32, num_warps=4, key_stages=3, value_stages=3),
    ),
    128: BackwardTiles(
        key=KeyTile(32, 64, num_warps=4, stages=3),
        query=QueryTile(64, 64, num_warps=4, key_stages=2, value_stages=2),
    ),
    256: BackwardTiles(
        key=KeyTile(64, 64, num_warps=4, stages=2, split=True),
        query=QueryTile(64, 32, num_warps=4, key_stages=3, value_stages=3),
    ),
}
# With "user" scales, measured as TILES.
FP8_TILES = {
    64: BackwardTiles(
        key=KeyTile(64, 64, num_warps=4, stages=3),
        query=QueryTile(64, 64, num_warps=4, key_stages=2, value_stages=2, held=True),
    ),
    128: BackwardTiles(
        key=KeyTile(64, 64, num_warps=4, stages=3),
        query=QueryTile(64, 64, num_warps=4, key_stages=2, value_stages=2),
    ),
    256: BackwardTiles(
        key=KeyTile(64, 64, num_warps=4, stages=2, split=True),
        query=QueryTile(128, 64, num_warps=8, key_stages=2, value_stages=2),
    ),
}
FP8_BLOCK_TILES = {
    64: BackwardTiles(
        key=KeyTile(64, 64, num_warps=4, stages=2),
        query=QueryTile(64, 64, num_warps=4, key_stages=2, value_stages=2),
    ),
    128: BackwardTiles(
        key=KeyTile(64, 64, num_warps=4, stages=2),
        query=QueryTile(64, 64, num_warps=4, key_stages=2, value_stages=2, held=True),
    ),
    256: BackwardTiles(
        key=KeyTile(64, 64, num_warps=4, stages=2, split=True),
        query=QueryTile(128, 64, num_warps=8, key_stages=2, value_stages=2),
    ),
}
# With a descale for each row, all of which are loaded for each tile.
FP8_ROW_TILES = {
    64: FP8_BLOCK_TILES[64],
    128: BackwardTiles(
        key=KeyTile(32, 64, num_warps=4, stages=3),
        query=QueryTile(64, 32, num_warps=4, key_stages=3, value_stages=3),
    ),
    256: FP8_BLOCK_TILES[256],
}


def _check_split(tiles: BackwardTiles, width: int) -> None:
    if tiles.key.split and 4 * tiles.key.rows > width:  # slopes lie where v was
        raise ValueError(f"split FP8 tiles have at most {width // 4} rows where heads are {width} wide")


def _check_fp8(tiles: BackwardTiles, width: int) -> None:
    _check_split(tiles, width)
    for name, size in (("key rows", tiles.key.rows), ("query keys", tiles.query.keys)):
        if size < LEAST_FP8_SUM:
            raise ValueError(f"FP8 takes {name} from {LEAST_FP8_SUM} on, not {size}")


tunable("hopper_backward", TILES)
tunable("hopper_backward_short", SHORT_TILES)
tunable("hopper_backward_fp8", FP8_TILES, check=_check_fp8)
tunable("hopper_backward_fp8_block", FP8_BLOCK_TILES, check=_check_split)
tunable("hopper_backward_fp8_row", FP8_ROW_TILES, check=_check_split)


def _table(q: Tensor, request: Request, scales: str) -> dict[int, BackwardTiles]:
    """Tiles by the width of heads; scales: "none", or of the FP8 mode."""
    if scales == "none":
        return SHORT_TILES if request.has_short_users(q) else TILES
    return {"user": FP8_TILES, "block": FP8_BLOCK_TILES, "row": FP8_ROW_TILES}[scales]


def why_not(q: Tensor, k: Tensor, v: Tensor, grad_output: Tensor, request: Request, scales: str = "none") -> str | None:
    """Why :func:`backward` can't serve such tensors, (T, H, d) all, on this device; None if it can."""
    inputs, widths = (q, k, v, grad_output), _table(q, request, scales)
    if q.dtype not in HALF_PRECISION or any(x.dtype != q.dtype for x in inputs):
        return f"q, k, v and the gradient must share bfloat16 or float16, not {', '.join(str(x.dtype) for x in inputs)}"
    if not all(has_whole_rows(x) for x in inputs):
        return "TMA takes heads that lie side by side, in rows that start at multiples of 16 bytes"
    return why_not_here(q, q.shape[2], v.shape[2], request, widths)


def why_not_fp8(grad_output: Tensor, qk_dim: int, request: Request) -> str | None:
    """Why :func:`backward_fp8` can't serve a gradient (T, H, d_v); None if it can."""
    if grad_output.dtype not in HALF_PRECISION:
        return f"the gradient is bfloat16 or float16, not {grad_output.dtype}"
    return why_not_here(grad_output, qk_dim, grad_output.shape[2], request, FP8_TILES)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_output: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    schedule: Tensor,
    request: Request,
    fp8: ScoreTensors | None = None,
) -> None:
    """Fill the gradients of v, q and k, (T, H * d) each, all with the same distance between rows.

    schedule: of :func:`genrec.hstu.attention.launch.make_schedule`. Every number is summed in one program, in the same
    order every time.
    """
    scored = (None,) * 4 if fp8 is None else (fp8.q.values, fp8.k.values, fp8.v.values, fp8.grad.values)
    q8, k8, v8, grad8 = scored
    scales = "none" if fp8 is None else fp8.scales
    tiles = _table(q, request, scales)[q.shape[2]]
    rows, keys = tiles.key.rows, tiles.key.keys
    by_key = _descriptors((q, rows), (k if k8 is None else k8, keys), (v if v8 is None else v8, keys))
    by_key += _descriptors((grad_output, rows), (q8, rows), (grad8, rows))
    rows, keys = tiles.query.rows, tiles.query.keys
    query, value, of_output = (q, v, grad_output) if fp8 is None else (q8, v8, grad8)
    by_query = _descriptors((query, rows), (k, keys), (value, keys), (of_output, rows), (k8, keys))
    _launch(by_key, by_query, grads, schedule, request, tiles, fp8, q)


def backward_fp8(grads: tuple[Tensor, Tensor, Tensor], schedule: Tensor, request: Request, fp8: ScoreTensors) -> None:
    """:func:`backward` where all products are of FP8 operands: ``fp8.products``."""
    q, k, v, grad, products = fp8.q.values, fp8.k.values, fp8.v.values, fp8.grad.values, fp8.products
    assert products is not None
    dim = q.shape[2]
    tiles = FP8_TILES[dim]
    rows, keys = tiles.key.rows, tiles.key.keys
    key, value, *others = _descriptors((k, keys), (v, keys), (q, rows), (grad, rows))
    by_key = [_columns(products.q, rows), key, value, _columns(products.grad, rows), *others]
    rows, keys = tiles.query.rows, tiles.query.keys
    query, *others = _descriptors((q, rows), (v, keys), (grad, rows), (k, keys))
    by_query = [query, _columns(products.k, keys), *others]
    _launch(by_key, by_query, grads, schedule, request, tiles, fp8, q)


def _launch(
    by_key: list[Any],
    by_query: list[Any],
    grads: tuple[Tensor, Tensor, Tensor],
    schedule: Tensor,
    request: Request,
    tiles: BackwardTiles,
    fp8: ScoreTensors | None,
    q: Tensor,
) -> None:
    """by_key, by_query: the descriptors that the two kernels take; q: (T, H, d), for its shape."""
    scales = "none" if fp8 is None else fp8.scales
    dv, dq, dk = grads
    if request.num_users == 0:
        for x in grads:
            x.zero_()
        return
    descales = (None,) * 4 if fp8 is None else (fp8.q.descale, fp8.k.descale, fp8.v.descale, fp8.grad.descale)
    weight_scale = score_scale = None
    if fp8 is not None and fp8.products is not None:
        weight_scale, score_scale = fp8.products.weight_scale, fp8.products.score_scale
    dim = q.shape[2]
    batch = (schedule, *request.users(), *request.sizes(q), *request.factors())
    constants = {"DIM": dim, **request.mask_constants(), "SCALES": scales}
    rows, keys = tiles.key.rows, tiles.key.keys
    options: dict[str, Any] = {"REGISTERS": _REGISTERS} if tiles.key.split else {}
    kernel = split_key_grad_kernel if tiles.key.split else key_grad_kernel
    kernel[request.grid(q, keys)](
        *by_key,
        *(*descales, weight_scale, score_scale, dk, dv, dk.stride(0), *batch),
        ROWS=rows,
        KEYS=keys,
        STAGES=tiles.key.stages,
        num_warps=tiles.key.num_warps,
        **options,
        **constants,
    )
    query_grad_kernel[request.grid(q, tiles.query.rows)](
        *by_query,
        *(*descales, score_scale, dq, dq.stride(0), *batch),
        ROWS=tiles.query.rows,
        KEYS=tiles.query.keys,
        KEY_STAGES=tiles.query.key_stages,
        VALUE_STAGES=tiles.query.value_stages,
        HELD=tiles.query.held,
        num_warps=tiles.query.num_warps,
        **constants,
    )


# Of a thread of the warp group with dK. The one with dV gets as many: what a block has, less the loader's 24.
_REGISTERS = 240


def _descriptors(*tensors: tuple[Tensor | None, int]) -> list[Any]:
    """TMA descriptors of (T, H, d), each for tiles of so many rows of one head; None of None."""
    return [None if x is None else descriptor(x, rows) for x, rows in tensors]


def _columns(tiles: Tensor, rows: int) -> Any:
    """TMA descriptor of (num_slots, H, d, 128), for tiles of so many of a block's rows."""
    return matrix_descriptor(tiles.view(-1, BLOCK), tiles.shape[2], rows)
