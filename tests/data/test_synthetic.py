"""Distributions mean what recsys-examples' mean, and synthetic sequences don't depend on ranks or batch size."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from genrec.configs.schema import BenchmarkDatasetArgs, EmbeddingArgs, FeatureArgs, RandomDistribution
from genrec.data.distributions import sample
from genrec.data.format import DataError
from genrec.data.synthetic import SyntheticLoader


def draw(size=20_000, **distribution):
    return sample(RandomDistribution(**distribution), size, rng=np.random.default_rng(0))


def test_uniform_leaves_out_high():
    values = draw(dist_type="uniform", low=3, high=6)
    assert values.dtype == np.int64 and set(values.tolist()) == {3, 4, 5}


def test_normal_is_rounded_and_clamped():
    values = draw(dist_type="normal", mean=10.0, std=4.0, low=2, high=18)
    assert (values.min(), values.max()) == (2, 18)
    assert abs(values.mean() - 10) < 0.2


@pytest.mark.parametrize("std", [None, 50.0])
def test_lognormal_takes_the_moments_of_the_values(std):
    values = draw(dist_type="lognormal", mean=200.0, std=std)
    assert abs(values.mean() / 200 - 1) < 0.02
    assert abs(values.std() / (std or 100) - 1) < 0.05


@pytest.mark.parametrize("low", [0, 1, 256])
def test_zipf_starts_at_low_and_is_clamped(low):
    values = draw(dist_type="zipf", alpha=2.0, low=low, high=low + 10)
    assert (values.min(), values.max()) == (low, low + 10)
    shares = [(values == low + k).mean() for k in range(3)]
    weight = math.pi**2 / 6
    assert np.allclose(shares, [1 / weight, 1 / 4 / weight, 1 / 9 / weight], atol=0.02)


def test_zipf_without_high_never_wraps():
    values = draw(dist_type="zipf", alpha=1.02, low=1000)
    assert values.min() == 1000 and values.max() > 2**40
    assert (draw(dist_type="zipf", alpha=1.02) >= 0).all()


def args(*, jagged=True, candidates=0, contexts=("age",), value_dists=None, context_length=1, **options):
    lengths = RandomDistribution(dist_type="zipf", low=1, alpha=1.3)
    return BenchmarkDatasetArgs(
        feature_args=(
            FeatureArgs(("item", "action"), 20, is_jagged=jagged, seqlen_dist=lengths, value_dists=value_dists),
            FeatureArgs(("age", "extra"), context_length),
        ),
        embedding_args=(EmbeddingArgs(("item",), "items", 50), EmbeddingArgs(("action", "age"), "shared", 7)),
        item_feature_name="item",
        action_feature_name="action",
        contextual_feature_names=contexts,
        max_num_candidates=candidates,
        num_generated_batches=3,
        **options,
    )


def users(batches):
    """user id to items, over batches."""
    out = {}
    for batch in batches:
        items = torch.split(batch.features["item"].values(), batch.features["item"].lengths().tolist())
        out |= {user: part.tolist() for user, part in zip(batch.user_ids.tolist(), items, strict=True)}
    return out


def test_shapes_and_ranges():
    batch = next(iter(SyntheticLoader(args(), batch_size=8, num_label_values=4)))
    assert batch.features.keys() == ["age", "item", "action"] and batch.batch_size == 8
    lengths = batch.features["item"].lengths()
    assert (
        torch.equal(lengths, batch.features["action"].lengths()) and batch.features["age"].lengths().tolist() == [1] * 8
    )
    assert lengths.min() >= 1 and lengths.max() <= 20 and batch.max_num_events == lengths.max()
    assert torch.equal(batch.num_labelled, lengths) and batch.labels.numel() == lengths.sum()
    assert batch.features["item"].values().max() < 50 and batch.features["action"].values().max() < 7
    assert batch.labels.min() >= 0 and batch.labels.max() < 4


@pytest.mark.parametrize(("mode", "has_candidates"), [("train", True), ("sequential", False), ("frozen", True)])
def test_modes(mode, has_candidates):
    batch = next(iter(SyntheticLoader(args(candidates=4), batch_size=8, num_label_values=2, mode=mode)))
    expected = batch.features["item"].lengths().clamp(max=4)
    assert torch.equal(batch.num_labelled, expected)
    assert torch.equal(batch.num_candidates, expected if has_candidates else torch.zeros_like(expected))


@pytest.mark.parametrize("balanced", [False, True])
def test_world_size_does_not_matter(balanced):
    one = users(SyntheticLoader(args(), batch_size=6, num_label_values=2, seed=2))
    ranks = [
        SyntheticLoader(args(), batch_size=2, num_label_values=2, seed=2, rank=rank, world_size=3, balanced=balanced)
        for rank in range(3)
    ]
    together = users(itertools.chain(*ranks))
    assert together == one and len(one) == 18


def test_imbalance_is_of_the_global_batches():
    loader = SyntheticLoader(args(), batch_size=4, num_label_values=2, world_size=3, balanced=True)
    said = loader.imbalance(num_batches=2)
    assert said.num_batches == 2 and 1 <= said.balanced <= said.sliced <= 3


def test_epochs_repeat_and_resume():
    first = SyntheticLoader(args(), batch_size=2, num_label_values=2)
    epochs = [[batch.user_ids.tolist() for batch in first] for _ in range(2)]
    assert epochs[0] == epochs[1] and len(first) == 3
    stopped = SyntheticLoader(args(), batch_size=2, num_label_values=2)
    next(iter(stopped))
    resumed = SyntheticLoader(args(), batch_size=2, num_label_values=2)
    resumed.load_state_dict(stopped.state_dict())
    assert [batch.user_ids.tolist() for batch in resumed] == epochs[0][1:]
    with pytest.raises(DataError, match="of seed 0, this run has 1"):
        SyntheticLoader(args(), batch_size=2, num_label_values=2, seed=1).load_state_dict(stopped.state_dict())


def test_fixed_lengths_and_unclamped_values():
    zipf = RandomDistribution(dist_type="zipf", alpha=1.1)
    loader = SyntheticLoader(args(jagged=False, value_dists={"item": zipf}), batch_size=4, num_label_values=2)
    batch = next(iter(loader))
    assert batch.features["item"].lengths().tolist() == [20] * 4
    assert batch.features["item"].values().max() == 49  # clamped to the table


def test_refusals():
    beyond = RandomDistribution(dist_type="uniform", low=0, high=51)
    with pytest.raises(DataError, match="'item' draws ids from 0 to 51 but table 'items' has 50 rows"):
        SyntheticLoader(args(value_dists={"item": beyond}), batch_size=2, num_label_values=2)
    with pytest.raises(DataError, match="contextual feature 'age' has max_sequence_length 3"):
        SyntheticLoader(args(context_length=3), batch_size=2, num_label_values=2)
    with pytest.raises(DataError, match="max_num_candidates is 0, frozen evaluation needs at least 1"):
        SyntheticLoader(args(), batch_size=2, num_label_values=2, mode="frozen")


def test_unused_features_are_named(caplog):
    SyntheticLoader(args(), batch_size=2, num_label_values=2)
    assert "extra are neither item, action nor context" in caplog.text
