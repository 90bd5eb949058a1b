"""Linears, norms and dropout."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from genrec.configs.schema import ConfigError, MixedPrecisionArgs
from genrec.hstu.dropout import dropout
from genrec.hstu.linear import make_linear
from genrec.hstu.norm import HeadNorm, Norm


def test_linear_starts_xavier_uniform_and_keeps_its_weights_in_float32():
    torch.manual_seed(0)
    linear = make_linear(6, 10, bias=True)
    assert linear.weight.abs().max() <= math.sqrt(6 / 16)
    assert (linear.bias == 0).all()
    x = torch.randn(4, 6, dtype=torch.bfloat16)
    assert linear(x).dtype == torch.bfloat16
    assert linear.weight.dtype == torch.float32
    assert make_linear(6, 10, bias=False).bias is None


@pytest.mark.parametrize(("dims", "recipe", "multiple"), [((24, 32), "blockwise", 16), ((32, 48), "mxfp8", 32)])
def test_dimensions_that_fp8_can_not_take_are_refused(dims, recipe, multiple):
    precision = MixedPrecisionArgs(mixed_precision_dtype="fp8", linear_recipe=recipe)
    with pytest.raises(ConfigError, match=rf"{dims[0]} -> {dims[1]} can't run in FP8 \({recipe}\).*of {multiple} "):
        make_linear(*dims, bias=True, precision=precision)
    for off in (None, MixedPrecisionArgs(), MixedPrecisionArgs(linear_recipe=recipe)):
        assert make_linear(*dims, bias=True, precision=off).recipe is None
    assert make_linear(*dims, bias=True, precision=precision, why_not="for a reason").why_not == "for a reason"


def test_head_norm_is_torchs_group_norm():
    torch.manual_seed(0)
    norm = HeadNorm(3, 4, epsilon=1e-6)
    with torch.no_grad():
        norm.weight.normal_(), norm.bias.normal_()
    x = torch.randn(5, 12)
    # A group norm over (T, heads, width) with one channel a head.
    expected = F.group_norm(x.view(5, 3, 4), 3, norm.weight, norm.bias, eps=1e-6).flatten(1)
    torch.testing.assert_close(norm(x), expected)
    assert norm(torch.empty(0, 12)).shape == (0, 12)


def test_norm_without_parameters_has_none():
    assert list(Norm(4, epsilon=1e-5, affine=False).parameters()) == []
    assert Norm(4, epsilon=1e-5, affine=True)(torch.empty(0, 4)).shape == (0, 4)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_share_and_the_mean(p):
    torch.manual_seed(0)
    x = torch.ones(400, 500)
    kept = dropout(x, p=p, training=True)
    assert set(kept.unique().tolist()) == {0.0, torch.tensor(1 / (1 - p)).item()}
    error = 4 * math.sqrt(p * (1 - p) / x.numel())
    assert abs((kept > 0).float().mean() - (1 - p)) < error


def test_dropout_follows_the_seed_and_its_gradient_is_its_mask():
    x = torch.randn(30, 4, requires_grad=True)
    results = []
    for _ in range(2):
        torch.manual_seed(7)
        results.append(dropout(x, p=0.3, training=True))
    assert torch.equal(*results)
    grad = torch.autograd.grad(results[0].sum(), x)[0]
    torch.testing.assert_close(results[0], grad * x)


def test_dropout_extremes():
    x = torch.randn(5, 3)
    assert torch.equal(dropout(x, p=0.5, training=False), x)
    assert torch.equal(dropout(x, p=0.0, training=True), x)
    assert (dropout(x, p=1.0, training=True) == 0).all()
    assert dropout(x.bfloat16(), p=0.5, training=True).dtype == torch.bfloat16
