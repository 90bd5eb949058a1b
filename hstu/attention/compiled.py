"""Launches of compiled kernels that cost the host little.

Triton takes some 50 us to bind the thirty arguments of a kernel and to look at each of them, which is more than short
users need on the GPU. :class:`Kernel` finds what Triton compiled before by the kinds of the arguments, a tuple.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor


class Descriptor:
    """A TMA descriptor, as a launch reads it; Triton's own, which checks itself, is made where a kernel compiles.

    shape and strides, in numbers, are those of a matrix in the memory of ``base``; a tile is ``block_shape``.
    """

    __slots__ = ("base", "block_shape", "kind", "padding", "shape", "strides", "triton_type")

    def __init__(
        self,
        base: Tensor,
        shape: list[int],
        strides: list[int],
        block_shape: list[int],
        triton_type: Callable[..., Any],
    ) -> None:
        """triton_type: makes Triton's own of the others."""
        self.base = base
        self.shape = shape
        self.strides = strides
        self.block_shape = block_shape
        self.padding = "zero"
        self.triton_type = triton_type
        self.kind = (base.dtype, *block_shape)

    def for_triton(self) -> Any:
        """Triton's own, checked."""
        return self.triton_type(self.base, self.shape, self.strides, self.block_shape)


class Kernel:
    """A kernel of ``triton.jit`` or ``gluon.jit``.

    ``kernel[grid](*args, **constants)`` is as there, but that constants and options, and they alone, go by name. Like
    Triton, it tells arguments apart by: the dtype of a tensor and whether its address divides by 16; the value of a
    number or, where the kernel is not specialized in it, its width; what a descriptor's tiles are.
    """

    def __init__(self, jit: Any, current_device: Callable[[], int]) -> None:
        """current_device: where Triton launches."""
        self._jit = jit
        self._current_device = current_device
        self._varies = [parameter.do_not_specialize for parameter in jit.params]
        self._known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int], *args: Any, **constants: Any) -> None:
        kinds = [_kind(x, varies) for x, varies in zip(args, self._varies, strict=False)]
        key = (self._current_device(), *kinds, *constants.values())
        known = self._known.get(key)
        if known is None:
            self._known[key] = self._compile(grid, args, constants)
        else:
            compiled, values = known
            compiled[(*grid, 1, 1)](*args, *values)

    def _compile(
        self, grid: tuple[int], args: tuple[Any, ...], constants: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...]]:
        """Launch through Triton; what it compiled, and the constants in the order of the parameters."""
        compiled = self._jit[grid](*(x.for_triton() if isinstance(x, Descriptor) else x for x in args), **constants)
        return compiled, tuple(constants[name] for name in self._jit.arg_names[len(args) :])


def _kind(x: Any, varies: bool) -> Any:
    # By type first: to ask whether another type is a Tensor takes its metaclass.
    of = type(x)
    if of is int:
        return (int, -(2**31) <= x < 2**31, x < 2**63) if varies else x
    if of is Descriptor:
        return x.kind
    if of is float:
        return float
    return (x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, Tensor) else x
