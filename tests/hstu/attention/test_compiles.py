"""The kernels compile for a Hopper GPU, without one: Triton's interpreter takes more than its compiler does."""

from __future__ import annotations

import json

import pytest

from genrec.hstu.attention.quantization import SCALES

# Attention forward and backward.
COMPILE = r"""
import json, re, sys
import torch
from genrec.hstu.attention import compiled, hopper_support, operators, operators_fp8
from genrec.hstu.attention.mask import MaskRules
from genrec.hstu.attention.request import Request

mode, dim, hopper, num_rows = json.loads(sys.argv[1])
hopper_support.is_hopper = lambda x: hopper
names, compile_one = [], compiled.Kernel._compile

def noted(self, grid, args, constants):
    names.append(self._jit.fn.__name__)
    found, values = compile_one(self, grid, args, constants)
    # A product runs beside other instructions until it is waited for: none may compute with its sum before that.
    for running in re.findall(r"wgmma[.]mma_async.*?wgmma[.]wait_group", found.asm["ptx"], re.DOTALL):
        sums = set(re.findall(r"%\w+", " ".join(re.findall(r"mma_async.*?{(.*?)}", running))))
        used = re.findall(r"^\s*(?!mov|wgmma)[a-z]\S*\s+[^,;]*%\w+, (.*);", running, re.MULTILINE)
        early = sums & set(re.findall(r"%\w+", " ".join(used)))
        assert sums and not early, f"{names[-1]} computes with a product that may still run"
    assert "wgmma" in found.asm["ptx"] or not names[-1].endswith(("forward_kernel", "grad_kernel")), names[-1]
    return found, values

compiled.Kernel._compile = noted
offsets = torch.tensor([0, 5, num_rows])
request = Request(offsets, None, offsets[1:], num_rows, 0.1, MaskRules(), None)
q, k, v = (torch.zeros(num_rows, 2, dim, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
if mode == "bf16":
    output = operators._Attention.apply(q, k, v, None, None, request)
else:
    output = operators_fp8._Attention.apply(q, k, v, request, mode, True)
output.sum().backward()
print(json.dumps(names))
"""


@pytest.fixture
def kernels(compiling_for_hopper):
    """``kernels("bf16", hopper=True, num_rows=64)``: the names of those that were compiled."""

    def run(mode, *, hopper, num_rows, dim=64):
        return json.loads(compiling_for_hopper(COMPILE, json.dumps([mode, dim, hopper, num_rows])).splitlines()[-1])

    return run


@pytest.mark.parametrize("num_rows", [64, 4096], ids=["short users", "long users"])
@pytest.mark.parametrize("hopper", [True, False], ids=["Gluon", "Triton"])
def test_in_bfloat16(kernels, hopper, num_rows):
    found = kernels("bf16", hopper=hopper, num_rows=num_rows)
    assert found == ["schedule_kernel", "forward_kernel", "key_grad_kernel", "query_grad_kernel"]


@pytest.mark.parametrize(
    ("mode", "hopper", "dim"),
    [
        *((mode, True, 64) for mode in SCALES if mode not in ("128x1", "per-tensor", "per-batch")),
        ("per-head", True, 256),
        *((mode, False, 64) for mode in ("per-head", "per-block", "1xdim")),
    ],
)
def test_in_fp8(kernels, mode, hopper, dim):
    found = kernels(mode, hopper=hopper, num_rows=4096, dim=dim)
    key_grad = "split_key_grad_kernel" if dim == 256 else "key_grad_kernel"
    assert {"quantize_kernel", "bound_scale_kernel", "forward_kernel", key_grad, "query_grad_kernel"} < set(found)
    assert ("amax_kernel" in found) == (SCALES[mode] == "user")  # of "fp8" the output's gradient has a scale
