"""Transformer Engine's linears against the emulation, which states what each recipe means, on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch

from genrec.configs.schema import MixedPrecisionArgs
from genrec.hstu.linear import Linear, make_linear
from genrec.hstu.precision.capability import linear_capabilities
from genrec.hstu.precision.region import fp8_region
from genrec.hstu.precision.state import load_precision_tensors, precision_tensors, snapshot

pytestmark = pytest.mark.gpu

RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
# An FP8 product is summed by the tensor cores with some 14 bits, in float32 beyond; this is of the sum of magnitudes.
ACCUMULATION = 2.0**-10


@pytest.fixture(params=RECIPES)
def recipe(request):
    reason = linear_capabilities()[request.param]
    if reason:
        pytest.skip(reason)
    return request.param


def make_pair(recipe, *, bias=True, in_features=128, out_features=256, scaling="hybrid", history=4):
    """A Transformer Engine linear and an emulated one of the same weights."""
    pair = []
    for backend in ("te", "emulated"):
        args = MixedPrecisionArgs(
            mixed_precision_dtype="fp8",
            linear_recipe=recipe,
            linear_scaling_precision=scaling,
            backend=backend,
            amax_history_len=history if recipe == "delayed" else 1024,
        )
        pair.append(make_linear(in_features, out_features, bias=bias, precision=args).cuda())
    if bias:
        torch.nn.init.normal_(pair[0].bias)
    pair[1].load_state_dict(pair[0].state_dict())
    return pair


def run(linear: Linear, x, dy):
    """Output and gradients of one pass."""
    linear.zero_grad()
    x = x.clone().requires_grad_()
    with fp8_region():
        y = linear(x)
    y.backward(dy)
    bias = None if linear.bias is None else linear.bias.grad.clone()
    return y.detach(), x.grad, linear.weight.grad.clone(), bias


def assert_within_accumulation(actual, expected, magnitude, dtype):
    """Equal up to the order of accumulation and one rounding to ``dtype``."""
    rounding = torch.finfo(dtype).eps
    bound = rounding * expected.abs() + ACCUMULATION * magnitude + 1e-30
    excess = ((actual.float() - expected.float()).abs() / bound).max().item()
    assert excess <= 1.0, f"{excess:.2f} times the bound"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 15, 16, 33, 128, 257])
@pytest.mark.parametrize("scaling", ["hybrid", "e4m3"])
def test_equals_the_emulation(recipe, scaling, rows, bias, dtype) -> None:
    torch.manual_seed(rows)
    theirs, ours = make_pair(recipe, bias=bias, scaling=scaling)
    for step in range(4):
        # Sizes over three decades, as rows and gradients have them, and new in each step.
        spread = 10 ** (3 * torch.rand(rows, 1, device="cuda") - 2)
        x = (torch.randn(rows, 128, device="cuda") * spread).to(dtype)
        dy = (torch.randn(rows, 256, device="cuda") * spread * 1e-4).to(dtype)
        actual, expected = run(theirs, x, dy), run(ours, x, dy)
        weight = ours.weight.detach()
        magnitudes = (
            x.float().abs() @ weight.abs().T,
            dy.float().abs() @ weight.abs(),
            dy.float().abs().T @ x.float().abs(),
        )
        # In the first pass of delayed scaling the scale is 1, and small gradients are all lost, in both.
        for a, e, magnitude in zip(actual[:3], expected[:3], magnitudes, strict=True):
            assert_within_accumulation(a, e, magnitude, dtype)
        if bias:
            torch.testing.assert_close(actual[3], expected[3], rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        for name, tensor in precision_tensors(theirs).items():
            assert torch.equal(tensor, precision_tensors(ours)[name]), (step, name)


def test_without_rows(recipe) -> None:
    theirs, _ = make_pair(recipe)
    nothing = [torch.empty(0, width, device="cuda", dtype=torch.bfloat16) for width in (128, 256)]
    y, dx, dw, db = run(theirs, *nothing)
    assert y.shape == (0, 256) and dx.shape == (0, 128)
    assert not dw.any() and not db.any()


def test_gradients_below_fp8s_range_survive(recipe) -> None:
    """Without a scale most become zero."""
    theirs, _ = make_pair(recipe)
    torch.manual_seed(0)
    x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16) * 1e-7
    for _ in range(3):
        _, dx, dw, _ = run(theirs, x, dy)
    exact = dy.float() @ theirs.weight.detach()
    assert ((dx.float() - exact).norm() / exact.norm()).item() < 0.1
    assert (dw != 0).float().mean().item() > 0.99


def test_weights_are_never_stale(recipe) -> None:
    torch.manual_seed(0)
    theirs, ours = make_pair(recipe)
    x = torch.randn(32, 128, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(32, 256, device="cuda", dtype=torch.bfloat16)
    before = [run(linear, x, dy)[0] for linear in (theirs, theirs)][-1]
    with torch.no_grad():
        theirs.weight.mul_(-1)
    # Outputs of up to 8 are rounded to bfloat16, twice, to within 1/64 each.
    torch.testing.assert_close(run(theirs, x, dy)[0] - theirs.bias, -(before - theirs.bias), rtol=0.02, atol=0.05)
    # As the average of the weights is evaluated: by other data in the same parameter.
    theirs.weight.data = ours.weight.data.clone()
    torch.testing.assert_close(run(theirs, x, dy)[0], before, rtol=0.02, atol=0.05)


def test_parameters_are_ours(recipe) -> None:
    theirs, ours = make_pair(recipe)
    run(theirs, torch.randn(16, 128, device="cuda"), torch.randn(16, 256, device="cuda"))
    assert [n for n, _ in theirs.named_parameters()] == ["weight", "bias"]
    assert theirs.state_dict().keys() == ours.state_dict().keys() and len(list(theirs.modules())) == 1
    moved = copy.deepcopy(theirs).cpu()
    assert moved.weight.device.type == "cpu" and theirs.weight.device.type == "cuda"


def test_delayed_state_goes_through_plain_tensors() -> None:
    """A new linear that is given the tensors goes on, bit for bit, with either backend's."""
    torch.manual_seed(0)
    theirs, ours = make_pair("delayed")
    passes = [(torch.randn(48, 128, device="cuda"), torch.randn(48, 256, device="cuda") * 1e-3) for _ in range(6)]
    for x, dy in passes[:3]:
        run(theirs, x, dy), run(ours, x, dy)
    saved = snapshot(theirs)
    assert saved.keys() == snapshot(ours).keys() and all(t.any() for t in saved.values())
    again, _ = make_pair("delayed")
    again.load_state_dict(theirs.state_dict())
    load_precision_tensors(again, snapshot(ours))
    for x, dy in passes[3:]:
        for a, b in zip(run(theirs, x, dy), run(again, x, dy), strict=True):
            assert torch.equal(a, b)
    assert all(torch.equal(t, snapshot(again)[name]) for name, t in snapshot(theirs).items())


def test_evaluation_leaves_amaxes_to_a_restore() -> None:
    """Transformer Engine records amaxes without gradients too: what evaluation restores is what it must."""
    theirs, _ = make_pair("delayed")
    run(theirs, torch.randn(16, 128, device="cuda"), torch.randn(16, 256, device="cuda"))
    before = snapshot(theirs)
    with torch.no_grad():
        theirs(100 * torch.randn(16, 128, device="cuda"))
    load_precision_tensors(theirs, before)
    run(theirs, torch.ones(16, 128, device="cuda"), torch.ones(16, 256, device="cuda"))
    assert float(snapshot(theirs)[".amax_history.input"][-1]) == 1.0
