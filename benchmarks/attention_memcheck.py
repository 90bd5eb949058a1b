"""One jagged attention, forward and backward, in bfloat16, float16 and each FP8 mode, for NVIDIA's compute-sanitizer.

    python benchmarks/attention_memcheck.py [--dims 32 64 128 256]
    compute-sanitizer --tool memcheck --error-exitcode 9 python benchmarks/attention_memcheck.py [--dims 32 64 128 256]

The first call fills Triton's cache, so that the second, many times slower, compiles nothing. Users of 0 to 333 tokens
have contexts, targets in groups and a window; every tensor is an allocation of its own, so that a byte beyond one is
found. Results are compared with those of the plain backend on the CPU (FP8: emulated); 1 where they differ.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # read as torch takes its first memory

import torch
from torch import Tensor

from genrec.configs.schema import ATTENTION_QUANTIZATIONS
from genrec.hstu.attention import hstu_attention

LENGTHS = (333, 0, 1, 130, 65, 77)
PADDING, NUM_HEADS, NUM_CONTEXTS, NUM_TARGETS = 5, 2, 3, 20
# Of the norm: rounding of half precision; FP8 weights that fall on the other side of a border of e4m3.
TOLERANCE, FP8_TOLERANCE = 2**-7, 2**-6


def make_inputs(dim: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """u | v | q | k and a gradient with NaN beyond the last user, and the other arguments."""
    rows, generator = sum(LENGTHS) + PADDING, torch.Generator(device).manual_seed(0)
    fused = torch.randn(rows, 4 * NUM_HEADS * dim, device=device, generator=generator).to(dtype)
    grad = torch.randn(rows, NUM_HEADS, dim, device=device, generator=generator).to(dtype)
    fused[-PADDING:], grad[-PADDING:] = torch.nan, torch.nan
    lengths = torch.tensor(LENGTHS, device=device)
    contexts = lengths.clamp(max=NUM_CONTEXTS)
    return (
        fused,
        grad,
        {
            "offsets": torch.tensor([0, *itertools.accumulate(LENGTHS)], device=device),
            "max_seqlen": max(LENGTHS),
            "scaling_seqlen": 256,
            "num_contexts": contexts,
            "num_targets": (lengths - contexts).clamp(max=NUM_TARGETS),
            "target_group_size": 3,
            "max_attn_len": 150,
        },
    )


def run(attention: Callable[..., Tensor], fused: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Output and gradient of the projection."""
    fused = fused.detach().requires_grad_()
    _, v, q, k = (part.unflatten(1, (NUM_HEADS, -1)) for part in fused.chunk(4, dim=1))
    output = attention(q, k, v)
    return output.detach(), torch.autograd.grad(output, fused, grad)[0]


def difference(dim: int, dtype: torch.dtype, mode: str, *, device: str, backend: str) -> float:
    """The largest of output and gradient, of the norm; infinite where padding is not zero."""
    fused, grad, kwargs = make_inputs(dim, dtype, device)
    attend = functools.partial(hstu_attention, quantization=mode)
    mine = [x.cpu() for x in run(functools.partial(attend, backend=backend, **kwargs), fused, grad)]
    # The plain backend computes in float32, and rounds where FP8 says so.
    there = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in kwargs.items()}
    right = run(functools.partial(attend, backend="pytorch", **there), fused.cpu(), grad.cpu())
    if any((x[-PADDING:] != 0).any() for x in mine):
        return float("inf")
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(mine, right, strict=True))


def main() -> int:
    """Run all, print, 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=(32, 64, 128, 256))
    parser.add_argument("--modes", nargs="+", choices=ATTENTION_QUANTIZATIONS, default=ATTENTION_QUANTIZATIONS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="triton")
    args = parser.parse_args()
    cases = [(dim, torch.bfloat16, mode) for dim in args.dims for mode in args.modes]
    cases += [(dim, torch.float16, "bf16") for dim in args.dims]
    good = True
    for dim, dtype, mode in cases:
        found = difference(dim, dtype, mode, device=args.device, backend=args.backend)
        is_right = found <= (TOLERANCE if mode == "bf16" else FP8_TOLERANCE)
        good &= is_right
        quantization = "" if mode == "bf16" else f", {mode}"
        print(f"d = {dim}, {dtype}{quantization}: {'' if is_right else 'WRONG, '}differs by {found:.2e}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
