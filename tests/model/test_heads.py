"""The prediction head: its options, what they do to the states and how it starts."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from genrec.model.heads import ACTIVATIONS, PredictionHead
from genrec.model.ranking import RankingModel

HEAD = {"layer_sizes": (8, 3), "activation": "silu", "bias": True}


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_is_an_mlp(activation) -> None:
    head = PredictionHead(6, **{**HEAD, "activation": activation})
    states = torch.randn(5, 6)
    expected = getattr(F, activation)(states @ head.hidden[0].weight.T) @ head.output.weight.T
    torch.testing.assert_close(head(states), expected)
    assert set(ACTIVATIONS) == {"relu", "gelu", "silu"}


@pytest.mark.parametrize("layer_sizes", [(3,), (8, 3)])
def test_starts_at_logits_of_zero_and_learns(layer_sizes) -> None:
    head = PredictionHead(6, **{**HEAD, "layer_sizes": layer_sizes}, zero_init=True)
    states = torch.randn(5, 6)
    assert not head(states).any()
    assert all(not parameter.any() for name, parameter in head.named_parameters() if name.endswith("bias"))
    head(states).square().sum().add(head(states).sum()).backward()
    assert head.output.weight.grad.any()
    plain = PredictionHead(6, **{**HEAD, "layer_sizes": layer_sizes})
    assert plain.output.weight.any() and not plain.output.bias.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layernorm_makes_scale_and_shift_of_the_state_irrelevant(dtype) -> None:
    head = PredictionHead(32, **HEAD, layernorm=True)
    states = torch.randn(5, 32)
    moved = head((7 * states + 3).to(dtype))
    assert moved.dtype == torch.float32
    torch.testing.assert_close(moved, head(states), rtol=0, atol=1e-4 if dtype == torch.float32 else 0.1)
    with torch.no_grad():
        head.norm.bias += 1.0
    assert not torch.allclose(head(states), moved)
    assert head(states[:0]).shape == (0, 3)


def test_dropout_is_of_the_normed_state_in_training_alone() -> None:
    torch.manual_seed(0)
    head = PredictionHead(400, **HEAD, layernorm=True, dropout_rate=0.25)
    seen = []
    head.hidden.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    states = torch.randn(20, 400)
    head(states), head.eval()(states)
    dropped = seen[0] == 0
    assert 0.2 < dropped.float().mean() < 0.3
    torch.testing.assert_close(seen[0][~dropped], seen[1][~dropped] / 0.75)
    assert torch.equal(seen[1], head.norm(states))


def test_options_come_from_the_configuration(make_config, metadata) -> None:
    options = {"head_layernorm": True, "head_dropout": 0.1, "head_zero_init": True, "prediction_head_act_type": "silu"}
    head = RankingModel(make_config(ranking=options), metadata=metadata).head
    assert head.norm is not None and head.dropout_rate == 0.1 and not head.output.weight.any()
    assert isinstance(head.hidden[1], torch.nn.SiLU)
    plain = RankingModel(make_config(), metadata=metadata).head
    assert plain.norm is None and plain.dropout_rate == 0.0 and plain.output.weight.any()
