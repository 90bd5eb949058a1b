"""The two formats, against values written out from their definition and a rounding in exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genrec.hstu.precision.formats import E4M3, E5M2, FP8Format, saturating_cast

# Mantissa bits and the exponent of the least normal value.
LAYOUT = {E4M3.name: (3, -6), E5M2.name: (2, -14)}


def rounded(value: float, fmt: FP8Format) -> float:
    """The nearest value of ``fmt``, ties to even, at most max in size; in exact arithmetic."""
    if math.isnan(value) or math.isinf(value):
        return math.copysign(fmt.max, value) if math.isinf(value) else value
    if value == 0.0:
        return value
    mantissa_bits, least_exponent = LAYOUT[fmt.name]
    exponent = max(math.frexp(abs(value))[1] - 1, least_exponent)
    quantum = Fraction(2) ** (exponent - mantissa_bits)
    magnitude = round(abs(Fraction(value)) / quantum) * quantum
    return math.copysign(min(float(magnitude), fmt.max), value)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_max_is_the_largest_finite_value_of_the_dtype(fmt) -> None:
    assert fmt.max == torch.finfo(fmt.dtype).max
    codes = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    assert codes[codes.isfinite()].max() == fmt.max


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_every_value_of_the_format_is_kept(fmt) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(fmt.dtype)
    finite = values[values.float().isfinite()]
    assert torch.equal(saturating_cast(finite.float(), fmt).view(torch.uint8), finite.view(torch.uint8))


@pytest.mark.parametrize(
    ("fmt", "value", "expected"),
    [
        # torch's own cast makes NaN of 465: up to 464 e4m3 rounds down to 448, above it has nothing to round to.
        (E4M3, 447.0, 448.0),
        (E4M3, 464.0, 448.0),
        (E4M3, 465.0, 448.0),
        (E4M3, -1e38, -448.0),
        (E4M3, math.inf, 448.0),
        (E4M3, -math.inf, -448.0),
        (E4M3, 432.0, 448.0),  # between 416 (odd mantissa) and 448 (even)
        (E4M3, 2.0**-10, 0.0),  # half the least value, ties to even
        (E4M3, 1.0001 * 2.0**-10, 2.0**-9),
        (E5M2, 61439.0, 57344.0),
        (E5M2, 61440.0, 57344.0),
        (E5M2, 1e38, 57344.0),
        (E5M2, math.inf, 57344.0),
        (E5M2, -math.inf, -57344.0),
        (E5M2, 53248.0, 49152.0),  # between 49152 (even mantissa) and 57344 (odd)
        (E5M2, 2.0**-17, 0.0),
        (E5M2, 1.0001 * 2.0**-17, 2.0**-16),
    ],
)
def test_boundaries(fmt, value, expected) -> None:
    assert saturating_cast(torch.tensor([value]), fmt).float().item() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_nan_stays_nan_and_disturbs_nothing_else(fmt, dtype) -> None:
    cast = saturating_cast(torch.tensor([1.0, math.nan, math.inf, -3.0], dtype=dtype), fmt)
    assert cast.dtype == fmt.dtype
    assert cast.float().isnan().tolist() == [False, True, False, False]
    assert cast.float()[[0, 2, 3]].tolist() == [1.0, fmt.max, -3.0]


@settings(max_examples=300, deadline=None)
@given(value=st.floats(width=32), fmt=st.sampled_from([E4M3, E5M2]))
def test_rounds_to_nearest_even(value, fmt) -> None:
    cast = saturating_cast(torch.tensor([value]), fmt).float().item()
    assert cast == rounded(value, fmt) or (math.isnan(cast) and math.isnan(value))


@settings(max_examples=200, deadline=None)
@given(
    exponent=st.floats(min_value=0.0, max_value=1.0),
    sign=st.sampled_from([-1.0, 1.0]),
    fmt=st.sampled_from([(E4M3, -6, 2.0**-4), (E5M2, -14, 2.0**-3)]),
)
def test_relative_error_of_normal_values(exponent, sign, fmt) -> None:
    fmt, least_exponent, bound = fmt
    least, largest = least_exponent, math.log2(fmt.max)
    value = torch.tensor([sign * 2.0 ** (least + exponent * (largest - least))]).clamp(-fmt.max, fmt.max)
    error = (saturating_cast(value, fmt).double() - value.double()).abs() / value.double().abs()
    assert error.item() <= bound
