"""Triton and Gluon, where they are installed: the one file of attention that imports them, and the kernels' decorators.

Without them all names are None, decorators return functions as they are, and asking for kernels says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from genrec.hstu.attention.compiled import Kernel

try:
    import triton as triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor as TensorDescriptor
except ModuleNotFoundError:
    triton = tl = TensorDescriptor = None

try:
    from triton.experimental import gluon as gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_init,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
except ImportError:  # No Triton, or one without Gluon: the Triton kernels serve.
    gluon = gl = GluonDescriptor = fence_async_shared = mbarrier = tma = None
    warpgroup_mma = warpgroup_mma_init = warpgroup_mma_wait = None

__all__ = [
    "triton", "tl", "TensorDescriptor",
    "gluon", "gl", "GluonDescriptor", "fence_async_shared", "mbarrier", "tma",
    "warpgroup_mma", "warpgroup_mma_init", "warpgroup_mma_wait",
    "FOUR_TO_FP8", "INTERPRETED", "PER_BATCH", "constexpr", "jit", "gluon_jit", "kernel", "gluon_kernel",
]  # fmt: skip

# Triton's own switch for running kernels on the CPU, read as the kernels are defined.
INTERPRETED = triton is not None and bool(triton.knobs.runtime.interpret)
# Values that change from batch to batch: no new compilation for one that divides by 16, or is 1.
PER_BATCH = ["num_users", "num_rows", "window", "group_size", "num_positions", "num_buckets"]


def constexpr(value: Any) -> Any:
    """A constant of a module that kernels may read."""
    return value if triton is None else tl.constexpr(value)


# PTX that puts four float32 as e4m3 into a word, the first lowest, for ``inline_asm_elementwise`` with "=r,f,f,f,f".
FOUR_TO_FP8 = constexpr(
    """{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
    }"""
)


def jit(function: Any, **options: Any) -> Any:
    """``triton.jit``; the function as it is without Triton."""
    return function if triton is None else triton.jit(function, **options)


def gluon_jit(function: Any, **options: Any) -> Any:
    """``gluon.jit``; the function as it is without Gluon, and in Triton's interpreter, which has no Gluon."""
    return function if gluon is None or INTERPRETED else gluon.jit(function, **options)


def kernel(*, per_batch: Sequence[str] = PER_BATCH) -> Callable[[Any], Any]:
    """Decorates a kernel in Triton that the host launches. per_batch: the arguments that change from batch to batch."""
    return lambda function: _launched(jit(function, do_not_specialize=per_batch))


def gluon_kernel(function: Any) -> Any:
    """Decorates a kernel in Gluon that the host launches."""
    return _launched(gluon_jit(function, do_not_specialize=PER_BATCH))


def _launched(compiled: Any) -> Any:
    if triton is None or not isinstance(compiled, triton.JITFunction):
        return compiled
    return Kernel(compiled, lambda: triton.runtime.driver.active.get_current_device())
