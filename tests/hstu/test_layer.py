"""The three layers against a loop over rows and keys that shares nothing with them but the parameters."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from genrec.configs.schema import MixedPrecisionArgs, UnavailableError
from genrec.hstu.block import HSTUBlock
from genrec.hstu.jagged import JaggedSequence
from genrec.hstu.layer import HSTULayer

STYLES = ["recsys_examples", "dlrm_v3", "research"]
MAX_SEQLEN = 11


def make_layer(make_network, *, seed=0, **network):
    torch.manual_seed(seed)
    layer = HSTULayer(make_network(**network), max_seqlen_tokens=MAX_SEQLEN).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def sequence_of(case, values, timestamps=None):
    return JaggedSequence(
        values=values,
        offsets=case.offsets,
        max_seqlen=case.max_seqlen,
        num_contexts=case.num_contexts,
        num_targets=case.num_targets,
        timestamps=timestamps,
    )


def check(oracle, layer, case, *, alpha, scaling_seqlen=MAX_SEQLEN):
    torch.manual_seed(1)
    x = torch.randn(case.num_tokens, 12, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(x)
    timestamps = torch.randint(0, 500, (case.num_tokens,))
    output = layer(sequence_of(case, x, timestamps)).values
    loop = oracle.loop_layer(
        layer, x, case=case, alpha=alpha, scaling_seqlen=scaling_seqlen, timestamps=timestamps.tolist()
    )
    torch.testing.assert_close(output, loop, rtol=1e-9, atol=1e-11)
    inputs = [x, *layer.parameters()]
    expected = torch.autograd.grad(loop, inputs, grad, allow_unused=True)
    for mine, other in zip(torch.autograd.grad(output, inputs, grad), expected, strict=True):
        torch.testing.assert_close(mine, torch.zeros_like(mine) if other is None else other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", ["none", "table", "smooth"])
@pytest.mark.parametrize("style", STYLES)
def test_every_style_with_every_relative_bias(oracle, make_network, style, kind):
    layer = make_layer(make_network, layer_style=style, relative_bias=kind)
    case = oracle.Case((oracle.UserTokens(2, 3, 2), oracle.UserTokens(0, 4, 0)), oracle.Masking())
    check(oracle, layer, case, alpha=1.0 if style == "research" else 1 / math.sqrt(8))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("contextual_mask", ["prefix", "history"])
def test_values_and_all_gradients_for_every_mask(oracle, make_network, style, causal, contextual_mask):
    for window, size, kinds in itertools.product((0, 1), (1, 2), ("cht", "ch", "ht", "h")):
        full, short = {"c": 2, "h": 2, "t": 3}, {"c": 1, "h": 1, "t": 1}
        users = [oracle.UserTokens(*(n[kind] if kind in kinds else 0 for kind in "cht")) for n in (full, short)]
        masking = oracle.Masking(causal, contextual_mask, window, size)
        layer = make_layer(
            make_network,
            layer_style=style,
            is_causal=causal,
            contextual_mask=contextual_mask,
            max_attn_len=window,
            target_group_size=size,
        )
        check(oracle, layer, oracle.Case(tuple(users), masking), alpha=1.0 if style == "research" else 1 / math.sqrt(8))


@pytest.fixture
def case(oracle):
    return oracle.Case((oracle.UserTokens(2, 3, 2), oracle.UserTokens(1, 2, 0)))


def test_group_norm_over_heads(oracle, make_network, case):
    layer = make_layer(make_network, layer_style="dlrm_v3", output_norm="group")
    assert layer.output_norm.weight.shape == (2,)
    check(oracle, layer, case, alpha=1 / math.sqrt(8))


@pytest.mark.parametrize("style", STYLES)
def test_alpha_and_divisor_can_be_set(oracle, make_network, case, style):
    layer = make_layer(make_network, layer_style=style, attn_alpha=0.7, scaling_seqlen=5)
    check(oracle, layer, case, alpha=0.7, scaling_seqlen=5)


def test_without_contextual_mask_contexts_are_history(oracle, make_network, case):
    layer = make_layer(make_network, disable_contextual_mask=True)
    x = torch.randn(case.num_tokens, 12, dtype=torch.float64)
    plain = oracle.Case(tuple(oracle.UserTokens(0, u.contexts + u.history, u.targets) for u in case.users))
    assert torch.equal(layer(sequence_of(case, x)).values, layer(sequence_of(plain, x)).values)


def test_norm_epsilon_overrides_the_styles_own(make_network):
    defaults = {style: HSTULayer(make_network(layer_style=style), max_seqlen_tokens=4) for style in STYLES}
    assert [layer.input_norm.epsilon for layer in defaults.values()] == [1e-5, 1e-6, 1e-6]
    layer = HSTULayer(make_network(layer_style="dlrm_v3", norm_epsilon=1e-3), max_seqlen_tokens=4)
    assert (layer.input_norm.epsilon, layer.output_norm.epsilon) == (1e-3, 1e-3)


@pytest.mark.parametrize(
    ("style", "names"),
    [
        (
            "recsys_examples",
            "input_norm.weight input_norm.bias uvqk.weight uvqk.bias output_norm.weight output_norm.bias output.weight",
        ),
        (
            "dlrm_v3",
            "input_norm.weight input_norm.bias uvqk.weight uvqk.bias output_norm.weight output_norm.bias output.weight",
        ),
        ("research", "uvqk.weight output.weight output.bias relative_bias.position relative_bias.time"),
    ],
)
def test_parameters_of_each_style(make_network, style, names):
    layer = HSTULayer(make_network(layer_style=style), max_seqlen_tokens=MAX_SEQLEN)
    assert {name for name, _ in layer.named_parameters()} == set(names.split())
    assert layer.uvqk.weight.shape == (4 * 16, 12)
    assert layer.output.weight.shape == (12, 48 if style == "dlrm_v3" else 16)


def test_start_values_are_reproducible_and_qk_biases_start_where_told(make_network):
    def make(**network):
        torch.manual_seed(3)
        return HSTULayer(make_network(**network), max_seqlen_tokens=4)

    plain, shifted = make(), make(qk_bias_init=0.5)
    assert shifted.uvqk.bias[:32].eq(0).all() and shifted.uvqk.bias[32:].eq(0.5).all()
    assert plain.uvqk.bias.eq(0).all()
    assert torch.equal(plain.uvqk.weight, shifted.uvqk.weight)
    assert plain.uvqk.weight.abs().max() <= math.sqrt(6 / (12 + 64))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("training", [True, False])
def test_recomputing_changes_no_bit(make_network, case, style, training):
    results = []
    for layernorm, silu in itertools.product((False, True), repeat=2):
        network = make_network(
            layer_style=style,
            hidden_dropout=0.5,
            recompute_input_layernorm=layernorm,
            recompute_input_silu=silu,
        )
        torch.manual_seed(0)
        block = HSTUBlock(network, max_seqlen_tokens=MAX_SEQLEN).train(training)
        x = torch.randn(case.num_tokens, 12, requires_grad=True)
        output = block(sequence_of(case, x, torch.arange(case.num_tokens))).values
        results.append([output, *torch.autograd.grad(output.square().sum(), [x, *block.parameters()])])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("recomputes", [True, False])
def test_recomputed_results_are_not_kept_between_forward_and_backward(make_network, monkeypatch, style, recomputes):
    network = make_network(layer_style=style, recompute_input_layernorm=recomputes, recompute_input_silu=recomputes)
    layer = HSTULayer(network, max_seqlen_tokens=MAX_SEQLEN)
    storages = {}

    def watched(name, function):
        def call(*args):
            result = function(*args)
            storages.setdefault(name, StorageWeakRef(result.untyped_storage()))
            return result

        return call

    monkeypatch.setattr(layer, "_activate", watched("silu", layer._activate))
    monkeypatch.setattr(layer.input_norm, "forward", watched("norm", layer.input_norm.forward))
    x = torch.randn(8, 12, requires_grad=True)
    output = layer(JaggedSequence(x, torch.tensor([0, 8]), 8, timestamps=torch.arange(8)))
    assert {name: storage.expired() for name, storage in storages.items()} == {"silu": recomputes, "norm": recomputes}
    output.values.sum().backward()


@pytest.mark.usefixtures("no_cutlass")
def test_precision_that_is_not_there(make_network):
    fp8 = MixedPrecisionArgs(mixed_precision_dtype="fp8", linear_recipe=None, hstu_attn_quantization_mode="per-block")
    with pytest.raises(UnavailableError, match="'per-block' does not go with a relative bias"):
        HSTULayer(make_network(layer_style="research"), max_seqlen_tokens=4, precision=fp8)
    with pytest.raises(UnavailableError, match="kernel_backend 'cutlass'"):
        HSTULayer(make_network(kernel_backend="cutlass"), max_seqlen_tokens=4)


def test_bfloat16_activations_with_float32_weights(make_network, case):
    layer = HSTULayer(make_network(), max_seqlen_tokens=MAX_SEQLEN)
    x = torch.randn(case.num_tokens, 12, dtype=torch.bfloat16, requires_grad=True)
    output = layer(sequence_of(case, x)).values
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert x.grad.dtype == torch.bfloat16
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())
