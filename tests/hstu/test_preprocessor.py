"""Where each embedding goes, and what is added to it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from genrec.configs.schema import MixedPrecisionArgs
from genrec.hstu.jagged import owners
from genrec.hstu.preprocessor import HSTUPreprocessor


def build(make_network, *, widths=(12, 12, 12), encode=False, precision=None, **network):
    torch.manual_seed(0)
    item_dim, action_dim, context_dim = widths
    preprocessor = HSTUPreprocessor(
        make_network(**network),
        item_dim=item_dim,
        action_dim=action_dim,
        context_dim=context_dim,
        max_seqlen_tokens=64,
        precision=precision,
    ).double()
    preprocessor.dtype = torch.float64
    if not encode:
        preprocessor.encoding.forward = lambda sequence, *, time_buckets: sequence.values
    return preprocessor


def test_contexts_then_items_and_actions_in_turn(make_network, make_inputs):
    inputs = make_inputs([2, 0, 1], contexts=[1, 2, 0], candidates=[1, 0, 1])
    sequence = build(make_network)(inputs)
    item, action, context = inputs.item, inputs.action, inputs.context
    expected = [context[0], item[0], action[0], item[1], action[1], context[1], context[2], item[2], action[2]]
    assert torch.equal(sequence.values, torch.stack(expected))
    assert sequence.offsets.tolist() == [0, 5, 7, 9]
    assert sequence.num_contexts.tolist() == [1, 2, 0]
    assert sequence.num_targets.tolist() == [2, 0, 2]
    assert sequence.max_seqlen == 2 + 2 * 2
    assert (sequence.num_tokens, sequence.lengths.tolist()) == (9, [5, 2, 2])
    assert sequence.timestamps is None


def test_without_contexts_and_actions(make_network, make_inputs):
    inputs = make_inputs([2, 0, 1], actions=False)
    sequence = build(make_network)(inputs)
    assert torch.equal(sequence.values, inputs.item)
    assert sequence.num_contexts is None
    assert sequence.offsets.tolist() == [0, 2, 2, 3]


def test_every_embedding_gets_its_gradient(make_network, make_inputs):
    inputs = make_inputs([2, 0, 1], contexts=[1, 2, 0])
    weights = torch.randn(9, 12, dtype=torch.float64)
    (build(make_network)(inputs).values * weights).sum().backward()
    assert torch.equal(inputs.item.grad, weights[[1, 3, 7]])
    assert torch.equal(inputs.action.grad, weights[[2, 4, 8]])
    assert torch.equal(inputs.context.grad, weights[[0, 5, 6]])


def test_fused_actions_add_their_item(make_network, make_inputs):
    inputs = make_inputs([2, 1])
    values = build(make_network, action_fusion="add")(inputs).values
    assert torch.equal(values[0::2], inputs.item)
    assert torch.equal(values[1::2], inputs.action + inputs.item)


def test_other_widths_are_projected_by_mlps(make_network, make_inputs):
    inputs = make_inputs([2, 1], contexts=[1, 1], width=5)
    preprocessor = build(make_network, widths=(5, 5, 5))
    mlp = lambda net, x: net[2](torch.relu(net[0](x)))  # noqa: E731
    values = preprocessor(inputs).values
    torch.testing.assert_close(values[1], mlp(preprocessor.item_mlp, inputs.item)[0])
    # Items and actions of one width share an MLP, as in recsys-examples; contexts have their own.
    assert preprocessor.action_mlp is None
    torch.testing.assert_close(values[2], mlp(preprocessor.item_mlp, inputs.action)[0])
    torch.testing.assert_close(values[0], mlp(preprocessor.context_mlp, inputs.context)[0])
    own = build(make_network, widths=(12, 5, None))
    assert own.item_mlp is None and own.action_mlp is not None and own.context_mlp is None
    mixed = replace(make_inputs([2, 1]), action=inputs.action)
    torch.testing.assert_close(own(mixed).values[1::2], mlp(own.action_mlp, inputs.action))


def test_position_encoding_counts_contexts_and_gives_targets_one_place(make_network, make_inputs):
    inputs = make_inputs([3, 2], contexts=[1, 1], candidates=[2, 0])
    preprocessor = build(make_network, encode=True, num_position_buckets=4)
    sequence = preprocessor(inputs)
    plain = build(make_network)(inputs).values
    # User 1: context 0, item 1, action 2, then four target tokens at place 3. User 2: its last token is cut to place 3.
    places = [0, 1, 2, 3, 3, 3, 3, 0, 1, 2, 3, 3]
    expected = plain * 12**0.5 + preprocessor.encoding.position[places]
    torch.testing.assert_close(sequence.values, expected)


def test_time_encoding_gives_both_tokens_of_an_event_its_bucket(make_network, make_inputs):
    inputs = replace(make_inputs([2], contexts=[1]), timestamps=torch.tensor([0, 60 * 9]))
    preprocessor = build(make_network, encode=True, use_time_encoding=True)
    plain = build(make_network)(inputs).values * 12**0.5 + preprocessor.encoding.position[:5]
    expected = plain + preprocessor.encoding.time[[2048, 3, 3, 0, 0]]
    torch.testing.assert_close(preprocessor(inputs).values, expected)


def test_timestamps_of_tokens_where_the_layer_reads_them(make_network, make_inputs):
    inputs = replace(make_inputs([2], contexts=[1]), timestamps=torch.tensor([5, 8]))
    assert build(make_network, layer_style="research")(inputs).timestamps.tolist() == [0, 5, 5, 8, 8]


def fp8_attention(pad_multiple):
    return MixedPrecisionArgs("fp8", linear_recipe=None, hstu_attn_quantization_mode="fp8", pad_multiple=pad_multiple)


def test_without_fp8_nothing_is_padded(make_network, make_inputs):
    precision = MixedPrecisionArgs(pad_multiple=16)
    assert build(make_network, precision=precision)(make_inputs([2, 0, 1])).num_padding == 0


@pytest.mark.parametrize(("multiple", "padding"), [(None, 0), (1, 0), (8, 7), (16, 7), (3, 0)])
def test_padding_comes_at_the_very_end_and_is_zero(make_network, make_inputs, multiple, padding):
    inputs = make_inputs([2, 0, 1], contexts=[1, 2, 0])
    sequence = build(make_network, encode=True, precision=fp8_attention(multiple))(inputs)
    assert sequence.num_padding == padding
    assert sequence.values.shape[0] == 9 + padding
    assert sequence.num_tokens == 9
    assert (sequence.values[9:] == 0).all()


def test_a_user_longer_than_the_divisor_allows_is_refused(make_network, make_inputs):
    with pytest.raises(ValueError, match="up to 66 tokens, but the encoder was built for max_seqlen_tokens = 64"):
        build(make_network)(make_inputs([33]))


def test_dropout_only_in_training(make_network, make_inputs):
    preprocessor = build(make_network, hidden_dropout=0.5)
    inputs = make_inputs([20])
    assert (preprocessor(inputs).values == 0).any()
    assert not (preprocessor.eval()(inputs).values == 0).any()


@pytest.mark.parametrize(("hidden", "embedding", "drops"), [(0.5, 0.0, False), (0.0, 0.5, True)])
def test_embedding_dropout_takes_the_place_of_hidden_dropout(make_network, make_inputs, hidden, embedding, drops):
    preprocessor = build(make_network, hidden_dropout=hidden, embedding_dropout=embedding)
    assert (preprocessor(make_inputs([20])).values == 0).any() == drops


def test_values_come_in_the_networks_dtype(make_network, make_inputs):
    inputs = make_inputs([2])
    inputs = replace(inputs, item=inputs.item.float(), action=inputs.action.float())
    network = make_network(dtype_str="bfloat16")
    preprocessor = HSTUPreprocessor(network, item_dim=12, action_dim=12, context_dim=None, max_seqlen_tokens=64)
    assert preprocessor(inputs).values.dtype == torch.bfloat16


def test_owners():
    assert owners(torch.tensor([0, 3, 3, 5]), num_rows=5).tolist() == [0, 0, 0, 2, 2]
    assert owners(torch.tensor([0]), num_rows=0).tolist() == []
