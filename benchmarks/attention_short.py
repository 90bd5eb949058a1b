"""HSTU attention of short users: ours beside the Triton kernels of Meta's generative-recommenders, launches included.

    python benchmarks/attention_short.py --meta CLONE [--dims 64 128 256] [--output FILE]

512 users of 40 to 700 tokens, log-uniform, mean about 230, with targets: here the launches count as much as the
products. Meta's kernels try all of their own configurations first, each in a process of its own that fills Triton's
cache, since after an illegal address a process can't use the GPU any more: those that fail are left out and listed.
Ours take those of our table.
The rest is as in attention.py, whose cases and timing these are.

--meta: a clone of facebookresearch/generative-recommenders.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import importlib
import math
import multiprocessing
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attention import check_agreement, measure
from attention_cases import DIRECTIONS, Case, Contender, Inputs, differentiated, draw, draw_lengths, ours
from reporting import RESULTS, header, write

RESULT = RESULTS / "attention_short.json"
KERNELS = ("_hstu_attn_fwd", "_hstu_attn_bwd")
NUM_USERS, SHORTEST, LONGEST, NUM_TARGETS = 512, 40, 700, 20


def make_case(dim: int, num_heads: int) -> Case:
    """Users without contexts, which Meta's kernels have for all users alike and under another mask."""
    lengths = draw_lengths(NUM_USERS, SHORTEST, LONGEST)
    return Case("jagged short", lengths, dim, num_heads, num_targets=NUM_TARGETS)


def load(clone: Path) -> ModuleType:
    """Meta's module of Triton attention."""
    import triton.language as tl

    # Named where its kernels would use another form of TMA, which is off; Triton looks up the name all the same.
    if not hasattr(tl, "_experimental_descriptor_store"):
        tl._experimental_descriptor_store = None
    sys.path.insert(0, str(clone))
    return importlib.import_module("generative_recommenders.ops.triton.triton_hstu_attention")


def meta(module: ModuleType, inputs: Inputs) -> Contender:
    """Meta's autograd function, on the same slices; it divides by the longest length."""
    q, k, v = (x.detach().requires_grad_() for x in inputs.qkv)
    longest = max(inputs.case.lengths)

    def forward() -> Tensor:
        output: Tensor = module.triton_hstu_mha(
            N=longest,
            alpha=1 / math.sqrt(inputs.case.dim),
            q=q,
            k=k,
            v=v,
            seq_offsets=inputs.offsets,
            num_targets=inputs.num_targets,
            sort_by_length=True,
        )
        return output

    return differentiated(forward, (q, k, v), inputs.grad)


def try_configuration(clone: Path, case: Case, kernel: str, index: int) -> str | None:
    """Run one configuration of one of Meta's kernels; what went wrong, or None. In a process of its own."""
    from triton.runtime.errors import TritonError

    module = load(clone)
    for name in KERNELS:
        configs = getattr(module, name).configs
        getattr(module, name).configs = [configs[index]] if name == kernel else configs[:1]
    try:
        contender = meta(module, draw(case, torch.bfloat16))
        contender["forward" if kernel == KERNELS[0] else "both"]()
        torch.cuda.synchronize()
    except (RuntimeError, TritonError) as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return None


def try_all(module: ModuleType, clone: Path, case: Case, processes: int) -> list[str]:
    """Leave Meta's kernels the configurations that work; the others, with what went wrong."""
    tasks = [(name, index) for name in KERNELS for index in range(len(getattr(module, name).configs))]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context, max_tasks_per_child=1) as pool:
        attempt = functools.partial(try_configuration, clone, case)
        outcomes = list(pool.map(attempt, *zip(*tasks, strict=True)))
    failed = []
    for name in KERNELS:
        kernel = getattr(module, name)
        outcome_of = {index: outcome for (of, index), outcome in zip(tasks, outcomes, strict=True) if of == name}
        failed += [f"{name}, {kernel.configs[i]}: {what}" for i, what in outcome_of.items() if what is not None]
        kernel.configs = [kernel.configs[i] for i, what in outcome_of.items() if what is None]
    return failed


def main() -> int:
    """Compile, tune, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meta", type=Path, required=True, help="a clone of generative-recommenders")
    parser.add_argument("--dims", type=int, nargs="+", default=(64, 128, 256))
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--round-ms", type=float, default=30.0, help="how long a contender runs in each round")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    report: dict[str, Any] = {**header("HSTU attention of short users", "triton"), "peer": "Meta's Triton kernels"}
    report |= {"rounds": args.rounds, "results": []}
    for dim in args.dims:
        case = make_case(dim, args.num_heads)
        start = time.perf_counter()
        module = importlib.reload(load(args.meta))  # with all of its configurations, and no choice among them yet
        failed = try_all(module, args.meta, case, args.processes)
        inputs = draw(case, torch.bfloat16)
        contenders = {"ours": ours(inputs), "meta": meta(module, inputs)}
        entry: dict[str, Any] = {"case": case.name, "dim": dim, "num_heads": args.num_heads}
        entry |= {"num_users": len(case.lengths), "num_tokens": sum(case.lengths)}
        entry["difference"] = check_agreement(contenders["ours"], contenders["meta"])
        entry["peer_configurations"] = [str(getattr(module, name).best_config) for name in KERNELS]
        entry["peer_configurations_left_out"] = failed
        entry |= measure(contenders, case, rounds=args.rounds, round_ms=args.round_ms)
        report["results"].append(entry)
        ratios = ", ".join(f"{name} {entry[name]['ratio to meta']:.2f}x" for name in DIRECTIONS)
        seconds = time.perf_counter() - start
        print(
            f"d = {dim}: {ratios} as fast as Meta's ({len(failed)} configurations left out, {seconds:.0f} s)",
            flush=True,
        )
        write(report, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
