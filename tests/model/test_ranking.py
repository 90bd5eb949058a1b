"""What must hold for the ranking model: shapes, empty batches, independence of the batch, precision, learning."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from genrec.configs.schema import RANKING_METRICS, BenchmarkDatasetArgs, ConfigError, EmbeddingArgs, FeatureArgs
from genrec.model.ranking import RankingModel, RankingOutput
from genrec.training.metrics import RankingMetrics
from genrec.training.optim import build_optimizers

K_CLASS = {"prediction_head_arch": (8, 5), "num_tasks": 1}
ONE_TASK = {"prediction_head_arch": (8, 1), "num_tasks": 1}


@pytest.mark.parametrize(("ranking", "width"), [({}, 2), (K_CLASS, 5), (ONE_TASK, 1)])
@pytest.mark.parametrize("candidates", [None, [2, 0, 1]])
def test_one_output_a_labelled_item(ranking, width, candidates, make_config, make_batch, metadata) -> None:
    model = RankingModel(make_config(ranking=ranking), metadata=metadata)
    labelled = candidates or [2, 0, 5]
    output = model(make_batch([1, 2, 3], lengths=[3, 0, 5], labelled=labelled, candidates=candidates))
    count = sum(labelled)
    assert output.loss_per_target.shape == (count,) and output.logits.shape == (count, width)
    assert output.loss_per_target.dtype == output.logits.dtype == torch.float32
    assert model.scores(output).shape == model.binary_labels(output.labels).shape == (count, model.num_tasks)


@pytest.mark.parametrize("ranking", [{}, K_CLASS])
@pytest.mark.parametrize("contexts", [("age", "gender"), ()])
@pytest.mark.parametrize(
    "shape",
    [
        {"users": [], "lengths": []},
        {"users": [1, 2], "lengths": [0, 0]},
        {"users": [1, 2], "lengths": [3, 1], "labelled": [0, 0]},
    ],
    ids=["no users", "no events", "no labels"],
)
def test_nothing_to_score_gives_zero_gradients(shape, contexts, ranking, make_config, make_batch, metadata) -> None:
    config = make_config(ranking=ranking, dataset={"contextual_features": contexts})
    model = RankingModel(config, metadata=metadata)
    loss = model(make_batch(**shape, contexts=contexts)).loss_per_target.sum()
    loss.backward()
    assert loss.item() == 0.0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


@pytest.mark.parametrize("layer_style", ["recsys_examples", "dlrm_v3", "research"])
@pytest.mark.parametrize("dims", [(-1, -1), (4, 6)])
def test_every_parameter_takes_part(layer_style, dims, make_config, make_batch, metadata) -> None:
    network = {"layer_style": layer_style, "item_embedding_dim": dims[0], "contextual_embedding_dim": dims[1]}
    model = RankingModel(make_config(network=network), metadata=metadata)
    model(make_batch([1, 2], lengths=[4, 6])).loss_per_target.sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("layer_style", ["recsys_examples", "dlrm_v3", "research"])
@pytest.mark.parametrize("candidates", [None, [2]])
def test_scores_do_not_depend_on_who_shares_the_batch(
    layer_style, candidates, make_config, make_batch, metadata
) -> None:
    network = {"layer_style": layer_style, "use_time_encoding": True, "time_encoding_reference": "previous"}
    model = RankingModel(make_config(network=network), metadata=metadata).eval()
    alone = model(make_batch([7], lengths=[4], labelled=[2], candidates=candidates)).logits
    with_others = make_batch(
        [3, 7, 5], lengths=[12, 4, 1], labelled=[0, 2, 0], candidates=candidates and [0, *candidates, 1]
    )
    torch.testing.assert_close(model(with_others).logits, alone, rtol=1e-5, atol=1e-6)


def test_an_events_own_action_and_the_future_are_not_seen(make_config, make_batch, metadata) -> None:
    model = RankingModel(make_config(), metadata=metadata).eval()
    batch = make_batch([7], lengths=[5])
    before = model(batch).logits.detach()
    changed = make_batch([7], lengths=[5])
    actions = changed.features.values()[-5:]
    actions[2] = (actions[2] + 1) % 5  # of the middle event
    after = model(changed).logits.detach()
    assert torch.equal(before[:3], after[:3])
    assert not torch.equal(before[3:], after[3:])


@pytest.mark.parametrize("dtype_str", ["bfloat16", "float16"])
def test_low_precision_trains_and_scores_on_the_cpu(dtype_str, make_config, make_batch, metadata) -> None:
    torch.manual_seed(0)
    batch = make_batch([1, 2, 3], lengths=[5, 9, 12])
    exact = RankingModel(make_config(), metadata=metadata)
    model = RankingModel(make_config(network={"dtype_str": dtype_str}), metadata=metadata)
    model.load_state_dict(exact.state_dict())  # one checkpoint serves every dtype
    torch.testing.assert_close(model(batch).logits, exact(batch).logits, rtol=0.05, atol=0.05)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    optimizers = build_optimizers(model, make_config().optimizer)
    first = last = math.nan
    for step in range(30):
        loss = model(batch).loss_per_target.mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        first, last = (loss.item() if step == 0 else first), loss.item()
    assert last < 0.8 * first
    metrics = RankingMetrics(2, RANKING_METRICS)
    output = model(batch)
    users = batch.user_ids.repeat_interleave(batch.num_labelled)
    metrics.update(model.scores(output), model.binary_labels(output.labels), users, hits=model.hits(output))
    assert all(math.isfinite(value) for value in metrics.compute().values())


def test_small_steps_are_not_lost_in_bfloat16(make_config, make_batch, metadata) -> None:
    model = RankingModel(make_config(network={"dtype_str": "bfloat16"}), metadata=metadata)
    weight = next(p for p in model.encoder.parameters() if p.ndim == 2)
    before = weight.detach().clone()
    model(make_batch([1], lengths=[5])).loss_per_target.mean().backward()
    with torch.no_grad():
        weight -= 1e-6 * weight.grad.sign()
    moved = weight.grad != 0
    assert bool(moved.any()) and not torch.equal(before[moved], weight[moved])


def test_scores_labels_and_hits_of_tasks(make_config, metadata) -> None:
    model = RankingModel(make_config(), metadata=metadata)
    output = RankingOutput(torch.zeros(2), torch.tensor([[0.0, math.log(3)], [30.0, -40.0]]), torch.tensor([2, 1]))
    scores = model.scores(output)
    torch.testing.assert_close(scores[0], torch.tensor([0.5, 0.75], dtype=torch.float64))
    assert 0 < 1 - scores[1, 0] < 1e-12 and 0 < scores[1, 1] < 1e-16
    assert model.binary_labels(output.labels).tolist() == [[0, 1], [1, 0]]
    assert model.hits(output).tolist() == [[True, True], [True, True]]


def test_scores_labels_and_hits_of_classes(make_config, metadata) -> None:
    model = RankingModel(make_config(ranking=K_CLASS), metadata=metadata)
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.3, 0.1]]).log()
    output = RankingOutput(torch.zeros(1), logits, torch.tensor([3]))
    torch.testing.assert_close(model.scores(output), torch.tensor([[0.4]], dtype=torch.float64))
    assert model.binary_labels(torch.tensor([0, 2, 3, 4])).tolist() == [[0], [0], [1], [1]]
    assert model.hits(dataclasses.replace(output, logits=logits.roll(1))).tolist() == [[True]]
    assert model.hits(dataclasses.replace(output, labels=torch.tensor([0]))).tolist() == [[False]]


def test_task_weights_scale_the_loss(make_config, make_batch, metadata) -> None:
    torch.manual_seed(0)
    model = RankingModel(make_config(), metadata=metadata)
    batch = make_batch([1], lengths=[5])
    losses = {}
    for weights in ((1.0, 0.0), (0.0, 1.0), (2.0, 3.0)):
        weighted = RankingModel(make_config(ranking={"task_weights": weights}), metadata=metadata)
        weighted.load_state_dict(model.state_dict())
        losses[weights] = weighted(batch).loss_per_target
    torch.testing.assert_close(losses[2.0, 3.0], 2 * losses[1.0, 0.0] + 3 * losses[0.0, 1.0])
    torch.testing.assert_close(model(batch).loss_per_target, losses[1.0, 0.0] + losses[0.0, 1.0])


def test_l2_norm_makes_the_states_length_irrelevant(make_config, make_batch, metadata) -> None:
    model = RankingModel(make_config(ranking={"l2_norm": True}), metadata=metadata)
    states = []
    model.head.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    model(make_batch([1], lengths=[3]))
    torch.testing.assert_close(states[0].norm(dim=1), torch.ones(3))


def test_labels_the_dataset_lacks_are_refused(make_config, metadata) -> None:
    three_tasks = make_config(ranking={"prediction_head_arch": (8, 3), "num_tasks": 3})
    with pytest.raises(ConfigError, match=r"num_tasks is 3, but .* has 2 label bits \(rating>=4, rating>=5\)"):
        RankingModel(three_tasks, metadata=metadata)
    with pytest.raises(ConfigError, match="ends in 3 classes, but dataset 'small' has 5"):
        RankingModel(make_config(ranking={"prediction_head_arch": (3,), "num_tasks": 1}), metadata=metadata)


def test_builds_on_the_meta_device(make_config, metadata) -> None:
    meta = RankingModel(make_config(), metadata=metadata, device=torch.device("meta"))
    real = RankingModel(make_config(), metadata=metadata)
    assert {parameter.device.type for parameter in meta.parameters()} == {"meta"}
    assert [(n, p.shape) for n, p in meta.named_parameters()] == [(n, p.shape) for n, p in real.named_parameters()]


def test_synthetic_data_needs_no_metadata(make_config, make_batch) -> None:
    dataset = BenchmarkDatasetArgs(
        feature_args=(FeatureArgs(feature_names=("item", "action"), max_sequence_length=12),),
        embedding_args=(EmbeddingArgs(("item",), "items", 20), EmbeddingArgs(("action",), "actions", 5)),
        item_feature_name="item",
        contextual_feature_names=(),
        action_feature_name="action",
    )
    model = RankingModel(dataclasses.replace(make_config(ranking=K_CLASS), dataset=dataset), metadata=None)
    assert model(make_batch([1], lengths=[4], contexts=())).logits.shape == (4, 5)
    assert model.binary_labels(torch.tensor([1, 2])).tolist() == [[0], [1]]


def test_the_same_seed_gives_the_same_model(make_config, metadata) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(RankingModel(make_config(), metadata=metadata))
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))


def test_overfits_a_batch(make_config, make_batch, metadata) -> None:
    torch.manual_seed(0)
    model = RankingModel(make_config(ranking=K_CLASS), metadata=metadata)
    batch = make_batch([1, 2, 3], lengths=[6, 9, 12])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        loss = model(batch).loss_per_target.mean()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


ITEM_FEATURES = ("genres", "year")


@pytest.mark.parametrize("fusion", ["none", "add"])
@pytest.mark.parametrize("dim", [-1, 4])
def test_item_features_reach_item_and_fused_action_tokens(fusion, dim, make_config, make_batch, metadata) -> None:
    network = {"action_fusion": fusion, "item_embedding_dim": dim}
    config = make_config(dataset={"item_features": ITEM_FEATURES}, network=network)
    model = RankingModel(config, metadata=metadata).eval()
    batch = make_batch([1], lengths=[6], item_features=ITEM_FEATURES)
    tokens = []
    model.encoder.block.register_forward_pre_hook(lambda _, args: tokens.append(args[0].values.detach()))
    before = model(batch)
    genres = next(p for name, p in model.named_parameters() if "table_item_genres" in name)
    with torch.no_grad():
        genres += 1.0
    after = model(batch)
    changed = (tokens[0] != tokens[1]).any(dim=1)
    has_genre = batch.features["item"].values() % 4 != 0
    assert changed[:2].tolist() == [False, False]  # the contexts
    assert torch.equal(changed[2::2], has_genre)
    assert torch.equal(changed[3::2], has_genre & (fusion == "add"))
    assert has_genre.any() and not torch.equal(before.logits, after.logits)


@pytest.mark.parametrize("shape", [{"users": [], "lengths": []}, {"users": [1, 2], "lengths": [0, 3]}])
def test_item_features_train_on_any_batch(shape, make_config, make_batch, metadata) -> None:
    config = make_config(dataset={"item_features": ITEM_FEATURES}, network={"dtype_str": "bfloat16"})
    model = RankingModel(config, metadata=metadata)
    model(make_batch(**shape, item_features=ITEM_FEATURES)).loss_per_target.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    tables, dense = build_optimizers(model, config.optimizer)[::-1]
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)].split("table_")[-1] for g in tables.param_groups for p in g["params"]} >= {
        "item.weight", "item_genres.weight", "item_year.weight"
    }  # fmt: skip
    assert not any("table_" in names[id(p)] for g in dense.param_groups for p in g["params"])


def test_item_features_build_on_the_meta_device(make_config, metadata) -> None:
    config = make_config(dataset={"item_features": ITEM_FEATURES})
    meta = RankingModel(config, metadata=metadata, device=torch.device("meta"))
    real = RankingModel(config, metadata=metadata)
    assert {parameter.device.type for parameter in meta.parameters()} == {"meta"}
    assert [(n, p.shape) for n, p in meta.named_parameters()] == [(n, p.shape) for n, p in real.named_parameters()]
