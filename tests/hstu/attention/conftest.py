"""Triton 3.6's interpreter made to run, and quicker: a CPU has nothing else for the kernels."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch

from genrec.hstu.attention import triton_jit

# A driver that compiles for sm_90 and launches nothing.
HOPPER_DRIVER = """
import triton
from triton.backends.compiler import GPUTarget

class Driver:
    launcher_cls = lambda self, source, metadata: lambda *args: None

    class utils:
        load_binary = staticmethod(lambda *_: (1, 1, 0, 0, 1024))
        get_device_properties = staticmethod(lambda _: {"max_shared_mem": 232448})

    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 7
    get_device_capability = lambda self, device=0: (9, 0)

triton.runtime.driver.set_active(Driver())
"""


@pytest.fixture
def compiling_for_hopper(tmp_path):
    """``compiling_for_hopper(code, argument)`` runs Python code where kernels compile for Hopper; what it prints."""
    pytest.importorskip("triton")

    def run(code, *arguments):
        command = [sys.executable, "-W", "ignore", "-c", HOPPER_DRIVER + code, *arguments]
        settings = {"PYTHONPATH": ".pkgroot", "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
        done = subprocess.run(
            command, env={"PATH": "/usr/bin", **settings}, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return run


@pytest.fixture(scope="module")
def interpreter():
    """For modules that run kernels; does nothing where they are compiled."""
    with pytest.MonkeyPatch.context() as patch:
        if triton_jit.INTERPRETED:
            _repair(patch)
        yield


def _repair(patch):
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    patch_tensor, call = interpreter._patch_lang_tensor, interpreter.InterpretedFunction.__call__

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        # int() of an array of one element is an error since NumPy 2.4.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def call_patched_once(self, *args, **kwargs):
        # A kernel's launch has already replaced Triton's language; again for every helper takes most of the time.
        if self.fn.__module__.startswith("genrec.hstu.attention."):
            return self.rewrite()(*args, **kwargs)
        return call(self, *args, **kwargs)

    def add_to_tile(self, kind, descriptor, value, indices):
        pointers, mask = descriptor.materialize_pointers(indices)
        self.create_atomic_rmw(
            interpreter._ir.ATOMIC_OP.FADD, pointers, value, mask, interpreter._ir.MEM_SEMANTIC.RELAXED, None
        )

    def convert(self, source, to, rounding):
        """By PyTorch: Triton's own conversion to FP8 truncates."""
        return interpreter.TensorHandle(_convert(source.data, source.dtype.scalar, to.scalar), to.scalar)

    def dot(self, a, b, d, *_):
        """With FP8 operands in float32, not in float16."""
        a, b = (_convert(x.data, x.dtype.scalar, d.dtype.scalar) if _is_fp8(x.dtype) else x.data for x in (a, b))
        return interpreter.TensorHandle(np.matmul(a, b, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    patch.setattr(builder, "create_descriptor_reduce", add_to_tile, raising=False)
    patch.setattr(builder, "create_fp_to_fp", convert)
    patch.setattr(builder, "create_dot", dot)
    patch.setattr(interpreter, "_patch_lang_tensor", patch_tensor_and_index)
    patch.setattr(interpreter.InterpretedFunction, "__call__", call_patched_once)
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    patch.setattr(interpreter.interpreter_builder, "options", options)


def _is_fp8(dtype):
    return dtype.scalar.is_fp8()


def _convert(data, source, to):
    """Between float types of Triton's, of which NumPy holds some as integers."""
    x = torch.from_numpy(np.array(data, order="C")).view(_TORCH[source.name])
    # What GPUs do (cvt.satfinite): nothing becomes NaN but NaN.
    x = x.float().clamp(-448, 448) if to.is_fp8() else x
    held = x.to(_TORCH[to.name]).view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[to.primitive_bitwidth // 8])
    return held.numpy().view(_NUMPY[to.name])


_TORCH = {"fp8e4nv": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_NUMPY = {"fp8e4nv": np.uint8, "bf16": np.uint16, "fp16": np.float16, "fp32": np.float32}
