"""What must hold of the attention beside its values."""

from __future__ import annotations

import pytest
import torch

from genrec.hstu.attention import RelativeBias, hstu_attention, plan
from genrec.hstu.attention.blocked import blocked_attention
from genrec.hstu.attention.mask import MaskRules
from genrec.hstu.attention.plan import plan_for
from genrec.hstu.attention.reference import reference_attention


def attend(q, k, v, case, **changes):
    kwargs = {
        "offsets": case.offsets,
        "max_seqlen": case.max_seqlen,
        "scaling_seqlen": 9,
        "num_contexts": case.num_contexts,
        "num_targets": case.num_targets,
        **case.masking.kwargs(),
    }
    return hstu_attention(q, k, v, **{**kwargs, **changes})


@pytest.fixture
def case(oracle):
    users = [(2, 3, 2), (0, 0, 0), (0, 6, 0), (1, 4, 3), (0, 1, 0)]
    return oracle.Case(tuple(oracle.UserTokens(*user) for user in users))


def draw(rows, *, heads=2, width=3, value_width=2, dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(rows, heads, d, dtype=dtype, requires_grad=True) for d in (width, width, value_width)]


def test_gradcheck(case):
    assert torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v, case), draw(case.num_tokens + 1))


def test_gradcheck_with_bias_and_window(case, oracle):
    times = torch.arange(case.num_tokens) * 7
    windowed = oracle.Case(case.users, oracle.Masking(max_attn_len=2, target_group_size=2))
    weights = [torch.randn(23, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def function(q, k, v, position, time):
        return attend(q, k, v, windowed, bias=RelativeBias(position, time, times, times))

    assert torch.autograd.gradcheck(function, [*draw(case.num_tokens), *weights])


def test_alpha_defaults_to_inverse_square_root(case):
    q, k, v = draw(case.num_tokens, width=4)
    assert torch.equal(attend(q, k, v, case), attend(q, k, v, case, alpha=0.5))


def test_strided_views_and_their_gradients(case):
    torch.manual_seed(0)
    fused = torch.randn(case.num_tokens, 4 * 2 * 3, dtype=torch.float64, requires_grad=True)

    def output(x, copy):
        _, v, q, k = (part.view(-1, 2, 3) for part in x.split(6, dim=1))
        return attend(*((q.clone(), k.clone(), v.clone()) if copy else (q, k, v)), case)

    grads = [torch.autograd.grad(output(fused, copy).square().sum(), fused)[0] for copy in (False, True)]
    assert torch.equal(output(fused, False), output(fused, True))
    assert torch.equal(*grads)


def test_non_contiguous_gradient_of_the_output(case):
    q, k, v = draw(case.num_tokens)
    wide = torch.randn(2, 2, case.num_tokens, dtype=torch.float64)
    strided = wide.permute(2, 0, 1)
    views = torch.autograd.grad(attend(q, k, v, case), (q, k, v), strided)
    copies = torch.autograd.grad(attend(q, k, v, case), (q, k, v), strided.contiguous())
    expanded = torch.autograd.grad(attend(q, k, v, case).sum(), (q, k, v))
    ones = torch.autograd.grad(attend(q, k, v, case), (q, k, v), torch.ones_like(v))
    assert all(torch.equal(a, b) for a, b in zip(views + expanded, copies + ones, strict=True))


@pytest.mark.usefixtures("nan_filled")
def test_every_row_is_written_and_rows_of_no_user_are_zero(case):
    inputs = draw(case.num_tokens + 3)
    with torch.no_grad():
        for x in inputs:
            x[case.num_tokens :] = float("nan")
    output = attend(*inputs, case)
    assert output.isfinite().all()
    assert (output[case.num_tokens :] == 0).all()
    grad = torch.ones_like(output)
    grad[case.num_tokens :] = float("nan")
    for x in torch.autograd.grad(output, inputs, grad):
        assert x.isfinite().all()
        assert (x[case.num_tokens :] == 0).all()


def test_a_user_does_not_depend_on_the_others_or_on_their_order(case, oracle):
    q, k, v = draw(case.num_tokens)
    together = attend(q, k, v, case)
    starts = case.offsets.tolist()
    for user, start in zip(case.users, starts, strict=False):
        own = [x[start : start + user.length] for x in (q, k, v)]
        torch.testing.assert_close(
            together[start : start + user.length], attend(*own, oracle.Case((user,))), rtol=1e-12, atol=1e-14
        )
    order = [3, 0, 4, 2, 1]
    rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in order])
    permuted = attend(q[rows], k[rows], v[rows], oracle.Case(tuple(case.users[i] for i in order)))
    torch.testing.assert_close(permuted, together[rows], rtol=1e-12, atol=1e-14)


def test_a_user_that_is_not_finite_spoils_no_other(oracle):
    case = oracle.Case((oracle.UserTokens(0, 8, 0), oracle.UserTokens(0, 7, 0)))
    q, k, v = draw(15)
    clean = attend(q, k, v, case)[8:]
    with torch.no_grad():
        q[:8], v[:8] = float("nan"), float("inf")
    assert torch.equal(attend(q, k, v, case)[8:], clean)


@pytest.mark.parametrize("users", [(), ((0, 0, 0),), ((0, 0, 0), (0, 0, 0))])
def test_no_users_or_no_tokens(oracle, users):
    case = oracle.Case(tuple(oracle.UserTokens(*user) for user in users))
    for padding in (0, 4):
        q, k, v = draw(padding)
        position, time = torch.ones(5, requires_grad=True), torch.ones(3, requires_grad=True)
        times = torch.zeros(padding, dtype=torch.int64)
        output = attend(q, k, v, case, bias=RelativeBias(position, time, times, times))
        assert output.shape == (padding, 2, 2)
        assert (output == 0).all()
        grads = torch.autograd.grad(output.sum(), (q, k, v, position, time))
        assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_no_more_than_twice_pytorchs_own(oracle, dtype):
    case = oracle.Case((oracle.UserTokens(2, 40, 3), oracle.UserTokens(0, 70, 0)))
    exact = [x.detach().to(dtype).double().requires_grad_() for x in draw(case.num_tokens, width=16, value_width=16)]
    half = [x.detach().to(dtype).requires_grad_() for x in exact]
    kwargs = {
        "offsets": case.offsets,
        "scaling_seqlen": 1,
        "alpha": 0.25,
        "num_contexts": case.num_contexts,
        "num_targets": case.num_targets,
        "rules": MaskRules(),
        "bias": None,
    }
    truth, mine = reference_attention(*exact, **kwargs), blocked_attention(*half, **kwargs)
    assert mine.dtype == dtype
    # The same-precision PyTorch: the exact result, rounded once.
    budget = (truth.to(dtype).double() - truth).abs().max()
    assert (mine.double() - truth).abs().max() <= 2 * budget
    grad = torch.randn_like(truth)
    grads = torch.autograd.grad(mine, half, grad.to(dtype))
    for true, got in zip(torch.autograd.grad(truth, exact, grad.to(dtype).double()), grads, strict=True):
        assert got.dtype == dtype
        assert (got.double() - true).abs().max() <= 3 * (true.to(dtype).double() - true).abs().max()


@pytest.mark.parametrize("lengths", [[50_000], [4096, 4000, 17, 5], [200] * 512, list(range(1, 400))])
@pytest.mark.parametrize("num_heads", [1, 8])
def test_memory_is_linear_in_tokens(lengths, num_heads):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    made = plan_for(offsets, None, None, num_heads=num_heads, rules=MaskRules())
    assert made.max_tile_elements(num_heads) <= max(plan.TILE_ELEMENTS, num_heads * plan.BLOCK_ROWS**2)
    slots = sum(group.num_users * group.width for group, _ in made.groups)
    assert sum(lengths) <= slots <= 1.25 * (sum(lengths) + 4 * len(lengths))


def test_short_users_go_together():
    lengths = [1 + user % 20 for user in range(1000)]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    made = plan_for(offsets, None, None, num_heads=2, rules=MaskRules())
    assert sum(len(tiles) for _, tiles in made.groups) <= 6


def test_tiles_never_reach_beyond_what_causality_and_window_show():
    offsets = torch.tensor([0, 10_000])
    tiles = plan_for(offsets, None, None, num_heads=1, rules=MaskRules(max_attn_len=256)).groups[0][1]
    assert all(tile.row_start - 256 <= tile.key_start and tile.key_stop <= tile.row_stop for tile in tiles)
    causal = plan_for(offsets, None, None, num_heads=1, rules=MaskRules()).groups[0][1]
    assert all(tile.key_stop <= tile.row_stop for tile in causal)
    assert {tile.mask for tile in causal} == {"none", "triangle"}


def test_layers_of_a_batch_share_the_plan():
    offsets = torch.tensor([0, 3, 9])
    first = plan_for(offsets, None, None, num_heads=2, rules=MaskRules())
    assert plan_for(offsets.clone(), None, None, num_heads=2, rules=MaskRules()) is first
    assert plan_for(torch.tensor([0, 4, 9]), None, None, num_heads=2, rules=MaskRules()) is not first
