"""FP8 of attention's operands in plain PyTorch: which numbers share a scale, and the quantized tensors to the bit.

The mode (``hstu_attn_quantization_mode``) says what one scale covers, of q, k, v and the output's gradient alike:

==========  ==========================  ========  =====================================================
mode        a scale for                 scales    descales
==========  ==========================  ========  =====================================================
fp8         nothing: a plain cast       "user"    (B, H), all 1; the gradient is scaled as "per-tensor"
per-tensor  the tensor                  "user"    (B, H), all the same
per-batch   a user                      "user"    (B, H), the same for all heads
per-head    a user's head               "user"    (B, H)
per-block   128 tokens of a user, head  "block"   (num_slots, H)
1xdim       a token, head               "row"     (T, H); as columns of O = P v: (num_slots, H, d_v)
128x1       the same as 1xdim
==========  ==========================  ========  =====================================================

Blocks start at a user's first token. In O = P v the sum runs over tokens, so that "1xdim" takes 128 tokens of a column
there. A scale is 448 / amax, a descale its inverse. But for q, k and the gradient of "1xdim", what a scale covers has
later tokens in it (with "per-tensor" other users too): they move the rounding of earlier ones, as in every
implementation of these modes. So do the scales of P and dS, powers of two a user and head, but only of what is tiny.
The mask holds for all else.

With "user" scales all products of backward are made of FP8 operands: P and dS are rounded with those scales. With the
others dV = P^T dO, dQ = dS k and dK = dS^T q take q, k and dO as they came.

Numbers that are not finite become NaN, which no product hides, and don't count for an amax. What covers only zeros has
scale 1. Tokens that belong to no user are zeros and count nowhere.

Slots are those of :mod:`genrec.hstu.attention.triton_schedule` for blocks of 128: three users of 5, 200 and 130 tokens
have, as the longest comes first, slots 4, 0 to 1 and 2 to 3 (200 // 128 + 1 = 2; 330 // 128 + 2 = 4).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from genrec.hstu.precision.formats import E4M3, saturating_cast

BLOCK = 128
# By mode, what shares a scale: nothing, a tensor, a user, a user's head, a block or a row.
CELLS = {
    "fp8": "none",
    "per-tensor": "tensor",
    "per-batch": "user",
    "per-head": "head",
    "per-block": "block",
    "1xdim": "row",
    "128x1": "row",
}
# By mode, how descales lie, which is all that the attention kernels know of it.
SCALES = {mode: cell if cell in ("block", "row") else "user" for mode, cell in CELLS.items()}
# Descales stay normal float32 numbers, which nothing flushes to zero.
MAX_SCALE = 2.0**126
MAX_WEIGHT_EXPONENT = 60
# Beyond the largest derivative of SiLU, 1.0998, by more than tanh.approx.f32 and FP8 tensor cores' sums err.
MAX_SLOPE = 1.125


@dataclass(frozen=True)
class FP8Tensor:
    """e4m3 values and what takes them back: ``values * descale``, shapes as in the module's table."""

    values: Tensor
    descale: Tensor


@dataclass(frozen=True)
class QuantizedBatch:
    """The operands of an attention in FP8.

    q, k: (T, H, d_qk). v: (T, H, d_v), for dP = dO v^T; None where no gradient is wanted. v_tiles: (num_slots, H, d_v,
    128), for O = P v: blocks of v transposed, zeros beyond the user's end, keys in the order of ``KEY_ORDER``.
    weight_scale: (B, H), the power of two that P = SiLU(S) is multiplied with before its cast.

    Only with "user" scales, and where a gradient is wanted: q_tiles, k_tiles, values of q and k as v_tiles are of v,
    for dK = dS^T q and dQ = dS k; v_norm: (B, H), the norm of the longest row of v.
    """

    q: FP8Tensor
    k: FP8Tensor
    v: FP8Tensor | None
    v_tiles: FP8Tensor
    weight_scale: Tensor
    q_tiles: Tensor | None = None
    k_tiles: Tensor | None = None
    v_norm: Tensor | None = None


@dataclass(frozen=True)
class QuantizedGrad:
    """The output's gradient in FP8, (T, H, d_v).

    Only with "user" scales: tiles, its values as those of v in :class:`QuantizedBatch`, for dV = P^T dO; score_scale:
    (B, H), the power of two that dS is multiplied with before its cast.
    """

    rows: FP8Tensor
    tiles: Tensor | None = None
    score_scale: Tensor | None = None


@dataclass(frozen=True)
class ProductTensors:
    """What backward makes dV = P^T dO, dQ = dS k and dK = dS^T q of in FP8.

    Tiles of q, k and the gradient, and the powers of two that P and dS are multiplied with, (B, H).
    """

    q: Tensor
    k: Tensor
    grad: Tensor
    weight_scale: Tensor
    score_scale: Tensor


@dataclass(frozen=True)
class ScoreTensors:
    """What backward makes S = alpha q k^T and dP = grad v^T of in FP8; scales: of the mode.

    products: of the other three products; None where they are not in FP8.
    """

    q: FP8Tensor
    k: FP8Tensor
    v: FP8Tensor
    grad: FP8Tensor
    scales: str
    products: ProductTensors | None = None


def _key_order() -> tuple[int, ...]:
    """Which key of a block lies at each place of a tile.

    In each 16 keys, key 8 j + 2 c + e lies at 4 c + 2 j + e (j, e of 0..1, c of 0..3): the float32 accumulators of S
    are then, in place, an FP8 operand of the next product.
    """
    within = [8 * j + 2 * c + e for c in range(4) for j in range(2) for e in range(2)]
    return tuple(first + key for first in range(0, BLOCK, 16) for key in within)


KEY_ORDER = _key_order()


@dataclass(frozen=True)
class Places:
    """Where the rows of a batch lie: user (T,), B for rows of no user; slot and place (T,), which block, and where."""

    user: Tensor
    slot: Tensor
    place: Tensor
    num_users: int
    num_slots: int

    @staticmethod
    def of(offsets: Tensor, num_rows: int) -> Places:
        """Of users with these offsets among ``num_rows`` rows."""
        num_users = offsets.shape[0] - 1
        offsets = offsets.long()
        starts = torch.cat([offsets, offsets.new_tensor([num_rows])])
        lengths = starts.diff()
        order = lengths.argsort(descending=True, stable=True)
        tokens_before = lengths[order].cumsum(0) - lengths[order]
        first_slot = torch.empty_like(order)
        first_slot[order] = tokens_before // BLOCK + torch.arange(num_users + 1, device=offsets.device)
        rows = torch.arange(num_rows, device=offsets.device)
        user = torch.searchsorted(offsets, rows, right=True) - 1
        places = rows - starts[user]
        return Places(
            user=user,
            slot=first_slot[user] + places // BLOCK,
            place=places % BLOCK,
            num_users=num_users,
            num_slots=num_slots(num_rows, num_users),
        )


def num_slots(num_rows: int, num_users: int) -> int:
    """Blocks that the tokens of any such batch fit into."""
    return num_rows // BLOCK + num_users + 1


def grad_mode(mode: str) -> str:
    """The mode of the output's gradient: unscaled, most of it would round to zero."""
    return "per-tensor" if mode == "fp8" else mode


def quantize_batch(
    q: Tensor, k: Tensor, v: Tensor, *, mode: str, offsets: Tensor, alpha: float, needs_grad: bool = True
) -> QuantizedBatch:
    """q, k: (T, H, d_qk), v: (T, H, d_v), strided as they may be."""
    places = Places.of(offsets, q.shape[0])
    query, key = (quantize_rows(x, mode=mode, places=places) for x in (q, k))
    value = quantize_rows(v, mode=mode, places=places) if needs_grad else None
    has_products = value is not None and SCALES[mode] == "user"
    columns = quantize_columns(v, mode=mode, places=places)
    return QuantizedBatch(
        q=query,
        k=key,
        v=value,
        v_tiles=replace(columns, values=_tiles(columns.values, places)),
        weight_scale=weight_scale(query, key, mode=mode, places=places, alpha=alpha),
        q_tiles=_tiles(query.values, places) if has_products else None,
        k_tiles=_tiles(key.values, places) if has_products else None,
        v_norm=longest_row(value, mode=mode, places=places) if value is not None and has_products else None,
    )


def quantize_grad(grad: Tensor, *, mode: str, offsets: Tensor, v_norm: Tensor | None = None) -> QuantizedGrad:
    """grad: (T, H, d_v), the output's gradient, strided as it may be; v_norm: of :class:`QuantizedBatch`."""
    places, mode = Places.of(offsets, grad.shape[0]), grad_mode(mode)
    rows = quantize_rows(grad, mode=mode, places=places)
    if v_norm is None:
        return QuantizedGrad(rows)
    norm = longest_row(rows, mode=mode, places=places)
    return QuantizedGrad(rows, tiles=_tiles(rows.values, places), score_scale=score_scale(norm, v_norm))


def quantize_rows(x: Tensor, *, mode: str, places: Places) -> FP8Tensor:
    """x: (T, H, d) as an operand whose products are summed over d."""
    amax = _magnitudes(x, places).amax(2)
    scale = _scale(_shared_amax(amax, mode, places), mode)
    return FP8Tensor(_cast(x, spread(scale, mode, places), places), _reciprocal(scale))


def quantize_columns(x: Tensor, *, mode: str, places: Places) -> FP8Tensor:
    """x: (T, H, d) as an operand whose products are summed over tokens."""
    if SCALES[mode] != "row":
        return quantize_rows(x, mode=mode, places=places)
    amax = _largest_of(_magnitudes(x, places), places.slot, places.num_slots)
    scale = _scale(amax, mode)
    return FP8Tensor(_cast(x, scale[places.slot], places), _reciprocal(scale))


def dequantize_rows(x: FP8Tensor, *, mode: str, places: Places, dtype: torch.dtype) -> Tensor:
    """What the result of :func:`quantize_rows` stands for, (T, H, d)."""
    return x.values.to(dtype) * spread(x.descale, mode, places).to(dtype)


def dequantize_columns(x: FP8Tensor, *, mode: str, places: Places, dtype: torch.dtype) -> Tensor:
    """What the result of :func:`quantize_columns` stands for, (T, H, d)."""
    if SCALES[mode] != "row":
        return dequantize_rows(x, mode=mode, places=places, dtype=dtype)
    return x.values.to(dtype) * x.descale[places.slot].to(dtype)


def weight_scale(q: FP8Tensor, k: FP8Tensor, *, mode: str, places: Places, alpha: float) -> Tensor:
    """(B, H): what P is multiplied with before its cast, by :func:`_power_below`.

    |SiLU(S)| <= |S| <= alpha |q| |k|, with the norms of the longest rows of the user and head, as they are in FP8.
    """
    norms = [longest_row(x, mode=mode, places=places) for x in (q, k)]
    return _power_below(norms[0] * norms[1] * abs(alpha))


def score_scale(grad_norm: Tensor, v_norm: Tensor) -> Tensor:
    """(B, H): what dS = SiLU'(S) dP, without alpha / N, is multiplied with before its cast, by :func:`_power_below`.

    |dS| <= 1.1 |dP| <= 1.1 |dO| |v|, with the norms of :func:`longest_row`.
    """
    return _power_below(grad_norm * v_norm * MAX_SLOPE)


def longest_row(x: FP8Tensor, *, mode: str, places: Places) -> Tensor:
    """(B, H): the norm of the longest row of each user and head, as it is in FP8; NaN counts as 0."""
    return _largest_of(_norms(x, mode, places), places.user, places.num_users + 1)[:-1]


def _power_below(bound: Tensor) -> Tensor:
    """The largest power of two that can't take what is within ``bound`` beyond 448, at most 2^60; 1 where that is 0.

    NaN where that takes less than 2^-60: of such numbers nothing is hidden.
    """
    exponent = _exponent(torch.full_like(bound, E4M3.max) / bound).clamp(max=MAX_WEIGHT_EXPONENT)
    scale = torch.where(exponent < -MAX_WEIGHT_EXPONENT, torch.nan, _power_of_two(exponent))
    return torch.where(bound > 0, scale, 1.0)


def spread(scale: Tensor, mode: str, places: Places) -> Tensor:
    """(T, H, 1): each row's scale or descale; 1 for rows of no user."""
    if SCALES[mode] == "row":
        return scale[:, :, None]
    if SCALES[mode] == "block":
        return scale[places.slot][:, :, None]
    return spread_users(scale, places)


def spread_users(scale: Tensor, places: Places) -> Tensor:
    """(B, H) -> (T, H, 1): each row's user's scale; 1 for rows of no user."""
    return torch.cat([scale, scale.new_ones(1, scale.shape[1])])[places.user][:, :, None]


def _magnitudes(x: Tensor, places: Places) -> Tensor:
    """|x| in float32, 0 for what isn't finite or of no user."""
    magnitudes = x.detach().float().abs()
    counts = magnitudes.isfinite() & (places.user < places.num_users)[:, None, None]
    return torch.where(counts, magnitudes, 0.0)


def _shared_amax(amax: Tensor, mode: str, places: Places) -> Tensor:
    """From (T, H) by row to what the mode's scales cover, in the shape of its descales."""
    if SCALES[mode] == "row":
        return amax
    if SCALES[mode] == "block":
        return _largest_of(amax, places.slot, places.num_slots)
    by_head = _largest_of(amax, places.user, places.num_users + 1)[:-1]
    if mode == "per-head" or by_head.numel() == 0:
        return by_head
    return by_head.amax(dim=(1,) if mode == "per-batch" else (0, 1), keepdim=True).expand(by_head.shape)


def _largest_of(x: Tensor, index: Tensor, size: int) -> Tensor:
    """x: (T, ...) >= 0 -> (size, ...): the largest of all rows with an index, 0 where there are none."""
    index = index.view(-1, *(1,) * (x.ndim - 1)).expand_as(x)
    return x.new_zeros(size, *x.shape[1:]).scatter_reduce(0, index, x, "amax")


def _scale(amax: Tensor, mode: str) -> Tensor:
    # Tensors over tensors: torch makes a product with the reciprocal, which rounds twice, of a number over a tensor.
    if mode == "fp8":
        return torch.ones_like(amax)
    return torch.where(amax > 0, (torch.full_like(amax, E4M3.max) / amax).clamp(max=MAX_SCALE), 1.0)


def _reciprocal(scale: Tensor) -> Tensor:
    return torch.ones_like(scale) / scale


def _cast(x: Tensor, scale: Tensor, places: Places) -> Tensor:
    values = x.detach().float()
    values = torch.where(values.isfinite(), values * scale, torch.nan)
    return saturating_cast(torch.where((places.user < places.num_users)[:, None, None], values, 0.0), E4M3)


def _norms(x: FP8Tensor, mode: str, places: Places) -> Tensor:
    """(T, H): Euclidean norms of rows of FP8 values, without those that are NaN."""
    values = x.values.float().nan_to_num(0.0)
    return values.square().sum(2).sqrt() * spread(x.descale, mode, places)[:, :, 0]


def _exponent(x: Tensor) -> Tensor:
    """floor(log2(x)) of normal float32 numbers, 128 of infinity."""
    return (x.view(torch.int32) >> 23) - 127


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 127) << 23).view(torch.float32)


def _tiles(values: Tensor, places: Places) -> Tensor:
    """FP8 values (T, H, d) as (num_slots, H, d, 128) in ``KEY_ORDER``."""
    values = values.view(torch.uint8)  # which torch can index
    tiles = values.new_zeros(places.num_slots, BLOCK, *values.shape[1:])
    own = places.user < places.num_users
    tiles[places.slot[own], places.place[own]] = values[own]
    tiles = tiles[:, list(KEY_ORDER)].permute(0, 2, 3, 1).contiguous()
    return tiles.view(E4M3.dtype)
