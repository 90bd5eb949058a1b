"""FP8 attention in the whole ranking model, emulated: with FP8 linears and without, in every mode."""

from __future__ import annotations

import pytest
import torch

from genrec.configs.schema import ATTENTION_QUANTIZATIONS
from genrec.hstu.layer import HSTULayer
from genrec.hstu.preprocessor import HSTUPreprocessor
from genrec.model.ranking import RankingModel

MODES = [mode for mode in ATTENTION_QUANTIZATIONS if mode not in ("bf16", "128x1")]
NETWORK = {"hidden_size": 32, "num_attention_heads": 2, "kv_channels": 16, "dtype_str": "bfloat16"}
HEAD = {"prediction_head_arch": (32, 2), "num_tasks": 2}
RECIPES = (None, "tensorwise", "blockwise")


def fp8(mode, recipe=None, **fields):
    fields = {"backend": "emulated", "linear_recipe": recipe, "hstu_attn_quantization_mode": mode, **fields}
    return {"mixed_precision_dtype": "fp8", **fields}


@pytest.fixture
def make_model(make_config, metadata):
    """``make_model(precision, **network)``: the same first weights, whatever the precision."""

    def make(precision, **network):
        config = make_config(network=NETWORK | network, ranking=HEAD, mixed_precision=precision)
        torch.manual_seed(0)
        return RankingModel(config, metadata=metadata)

    return make


def train(model, batches, *, steps=1):
    """Losses, and the last gradients."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(batches[step % len(batches)]).loss_per_target.mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    return torch.stack(losses), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.fixture
def batches(make_batch):
    return [make_batch([1, 2, 3], lengths=[5, 0, 9]), make_batch([4, 5], lengths=[12, 1])]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mode", MODES)
def test_trains_as_without_fp8(mode, recipe, make_model, batches):
    exact, _ = train(make_model({"mixed_precision_dtype": None}), batches, steps=20)
    losses, gradients = train(make_model(fp8(mode, recipe)), batches, steps=20)
    assert losses.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)
    assert not torch.equal(losses, exact)
    assert losses[-2:].mean() < losses[:2].mean()
    torch.testing.assert_close(losses, exact, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("recipe", [None, "tensorwise"])
@pytest.mark.parametrize("mode", MODES)
def test_padding_rows_change_no_bit(mode, recipe, make_model, batches, monkeypatch):
    results = []
    for rows in (0, 1, 9, 16):
        with monkeypatch.context() as patch:
            patch.setattr(HSTUPreprocessor, "num_padding", lambda self, num_tokens, rows=rows: rows)
            results.append(train(make_model(fp8(mode, recipe)), batches, steps=2))
    for losses, gradients in results[1:]:
        assert torch.equal(losses, results[0][0])
        assert all(torch.equal(a, b) for a, b in zip(gradients, results[0][1], strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 16, 17])
def test_every_number_of_tokens_trains(recipe, num_tokens, make_model, make_batch):
    model = make_model(fp8("per-block", recipe, fp8_during_eval=True))
    batch = make_batch([1, 2], lengths=[num_tokens // 3, num_tokens - num_tokens // 3])
    output = model(batch)
    output.loss_per_target.sum().backward()
    losses, gradients = output.loss_per_target, [parameter.grad for parameter in model.parameters()]
    assert losses.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)
    with torch.no_grad():
        assert model.eval()(batch).logits.shape == (num_tokens, 2)


@pytest.mark.parametrize("recipe", RECIPES)
def test_evaluation_is_in_fp8_where_asked_and_only_there(recipe, make_model, batches):
    plain = make_model({"mixed_precision_dtype": None}).eval()
    off, on = (make_model(fp8("per-head", recipe, fp8_during_eval=wanted)).eval() for wanted in (False, True))
    with torch.no_grad():
        expected = plain(batches[0]).logits
        assert torch.equal(off(batches[0]).logits, expected)
        in_fp8 = on(batches[0]).logits
    assert not torch.equal(in_fp8, expected)
    torch.testing.assert_close(in_fp8, expected, rtol=0.1, atol=0.1)


def test_first_and_last_layer_stay_as_they_are_where_asked(make_model):
    model = make_model(fp8("per-head", skip_first_last_layer=True), num_layers=4)
    layers = [module for module in model.modules() if isinstance(module, HSTULayer)]
    assert [layer.quantization for layer in layers] == ["bf16", "per-head", "per-head", "bf16"]
    assert [bool(layer.attention_why_not) for layer in layers] == [True, False, False, True]


@pytest.mark.parametrize(("layer_style", "more"), [("dlrm_v3", {}), ("research", {"relative_bias": "none"})])
def test_other_layer_styles(layer_style, more, make_model, batches):
    exact, _ = train(make_model({"mixed_precision_dtype": None}, layer_style=layer_style, **more), batches, steps=4)
    losses, _ = train(make_model(fp8("1xdim", "tensorwise"), layer_style=layer_style, **more), batches, steps=4)
    assert not torch.equal(losses, exact)
    torch.testing.assert_close(losses, exact, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("recomputes", ["recompute_input_layernorm", "recompute_input_silu"])
def test_recompute_changes_no_bit(recomputes, make_model, batches):
    precision = fp8("per-block", "tensorwise")
    kept, again = (train(make_model(precision, **{recomputes: wanted}), batches, steps=3) for wanted in (False, True))
    assert torch.equal(kept[0], again[0])
    assert all(torch.equal(a, b) for a, b in zip(kept[1], again[1], strict=True))


def test_what_overflows_in_attention_is_seen_in_the_loss(make_model, batches):
    """A saturating cast would make a number of an infinite query, and the loss finite."""
    model = make_model(fp8("per-head"))
    model.encoder.block.layers[0].uvqk.register_forward_hook(
        lambda module, inputs, output: output.index_fill(1, torch.tensor([2 * 32 + 3]), float("inf"))
    )
    assert not model(batches[0]).loss_per_target.isfinite().all()
