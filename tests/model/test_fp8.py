"""FP8 linears in the whole ranking model, emulated: padding changes nothing, every shape runs, nothing is left out."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torchrec.modules.embedding_modules import EmbeddingCollection

from genrec.configs.schema import BenchmarkDatasetArgs, EmbeddingArgs, FeatureArgs
from genrec.hstu.linear import Linear
from genrec.hstu.precision import region
from genrec.hstu.precision.state import precision_tensors, restore, snapshot
from genrec.hstu.preprocessor import HSTUPreprocessor
from genrec.model.ranking import RankingModel

RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
WIDE = {"hidden_size": 32, "num_attention_heads": 2, "kv_channels": 16}
HEAD = {"prediction_head_arch": (32, 32, 2), "num_tasks": 2}


def fp8(recipe="tensorwise", **fields):
    return {
        "mixed_precision_dtype": "fp8",
        "linear_recipe": recipe,
        "backend": "emulated",
        "amax_history_len": 4 if recipe == "delayed" else 1024,
        **fields,
    }


@pytest.fixture
def make_model(make_config, metadata):
    """``make_model(precision, network=..., ranking=...)``: the same first weights, whatever the precision."""

    def make(precision, *, network=None, ranking=HEAD, dataset=None):
        config = make_config(
            network=WIDE | (network or {}), ranking=ranking, mixed_precision=precision, dataset=dataset or {}
        )
        torch.manual_seed(0)
        return RankingModel(config, metadata=metadata)

    return make


def loss_and_gradients(model, batches):
    """The losses of each batch and the gradients of their sum, in one backward a batch, dropout from one seed."""
    model.zero_grad()
    torch.manual_seed(1)
    losses = []
    for batch in batches:
        loss = model(batch).loss_per_target
        loss.sum().backward()
        losses.append(loss.detach())
    return losses, [parameter.grad.clone() for parameter in model.parameters()]


def assert_same_bits(first, second):
    for a, b in zip(itertools.chain(*first), itertools.chain(*second), strict=True):
        assert torch.equal(a, b)


def randomize_vectors(model):
    """Biases and norms, which start at 0 and 1."""
    torch.manual_seed(2)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter)


def force_padding(monkeypatch, rows):
    """Exactly so many padding rows in the encoder, whatever the recipe needs; linears add what that lacks."""
    monkeypatch.setattr(HSTUPreprocessor, "num_padding", lambda self, num_tokens: rows)


@pytest.mark.parametrize("layer_style", ["recsys_examples", "dlrm_v3", "research"])
@pytest.mark.parametrize("scaling", ["hybrid", "e4m3"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_padding_rows_change_no_bit(recipe, scaling, layer_style, make_model, make_batch, monkeypatch) -> None:
    """Loss, gradients and what delayed scaling remembers, over four batches, with dropout and projections.

    Norms and linears have biases that make something of a row of zeros, and one batch has so few tokens that this
    something would be the largest in its block.
    """
    precision = fp8(recipe, linear_scaling_precision=scaling, enable_fp8_for_prediction_head=True)
    network = {"layer_style": layer_style, "hidden_dropout": 0.2, "item_embedding_dim": 64, "dtype_str": "bfloat16"}
    batches = [make_batch([1, 2, 3], lengths=lengths) for lengths in ([5, 0, 9], [4, 3, 2])]
    batches += [make_batch([4], lengths=[1]), make_batch(list(range(9)), lengths=[12] * 8 + [5])]
    results = []
    for rows in (0, 1, 9, 15, 16):
        with monkeypatch.context() as patch:
            force_padding(patch, rows)
            model = make_model(precision, network=network)
            randomize_vectors(model)
            losses, gradients = loss_and_gradients(model, batches)
            results.append((losses, gradients, list(precision_tensors(model).values())))
    assert results[0][1][0].any()
    for other in results[1:]:
        assert_same_bits(results[0], other)


@pytest.mark.parametrize("layer_style", ["recsys_examples", "dlrm_v3", "research"])
def test_padding_rows_enter_every_product_as_zeros(layer_style, make_model, make_batch, monkeypatch) -> None:
    """Forward and backward, whatever norms and biases make of a row of zeros, so that no amax sees them."""
    force_padding(monkeypatch, 9)
    model = make_model(fp8(), network={"layer_style": layer_style, "hidden_dropout": 0.2})
    randomize_vectors(model)
    num_tokens = 3 * 2 + 2 * (5 + 0 + 9)  # two contexts a user, two tokens an event
    seen = []

    def check(name, rows):
        assert rows.shape[0] == num_tokens + 9 and not rows[num_tokens:].any(), name
        assert rows.any(), name
        seen.append(name)

    for name, linear in linears(model.encoder.block).items():
        linear.register_forward_pre_hook(lambda module, inputs, name=name: check(f"{name} forward", inputs[0]))
        linear.register_full_backward_pre_hook(lambda module, dy, name=name: check(f"{name} backward", dy[0]))
    loss_and_gradients(model, [make_batch([1, 2, 3], lengths=[5, 0, 9])])
    assert len(seen) == 2 * 2 * 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_unwritten_memory_changes_no_bit(recipe, make_model, make_batch) -> None:
    """With every fresh buffer full of NaN."""
    batches = [make_batch([1, 2], lengths=[7, 4]), make_batch([3], lengths=[1]), make_batch([], lengths=[])]
    precision = fp8(recipe, enable_fp8_for_prediction_head=True)
    expected = loss_and_gradients(make_model(precision), batches)
    was = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        assert torch.empty(3).isnan().all()
        poisoned = loss_and_gradients(make_model(precision), batches)
    finally:
        torch.use_deterministic_algorithms(was[0])
        torch.utils.deterministic.fill_uninitialized_memory = was[1]
    assert_same_bits(expected, poisoned)
    assert all(gradient.isfinite().all() for gradient in poisoned[1])


def one_token_an_event(recipe, make_config, *, head, during_eval, head_fp8=True):
    """A model without actions and contexts, so that tokens are events and their number can be odd."""
    dataset = BenchmarkDatasetArgs(
        feature_args=(FeatureArgs(feature_names=("item",), max_sequence_length=64, is_jagged=True),),
        embedding_args=(EmbeddingArgs(feature_names=("item",), table_name="items", item_vocab_size_or_capacity=20),),
        item_feature_name="item",
        contextual_feature_names=(),
        action_feature_name=None,
    )
    precision = fp8(recipe, enable_fp8_for_prediction_head=head, fp8_during_eval=during_eval)
    config = dataclasses.replace(make_config(network=WIDE, ranking=HEAD, mixed_precision=precision), dataset=dataset)
    torch.manual_seed(0)
    return RankingModel(config)


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 8, 15, 16, 17, 24, 33])
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_number_of_tokens_trains_and_evaluates(recipe, head, num_tokens, make_config, make_batch) -> None:
    """Every token keeps its label and its loss: nothing is cut off to fit, and evaluation is padded too."""
    model = one_token_an_event(recipe, make_config, head=head, during_eval=True)
    lengths = [num_tokens // 3, num_tokens - num_tokens // 3]
    batch = make_batch([1, 2], lengths=lengths, contexts=(), with_actions=False)
    output = model(batch)
    output.loss_per_target.sum().backward()
    assert output.loss_per_target.shape == (num_tokens,) and output.loss_per_target.isfinite().all()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert bool(parameter.grad.any()) == (num_tokens > 0), name
    model.eval()
    with torch.no_grad():
        evaluated = model(batch)
    assert evaluated.logits.shape == (num_tokens, 2) and evaluated.logits.isfinite().all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_evaluation_is_in_fp8_where_asked_and_only_there(recipe, make_model, make_batch) -> None:
    batch = make_batch([1, 2, 3], lengths=[5, 0, 9])
    plain = make_model({"mixed_precision_dtype": None}).eval()
    off, on = make_model(fp8(recipe)).eval(), make_model(fp8(recipe, fp8_during_eval=True)).eval()
    with torch.no_grad():
        expected = plain(batch).logits
        assert torch.equal(off(batch).logits, expected)
        in_fp8 = on(batch).logits
    assert not torch.equal(in_fp8, expected)
    torch.testing.assert_close(in_fp8, expected, rtol=0.1, atol=0.1)


def test_every_number_of_users_evaluates_after_training(make_model, make_batch) -> None:
    """Such as the last batch of an evaluation, of 3 users, whose tokens are no multiple of anything."""
    model = make_model(fp8("delayed", fp8_during_eval=True))
    loss_and_gradients(model, [make_batch([1, 2], lengths=[8, 8])])
    model.eval()
    for users in (0, 1, 3):
        with torch.no_grad():
            output = model(make_batch(list(range(users)), lengths=[3] * users))
        assert output.logits.shape[0] == 3 * users and output.logits.isfinite().all()


def linears(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear)}


@pytest.mark.parametrize("layer_style", ["recsys_examples", "dlrm_v3", "research"])
def test_every_linear_obeys(layer_style, make_model) -> None:
    """In all layer styles, and in no place that was not asked for."""
    network = {"layer_style": layer_style, "num_layers": 3, "item_embedding_dim": 64, "contextual_embedding_dim": 16}
    all_on = linears(make_model(fp8("blockwise", enable_fp8_for_prediction_head=True), network=network))
    assert {name for name, linear in all_on.items() if linear.recipe is None} == {"head.output"}
    assert {linear.recipe.name for linear in all_on.values() if linear.recipe} == {"blockwise"}
    without_head = linears(make_model(fp8("blockwise"), network=network))
    assert {name for name, linear in without_head.items() if linear.recipe is None} == {
        name for name in without_head if name.startswith("head.")
    }
    skipping = linears(make_model(fp8("blockwise", skip_first_last_layer=True), network=network))
    assert {name for name, linear in skipping.items() if linear.recipe is not None} == {
        "encoder.block.layers.1.uvqk",
        "encoder.block.layers.1.output",
    }
    assert all(linear.why_not for linear in skipping.values() if linear.recipe is None)
    assert not any(linear.recipe for linear in linears(make_model({"mixed_precision_dtype": None})).values())


@pytest.mark.parametrize("recipe", RECIPES)
def test_precisions_load_each_others_weights(recipe, make_model, make_batch) -> None:
    """Names and dtypes of weights don't depend on the precision; FP8 state is not among them."""
    plain, quantized = make_model({"mixed_precision_dtype": None}), make_model(fp8(recipe))
    loss_and_gradients(quantized, [make_batch([1], lengths=[4])])
    states = plain.state_dict(), quantized.state_dict()
    assert [(n, t.dtype, t.shape) for n, t in states[0].items()] == [
        (n, t.dtype, t.shape) for n, t in states[1].items()
    ]
    assert {tensor.dtype for tensor in states[1].values()} == {torch.float32}
    torch.manual_seed(5)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    quantized.load_state_dict(plain.state_dict())
    plain.load_state_dict(quantized.state_dict())
    batch = make_batch([1, 2], lengths=[4, 7])
    torch.testing.assert_close(quantized(batch).logits, plain(batch).logits, rtol=0.2, atol=0.2)


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_quantized_weight_goes_stale(recipe, make_model, make_batch) -> None:
    """A quantized weight kept from an earlier step would train and look plausible."""
    batch, model = make_batch([1, 2], lengths=[6, 3]), make_model(fp8(recipe))
    seen = []
    for _ in range(3):
        loss_and_gradients(model, [batch, batch])  # two micro-batches: weights change after them, not between
        seen.append(model(batch).logits.detach())
        with torch.no_grad():
            for name, linear in linears(model).items():
                if linear.recipe is not None:
                    before = linear.weight.clone()
                    linear.weight.mul_(1.5)
                    assert not torch.equal(before, linear.weight), name
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    doubled = make_model(fp8(recipe))
    doubled.load_state_dict(model.state_dict())
    restore(doubled, snapshot(model))
    assert torch.equal(doubled(batch).logits, model(batch).logits)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("recomputes", [("recompute_input_layernorm",), ("recompute_input_silu",)])
def test_recompute_changes_no_bit(recomputes, recipe, make_model, make_batch) -> None:
    batches = [make_batch([1, 2, 3], lengths=[5, 0, 9]), make_batch([4], lengths=[3])]
    kept = loss_and_gradients(make_model(fp8(recipe)), batches)
    again = loss_and_gradients(make_model(fp8(recipe), network=dict.fromkeys(recomputes, True)), batches)
    assert_same_bits(kept, again)


def test_the_region_encloses_the_linears_and_nothing_else(make_model, make_batch) -> None:
    """Embeddings are looked up before it, losses taken after it, and all FP8 linears run in the same one."""
    model, seen = make_model(fp8("delayed", enable_fp8_for_prediction_head=True)), {}
    for name, module in model.named_modules():
        if isinstance(module, (Linear, EmbeddingCollection)):
            module.register_forward_hook(lambda *_, name=name: seen.update({name: list(region._open)}))
    loss = model._loss
    model._loss = lambda *inputs: seen.update(loss=list(region._open)) or loss(*inputs)
    model(make_batch([1], lengths=[4]))
    outside = {name for name, opened in seen.items() if not opened}
    assert outside == {"loss", *(name for name in seen if name.startswith("embeddings."))} and len(outside) > 1
    assert len({id(opened[0]) for opened in seen.values() if opened}) == 1
    assert region._open == []


def test_delayed_scaling_takes_one_step_a_pass(make_model, make_batch) -> None:
    """Also of a linear that items and actions share; evaluation and passes without gradients take none."""
    batch = make_batch([1, 2], lengths=[6, 3])
    model = make_model(fp8("delayed", enable_fp8_for_prediction_head=True), network={"item_embedding_dim": 64})
    for passes in range(1, 4):
        loss_and_gradients(model, [batch])
        for name, tensor in precision_tensors(model).items():
            if ".amax_history." in name:
                assert int((tensor != 0).sum()) == passes, name
    before = snapshot(model)
    with torch.no_grad():
        model(batch)
        model.eval()(batch)
    assert before.keys() == precision_tensors(model).keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in precision_tensors(model).items())


def test_infinity_before_an_fp8_product_does_not_stay_unseen(make_model, make_batch) -> None:
    """Saturation makes a number of it, so the loss stays finite; the watch tells."""
    model, batch = make_model(fp8("tensorwise", enable_fp8_for_prediction_head=True)), make_batch([1], lengths=[6])
    cpu = torch.device("cpu")
    loss_and_gradients(model, [batch])
    assert region.FINITE_WATCH.take(cpu).isfinite()
    assert region.FINITE_WATCH.take(cpu) is None

    def overflow(module, inputs, output):
        return output.index_fill(0, torch.tensor([2]), float("inf"))

    handle = model.encoder.register_forward_hook(overflow)
    losses, _ = loss_and_gradients(model, [batch])
    assert losses[0].isfinite().all()
    assert not region.FINITE_WATCH.take(cpu).isfinite()
    handle.remove()
    # In backward, of a linear without bias.
    output = model.encoder.block.layers[0].output
    assert output.bias is None
    handle = output.register_full_backward_pre_hook(lambda module, grads: (grads[0] * float("inf"),))
    loss_and_gradients(model, [batch])
    assert not region.FINITE_WATCH.take(cpu).isfinite()
    handle.remove()


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_learns_what_float32_learns(recipe, make_model, make_batch) -> None:
    batches = [make_batch([1, 2, 3], lengths=[5, 4, 9]), make_batch([4, 5], lengths=[8, 8])]

    def train(precision):
        model = make_model(precision)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for step in range(30):
            loss = model(batches[step % 2]).loss_per_target.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return float(loss.detach())

    plain, quantized = train({"mixed_precision_dtype": None}), train(fp8(recipe))
    assert plain < 0.1 and quantized < 0.1  # of 1.5 at the start
