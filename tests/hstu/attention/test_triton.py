"""The Triton kernels against the reference: in Triton's interpreter on a CPU, compiled where there is a GPU."""

from __future__ import annotations

import dataclasses
import logging
import os

import pytest
import torch

from genrec.configs.schema import UnavailableError
from genrec.hstu.attention import RelativeBias, hstu_attention, interface, launch, operators, triton_jit, tuning
from genrec.hstu.attention.mask import MaskRules
from genrec.hstu.attention.reference import reference_attention

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read as cuBLAS starts, for deterministic products

pytestmark = pytest.mark.usefixtures("interpreter")

DEVICE = "cpu" if triton_jit.INTERPRETED else "cuda"
# (contexts, history, targets): lengths 0, 1, 15, 16, 17 and 33 where float32 has tiles of 16, then users of contexts or
# targets alone.
USERS = ((2, 11, 4), (0, 0, 0), (0, 1, 0), (1, 10, 4), (0, 16, 0), (3, 19, 11), (0, 0, 5), (3, 0, 0))
PLAIN = tuple((0, sum(user), 0) for user in USERS)
MASKS = {
    "causal": (PLAIN, {}),
    "targets": (USERS, {}),
    "targets in groups": (USERS, {"target_group_size": 3}),
    "contexts see the history": (USERS, {"contextual_mask": "history", "target_group_size": 2}),
    "many contexts": (((20, 9, 4), (17, 0, 0), (5, 0, 12), (33, 1, 1)), {}),
    "window": (PLAIN, {"max_attn_len": 5}),
    "window, contexts, targets": (USERS, {"max_attn_len": 4, "target_group_size": 2}),
    "window beyond a tile": (((1, 60, 3), (20, 40, 0)), {"max_attn_len": 18, "contextual_mask": "history"}),
    "both ways": (PLAIN, {"causal": False}),
    "both ways, targets": (USERS, {"causal": False, "target_group_size": 3}),
    "both ways, contexts see the history": (USERS, {"causal": False, "contextual_mask": "history"}),
    "both ways, window": (((1, 60, 3), (20, 30, 9)), {"causal": False, "max_attn_len": 7, "target_group_size": 4}),
}


@pytest.fixture
def make_case(oracle):
    """``make_case(users, **masking)``: a Case of (contexts, history, targets)."""

    def make(users, **masking):
        return oracle.Case(tuple(oracle.UserTokens(*user) for user in users), oracle.Masking(**masking))

    return make


def arguments(case, **changes):
    """Of hstu_attention; users without contexts or targets at all pass None."""
    contexts, targets = case.num_contexts, case.num_targets
    return {
        "offsets": case.offsets.to(DEVICE),
        "max_seqlen": case.max_seqlen,
        "scaling_seqlen": 7,
        "alpha": 0.6,
        "num_contexts": contexts.to(DEVICE) if contexts.any() else None,
        "num_targets": targets.to(DEVICE) if targets.any() else None,
        "backend": "triton",
        **case.masking.kwargs(),
        **changes,
    }


def attend(q, k, v, case, **changes):
    return hstu_attention(q, k, v, **arguments(case, **changes))


def refer(q, k, v, case, **changes):
    kwargs = arguments(case, **changes)
    rules = MaskRules(**{field: kwargs.pop(field) for field in case.masking.kwargs()})
    del kwargs["max_seqlen"], kwargs["backend"]
    return reference_attention(q, k, v, rules=rules, **{"bias": None, **kwargs})


def draw(rows, *, heads=1, width=8, value_width=16, dtype=torch.float32, spoiled=()):
    """q, k, v as slices of one fused projection u | v | q | k, and the projection; NaN in the rows ``spoiled``."""
    widths = [heads * d for d in (value_width, value_width, width, width)]
    fused = torch.randn(rows, sum(widths), generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    fused[list(spoiled)] = float("nan")
    fused.requires_grad_()
    _, v, q, k = (part.unflatten(1, (heads, part.shape[1] // heads)) for part in fused.split(widths, dim=1))
    return q, k, v, fused


def assert_as_reference(case, *, padding=2, alpha=0.6, **sizes):
    """Output and gradients, with NaN wherever nothing may look, and in all memory that must be written."""
    spoiled = range(case.num_tokens, case.num_tokens + padding)
    q, k, v, fused = draw(case.num_tokens + padding, spoiled=spoiled, **sizes)
    grad = torch.randn(v.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    grad[case.num_tokens :] = float("nan")
    truth = refer(q, k, v, case, alpha=alpha)
    true_grad = torch.autograd.grad(truth[: case.num_tokens], fused, grad[: case.num_tokens], retain_graph=True)[0]
    output = attend(q, k, v, case, alpha=alpha)
    torch.testing.assert_close(output, truth, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(torch.autograd.grad(output, fused, grad)[0], true_grad, rtol=1e-5, atol=5e-6)


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize("mask", MASKS)
def test_masks(make_case, mask):
    users, masking = MASKS[mask]
    assert_as_reference(make_case(users, **masking))


def test_the_derivative_of_huge_scores_is_one_or_zero(make_case):
    """Of scores near 1e9, beside which float32 has no 1 left."""
    case = make_case(((1, 13, 2), (0, 17, 0)))
    q, k, v, _ = draw(case.num_tokens)
    grad = torch.randn(v.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    grads = [torch.autograd.grad(f(q, k, v, case, alpha=1e9), (q, k, v), grad) for f in (attend, refer)]
    for got, true in zip(*grads, strict=True):
        assert true.abs().max() > 0
        torch.testing.assert_close(got / true.abs().max(), true / true.abs().max(), rtol=0, atol=1e-6)


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize(("width", "value_width"), [(32, 32), (64, 64), (128, 128), (256, 256), (24, 40), (64, 8)])
def test_widths(make_case, width, value_width):
    case = make_case(((1, 13, 2), (0, 17, 0)))
    assert_as_reference(case, heads=2, width=width, value_width=value_width, alpha=width**-0.5)


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize("masking", [{}, {"causal": False, "max_attn_len": 20, "contextual_mask": "history"}])
def test_relative_bias(make_case, masking):
    """Values, and all gradients; gaps from nothing to years, and places further apart than there are weights for."""
    case = make_case(((2, 30, 4), (0, 0, 0), (0, 18, 0)), target_group_size=2, **masking)
    generator = torch.Generator().manual_seed(2)
    q, k, v, fused = draw(case.num_tokens + 1, heads=2)
    times = [(torch.rand(case.num_tokens + 1, generator=generator) * 18).exp().long().to(DEVICE) for _ in range(2)]
    weights = [torch.randn(n, generator=generator).to(DEVICE).requires_grad_() for n in (2 * 25 - 1, 41)]
    grad = torch.randn(v.shape, generator=generator).to(DEVICE)
    outputs = [f(q, k, v, case, bias=RelativeBias(*weights, *times)) for f in (attend, refer)]
    grads = [torch.autograd.grad(x, (fused, *weights), grad, retain_graph=True) for x in outputs]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("users", [(), ((0, 0, 0),), ((0, 0, 0), (0, 0, 0))])
@pytest.mark.parametrize("padding", [0, 17])
@pytest.mark.usefixtures("nan_filled")
def test_no_users_or_no_tokens(make_case, users, padding):
    q, k, v, fused = draw(padding)
    output = attend(q, k, v, make_case(users))
    assert output.shape == v.shape
    assert (output == 0).all()
    assert (torch.autograd.grad(output.sum(), fused)[0] == 0).all()


def test_other_layouts_of_the_inputs(make_case):
    case = make_case(((0, 18, 0), (0, 3, 0)))
    q, k, v, _ = draw(case.num_tokens, heads=2, width=16)
    contiguous = attend(q.contiguous(), k.contiguous(), v.contiguous(), case)
    assert torch.equal(attend(q, k, v, case), contiguous)
    across = [x.permute(1, 2, 0).contiguous().permute(2, 0, 1) for x in (q, k, v)]
    assert torch.equal(attend(*across, case), contiguous)
    for offsets in (case.offsets.int(), case.offsets.repeat_interleave(2)[::2]):
        assert torch.equal(attend(q, k, v, case, offsets=offsets.to(DEVICE)), contiguous)
    ones = torch.autograd.grad(attend(q, k, v, case), q, torch.ones_like(v), retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(attend(q, k, v, case).sum(), q)[0], ones)


def test_gradients_lie_in_one_buffer_as_in_the_projection(make_case):
    case = make_case(((0, 3, 0),))
    q, k, v, _ = draw(case.num_tokens, heads=2)
    dq, dk, dv = torch.autograd.grad(attend(q, k, v, case).sum(), (q, k, v))
    assert {x.untyped_storage().data_ptr() for x in (dq, dk, dv)} == {dv.data_ptr()}
    assert (dq.data_ptr() - dv.data_ptr(), dk.data_ptr() - dq.data_ptr()) == (4 * 2 * 16, 4 * 2 * 8)
    assert dq.stride() == dk.stride() == (2 * (16 + 8 + 8), 8, 1)


def test_schedule_has_the_longest_user_first(make_case):
    lengths = [3, 40, 0, 40, 17]
    case = make_case([(0, length, 0) for length in lengths])
    kwargs = arguments(case)
    q, k, v, _ = draw(case.num_tokens + 5)
    no_bias, masking = (None,) * 4, (True, "prefix", 0, 1)
    _, schedule = operators._forward(q, k, v, *no_bias, kwargs["offsets"], None, None, 7, 0.6, *masking)
    # User 5 is the padding, five rows of it.
    assert schedule[:2].tolist() == [[1, 3, 4, 5, 0, 2], [0, 40, 80, 97, 102, 105]]
    # The slots of tiles of 128 tokens: one each, since the tokens before are fewer, even of users without any.
    assert schedule[2].tolist() == [4, 0, 5, 1, 2, 3]
    assert schedule[3:].tolist() == [[3, 43, 83, 100, 0, 43], [40, 40, 17, 5, 3, 0]]


def test_tiles_that_the_mask_empties_are_not_computed(make_case):
    """A key that is NaN spoils its own tile of rows and what sees it; were its products taken, all would be NaN."""
    case = make_case(((0, 64, 0),), max_attn_len=4)
    q, k, v, fused = draw(64, spoiled=[20])
    bad = (~attend(q, k, v, case).isfinite()).all(dim=2).any(dim=1)
    assert bad[20:25].all()
    assert not bad[:16].any() and not bad[48:].any()
    grad = torch.autograd.grad(attend(q, k, v, case).sum(), fused)[0][:, 16:]
    assert grad[48:].isfinite().all()


def test_tiles_loaded_by_tma(make_case, monkeypatch):
    """The same numbers, from q, k and v in place; a gradient that TMA can't take is loaded as ever."""
    case = make_case(((1, 50, 4), (0, 33, 0)))
    q, k, v, fused = draw(case.num_tokens, heads=2, width=32, value_width=32)
    grads = [torch.randn(v.shape).to(DEVICE), torch.randn(1, 1, 32).to(DEVICE).expand(v.shape)]

    def run():
        output = attend(q, k, v, case)
        return [output, *(torch.autograd.grad(output, fused, grad, retain_graph=True)[0] for grad in grads)]

    plain = run()
    made = []
    describe = launch._descriptor
    monkeypatch.setattr(launch, "_descriptor", lambda *args: made.append(describe(*args)) or made[-1])
    monkeypatch.setattr(tuning, "FLOAT32_TILES", dataclasses.replace(tuning.FLOAT32_TILES, tma=True))
    torch.testing.assert_close(run(), plain, rtol=1e-6, atol=1e-6)
    # Of k and v; then of q, a gradient, k and v, twice.
    assert [x is not None for x in made] == [True] * 7 + [False, True, True]


@pytest.mark.usefixtures("nan_filled")
def test_one_backward_kernel(make_case, monkeypatch):
    """dQ summed in memory. A user of NaN spoils no other."""
    monkeypatch.setattr(tuning, "FLOAT32_TILES", dataclasses.replace(tuning.FLOAT32_TILES, fused=True))
    case = make_case(((1, 50, 4), (0, 0, 0), (3, 9, 1)), target_group_size=2)
    assert_as_reference(case, heads=2, width=24, value_width=16)
    q, k, v, fused = draw(68, heads=2, width=24, spoiled=range(55))
    grad = torch.autograd.grad(attend(q, k, v, case).sum(), fused)[0]
    assert grad[55:].isfinite().all()


def test_permuting_users_permutes_results(make_case):
    case = make_case(USERS, target_group_size=2)
    q, k, v, _ = draw(case.num_tokens)
    together = attend(q, k, v, case)
    order = [5, 3, 0, 1, 7, 2, 6, 4]
    starts = case.offsets.tolist()
    rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in order]).to(DEVICE)
    permuted = make_case([USERS[i] for i in order], target_group_size=2)
    assert torch.equal(attend(q[rows], k[rows], v[rows], permuted), together[rows])


@pytest.mark.parametrize("max_attn_len", [0, 9])
def test_three_layers_with_prefix_contexts_never_see_the_future(make_case, max_attn_len):
    case = make_case(((3, 37, 0),), max_attn_len=max_attn_len)
    x = draw(40, width=16)[3][:, :16].detach().view(40, 1, 16).requires_grad_()
    hidden = x
    for _ in range(3):
        hidden = hidden + attend(hidden, hidden, hidden, case, scaling_seqlen=64)
    for row in (17, 31):
        grad = torch.autograd.grad(hidden[row].sum(), x, retain_graph=True)[0]
        assert (grad[row + 1 :] == 0).all()
        assert (grad[row] != 0).any()


def test_a_target_never_sees_another_group(make_case):
    case = make_case(((1, 20, 6),), target_group_size=2)
    q, k, v, fused = draw(27)
    output = attend(q, k, v, case)
    for target in range(21, 27):
        grad = torch.autograd.grad(output[target].sum(), fused, retain_graph=True)[0].abs().sum(dim=1) > 0
        group = 21 + (target - 21) // 2 * 2
        assert grad.nonzero()[:, 0].tolist() == [*range(21), *range(group, target + 1)]


@pytest.mark.usefixtures("nan_filled")
def test_half_precision(make_case):
    """float16; Triton's interpreter has no products of bfloat16, which the tests for the GPU have."""
    dtype, case = torch.float16, make_case(((2, 14, 3), (0, 20, 0)))
    exact = draw(case.num_tokens, width=16, dtype=dtype)[3].detach().double().requires_grad_()
    half = exact.detach().to(dtype).requires_grad_()

    def run(function, fused):
        _, v, q, k = (part.view(case.num_tokens, 1, -1) for part in fused.split(16, dim=1))
        output = function(q, k, v, case)
        return output, torch.autograd.grad(output.sum(), fused)[0]

    for mine, truth, times in zip(run(attend, half), run(refer, exact), (2, 3), strict=True):
        assert mine.dtype == dtype
        budget = (truth.to(dtype).double() - truth).abs().max()
        assert (mine.double() - truth).abs().max() <= times * budget


def test_operators_are_what_torch_library_asks(make_case):
    case = make_case(((0, 2, 1),))
    kwargs = arguments(case)
    q, k, v, _ = (x.detach().clone().requires_grad_() for x in draw(4))
    batch = (kwargs["offsets"], None, kwargs["num_targets"])
    bias = [torch.randn(n, device=DEVICE, requires_grad=True) for n in (9, 5)]
    times = [torch.arange(4, device=DEVICE) * 100] * 2
    args = (q, k, v, *bias, *times, *batch, 7, 0.6, True, "prefix", 0, 1)
    torch.library.opcheck(operators._forward, args)


def test_torch_export_sees_one_operator(make_case):
    case = make_case(((0, 3, 0),))

    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return attend(q, k, v, case)

    inputs = tuple(x.detach().clone() for x in draw(3)[:3])
    program = torch.export.export(Attention(), inputs)
    assert torch.equal(program.module()(*inputs), Attention()(*inputs))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert "genrec.hstu_attention_forward.default" in targets


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "needs a CUDA device, and q is on 'cpu'"),
        ({"triton": None}, "Triton is not installed"),
        ({"dtype": torch.float64}, "must share bfloat16, float16 or float32, not torch.float64"),
        ({"dtype": torch.bfloat16}, "no products of bfloat16"),
        ({"width": 264}, "at most 256 wide, not 264"),
    ],
)
def test_what_it_cannot_serve(monkeypatch, changes, message):
    monkeypatch.setattr(triton_jit, "INTERPRETED", bool(changes))
    if "triton" in changes:
        monkeypatch.setattr(triton_jit, "triton", None)
    q = torch.ones(3, 1, changes.get("width", 8), dtype=changes.get("dtype", torch.float32))
    kwargs = {"offsets": torch.tensor([0, 3]), "max_seqlen": 3, "scaling_seqlen": 3}
    with pytest.raises(UnavailableError, match=rf"kernel_backend 'triton'.*{message}.*'auto' and 'pytorch' can"):
        hstu_attention(q, q, q, backend="triton", **kwargs)
    assert hstu_attention(q, q, q, backend="auto", **kwargs).isfinite().all()


def test_auto_on_a_cpu_stays_with_pytorch(make_case, caplog):
    interface._log_choice.cache_clear()
    case = make_case(((0, 3, 0),))
    with caplog.at_level(logging.INFO):
        hstu_attention(
            *(x.cpu() for x in draw(3)[:3]), **{**arguments(case), "backend": "auto", "offsets": case.offsets}
        )
    assert [record.getMessage() for record in caplog.records] == ["attention backend: pytorch (kernel_backend 'auto')"]
