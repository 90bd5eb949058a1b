"""What the Hopper kernels refuse, which the Triton kernels then serve. test_attention_gpu.py has what they compute."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from genrec.hstu.attention import hopper_backward, hopper_forward, hopper_support
from genrec.hstu.attention.mask import MaskRules
from genrec.hstu.attention.request import Request

pytest.importorskip("triton")


@pytest.fixture
def on_hopper(monkeypatch):
    """As if tensors lay on such a GPU."""
    monkeypatch.setattr(hopper_support, "is_hopper", lambda _: True)
    monkeypatch.setattr("genrec.hstu.attention.request.SHORT", 0)  # users of few tokens count as long


def draw(width, *, value_width=None, dtype=torch.bfloat16):
    fused = torch.zeros(3, 2 * (2 * width + (value_width or width)), dtype=dtype)
    q, k, v = fused.split([2 * width, 2 * width, 2 * (value_width or width)], dim=1)
    return [x.unflatten(1, (2, -1)) for x in (q, k, v)]


REQUEST = Request(torch.tensor([0, 3]), None, None, 3, 1.0, MaskRules(), None)
REFUSED = {
    "float32": (draw(128, dtype=torch.float32), {}, "bfloat16 or float16"),
    "another width": (draw(48), {}, "share a width of"),
    "two widths": (draw(128, value_width=64), {}, "share a width of"),
    "heads apart": ([x.transpose(0, 1).contiguous().transpose(0, 1) for x in draw(128)], {}, "TMA"),
    "rows of odd bytes": ([torch.zeros(3, 257, dtype=torch.bfloat16)[:, :256].unflatten(1, (2, 128))] * 3, {}, "TMA"),
    "a bias": (draw(128), {"bias": object()}, "bias"),
}


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("case", REFUSED)
def test_what_it_refuses(case):
    (q, k, v), changes, reason = REFUSED[case]
    request = dataclasses.replace(REQUEST, **changes)
    assert reason in hopper_forward.why_not(q, k, v, request)
    assert reason in hopper_backward.why_not(q, k, v, v, request)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_it_serves(dtype):
    q, k, v = draw(128, dtype=dtype)
    assert hopper_forward.why_not(q, k, v, REQUEST) is None
    assert hopper_backward.why_not(q, k, v, v, REQUEST) is None


@pytest.mark.usefixtures("on_hopper")
def test_short_users_of_wide_heads_go_forward_in_triton(monkeypatch):
    monkeypatch.setattr("genrec.hstu.attention.request.SHORT", 512)
    for width, reason in ((64, None), (128, "share a width of 64, 256, not 128"), (256, None)):
        q, k, v = draw(width)
        found = hopper_forward.why_not(q, k, v, REQUEST)
        assert (found is None) if reason is None else (reason in found)
        assert hopper_backward.why_not(q, k, v, v, REQUEST) is None


@pytest.mark.usefixtures("on_hopper")
def test_what_it_takes_in_fp8():
    grad = torch.zeros(3, 2, 128, dtype=torch.bfloat16)
    assert hopper_backward.why_not_fp8(grad, 128, REQUEST) is None
    assert hopper_backward.why_not_fp8(grad[::2, :, ::2], 64, REQUEST) is None  # it is copied as it is quantized
    assert "share a width of" in hopper_backward.why_not_fp8(grad, 64, REQUEST)
    assert "bfloat16 or float16" in hopper_backward.why_not_fp8(grad.float(), 128, REQUEST)
    assert "bias" in hopper_backward.why_not_fp8(grad, 128, dataclasses.replace(REQUEST, bias=object()))


def test_other_devices():
    q, k, v = draw(128)
    assert "compute capability 9.0" in hopper_forward.why_not(q, k, v, REQUEST)
    assert "compute capability 9.0" in hopper_backward.why_not(q, k, v, v, REQUEST)
