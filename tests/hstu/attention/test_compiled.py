"""Launches by what was compiled: which arguments share a compilation, and that Triton would pass the same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from genrec.hstu.attention import hstu_attention
from genrec.hstu.attention.compiled import Descriptor, Kernel

NAMES = ("x", "num_rows", "stride", "factor", "DIM", "MASKED")


class FakeJit:
    """Records what is compiled; what is "compiled" records what is launched."""

    arg_names = NAMES
    params = tuple(SimpleNamespace(do_not_specialize=name == "num_rows") for name in NAMES)

    def __init__(self):
        self.compiled, self.launched = [], []

    def __getitem__(self, grid):
        def launch(*args, **constants):
            self.compiled.append((grid, args, constants))
            return {(size, 1, 1): lambda *args, size=size: self.launched.append((size, args)) for size in range(9)}

        return launch


@pytest.fixture
def jit():
    return FakeJit()


def call(kernel, x, *, num_rows=100, stride=64, factor=0.5, grid=3, masked=True, **options):
    kernel[(grid,)](x, num_rows, stride, factor, MASKED=masked, DIM=32, **options)


def test_what_changes_from_batch_to_batch_is_launched_by_what_was_compiled(jit):
    kernel = Kernel(jit, lambda: 0)
    first, second = torch.zeros(8), torch.zeros(16)
    call(kernel, first)
    call(kernel, second, num_rows=1, factor=0.25, grid=5)
    call(kernel, first, num_rows=16)
    assert len(jit.compiled) == 1
    size, args = jit.launched[0]
    assert size == 5
    assert args[0] is second
    assert args[1:] == (1, 64, 0.25, 32, True)  # constants last, in the order of the parameters
    assert [size for size, _ in jit.launched] == [5, 3]


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(8, dtype=torch.bfloat16)},
        {"x": torch.zeros(9)[1:]},
        {"x": None},
        {"num_rows": 2**31},
        {"stride": 65},
        {"stride": 1},
        {"masked": False},
        {"num_warps": 8},
    ],
    ids=str,
)
def test_what_triton_compiles_anew_is_compiled_anew(jit, change):
    kernel = Kernel(jit, lambda: 0)
    call(kernel, torch.zeros(8), **({"num_warps": 4} if "num_warps" in change else {}))
    call(kernel, **{"x": torch.zeros(8), **change})
    assert len(jit.compiled) == 2
    assert not jit.launched


def test_each_device_has_its_own(jit):
    devices = iter((0, 1, 0))
    kernel = Kernel(jit, lambda: next(devices))
    for _ in range(3):
        call(kernel, torch.zeros(8))
    assert (len(jit.compiled), len(jit.launched)) == (2, 1)


def test_descriptors_are_told_apart_by_their_tiles(jit):
    kernel = Kernel(jit, lambda: 0)
    for rows in (64, 64, 128):
        x = torch.zeros(256, 32)
        call(kernel, Descriptor(x, [256, 32], [32, 1], [rows, 32], lambda *fields: ("checked", *fields[1:])))
    checked = [args[0] for _, args, _ in jit.compiled]
    assert checked == [("checked", [256, 32], [32, 1], [rows, 32]) for rows in (64, 128)]
    assert jit.launched[0][1][0].base.shape == (256, 32)


# A launcher in the place of the GPU's takes the arguments that Triton passes, and those that Kernel does.
LAUNCHES = """
import torch

launches = []

class Launcher:
    def __init__(self, source, metadata):
        pass

    def __call__(self, *args):
        launches.append(args[:4] + args[9:])

Driver.launcher_cls = Launcher
from genrec.hstu.attention.triton_schedule import schedule_kernel

offsets, schedule = torch.tensor([0, 3, 5]), torch.zeros(5, 3, dtype=torch.int32)
for num_rows in (8, 8, 16):
    schedule_kernel[(1,)](offsets, schedule, 2, num_rows, BLOCK=64, OTHERS=128)
by_triton, by_kernel, of_other_batch = launches
assert by_kernel == by_triton, launches
assert of_other_batch == (*by_triton[:-3], 16, 64, 128), launches
assert len(schedule_kernel._known) == 1
print("same launches")
"""


def test_triton_would_launch_with_the_same_arguments(compiling_for_hopper):
    assert compiling_for_hopper(LAUNCHES) == "same launches\n"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tensors_at_odd_addresses_and_batches_of_other_sizes(dtype):
    """In one process, one after another: each as if it were the first."""
    size = 2 * 64

    def attend(offset, num_tokens, backend):
        generator = torch.Generator("cuda").manual_seed(num_tokens)
        memory = torch.randn(3 * num_tokens * size + 8, device="cuda", generator=generator).to(dtype)
        q, k, v = memory[offset : offset + 3 * num_tokens * size].view(3, num_tokens, 2, 64)
        offsets = torch.tensor([0, num_tokens // 3, num_tokens], device="cuda")
        return hstu_attention(q, k, v, offsets=offsets, max_seqlen=num_tokens, scaling_seqlen=100, backend=backend)

    for offset, num_tokens in ((0, 64), (1, 64), (8, 1), (3, 200), (0, 333), (1, 16), (0, 64)):
        got, wanted = (attend(offset, num_tokens, backend) for backend in ("triton", "pytorch"))
        torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max()))
