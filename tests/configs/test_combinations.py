import dataclasses
import subprocess
import sys

import pytest

from genrec.configs import schema
from genrec.configs.schema import ConfigError, EmbeddingArgs, FeatureArgs

SHOWS_THE_FUTURE = [
    ({"is_causal": False}, "NetworkArgs.is_causal = False must be True"),
    ({"contextual_mask": "history"}, "NetworkArgs.contextual_mask = 'history' must be 'prefix'"),
    ({"use_time_encoding": True}, "NetworkArgs.time_encoding_reference = 'last' must be 'previous'"),
]


@pytest.mark.parametrize(("network", "part"), SHOWS_THE_FUTURE)
def test_what_shows_the_future_is_refused_when_the_loss_is_on_the_history(experiment, network, part):
    with pytest.raises(ConfigError, match="max_num_candidates = 0") as caught:
        experiment(network=network)
    assert part in str(caught.value)
    assert experiment(network=network, dataset={"max_num_candidates": 3}).network.is_causal is not None


def test_time_encoding_without_the_future_is_allowed_on_history(experiment):
    assert experiment(network={"use_time_encoding": True, "time_encoding_reference": "previous"})
    assert experiment(network={"time_encoding_reference": "last"})


@pytest.mark.parametrize(("network", "_part"), SHOWS_THE_FUTURE)
def test_a_network_tells_whether_its_history_is_causal(experiment, network, _part):
    """Evaluation asks for it where training on candidates allows such networks."""
    assert experiment().network.history_is_causal
    assert not experiment(network=network, dataset={"max_num_candidates": 3}).network.history_is_causal


def test_a_contextual_mask_that_is_disabled_shows_nothing(experiment):
    assert experiment(network={"contextual_mask": "history", "disable_contextual_mask": True}).network.history_is_causal


GROUPS_THAT_LEAK = [
    ({"target_group_size": 3}, "NetworkArgs.target_group_size = 3 must be 1 or 2 with actions"),
    ({"target_group_size": 4, "is_causal": False}, "NetworkArgs.target_group_size = 4 must be 1 or 2 with actions"),
    ({"target_group_size": 2, "is_causal": False}, "NetworkArgs.is_causal = False must be True with actions"),
]


@pytest.mark.parametrize(("network", "part"), GROUPS_THAT_LEAK)
def test_groups_that_show_candidates_a_label_are_refused(experiment, network, part):
    with pytest.raises(ConfigError) as caught:
        experiment(network=network, dataset={"max_num_candidates": 3})
    assert str(caught.value).startswith(part)
    config = experiment(dataset={"max_num_candidates": 3})
    with_actions = dataclasses.replace(config, dataset=synthetic(max_num_candidates=3))
    changed = dataclasses.replace(config.network, **network)
    with pytest.raises(ConfigError, match=part.split(" = ")[0]):
        dataclasses.replace(with_actions, network=changed)
    without = dataclasses.replace(config, dataset=synthetic(max_num_candidates=3, action_feature_name=None))
    assert dataclasses.replace(without, network=changed).network == changed


def test_large_groups_are_refused_where_only_evaluation_has_candidates(experiment):
    with pytest.raises(ConfigError, match="target_group_size = 3 must be 1 or 2 with actions"):
        experiment(network={"target_group_size": 3}, dataset={"max_num_candidates": 0})


def test_groups_of_an_item_and_its_action_are_allowed(experiment):
    for network in ({"target_group_size": 2}, {"target_group_size": 1, "is_causal": False}):
        assert experiment(network=network, dataset={"max_num_candidates": 3})


def test_heads_divide_over_tensor_parallel_ranks(experiment):
    with pytest.raises(ConfigError, match="num_attention_heads = 2 must be a multiple of tensor_model_parallel_"):
        experiment(tensor_parallel=schema.TensorModelParallelArgs(4))


def test_a_task_takes_its_own_head_alone(experiment):
    with pytest.raises(ConfigError, match="a ranking run needs RankingArgs and takes no RetrievalArgs"):
        experiment(retrieval=schema.RetrievalArgs())
    with pytest.raises(ConfigError, match="a retrieval run needs RetrievalArgs"):
        dataclasses.replace(experiment(), task="retrieval")


def synthetic(**changes):
    values = {
        "feature_args": (FeatureArgs(("item", "action"), 4), FeatureArgs(("age",), 1)),
        "embedding_args": tuple(EmbeddingArgs((name,), name, 10) for name in ("item", "action", "age")),
        "item_feature_name": "item",
        "contextual_feature_names": ("age",),
        "action_feature_name": "action",
    }
    return schema.BenchmarkDatasetArgs(**{**values, **changes})


REFUSED = [
    ({"contextual_feature_names": ("age", "city")}, "feature_args", "lacks ['city']"),
    ({"embedding_args": (EmbeddingArgs(("item", "action"), "all", 10),)}, "embedding_args", "lacks ['age']"),
    ({"embedding_args": (EmbeddingArgs(("item", "action", "age"), "a", 5), EmbeddingArgs(("age",), "b", 5))},
     "embedding_args", "repeats ['age']"),
    ({"embedding_args": (EmbeddingArgs(("item",), "a", 5), EmbeddingArgs(("action", "age"), "a", 5))},
     "embedding_args", "repeats ['a']"),
    ({"feature_args": (FeatureArgs(("item",), 4), FeatureArgs(("action",), 4), FeatureArgs(("age",), 1))},
     "action_feature_name", "must share a FeatureArgs with the item"),
    ({"action_feature_name": "item"}, "item_feature_name", "must differ"),
    ({"num_generated_batches": 0}, "num_generated_batches", "must be at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "field", "part"), REFUSED)
def test_synthetic_features_need_a_length_and_a_table_each(changes, field, part):
    with pytest.raises(ConfigError) as caught:
        synthetic(**changes)
    assert str(caught.value).startswith(f"BenchmarkDatasetArgs.{field} = ")
    assert part in str(caught.value)


def test_digest_follows_the_values_and_not_where_files_lie(experiment):
    digest = experiment().digest
    assert experiment(trainer={"output_dir": "elsewhere", "resume": "never"}, text="anything").digest == digest
    assert experiment(trainer={"seed": 1}).digest != digest
    assert experiment(network={"hidden_size": 24}).digest != digest
    config = experiment()
    changed = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, seed=1))
    assert changed.digest == experiment(trainer={"seed": 1}).digest


def test_digest_is_the_same_in_another_process():
    program = (
        "from genrec.configs.loading import load_experiment\n"
        "print(load_experiment('ranking', gin_files=['debug_synthetic.gin'], gin_bindings=[]).digest)"
    )
    digests = set()
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-c", program]
        environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": hash_seed}
        digests.add(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)
    assert len(digests) == 1
