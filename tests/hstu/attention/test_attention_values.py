"""Reference and blocked attention against the triple loop: values and every gradient, for every mask."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genrec.hstu.attention import RelativeBias, plan
from genrec.hstu.attention.blocked import blocked_attention
from genrec.hstu.attention.mask import MaskRules, visible
from genrec.hstu.attention.reference import reference_attention

PATHS = {"reference": reference_attention, "blocked": blocked_attention}
ALPHA, SCALING = 0.6, 7

users = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 4)), min_size=0, max_size=4)
maskings = st.fixed_dictionaries(
    {
        "causal": st.booleans(),
        "contextual_mask": st.sampled_from(["prefix", "history"]),
        "max_attn_len": st.sampled_from([0, 0, 1, 2, 4]),
        "target_group_size": st.integers(1, 3),
    }
)


def run(path, case, *, num_heads=2, bias_seed=None, padding=2, seed=0):
    """Output and gradients of a path, and the same from the loop's inputs: (tensors, keyword arguments of the loop)."""
    generator = torch.Generator().manual_seed(seed)
    rows = case.num_tokens + padding
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    q, k, v = (draw(rows, num_heads, d).requires_grad_() for d in (3, 3, 2))
    grad = draw(rows, num_heads, 2)
    bias = None
    if bias_seed is not None:
        times = [torch.randint(0, 50, (rows,), generator=generator) for _ in range(2)]
        bias = RelativeBias(draw(2 * 12 - 1).requires_grad_(), draw(9).requires_grad_(), *times)
    output = PATHS[path](
        q,
        k,
        v,
        offsets=case.offsets,
        scaling_seqlen=SCALING,
        alpha=ALPHA,
        num_contexts=case.num_contexts,
        num_targets=case.num_targets,
        rules=MaskRules(**case.masking.kwargs()),
        bias=bias,
    )
    inputs = [q, k, v] + ([bias.position_weight, bias.time_weight] if bias else [])
    grads = [None] * len(inputs)
    if output.requires_grad:
        grads = torch.autograd.grad((output * grad).sum(), inputs, allow_unused=path == "reference")
    # Only the reference may leave a gradient out: where no row sees a key.
    assert path == "reference" or all(grad is not None for grad in grads)
    grads = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True)]
    return [output, *grads], (q, k, v, grad, bias)


def check(oracle, path, case, **kwargs):
    got, (q, k, v, grad, bias) = run(path, case, **kwargs)
    loop_bias = None
    if bias is not None:
        loop_bias = oracle.LoopBias(
            *(x.tolist() for x in (bias.position_weight, bias.time_weight, bias.query_times, bias.key_times))
        )
    lists = [x.tolist() for x in (q, k, v, grad)]
    expected = oracle.loop_attention(*lists, case=case, alpha=ALPHA, scaling_seqlen=SCALING, bias=loop_bias)
    for mine, loop in zip(got, expected, strict=False):
        torch.testing.assert_close(
            mine, torch.tensor(loop, dtype=torch.float64).view(mine.shape), rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("path", PATHS)
@given(
    users=users,
    masking=maskings,
    num_heads=st.integers(1, 2),
    has_bias=st.booleans(),
    tile_elements=st.sampled_from([1, 10, 60, 1 << 19]),
    block_rows=st.sampled_from([1, 2, 3, 64]),
)
@settings(derandomize=True, max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_values_and_gradients_are_the_loops(
    oracle, path, users, masking, num_heads, has_bias, tile_elements, block_rows
):
    case = oracle.Case(tuple(oracle.UserTokens(*user) for user in users), oracle.Masking(**masking))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "TILE_ELEMENTS", tile_elements)
        patch.setattr(plan, "BLOCK_ROWS", block_rows)
        check(oracle, path, case, num_heads=num_heads, bias_seed=0 if has_bias else None)


def test_mask_is_the_rule_in_words_for_every_combination(oracle):
    for causal, contextual, window, size in itertools.product(
        (True, False), ("prefix", "history"), (0, 1, 3), (1, 2, 3)
    ):
        masking = oracle.Masking(causal, contextual, window, size)
        for counts in itertools.product((0, 1, 3), (0, 1, 4), (0, 1, 2, 5)):
            user = oracle.UserTokens(*counts)
            places = torch.arange(user.length)
            seen = visible(
                places[:, None],
                torch.arange(user.length + 2)[None, :],
                lengths=torch.tensor(user.length),
                num_contexts=torch.tensor(user.contexts),
                num_targets=torch.tensor(user.targets),
                rules=MaskRules(**masking.kwargs()),
            )
            words = [[oracle.sees(i, j, user, masking) for j in range(user.length)] for i in range(user.length)]
            assert seen[:, : user.length].tolist() == words, (masking, user)
            assert not seen[:, user.length :].any()


LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65)


@pytest.mark.parametrize("targets", [0, 1, 5])
@pytest.mark.parametrize("contexts", [0, 1, 3])
@pytest.mark.parametrize("window", [0, 20])
def test_blocked_is_the_reference_at_block_edges(oracle, contexts, targets, window):
    users = []
    for length in (*LENGTHS, 130, *reversed(LENGTHS)):
        c = min(contexts, length)
        n = min(targets, length - c)
        users.append(oracle.UserTokens(c, length - c - n, n))
    case = oracle.Case(tuple(users), oracle.Masking(max_attn_len=window))
    for blocked, reference in zip(run("blocked", case)[0], run("reference", case)[0], strict=True):
        torch.testing.assert_close(blocked, reference, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("length", [64, 65, 200])
def test_neighbours_of_one_length_are_served_without_a_copy_and_right(oracle, length):
    case = oracle.Case((oracle.UserTokens(0, length, 0),) * 3)
    for blocked, reference in zip(run("blocked", case)[0], run("reference", case)[0], strict=True):
        torch.testing.assert_close(blocked, reference, rtol=1e-10, atol=1e-12)


def test_users_of_one_length_that_differ_otherwise(oracle):
    for users in ([(0, 4, 2), (0, 2, 4), (0, 3, 3)], [(1, 5, 0), (3, 3, 0)], [(2, 2, 2), (2, 4, 0)]):
        for path in PATHS:
            check(oracle, path, oracle.Case(tuple(oracle.UserTokens(*user) for user in users)))


def test_one_context_that_sees_the_history(oracle):
    case = oracle.Case((oracle.UserTokens(1, 3, 0),), oracle.Masking(contextual_mask="history"))
    for path in PATHS:
        check(oracle, path, case)


def test_all_targets_and_contexts_only(oracle):
    users = (oracle.UserTokens(0, 0, 6), oracle.UserTokens(4, 0, 0), oracle.UserTokens(2, 0, 3))
    for path in PATHS:
        check(oracle, path, oracle.Case(users))
