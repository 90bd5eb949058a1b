"""Which tables a configuration makes, and where a batch's vectors end up."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from genrec.configs.schema import BenchmarkDatasetArgs, ConfigError, EmbeddingArgs, FeatureArgs
from genrec.model.embedding import FeatureEmbeddings
from genrec.model.features import feature_layout
from genrec.model.table_specs import TableSpec, embedding_tables

SYNTHETIC = BenchmarkDatasetArgs(
    feature_args=(
        FeatureArgs(feature_names=("video", "click"), max_sequence_length=7),
        FeatureArgs(feature_names=("interests",), max_sequence_length=3, is_jagged=True),
        FeatureArgs(feature_names=("city",), max_sequence_length=1),
    ),
    embedding_args=(
        EmbeddingArgs(("video",), "video", 50, "model_parallel"),
        EmbeddingArgs(("click",), "click", 4),
        EmbeddingArgs(("interests", "city"), "shared", 30),
    ),
    item_feature_name="video",
    contextual_feature_names=("interests", "city"),
    action_feature_name="click",
)


def test_tables_of_a_prepared_dataset(make_config, metadata) -> None:
    config = make_config(network={"item_embedding_dim": 4, "contextual_embedding_dim": 6})
    assert embedding_tables(config, metadata) == (
        TableSpec("age", ("age",), 6, 6),
        TableSpec("gender", ("gender",), 2, 6),
        TableSpec("item", ("item",), 20, 4),
        TableSpec("action", ("action",), 5, 4),
    )
    assert {table.embedding_dim for table in embedding_tables(make_config(), metadata)} == {16}


def test_contexts_are_those_asked_for_in_that_order(make_config, metadata) -> None:
    layout = feature_layout(make_config(dataset={"contextual_features": ("gender",)}), metadata)
    assert layout.names == ("gender", "item", "action")
    assert feature_layout(make_config(dataset={"contextual_features": ()}), metadata).names == ("item", "action")
    with pytest.raises(ConfigError, match="names 'zip', which dataset 'small' lacks: it has 'age', 'gender'"):
        feature_layout(make_config(dataset={"contextual_features": ("age", "zip")}), metadata)


def test_longest_sequence_in_tokens(make_config, metadata) -> None:
    config = make_config(dataset={"max_num_candidates": 3})
    assert feature_layout(config, metadata).max_num_tokens == 2 + 2 * (12 + 3)
    without_actions = dataclasses.replace(metadata, num_actions=0)
    assert feature_layout(config, without_actions).max_num_tokens == 2 + (12 + 3)


def test_tables_of_synthetic_data(make_config) -> None:
    config = dataclasses.replace(make_config(), dataset=SYNTHETIC)
    assert embedding_tables(config, None) == (
        TableSpec("video", ("video",), 50, 16, "model_parallel"),
        TableSpec("click", ("click",), 4, 16),
        TableSpec("shared", ("interests", "city"), 30, 16),
    )
    assert feature_layout(config, None).max_num_tokens == 3 + 1 + 2 * 7


def test_a_table_of_two_dims_or_of_nothing_is_refused(make_config) -> None:
    config = make_config(network={"contextual_embedding_dim": 8})
    mixed = (EmbeddingArgs(("video", "city"), "mixed", 50), EmbeddingArgs(("click", "interests"), "rest", 50))
    with pytest.raises(ConfigError, match=r"table 'mixed' .*needs embedding dims \[8, 16\] at once"):
        embedding_tables(
            dataclasses.replace(config, dataset=dataclasses.replace(SYNTHETIC, embedding_args=mixed)), None
        )
    features = (*SYNTHETIC.feature_args, FeatureArgs(feature_names=("unused",), max_sequence_length=1))
    tables = (*SYNTHETIC.embedding_args, EmbeddingArgs(("unused",), "idle", 5))
    dataset = dataclasses.replace(SYNTHETIC, feature_args=features, embedding_args=tables)
    with pytest.raises(ConfigError, match=r"table 'idle' .*is read by no feature in use"):
        embedding_tables(dataclasses.replace(config, dataset=dataset), None)


def test_any_table_name_but_a_dotted_one(make_config, metadata) -> None:
    layout = feature_layout(make_config(), metadata)
    FeatureEmbeddings([TableSpec(name, (name,), 3, 4) for name in ("items", "values", "training")], layout=layout)
    with pytest.raises(ConfigError, match=r"'a\.b' has a dot in its name"):
        FeatureEmbeddings([TableSpec("a.b", ("item",), 3, 4)], layout=layout)


def test_lookup_puts_contexts_user_after_user(make_config, make_batch) -> None:
    config = dataclasses.replace(make_config(), dataset=SYNTHETIC)
    layout = feature_layout(config, None)
    embeddings = FeatureEmbeddings(embedding_tables(config, None), layout=layout)
    batch = make_batch([0, 1], lengths=[2, 1])
    features = KeyedJaggedTensor(
        keys=["click", "interests", "video", "city"],
        values=torch.tensor([3, 0, 1, 10, 11, 12, 40, 41, 42, 20, 21]),
        lengths=torch.tensor([2, 1, 0, 3, 2, 1, 1, 1]),
    )
    batch = dataclasses.replace(
        batch,
        features=features,
        item_feature_name="video",
        action_feature_name="click",
        contextual_feature_names=layout.contextual,
    )
    inputs = embeddings(batch)
    shared = embeddings.collections["dim16"].embeddings["table_shared"].weight
    assert torch.equal(inputs.context, shared[[20, 10, 11, 12, 21]])
    assert inputs.context_offsets.tolist() == [0, 1, 5]
    assert torch.equal(inputs.item, embeddings.collections["dim16"].embeddings["table_video"].weight[[40, 41, 42]])
    assert torch.equal(inputs.action, embeddings.collections["dim16"].embeddings["table_click"].weight[[3, 0, 1]])
    assert inputs.event_offsets.tolist() == [0, 2, 3]


def test_no_user_and_users_without_events(make_config, make_batch, metadata) -> None:
    config = make_config()
    layout = feature_layout(config, metadata)
    embeddings = FeatureEmbeddings(embedding_tables(config, metadata), layout=layout)
    nobody = embeddings(make_batch([], lengths=[]))
    assert nobody.item.shape == nobody.action.shape == nobody.context.shape == (0, 16)
    assert nobody.event_offsets.tolist() == nobody.context_offsets.tolist() == [0]
    silent = embeddings(make_batch([1, 2], lengths=[0, 0]))
    assert silent.item.shape == (0, 16) and silent.context.shape == (4, 16)
    assert silent.event_offsets.tolist() == [0, 0, 0] and silent.context_offsets.tolist() == [0, 2, 4]
    for inputs in (nobody, silent):
        embeddings.zero_grad()
        sum(t.sum() for t in (inputs.item, inputs.action, inputs.context)).backward()
        assert all(parameter.grad is not None for parameter in embeddings.parameters())


@pytest.mark.parametrize("wrong", [-1, 20])
def test_an_id_outside_its_table_never_reads_a_row(wrong, make_config, make_batch, metadata) -> None:
    config = make_config()
    embeddings = FeatureEmbeddings(embedding_tables(config, metadata), layout=feature_layout(config, metadata))
    batch = make_batch([1], lengths=[2])
    batch.features.values()[2] = wrong
    with pytest.raises(IndexError):
        embeddings(batch)


def test_initial_spread(make_config, metadata) -> None:
    torch.manual_seed(0)
    tables = (TableSpec("item", ("item",), 10_000, 16),)
    layout = feature_layout(make_config(dataset={"contextual_features": ()}), metadata)
    normal = (
        FeatureEmbeddings(tables, layout=layout, init_std=0.02).collections["dim16"].embeddings["table_item"].weight
    )
    assert float(normal.detach().std()) == pytest.approx(0.02, rel=0.02)
    uniform = FeatureEmbeddings(tables, layout=layout).collections["dim16"].embeddings["table_item"].weight
    assert float(uniform.detach().abs().max()) == pytest.approx(0.01, rel=0.02)


FEATURES = ("year", "genres")


@pytest.fixture
def with_features(make_config, metadata):
    config = make_config(dataset={"item_features": FEATURES}, network={"item_embedding_dim": 4})
    torch.manual_seed(0)
    return FeatureEmbeddings(embedding_tables(config, metadata), layout=feature_layout(config, metadata))


def test_tables_of_item_features(make_config, metadata) -> None:
    config = make_config(dataset={"item_features": FEATURES}, network={"item_embedding_dim": 4})
    tables = embedding_tables(config, metadata)
    assert tables[-2:] == (
        TableSpec("item_year", ("item_year",), 3, 4),
        TableSpec("item_genres", ("item_genres",), 4, 4),
    )
    assert feature_layout(config, metadata).max_num_tokens == feature_layout(make_config(), metadata).max_num_tokens
    unknown = make_config(dataset={"item_features": ("genre",)})
    with pytest.raises(ConfigError, match=r"item_features names 'genre', .* 'small' lacks: it has 'genres', 'year'"):
        feature_layout(unknown, metadata)


def test_an_items_embedding_is_its_row_and_its_features(with_features, make_batch) -> None:
    batch = make_batch([1, 2, 3], lengths=[9, 0, 12], item_features=FEATURES)
    table = {name.split("table_")[1].split(".")[0]: weight for name, weight in with_features.named_parameters()}
    expected = []
    for item in batch.features["item"].values().tolist():
        genres, year = [[], [2], [1, 3], [1, 2, 3]][item % 4], [None, 1, 2, 1][item % 4]
        row = table["item"][item]
        for genre in genres:
            row = row + table["item_genres"][genre] / len(genres) ** 0.5
        expected.append(row if year is None else row + table["item_year"][year])
    inputs = with_features(batch)
    torch.testing.assert_close(inputs.item, torch.stack(expected))
    assert inputs.event_offsets.tolist() == [0, 9, 9, 21] and inputs.tokens_per_event == 2
    inputs.item.square().sum().backward()
    for name in ("item_genres", "item_year"):
        assert not table[name].grad[0].any() and table[name].grad[1:].abs().sum(1).gt(0).all()


@pytest.mark.parametrize(("users", "lengths"), [([], []), ([1, 2], [0, 0])])
def test_item_features_of_no_events(with_features, make_batch, users, lengths) -> None:
    inputs = with_features(make_batch(users, lengths=lengths, item_features=FEATURES))
    assert inputs.item.shape == (0, 4) and inputs.event_offsets.tolist() == [0] * (len(users) + 1)
    (inputs.item.sum() + inputs.action.sum() + inputs.context.sum()).backward()
    assert all(parameter.grad is not None for parameter in with_features.parameters())


def test_a_batch_without_the_features_is_a_mistake(with_features, make_batch) -> None:
    with pytest.raises(AssertionError):
        with_features(make_batch([1], lengths=[2]))
