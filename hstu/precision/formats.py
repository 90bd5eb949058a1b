"""The two 8-bit floating-point formats and the cast to them.

======  ========  ========  =======  ===============  ========================
format  exponent  mantissa  largest  least subnormal  beyond the largest value
======  ========  ========  =======  ===============  ========================
e4m3    4 bits    3 bits    448      2^-9             NaN
e5m2    5 bits    2 bits    57344    2^-16            infinities and NaN
======  ========  ========  =======  ===============  ========================

Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), table 1; e4m3 is torch's ``float8_e4m3fn``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FP8Format:
    """An 8-bit format; ``max`` is its largest finite value."""

    name: str
    dtype: torch.dtype
    max: float


E4M3 = FP8Format("e4m3", torch.float8_e4m3fn, 448.0)
E5M2 = FP8Format("e5m2", torch.float8_e5m2, 57344.0)


def saturating_cast(x: Tensor, fmt: FP8Format) -> Tensor:
    """Round ``x`` to the nearest value of ``fmt``, ties to even; what lies beyond ±max becomes ±max, NaN stays NaN.

    torch's own cast doesn't saturate: it makes NaN of an e4m3 value above 464 and infinity of an e5m2 value from 61440.
    What CUDA calls satfinite (PTX ISA, ``cvt``), and Transformer Engine uses for every cast, clamps infinities as well.
    """
    return x.float().clamp(-fmt.max, fmt.max).to(fmt.dtype)
