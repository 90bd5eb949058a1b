"""FP8 attention: its emulation against the formula written out user by user, the Triton kernels against the emulation.

The kernels run in Triton's interpreter on a CPU, compiled where there is a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math

import pytest
import torch

from genrec.configs.schema import UnavailableError
from genrec.hstu.attention import RelativeBias, hstu_attention, interface, operators, operators_fp8, triton_jit, tuning
from genrec.hstu.attention.quantization import SCALES

pytestmark = pytest.mark.usefixtures("interpreter")

DEVICE = "cpu" if triton_jit.INTERPRETED else "cuda"
MODES = [mode for mode in SCALES if mode != "128x1"]
SCALING = 50
# (contexts, history, targets)
USERS = ((2, 11, 4), (0, 0, 0), (0, 1, 0), (3, 120, 7), (0, 200, 30), (0, 0, 5), (140, 3, 2))
PLAIN = tuple((0, sum(user), 0) for user in USERS)
MASKS = {
    "causal": (PLAIN, {}),
    "targets in groups": (USERS, {"target_group_size": 3}),
    "window, contexts, targets": (USERS, {"max_attn_len": 20, "target_group_size": 2}),
    "window beyond a tile": (USERS, {"max_attn_len": 100, "contextual_mask": "history"}),
    "both ways, window": (USERS, {"causal": False, "max_attn_len": 70, "contextual_mask": "history"}),
    "both ways": (PLAIN, {"causal": False}),
}


@pytest.fixture
def make_case(oracle):
    """``make_case(users, **masking)``: a Case of (contexts, history, targets)."""

    def make(users, **masking):
        return oracle.Case(tuple(oracle.UserTokens(*user) for user in users), oracle.Masking(**masking))

    return make


def draw(rows, *, heads=2, width=32, value_width=32, dtype=torch.float64, spoiled=(), octaves=3):
    """q, k, v as slices of a projection, and a gradient; rows differ in magnitude, and ``spoiled`` ones are NaN."""
    generator = torch.Generator().manual_seed(0)
    widths = [heads * d for d in (value_width, value_width, width, width)]
    fused = torch.randn(rows, sum(widths), generator=generator, dtype=torch.float64)
    fused *= torch.exp2(torch.randint(-octaves, octaves + 1, (rows, 1), generator=generator).double())
    grad = 1e-3 * torch.randn(rows, heads, value_width, generator=generator, dtype=torch.float64)
    fused[list(spoiled)], grad[list(spoiled)] = float("nan"), float("nan")
    fused = fused.to(DEVICE, dtype).requires_grad_()
    _, v, q, k = (x.unflatten(1, (heads, -1)) for x in fused.split(widths, dim=1))
    return q, k, v, fused, grad.to(DEVICE, dtype)


def arguments(case, mode, *, backend="pytorch", **changes):
    contexts, targets = case.num_contexts, case.num_targets
    return {
        "offsets": case.offsets.to(DEVICE),
        "max_seqlen": case.max_seqlen,
        "scaling_seqlen": SCALING,
        "num_contexts": contexts.to(DEVICE) if contexts.any() else None,
        "num_targets": targets.to(DEVICE) if targets.any() else None,
        "backend": backend,
        "quantization": mode,
        **case.masking.kwargs(),
        **changes,
    }


def attend(q, k, v, case, mode, **changes):
    return hstu_attention(q, k, v, **arguments(case, mode, **changes))


def run(case, inputs, mode, **changes):
    """Output and gradient of the projection."""
    q, k, v, fused, grad = inputs
    output = attend(q, k, v, case, mode, **changes)
    return output.detach(), torch.autograd.grad(output, fused, grad)[0]


# The formula, written out.


def to_fp8(x, amax):
    """What numbers that share a scale of 448 / amax are in e4m3, taken back."""
    scale = 1.0 if amax is None or amax == 0 else float(torch.tensor(448.0) / torch.tensor(float(amax)))
    rounded = (x.float() * torch.tensor(scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return rounded.double() * float(1 / torch.tensor(scale))


def through_fp8(x, mode, starts, *, columns=False, grad=False):
    """(T, H, d) as operand; columns: of products that sum over tokens."""
    mode = "per-tensor" if mode == "fp8" and grad else mode
    result = torch.zeros_like(x)
    for start, stop in itertools.pairwise(starts):
        for head in range(x.shape[1]):
            if mode == "fp8":
                parts = [(slice(start, stop), slice(None), None)]
            elif mode == "per-tensor":
                parts = [(slice(start, stop), slice(None), x[: starts[-1]].abs().max())]
            elif mode == "per-batch":
                parts = [(slice(start, stop), slice(None), x[start:stop].abs().max() if stop > start else 0)]
            elif mode == "per-head":
                parts = [(slice(start, stop), slice(None), x[start:stop, head].abs().max() if stop > start else 0)]
            elif mode == "per-block" or columns:
                rows = [slice(i, min(i + 128, stop)) for i in range(start, stop, 128)]
                dims = [slice(d, d + 1) for d in range(x.shape[2])] if mode == "1xdim" else [slice(None)]
                parts = [(r, d, x[r, head, d].abs().max()) for r in rows for d in dims]
            else:
                parts = [(slice(i, i + 1), slice(None), x[i, head].abs().max()) for i in range(start, stop)]
            for rows, dims, amax in parts:
                result[rows, head, dims] = to_fp8(x[rows, head, dims], amax)
    return result


def written_out(oracle, case, q, k, v, grad, mode, *, alpha, dtype):
    """Output, dq, dk, dv in float64; dtype: what backward rounds P and dS to where scales are finer than a user's."""
    q, k, v, grad = (x.detach().double().cpu() for x in (q, k, v, grad))
    starts = case.offsets.tolist()
    q8, k8, v8 = (through_fp8(x, mode, starts) for x in (q, k, v))
    columns, grad8 = through_fp8(v, mode, starts, columns=True), through_fp8(grad, mode, starts, grad=True)
    output, dq, dk, dv = (torch.zeros_like(x) for x in (v, q, k, v))
    for user, start in zip(case.users, starts, strict=False):
        mask = torch.tensor(
            [[oracle.sees(i, j, user, case.masking) for j in range(user.length)] for i in range(user.length)],
            dtype=torch.float64,
        ).view(user.length, user.length)
        rows = slice(start, start + user.length)
        for h in range(q.shape[1]) if user.length else ():
            s = alpha * q8[rows, h] @ k8[rows, h].T
            p = mask * s * s.sigmoid()
            bound = alpha * q8[rows, h].norm(dim=1).max() * k8[rows, h].norm(dim=1).max()
            weight_scale = 2.0 ** math.floor(math.log2(448 / bound))
            p8 = (p.float() * weight_scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() / weight_scale
            output[rows, h] = p8 @ columns[rows, h] / SCALING
            ds = grad8[rows, h] @ v8[rows, h].T * mask * s.sigmoid() * (1 + s * (1 - s.sigmoid()))
            if SCALES[mode] == "user":
                bound = 1.125 * grad8[rows, h].norm(dim=1).max() * v8[rows, h].norm(dim=1).max()
                score_scale = 2.0 ** math.floor(math.log2(448 / bound))
                ds = (ds.float() * score_scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() / score_scale
                p, others = p8, (grad8, k8, q8)
            else:
                p, ds, others = p.to(dtype).double(), ds.to(dtype).double(), (grad, k, q)
            dv[rows, h] = p.T @ others[0][rows, h] / SCALING
            dq[rows, h] = alpha * ds @ others[1][rows, h] / SCALING
            dk[rows, h] = alpha * ds.T @ others[2][rows, h] / SCALING
    return output, torch.cat([torch.zeros_like(dv).flatten(1), *(x.flatten(1) for x in (dv, dq, dk))], dim=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_emulation_is_the_formula(oracle, make_case, mode, dtype):
    case = make_case(USERS, target_group_size=2)
    inputs = draw(case.num_tokens + 2, dtype=dtype)
    got = run(case, inputs, mode, alpha=0.3)
    q, k, v, _, grad = inputs
    truth = written_out(oracle, case, q, k, v, grad, mode, alpha=0.3, dtype=dtype)
    # Numbers right between two values of a format may be rounded either way: a few of thousands.
    tolerance = 1e-5 if dtype == torch.float64 else 4e-3
    for mine, true in zip(got, truth, strict=True):
        assert mine.dtype == dtype
        assert (mine.cpu().double() - true).norm() <= tolerance * true.norm()


@pytest.mark.parametrize("mode", MODES)
def test_how_far_fp8_is_from_exact(make_case, mode):
    """All modes err by some percent of the result: a wrong scale or a saturated number would err by more."""
    case = make_case(USERS)
    inputs = draw(case.num_tokens, octaves=0)
    for got, exact in zip(run(case, inputs, mode), run(case, inputs, "bf16"), strict=True):
        assert 0.01 * exact.norm() < (got - exact).norm() < 0.06 * exact.norm()


def test_names_of_the_same_mode(make_case):
    case = make_case(USERS)
    inputs = draw(case.num_tokens)
    for a, b in zip(run(case, inputs, "128x1"), run(case, inputs, "1xdim"), strict=True):
        assert torch.equal(a, b)


def assert_as_emulated(case, mode, *, dtype=torch.float16, tolerance=1e-3, **sizes):
    """A GPU's approximate tanh puts more P on the other side of a border between two numbers of FP8."""
    padding, tolerance = 3, tolerance if triton_jit.INTERPRETED else 0.03
    spoiled = range(case.num_tokens, case.num_tokens + padding)
    inputs = draw(case.num_tokens + padding, dtype=dtype, spoiled=spoiled, **sizes)
    got, emulated = (run(case, inputs, mode, backend=name) for name in ("triton", "pytorch"))
    for mine, true in zip(got, emulated, strict=True):
        assert mine.dtype == dtype and (mine[-padding:] == 0).all() and mine.isfinite().all()
        assert (mine.double() - true.double()).norm() <= tolerance * true.double().norm()


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize(
    ("mode", "mask"),
    [
        ("per-block", "both ways, window"),
        *(("per-head", mask) for mask in MASKS),
        *(("1xdim", mask) for mask in MASKS),
    ],
)
def test_kernels_are_as_emulated(make_case, mode, mask):
    users, masking = MASKS[mask]
    assert_as_emulated(make_case(users, **masking), mode, heads=1)


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize("mode", ["fp8", "per-tensor", "per-batch", "128x1"])
def test_kernels_of_the_other_modes(make_case, mode):
    assert_as_emulated(make_case(((3, 120, 7), (0, 1, 0))), mode, heads=2)


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize(("width", "value_width"), [(8, 24), (64, 128), (256, 256)])
@pytest.mark.parametrize("mode", ["per-head", "per-block", "1xdim"])
def test_widths(make_case, mode, width, value_width):
    assert_as_emulated(make_case(((1, 13, 2), (0, 129, 0))), mode, width=width, value_width=value_width)


@pytest.mark.usefixtures("nan_filled")
def test_kernels_in_float32(make_case):
    assert_as_emulated(make_case(((1, 13, 2), (0, 17, 0))), "per-head", dtype=torch.float32, heads=1, tolerance=1e-5)


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize("option", ["tma", "fused"])
def test_other_ways_to_run_the_kernels(make_case, monkeypatch, option):
    monkeypatch.setitem(tuning.FP8_TILES, 32, dataclasses.replace(tuning.FP8_TILES[32], **{option: True}))
    assert_as_emulated(make_case(((3, 120, 7), (0, 70, 0))), "per-block")


def test_the_fused_kernel_is_refused_where_its_products_would_be_fp8(make_case, monkeypatch):
    monkeypatch.setitem(tuning.FP8_TILES, 32, dataclasses.replace(tuning.FP8_TILES[32], fused=True))
    case = make_case(((0, 3, 0),))
    with pytest.raises(ValueError, match="fused = True don't go with FP8"):
        run(case, draw(3, dtype=torch.float16), "per-head", backend="triton")


@pytest.mark.parametrize("users", [(), ((0, 0, 0),), ((0, 0, 0), (0, 0, 0))])
@pytest.mark.parametrize("backend", ["pytorch", "triton"])
@pytest.mark.parametrize("mode", MODES)
def test_no_users_or_no_tokens(make_case, mode, backend, users):
    for rows in (0, 5):
        output, grad = run(make_case(users), draw(rows, dtype=torch.float16), mode, backend=backend)
        assert output.shape[0] == grad.shape[0] == rows
        assert (output == 0).all() and (grad == 0).all()


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "per-tensor"])
def test_permuting_users_permutes_results(make_case, mode):
    users = ((1, 20, 2), (0, 0, 0), (0, 130, 0), (2, 5, 3))
    order = [3, 1, 2, 0]
    case, permuted = make_case(users), make_case([users[i] for i in order])
    q, k, v, _, _ = draw(case.num_tokens, dtype=torch.float16, heads=1)
    starts = case.offsets.tolist()
    rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in order]).to(DEVICE)
    together = attend(q, k, v, case, mode, backend="triton")
    assert torch.equal(attend(q[rows], k[rows], v[rows], permuted, mode, backend="triton"), together[rows])


@pytest.mark.parametrize("mode", MODES)
def test_a_target_never_sees_another_group(make_case, mode):
    case = make_case(((1, 20, 6),), target_group_size=2)
    q, k, v, fused, _ = draw(27, octaves=0)
    output = attend(q, k, v, case, mode)
    for target in range(21, 27):
        grad = torch.autograd.grad(output[target].sum(), fused, retain_graph=True)[0].abs().sum(dim=1) > 0
        group = 21 + (target - 21) // 2 * 2
        assert grad.nonzero()[:, 0].tolist() == [*range(21), *range(group, target + 1)]


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_three_layers_never_come_from_the_future(make_case, mode):
    case = make_case(((3, 37, 0),))
    x = draw(40, heads=1)[0].detach().requires_grad_()
    hidden = x
    for _ in range(3):
        hidden = hidden + attend(hidden, hidden, hidden, case, mode)
    for row in (17, 31):
        grad = torch.autograd.grad(hidden[row].sum(), x, retain_graph=True)[0]
        assert (grad[row + 1 :] == 0).all()
        assert (grad[row] != 0).any()


@pytest.mark.parametrize("mode", ["fp8", "1xdim"])
def test_later_queries_and_keys_do_not_move_scores_of_earlier_ones(make_case, mode):
    """The other scales cover later tokens: that of P is of the longest rows, and that of v of ones stays as it is."""
    case = make_case(((0, 60, 0),))
    q, k, _, _, _ = (x.detach() for x in draw(60))
    ones = torch.ones_like(q)
    with torch.no_grad():
        q[3] *= 64
        k[5] *= 64
    before = attend(q, k, ones, case, mode)
    with torch.no_grad():
        q[40:] *= 0.3
        k[40:] *= 0.3
    assert torch.equal(attend(q, k, ones, case, mode)[:40], before[:40])


@pytest.mark.parametrize("mode", ["per-tensor", "per-batch", "per-head", "per-block"])
def test_later_keys_move_what_shares_a_scale_with_them(make_case, mode):
    """As the docstring warns: rounding of a row knows of the largest number of its block, user or batch."""
    case = make_case(((0, 60, 0),))
    q, k, v, _, _ = (x.detach() for x in draw(60))
    before = attend(q, k, v, case, mode)[:40]
    k[40:] *= 3
    after = attend(q, k, v, case, mode)[:40]
    assert 0 < (after - before).norm() < 0.05 * before.norm()


@pytest.mark.parametrize("backend", ["pytorch", "triton"])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_finite_is_seen_and_stays_with_its_user(make_case, mode, backend):
    """Also infinities, which a saturating cast would hide; other users stay finite, and in most modes as they were."""
    case = make_case(((0, 30, 0), (0, 40, 0)))
    q, k, v, fused, grad = draw(70, dtype=torch.float16, heads=1)
    clean = attend(q, k, v, case, mode, backend=backend)
    for part, bad in ((1, float("nan")), (1, float("inf")), (2, float("inf")), (3, -float("inf"))):
        spoiled = fused.detach().clone()
        spoiled.unflatten(1, (4, -1))[20, part] = bad
        spoiled.requires_grad_()
        _, v, q, k = (x.unflatten(1, (1, -1)) for x in spoiled.chunk(4, dim=1))
        output = attend(q, k, v, case, mode, backend=backend)
        assert output[20].isnan().any()
        assert output[30:].isfinite().all()
        assert mode == "per-tensor" or torch.equal(output[30:], clean[30:])
        assert not torch.autograd.grad(output, spoiled, grad)[0][20].isfinite().all()
    grads = torch.autograd.grad(clean, fused, grad.index_fill(0, torch.tensor([20], device=DEVICE), float("inf")))[0]
    assert not grads[20].isfinite().all() and grads[30:].isfinite().all()


@pytest.mark.parametrize("magnitude", [1e-6, 1e-2, 1.0, 30.0])
def test_weights_fill_their_format_and_never_saturate(make_case, magnitude):
    """Queries and keys all alike are as bad as it gets: S is the bound itself."""
    case = make_case(((0, 40, 0),))
    row = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * magnitude
    q = row.expand(40, 1, 32).contiguous().to(DEVICE)
    ones = torch.ones_like(q)
    exact = attend(q, q, ones, case, "bf16")
    for mode in MODES if magnitude > 1e-4 else [mode for mode in MODES if mode != "fp8"]:
        assert (attend(q, q, ones, case, mode) / exact - 1).abs().max() < 0.13


@pytest.mark.parametrize("magnitude", [1e-6, 1e-2, 1.0, 30.0])
@pytest.mark.parametrize("mode", [mode for mode in MODES if SCALES[mode] == "user"])
def test_gradients_of_scores_fill_their_format_and_never_saturate(make_case, mode, magnitude):
    """All rows alike, at S = 2.4 where SiLU is steepest: dS is nearly the bound. Twice its scale would halve it."""
    case = make_case(((0, 40, 0),))
    row = torch.ones(40, 1, 32, dtype=torch.float64, device=DEVICE)
    q, k = row.clone().requires_grad_(), row.clone().requires_grad_()
    grad = magnitude * torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(0)).double().expand(40, 1, 32)
    v = grad.to(DEVICE).clone().requires_grad_()

    def gradients(mode):
        return torch.autograd.grad(attend(q, k, v, case, mode, alpha=2.4 / 32), (q, k), grad.to(DEVICE))

    for mine, exact in zip(gradients(mode), gradients("bf16"), strict=True):
        assert (mine / exact - 1).abs().max() < 0.13 or (mode == "fp8" and magnitude < 1e-4)  # v rounds to zero there


@pytest.mark.usefixtures("nan_filled")  # tiles of slots without a block are not written
def test_operators_are_what_torch_library_asks(make_case):
    case = make_case(((0, 2, 1),))
    q, k, v, _, _ = (x.detach().clone().requires_grad_() for x in draw(4, dtype=torch.float32))
    batch = (case.offsets.to(DEVICE), None, case.num_targets.to(DEVICE), 7, 0.6, True, "prefix", 0, 1)
    for mode in ("1xdim", "per-head"):
        torch.library.opcheck(operators_fp8._forward, (q, k, v, *batch, mode, True))
    torch.library.opcheck(operators_fp8._forward, (*(x.detach() for x in (q, k, v)), *batch, "per-block", False))


def test_torch_export_sees_one_operator(make_case):
    case = make_case(((0, 3, 0),))

    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return attend(q, k, v, case, "per-head", backend="triton")

    inputs = tuple(x.detach().clone() for x in draw(3, dtype=torch.float32)[:3])
    program = torch.export.export(Attention(), inputs)
    assert torch.equal(program.module()(*inputs), Attention()(*inputs))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert "genrec.hstu_attention_fp8_forward.default" in targets


def test_torch_compile_takes_the_operators_whole(make_case):
    case = make_case(((1, 10, 3), (0, 4, 0)))
    inputs = draw(18, dtype=torch.float32, heads=1)
    q, k, v, fused, grad = inputs
    kwargs = arguments(case, "per-block", backend="triton")

    def attention(q, k, v):
        return hstu_attention(q, k, v, **kwargs)

    with torch.no_grad():
        without_gradient = torch.compile(attention, fullgraph=True, backend="aot_eager")(q, k, v)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")(q, k, v)
    expected, expected_grad = run(case, inputs, "per-block", backend="triton")
    assert torch.equal(without_gradient, expected) and torch.equal(compiled, expected)
    assert torch.equal(torch.autograd.grad(compiled, fused, grad)[0], expected_grad)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_the_host_never_waits_and_auto_takes_triton(make_case, mode):
    case = make_case(USERS)
    inputs = draw(case.num_tokens, dtype=torch.bfloat16)
    named = run(case, inputs, mode, backend="triton")
    kwargs = arguments(case, mode, backend="auto")
    torch.cuda.set_sync_debug_mode("error")
    try:
        q, k, v, fused, grad = inputs
        output = hstu_attention(q, k, v, **kwargs)
        gradient = torch.autograd.grad(output, fused, grad)[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(output, named[0]) and torch.equal(gradient, named[1])


def test_gradients_lie_in_one_buffer_as_in_the_projection(make_case):
    case = make_case(((0, 3, 0),))
    q, k, v, _, _ = draw(3, dtype=torch.float16, heads=2, value_width=64)
    dq, dk, dv = torch.autograd.grad(attend(q, k, v, case, "per-head", backend="triton").sum(), (q, k, v))
    assert {x.untyped_storage().data_ptr() for x in (dq, dk, dv)} == {dv.data_ptr()}
    assert dq.stride() == dk.stride() == (2 * (64 + 32 + 32), 32, 1)


@pytest.mark.parametrize("backend", ["auto", "pytorch", "triton"])
def test_a_relative_bias_is_refused(make_case, backend):
    case = make_case(((0, 3, 0),))
    q, k, v, _, _ = draw(3, dtype=torch.float32)
    bias = RelativeBias(torch.ones(5), torch.ones(3), torch.arange(3), torch.arange(3))
    with pytest.raises(UnavailableError, match=r"'per-head' does not go with a relative bias.*'bf16' does"):
        attend(q, k, v, case, "per-head", backend=backend, bias=bias)


@pytest.mark.skipif(not triton_jit.INTERPRETED, reason="a GPU has kernels")
def test_auto_says_once_that_it_emulates(make_case, caplog):
    interface._log_choice.cache_clear()
    case = make_case(((0, 3, 0),))
    q, k, v, _, _ = draw(3)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            attend(q, k, v, case, "per-head", backend="auto")
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["attention backend: pytorch, which emulates FP8 (kernel_backend 'auto')"]


def test_a_gpu_without_fp8_is_named(monkeypatch, make_case):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(triton_jit, "INTERPRETED", False)
    q = torch.empty(3, 1, 32, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    assert operators.why_not(q, q, q) is None
    assert operators.why_not(q, q, q, quantization="per-head") == "FP8 needs a GPU of compute capability 8.9 or higher"
