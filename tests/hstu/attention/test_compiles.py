"""The kernels compile for a Hopper GPU, without one: Triton's interpreter takes more than its compiler does."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from genrec.hstu.attention.quantization import SCALES

# Runs attention forward and backward with a driver that compiles for sm_90 and launches nothing.
COMPILE = """
import json, sys
import torch, triton
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
from genrec.hstu.attention import compiled, hopper_backward, hopper_forward, operators, operators_fp8
from genrec.hstu.attention.mask import MaskRules
from genrec.hstu.attention.request import Request

mode, dim, hopper, num_rows = json.loads(sys.argv[1])
hopper_forward.is_hopper = hopper_backward.is_hopper = lambda x: hopper
names, compile_one = [], compiled.Kernel._compile

def noted(self, grid, args, constants):
    names.append(self._jit.fn.__name__)
    return compile_one(self, grid, args, constants)

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


def kernels(cache, mode, *, hopper, num_rows, dim=64):
    pytest.importorskip("triton")
    command = [sys.executable, "-W", "ignore", "-c", COMPILE, json.dumps([mode, dim, hopper, num_rows])]
    environment = {
        "PATH": "/usr/bin",
        "PYTHONPATH": ".pkgroot",
        "TRITON_CACHE_DIR": str(cache),
        "TRITON_INTERPRET": "0",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("num_rows", [64, 4096], ids=["short users", "long users"])
@pytest.mark.parametrize("hopper", [True, False], ids=["Gluon", "Triton"])
def test_in_bfloat16(tmp_path, hopper, num_rows):
    found = kernels(tmp_path, "bf16", hopper=hopper, num_rows=num_rows)
    assert found == ["schedule_kernel", "forward_kernel", "key_grad_kernel", "query_grad_kernel"]


@pytest.mark.parametrize(
    ("mode", "hopper", "dim"),
    [
        *((mode, True, 64) for mode in SCALES if mode not in ("128x1", "per-tensor", "per-batch")),
        ("per-head", True, 256),
        *((mode, False, 64) for mode in ("per-head", "per-block", "1xdim")),
    ],
)
def test_in_fp8(tmp_path, mode, hopper, dim):
    found = kernels(tmp_path, mode, hopper=hopper, num_rows=4096, dim=dim)
    key_grad = "split_key_grad_kernel" if dim == 256 else "key_grad_kernel"
    assert {"quantize_kernel", "bound_scale_kernel", "forward_kernel", key_grad, "query_grad_kernel"} < set(found)
    assert ("amax_kernel" in found) == (SCALES[mode] == "user")  # of "fp8" the output's gradient has a scale
