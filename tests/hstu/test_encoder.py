"""What must hold of the whole encoder: who may influence whom, and what must change nothing."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from genrec.configs.schema import MixedPrecisionArgs, UnavailableError
from genrec.hstu.encoder import HSTUEncoder

STYLES = ["recsys_examples", "dlrm_v3", "research"]


def encode(encoder, inputs, labelled):
    return encoder(inputs, num_labelled=torch.tensor(labelled, dtype=torch.int64))


def influences(encoder, inputs, labelled):
    """(states, events): whether an event's item, and its action, has any influence on a state."""
    states = encode(encoder, inputs, labelled)
    rows = []
    for state in states:
        grads = torch.autograd.grad(state.sum(), [inputs.item, inputs.action], retain_graph=True)
        rows.append([grad.abs().sum(dim=1) > 0 for grad in grads])
    return [torch.stack([row[i] for row in rows]) for i in range(2)]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("window", [0, 3])
def test_the_future_never_leaks_through_three_layers(make_encoder, make_inputs, style, window):
    encoder = make_encoder(
        layer_style=style,
        num_layers=3,
        max_attn_len=window,
        use_time_encoding=True,
        time_encoding_reference="previous",
    )
    inputs = make_inputs([6, 5], contexts=[2, 1])
    by_item, by_action = influences(encoder, inputs, [6, 5])
    # Three layers of windows of three tokens reach far enough back here that everything earlier counts.
    same_user = torch.block_diag(torch.ones(6, 6), torch.ones(5, 5)).bool()
    earlier = torch.ones(11, 11).tril().bool() & same_user
    strictly = torch.ones(11, 11).tril(-1).bool() & same_user
    assert not (by_item & ~earlier).any()
    assert not (by_action & ~strictly).any(), "an item must not see its own action"
    if window == 0:
        assert torch.equal(by_item, earlier)
        assert torch.equal(by_action, strictly)


def test_contexts_that_see_the_history_do_leak_the_future(make_encoder, make_inputs):
    encoder = make_encoder(num_layers=2, contextual_mask="history")
    by_item, _ = influences(encoder, make_inputs([4], contexts=[1]), [4])
    assert by_item[0, 3], "the check in the configuration refuses this for a reason"


@pytest.mark.parametrize(
    ("network", "causal"),
    [
        ({}, True),
        ({"is_causal": False}, False),
        ({"contextual_mask": "history"}, False),
        ({"contextual_mask": "history", "disable_contextual_mask": True}, True),
        ({"use_time_encoding": True}, False),
        ({"use_time_encoding": True, "time_encoding_reference": "previous"}, True),
    ],
)
def test_encoder_knows_whether_history_sees_the_future(make_encoder, make_inputs, network, causal):
    encoder = make_encoder(**network)
    assert encoder.network.history_is_causal == causal
    inputs = make_inputs([4], contexts=[2])
    later = replace(inputs, timestamps=inputs.timestamps + torch.tensor([0, 0, 0, 10**6]))
    by_item, _ = influences(encoder, inputs, [4])
    unmoved = torch.equal(encode(encoder, inputs, [4])[:3], encode(encoder, later, [4])[:3])
    assert (not by_item.triu(1).any() and unmoved) == causal


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("contextual_mask", ["prefix", "history"])
def test_a_target_never_sees_another_group(make_encoder, make_inputs, style, size, contextual_mask):
    encoder = make_encoder(
        layer_style=style,
        num_layers=3,
        target_group_size=size,
        contextual_mask=contextual_mask,
        use_time_encoding=True,
        time_encoding_reference="previous",
    )
    inputs = make_inputs([7], contexts=[1], candidates=[4])
    by_item, by_action = influences(encoder, inputs, [7])
    history, targets = slice(0, 3), slice(3, 7)
    assert not by_item[history, targets].any() and not by_action[history, targets].any()
    assert by_item[targets, history].all() and by_action[targets, history].all()
    # Groups count tokens, two an event, causally within a group.
    groups = torch.arange(8) // size
    same = (groups[:, None] == groups[None, :]) & torch.ones(8, 8).tril().bool()
    assert torch.equal(by_item[targets, targets], same[0::2, 0::2])
    assert torch.equal(by_action[targets, targets], same[0::2, 1::2])
    # Which the configuration refuses with actions, since they tell the labels.
    assert bool(by_action[targets, targets].any()) == (size > 2)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("window", [0, 4])
def test_sequential_scores_are_those_of_each_event_alone_as_a_candidate(make_encoder, make_inputs, style, window):
    encoder = make_encoder(
        layer_style=style, max_attn_len=window, use_time_encoding=True, time_encoding_reference="previous"
    )
    sequential = encode(encoder, make_inputs([8], contexts=[2]), [8])
    for event in range(8):
        alone = encode(encoder, make_inputs([event + 1], contexts=[2], candidates=[1]), [1])
        torch.testing.assert_close(alone[0], sequential[event], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("style", STYLES)
def test_frozen_scores_do_not_depend_on_the_number_or_order_of_candidates(make_encoder, make_inputs, style):
    encoder = make_encoder(layer_style=style, use_time_encoding=True, time_encoding_reference="previous")
    inputs = make_inputs([9], contexts=[2], candidates=[4])
    together = encode(encoder, inputs, [4])
    for chosen in ([5], [8], [7, 6], [8, 7, 6, 5]):
        rows = [0, 1, 2, 3, 4, *chosen]
        some = replace(
            inputs,
            item=inputs.item[rows],
            action=inputs.action[rows],
            timestamps=inputs.timestamps[rows],
            event_offsets=torch.tensor([0, len(rows)]),
            num_candidates=torch.tensor([len(chosen)]),
        )
        expected = together[[row - 5 for row in chosen]]
        torch.testing.assert_close(encode(encoder, some, [len(chosen)]), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("style", STYLES)
def test_a_user_does_not_depend_on_who_shares_the_batch(make_encoder, make_inputs, style):
    encoder = make_encoder(layer_style=style, use_time_encoding=True)
    events, contexts, candidates = [5, 0, 1, 20, 6], [2, 1, 0, 3, 2], [2, 0, 1, 3, 0]
    together = encode(encoder, make_inputs(events, contexts=contexts, candidates=candidates), events)
    starts = [0, *itertools.accumulate(events)]
    for order in ([0], [1], [2], [3], [4], [4, 3, 2, 1, 0], [3, 0]):
        inputs = make_inputs(
            *[[events[i] for i in order]],
            contexts=[contexts[i] for i in order],
            candidates=[candidates[i] for i in order],
            seeds=order,
        )
        rows = [row for i in order for row in range(starts[i], starts[i] + events[i])]
        got = encode(encoder, inputs, [events[i] for i in order])
        torch.testing.assert_close(got, together[rows], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("multiple", [3, 16, 64])
@pytest.mark.usefixtures("nan_filled")
def test_padding_rows_change_nothing(make_encoder, make_inputs, style, multiple):
    inputs, labelled = make_inputs([5, 0, 3], contexts=[2, 1, 0], candidates=[2, 0, 0]), [5, 0, 2]
    results = []
    for precision in (None, MixedPrecisionArgs(pad_multiple=multiple)):
        encoder = make_encoder(layer_style=style)
        encoder.preprocessor.row_multiple = (precision.pad_multiple if precision else None) or 1
        states = encode(encoder, inputs, labelled)
        parameters = [inputs.item, inputs.action, inputs.context, *encoder.parameters()]
        results.append([states, *torch.autograd.grad(states.square().sum(), parameters)])
    for plain, padded in zip(*results, strict=True):
        torch.testing.assert_close(padded, plain, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("events", "contexts", "labelled"),
    [([], [], []), ([0], [0], [0]), ([0, 0], [2, 1], [0, 0]), ([0, 1], [0, 0], [0, 0])],
)
@pytest.mark.usefixtures("nan_filled")
def test_nothing_to_do_is_legal_and_gives_zero_gradients(make_encoder, make_inputs, style, events, contexts, labelled):
    encoder = make_encoder(layer_style=style, use_time_encoding=True, item_dim=5, action_dim=5, context_dim=5)
    inputs = make_inputs(events, contexts=contexts, width=5)
    states = encode(encoder, inputs, labelled)
    assert states.shape == (0, 12)
    states.sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad == 0).all(), name
    for embeddings in (inputs.item, inputs.action, inputs.context):
        assert (embeddings.grad == 0).all()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.usefixtures("nan_filled")
def test_every_length_around_a_block(make_encoder, make_inputs, style):
    lengths = [0, 1, 15, 16, 17, 31, 32, 33]
    encoder = make_encoder(layer_style=style, max_seqlen_tokens=70)
    inputs = make_inputs(lengths, contexts=[1] * 8)
    states = encode(encoder, inputs, lengths)
    assert states.isfinite().all()
    for grad in torch.autograd.grad(states.sum(), [inputs.item, inputs.action, inputs.context]):
        assert grad.isfinite().all()


def test_number_of_states_from_the_host_gives_the_same(make_encoder, make_inputs):
    encoder, inputs = make_encoder(), make_inputs([4, 2], contexts=[1, 1])
    labelled = torch.tensor([2, 1])
    assert torch.equal(encoder(inputs, num_labelled=labelled, num_states=3), encoder(inputs, num_labelled=labelled))


def test_same_seed_same_parameters_whatever_the_task_around_it(make_network):
    def make():
        torch.manual_seed(5)
        return HSTUEncoder(make_network(), item_dim=12, action_dim=12, context_dim=None, max_seqlen_tokens=8)

    for mine, other in zip(make().state_dict().values(), make().state_dict().values(), strict=True):
        assert torch.equal(mine, other)


def test_builds_on_the_meta_device(make_network):
    with torch.device("meta"):
        encoder = HSTUEncoder(make_network(), item_dim=5, action_dim=5, context_dim=5, max_seqlen_tokens=8)
    assert all(parameter.is_meta for parameter in encoder.parameters())


@pytest.mark.usefixtures("no_cutlass")
def test_what_is_not_there_is_refused_when_the_model_is_built(make_network):
    with pytest.raises(UnavailableError, match="kernel_backend 'cutlass'"):
        HSTUEncoder(
            make_network(kernel_backend="cutlass"), item_dim=12, action_dim=12, context_dim=None, max_seqlen_tokens=8
        )
