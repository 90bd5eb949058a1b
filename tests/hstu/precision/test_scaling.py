"""Each recipe's quantization against a slow definition of its own: loops over blocks in numpy's float32."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genrec.hstu.precision.formats import E4M3, E5M2, saturating_cast
from genrec.hstu.precision.scaling import (
    Quantized,
    quantize_blockwise,
    quantize_mxfp8,
    quantize_tensorwise,
    quantize_with_scale,
    tensor_amax,
)

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
SIZES = (1, 15, 16, 17, 127, 128, 129, 130, 257)
FLOAT32_MAX = float(np.finfo(np.float32).max)


def current_scale(amax: float, fmt, largest: float = FLOAT32_MAX) -> float:
    if amax == 0.0 or math.isinf(amax):
        return 1.0
    with np.errstate(over="ignore"):
        scale = float(np.float32(fmt.max) / np.float32(amax))
    return largest if math.isinf(scale) else scale


def blockwise_scale(amax: float, fmt, dtype: torch.dtype) -> float:
    _, exponent = math.frexp(current_scale(amax, fmt, torch.finfo(dtype).max))
    return 2.0 ** (exponent - 1)


def mxfp8_scale(amax: float, fmt) -> float:
    wanted = float(np.float32(amax) * np.float32(1.0 / fmt.max))
    exponent = next((e for e in range(-127, 127) if 2.0**e >= wanted), 127)
    return 2.0**-exponent


def by_loops(x: torch.Tensor, fmt, block, scale_of) -> tuple[np.ndarray, np.ndarray]:
    """What the quantized matrix stands for in float64, and the scales' inverses, block after block."""
    num_rows, num_cols = x.shape
    rows, cols = block
    source = x.float().numpy()
    dequantized = np.zeros(x.shape)
    inverses = np.zeros((math.ceil(num_rows / rows), math.ceil(num_cols / cols)), np.float32)
    for i, j in itertools.product(*map(range, inverses.shape)):
        part = source[i * rows : (i + 1) * rows, j * cols : (j + 1) * cols]
        amax = 0.0
        for value in part.flat:
            if not math.isnan(value):
                amax = max(amax, abs(float(value)))
        scale = scale_of(amax)
        with np.errstate(over="ignore"):
            inverses[i, j] = np.float32(1.0) / np.float32(scale)
            scaled = torch.from_numpy(part * np.float32(scale))
        values = saturating_cast(scaled, fmt).double().numpy()
        dequantized[i * rows : (i + 1) * rows, j * cols : (j + 1) * cols] = values * float(inverses[i, j])
    return dequantized, inverses


def check(quantized: Quantized, expected: tuple[np.ndarray, np.ndarray], x: torch.Tensor, fmt) -> None:
    assert quantized.values.dtype == fmt.dtype
    assert quantized.values.shape == x.shape
    assert quantized.scale_inv.dtype == torch.float32
    np.testing.assert_array_equal(quantized.scale_inv.numpy().reshape(expected[1].shape), expected[1])
    np.testing.assert_array_equal(quantized.dequantize().numpy(), expected[0])


def make_matrix(num_rows: int, num_cols: int, kind: str, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows * 1000 + num_cols)
    x = torch.randn(num_rows, num_cols, generator=generator)
    if kind == "wide":
        x *= torch.exp2(torch.randint(-30, 30, x.shape, generator=generator))
    elif kind == "special":
        flat = x.view(-1)
        for start, value in enumerate((0.0, 1e-40, -3e38, math.inf, math.nan, -0.0, 1.5e-38, 2e-45)):
            flat[start::41] = value
    elif kind == "zeros":
        x.zero_()
    elif kind == "tiny":
        x *= 1e-39  # subnormal: max / amax overflows
    elif kind == "huge":
        x = x.clamp(-3, 3) * 1e38
    elif kind == "nan":
        x.fill_(math.nan)
    return x.to(dtype)


KINDS = ("plain", "wide", "special", "zeros", "tiny", "huge", "nan")


@FORMATS
@pytest.mark.parametrize("kind", KINDS)
def test_tensorwise_against_loops(kind, fmt) -> None:
    for num_rows, num_cols in [(1, 1), (15, 16), (17, 127), (3, 129), (5, 257)]:
        x = make_matrix(num_rows, num_cols, kind)
        expected = by_loops(x, fmt, (num_rows, num_cols), lambda amax: current_scale(amax, fmt))
        check(quantize_tensorwise(x, fmt), expected, x, fmt)


@FORMATS
@pytest.mark.parametrize("kind", KINDS)
def test_blockwise_rows_against_loops(kind, fmt) -> None:
    for num_cols in SIZES:
        x = make_matrix(3, num_cols, kind)
        expected = by_loops(x, fmt, (1, 128), lambda amax: blockwise_scale(amax, fmt, torch.float32))
        check(quantize_blockwise(x, fmt), expected, x, fmt)


@FORMATS
@pytest.mark.parametrize("shape", [(1, 257), (15, 17), (127, 129), (128, 128), (130, 16), (257, 130)])
def test_blockwise_squares_against_loops(shape, fmt) -> None:
    for kind in ("wide", "special"):
        x = make_matrix(*shape, kind)
        expected = by_loops(x, fmt, (128, 128), lambda amax: blockwise_scale(amax, fmt, torch.float32))
        check(quantize_blockwise(x, fmt, (128, 128)), expected, x, fmt)


@FORMATS
@pytest.mark.parametrize("kind", KINDS)
def test_mxfp8_against_loops(kind, fmt) -> None:
    for num_cols in (*SIZES, 31, 32, 33):
        x = make_matrix(3, num_cols, kind)
        expected = by_loops(x, fmt, (1, 32), lambda amax: mxfp8_scale(amax, fmt))
        check(quantize_mxfp8(x, fmt), expected, x, fmt)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_are_scaled_in_float32(dtype) -> None:
    x = make_matrix(3, 130, "plain", dtype)
    x[0, 0], x[1, :128] = 0.0, 1e-7  # a block whose amax is subnormal in float16
    check(quantize_tensorwise(x, E4M3), by_loops(x, E4M3, x.shape, lambda a: current_scale(a, E4M3)), x, E4M3)
    by_block = by_loops(x, E4M3, (1, 128), lambda amax: blockwise_scale(amax, E4M3, dtype))
    check(quantize_blockwise(x, E4M3), by_block, x, E4M3)
    check(quantize_mxfp8(x, E4M3), by_loops(x, E4M3, (1, 32), lambda amax: mxfp8_scale(amax, E4M3)), x, E4M3)


@pytest.mark.parametrize(
    ("amax", "fmt", "tensorwise", "blockwise", "mxfp8"),
    [
        # 448 / 3 = 149.33..., of which float32 keeps 9786709 x 2^-16; a product with the rounded 1 / 3 gives 9786710.
        (3.0, E4M3, 9786709 * 2.0**-16, 128.0, 128.0),
        (448.0, E4M3, 1.0, 1.0, 1.0),
        (449.0, E4M3, None, 0.5, 0.5),
        (447.0, E4M3, None, 1.0, 1.0),
        (1e-6, E5M2, None, 2.0**35, 2.0**35),  # 57344 / 1e-6 = 5.7344e10, 2^35 = 3.4e10
        (7.0, E5M2, 8192.0, 8192.0, 8192.0),
        (0.0, E4M3, 1.0, 1.0, 2.0**127),
        (math.inf, E4M3, 1.0, 1.0, 2.0**-127),
        # 448 / 1e-39 is no float32. 1e-39 / 448 is, as a subnormal, and far below 2^-127.
        (1e-39, E4M3, FLOAT32_MAX, 2.0**127, 2.0**127),
        # amax / 448 at 2^-127, which is mantissa 0x400000 of a subnormal, and the next float32 above it.
        (448 * 2.0**-127, E4M3, None, 2.0**127, 2.0**127),
        (448 * 2.0**-127 * (1 + 2.0**-10), E4M3, None, 2.0**126, 2.0**126),
    ],
)
def test_scales_by_hand(amax, fmt, tensorwise, blockwise, mxfp8) -> None:
    x = torch.tensor([[0.0, -amax, amax / 2 if math.isfinite(amax) else 1.0]])
    if tensorwise is not None:
        scale_inv = quantize_tensorwise(x, fmt).scale_inv
        assert torch.equal(scale_inv, torch.tensor([tensorwise]).reciprocal())
    assert quantize_blockwise(x, fmt).scale_inv.tolist() == [[1.0 / blockwise]]
    assert quantize_mxfp8(x, fmt).scale_inv.tolist() == [[1.0 / mxfp8]]


QUANTIZERS = {
    "tensorwise": quantize_tensorwise,
    "with_scale": lambda x, fmt: quantize_with_scale(x, torch.tensor([3.0]), fmt),
    "blockwise": quantize_blockwise,
    "squares": lambda x, fmt: quantize_blockwise(x, fmt, (128, 128)),
    "mxfp8": quantize_mxfp8,
}
ALL = pytest.mark.parametrize("quantize", QUANTIZERS.values(), ids=list(QUANTIZERS))


@ALL
@FORMATS
def test_zeros_stay_zeros_with_a_finite_scale(quantize, fmt) -> None:
    quantized = quantize(torch.zeros(5, 130), fmt)
    assert not quantized.dequantize().any()
    assert quantized.scale_inv.isfinite().all()
    assert (quantized.scale_inv > 0).all()


@ALL
@pytest.mark.parametrize("shape", [(0, 130), (130, 0), (0, 0)])
def test_nothing_is_quantized_to_nothing(quantize, shape) -> None:
    assert quantize(torch.zeros(shape), E4M3).dequantize().shape == shape


@ALL
@FORMATS
def test_strides_do_not_matter(quantize, fmt) -> None:
    x = make_matrix(260, 140, "wide")
    for view in (x.t(), x[::2, 1:], x[3:7].t(), x[:1].expand(130, -1)):
        by_view, by_copy = quantize(view, fmt), quantize(view.contiguous(), fmt)
        assert torch.equal(by_view.scale_inv, by_copy.scale_inv)
        assert torch.equal(by_view.dequantize(), by_copy.dequantize())


@ALL
def test_transposing_exchanges_rows_and_columns(quantize) -> None:
    quantized = quantize(make_matrix(130, 257, "wide"), E4M3)
    assert torch.equal(quantized.t().dequantize(), quantized.dequantize().t())
    assert torch.equal(quantized.t().t().dequantize(), quantized.dequantize())


@ALL
@FORMATS
def test_nan_stays_one_nan(quantize, fmt) -> None:
    x = make_matrix(4, 130, "plain")
    poisoned = x.clone()
    poisoned[2, 5] = math.nan
    x[2, 5] = 0.0
    expected = quantize(x, fmt).dequantize()
    expected[2, 5] = math.nan
    torch.testing.assert_close(quantize(poisoned, fmt).dequantize(), expected, rtol=0, atol=0, equal_nan=True)


@ALL
@FORMATS
def test_infinity_saturates_and_never_becomes_nan(quantize, fmt) -> None:
    x = make_matrix(4, 130, "plain")
    x[2, 5], x[3, 129] = math.inf, -math.inf
    quantized = quantize(x, fmt)
    assert quantized.values[2, 5].float() == fmt.max
    assert quantized.values[3, 129].float() == -fmt.max
    assert quantized.dequantize().isfinite().all()


def test_a_given_scale_is_used_as_it_is() -> None:
    quantized = quantize_with_scale(torch.tensor([[1.0, -3.0, 100.0]]), torch.tensor([8.0]), E4M3)
    assert quantized.values.float().tolist() == [[8.0, -24.0, 448.0]]
    assert quantized.dequantize().tolist() == [[1.0, -3.0, 56.0]]


def test_amax_of_a_tensor() -> None:
    assert tensor_amax(torch.tensor([[1.0, -7.0, math.nan]])).tolist() == [7.0]
    assert tensor_amax(torch.tensor([[1.0, -math.inf]])).tolist() == [math.inf]
    assert tensor_amax(torch.zeros(0, 4)).tolist() == [0.0]
    assert tensor_amax(torch.tensor([[-3.0]], dtype=torch.bfloat16)).dtype == torch.float32


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    num_rows=st.integers(1, 4),
    num_cols=st.sampled_from([1, 31, 32, 33, 129]),
    name=st.sampled_from(["tensorwise", "blockwise", "squares", "mxfp8"]),
    fmt=st.sampled_from([(E4M3, 3, -9), (E5M2, 2, -16)]),
)
def test_error_of_quantizing(data, num_rows, num_cols, name, fmt) -> None:
    """At most half a unit in the last place: 2^-4 of the value (2^-3 in e5m2), or half the least value, scaled."""
    fmt, mantissa_bits, least_exponent = fmt
    exponents = data.draw(st.lists(st.integers(-60, 60), min_size=1, max_size=num_rows * num_cols))
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows * num_cols, generator=generator)
    x *= torch.exp2(torch.tensor(exponents).repeat(-(-x.numel() // len(exponents)))[: x.numel()])
    x = x.view(num_rows, num_cols)
    quantized = QUANTIZERS[name](x, fmt)
    error = (quantized.dequantize() - x.double()).abs()
    inverse = Quantized(torch.ones_like(x).to(fmt.dtype), quantized.scale_inv, quantized.block).dequantize()
    bound = torch.maximum(x.double().abs() * 2.0 ** -(mantissa_bits + 1), inverse * 2.0 ** (least_exponent - 1))
    # The product with the scale and the scale's inverse are rounded to float32 too.
    assert (error <= bound * (1 + 2.0**-20) + x.double().abs() * 2.0**-22).all()
