"""The relative biases: the numbers they stand for, and that any layer style can have them."""

from __future__ import annotations

import math

import pytest
import torch

from genrec.hstu.attention.bias import time_index
from genrec.hstu.layer import HSTULayer
from genrec.hstu.relative_bias import SmoothBias, TableBias

MAX_SEQLEN = 9


def smooth_bias(seed=0):
    bias = SmoothBias(max_seqlen_tokens=MAX_SEQLEN).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in bias.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return bias


@pytest.mark.parametrize("distance", [0, 1, 2, 7, 8, -3])
def test_a_position_weight_is_a_sum_of_decays_for_odd_or_for_even_distances(distance):
    bias = smooth_bias()
    position = bias()[0].detach()
    first = 4 if distance % 2 else 0
    decays = [math.exp(-abs(distance) / scale) for scale in (4, 16, 64, 256)]
    expected = 4 * sum(float(bias.position[first + k].detach()) * decay for k, decay in enumerate(decays))
    assert float(position[MAX_SEQLEN - 1 + distance]) == pytest.approx(expected, rel=1e-6)


def test_a_time_weight_is_a_sum_of_decays_and_same_timestamps_have_their_own():
    bias = smooth_bias()
    time = bias()[1].detach()
    for gap in (0, 60, 3600, 86400, 10**8):
        bucket = int(time_index(torch.tensor([gap]), torch.tensor([0]), num_weights=time.shape[0]))
        start = math.exp(0.301 * bucket)
        assert start <= max(gap, 1) < start * math.exp(0.301) * (1 + 1e-9)
        decays = [float(bucket == 0), *(math.exp(-start / scale) for scale in (3600, 86400, 30 * 86400))]
        expected = 4 * sum(float(w) * decay for w, decay in zip(bias.time.detach(), decays, strict=True))
        assert float(time[bucket]) == pytest.approx(expected, rel=1e-5, abs=1e-8)


def test_the_smooth_bias_starts_as_none(make_network):
    torch.manual_seed(0)
    layers = [HSTULayer(make_network(relative_bias=kind), max_seqlen_tokens=MAX_SEQLEN) for kind in ("none", "smooth")]
    layers[1].load_state_dict(layers[0].state_dict(), strict=False)
    position, time = layers[1].relative_bias()
    assert layers[0].relative_bias is None
    assert not position.any() and not time.any()


@pytest.mark.parametrize(
    ("style", "asked", "kind"),
    [
        ("recsys_examples", "auto", type(None)),
        ("dlrm_v3", "auto", type(None)),
        ("research", "auto", TableBias),
        ("research", "none", type(None)),
        ("recsys_examples", "smooth", SmoothBias),
        ("dlrm_v3", "table", TableBias),
    ],
)
def test_auto_is_what_the_layer_style_has(make_network, style, asked, kind):
    network = make_network(layer_style=style, relative_bias=asked)
    assert type(HSTULayer(network, max_seqlen_tokens=MAX_SEQLEN).relative_bias) is kind
