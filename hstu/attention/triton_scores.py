# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201
"""What a score goes through: tanh, and the relative bias before it.

SiLU(x) = h (1 + tanh h) with h = x / 2, which is one special-function instruction a score; its derivative is
(1 + tanh h)(1 + h (1 - tanh h)) / 2. All factors that are the same for all scores (alpha, 1 / N, 1 / 2) are applied to
the small results.
"""

from __future__ import annotations

from genrec.hstu.attention.bias import LOG_BUCKET_WIDTH
from genrec.hstu.attention.triton_jit import constexpr, jit, tl

_BUCKET_WIDTH = constexpr(LOG_BUCKET_WIDTH)


@jit
def one_plus_tanh(h, TANH: tl.constexpr):
    """1 + tanh h; TANH: one of ``genrec.hstu.attention.tuning.TANHS``."""
    if TANH == "exact":
        return 2.0 / (1.0 + tl.exp(-2.0 * h))
    if TANH == "approx":
        return 1.0 + tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [h], dtype=tl.float32, is_pure=True, pack=1
        )
    # Two scores an instruction, at half precision's 11 bits, which are those of tanh.approx.f32 too.
    return 1.0 + tl.inline_asm_elementwise(
        """{
        .reg .b32 pair; .reg .b16 low, high;
        cvt.rn.f16x2.f32 pair, $3, $2;
        tanh.approx.f16x2 pair, pair;
        mov.b32 {low, high}, pair;
        cvt.f32.f16 $0, low;
        cvt.f32.f16 $1, high;
        }""",
        "=f,=f,f,f",
        [h],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@jit
def load_times(times, first, end, SIZE: tl.constexpr):
    """(SIZE,) times of a user's tokens from ``first`` on; zeros from ``end`` on."""
    places = first + tl.arange(0, SIZE)
    return tl.load(times + places, mask=places < end, other=0)


@jit
def bias_indices(rows, keys, row_times, key_times, history_end, num_positions, num_buckets):
    """Position and time weight of every pair, as :mod:`genrec.hstu.attention.bias` has them."""
    place = tl.minimum(keys, history_end) - tl.minimum(rows, history_end) + num_positions // 2
    gap = tl.maximum(tl.abs(row_times - key_times), 1).to(tl.float64)
    bucket = (tl.log(gap) / _BUCKET_WIDTH).to(tl.int32)
    return tl.minimum(tl.maximum(place, 0), num_positions - 1), tl.minimum(bucket, num_buckets - 1)


@jit
def bias_of_pairs(place, bucket, position_weight, time_weight):
    """Half the bias, of indices of :func:`bias_indices`."""
    return 0.5 * (tl.load(position_weight + place).to(tl.float32) + tl.load(time_weight + bucket).to(tl.float32))
