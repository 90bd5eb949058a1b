"""How long the attention kernels take to compile: the first calls of every configuration, Triton's cache being empty.

Each configuration is a process of its own, several at a time; what they compile fills the cache for the caller.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import time
from collections.abc import Sequence
from typing import Any

import torch

from attention_cases import Case, draw, ours


def compile_times(
    cases: Sequence[Case], quantizations: Sequence[str], dtype: torch.dtype, *, processes: int
) -> list[dict[str, Any]]:
    """Seconds of the first forward and backward call of each width, mask and quantization."""
    # Contexts and targets are compiled in; lengths are not, and here few and incomplete tiles do.
    kinds = {(case.dim, case.num_targets > 0): dataclasses.replace(case, lengths=(300, 200)) for case in cases}
    jobs = [(case, quantization, dtype) for case in kinds.values() for quantization in quantizations]
    context = multiprocessing.get_context("spawn")
    # One job a process, which starts without any kernel loaded.
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context, max_tasks_per_child=1) as pool:
        return list(pool.map(_first_calls, *zip(*jobs, strict=True)))


def _first_calls(case: Case, quantization: str, dtype: torch.dtype) -> dict[str, Any]:
    inputs = draw(case, dtype)
    torch.cuda.synchronize()
    start = time.perf_counter()
    contender = ours(inputs, quantization=quantization)
    torch.cuda.synchronize()
    between = time.perf_counter()
    contender["backward"]()
    torch.cuda.synchronize()
    return {
        "dim": case.dim,
        "mask": "causal, contexts, targets" if case.num_targets else "causal",
        "quantization": quantization,
        "forward_s": between - start,
        "backward_s": time.perf_counter() - between,
    }
