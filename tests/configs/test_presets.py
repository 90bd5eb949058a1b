"""The shipped presets, and files as recsys-examples' users write them."""

import dataclasses

import pytest

from genrec.configs.availability import check_available
from genrec.configs.loading import load_experiment
from genrec.configs.lookup import presets
from genrec.configs.schema import DynamicEmbeddingArgs, MixedPrecisionArgs, RandomDistribution, UnavailableError

# Every construct that the files of recsys-examples' HSTU training use: scopes, references in lists and dicts, dynamic
# tables, tuples and lists for metrics, integers for floats, the same field bound twice.
RECSYS_EXAMPLES_STYLE = """
TrainerArgs.train_batch_size = 32
TrainerArgs.eval_batch_size = 32
TrainerArgs.log_interval = 10
TrainerArgs.log_interval = 50
TrainerArgs.max_train_iters = 512
TrainerArgs.pipeline_type = "prefetch" # none, native, prefetch
TrainerArgs.ckpt_save_dir = './checkpoints/'
TrainerArgs.ckpt_save_interval = 999999999

item_seqlen_dist/RandomDistribution.dist_type = 'zipf'
item_seqlen_dist/RandomDistribution.alpha = 1.2
item_seqlen_dist/RandomDistribution.low = 1
item_value_dist/RandomDistribution.dist_type = 'zipf'
item_and_action_feature/FeatureArgs.feature_names = ['item', 'action']
item_and_action_feature/FeatureArgs.max_sequence_length = 4096
item_and_action_feature/FeatureArgs.is_jagged = True
item_and_action_feature/FeatureArgs.seqlen_dist = @item_seqlen_dist/RandomDistribution()
item_and_action_feature/FeatureArgs.value_dists = {
    'item': @item_value_dist/RandomDistribution(),
}
user_features/FeatureArgs.feature_names = ['user_id', 'user_age']
user_features/FeatureArgs.max_sequence_length = 1
BenchmarkDatasetArgs.feature_args = [
    @item_and_action_feature/FeatureArgs(),
    @user_features/FeatureArgs(),
]
BenchmarkDatasetArgs.item_feature_name='item'
BenchmarkDatasetArgs.contextual_feature_names = [
    'user_id',
    'user_age',
]  # two
BenchmarkDatasetArgs.action_feature_name='action'

item_embedding/DynamicEmbeddingArgs.feature_names = ['item']
item_embedding/DynamicEmbeddingArgs.table_name = 'item'
item_embedding/DynamicEmbeddingArgs.item_vocab_size_or_capacity = 50000000  # 50M
item_embedding/DynamicEmbeddingArgs.item_vocab_gpu_capacity_ratio = 0
item_embedding/DynamicEmbeddingArgs.evict_strategy = 'lru'
user_embedding/EmbeddingArgs.feature_names = ['user_id', 'user_age']
user_embedding/EmbeddingArgs.table_name = 'user'
user_embedding/EmbeddingArgs.item_vocab_size_or_capacity = 10000
user_embedding/EmbeddingArgs.sharding_type = 'model_parallel'
action_embedding/EmbeddingArgs.feature_names = ['action']
action_embedding/EmbeddingArgs.table_name = 'action'
action_embedding/EmbeddingArgs.item_vocab_size_or_capacity = 100
action_embedding/EmbeddingArgs.sharding_type = 'data_parallel'
BenchmarkDatasetArgs.embedding_args = [
    @item_embedding/DynamicEmbeddingArgs(),
    @user_embedding/EmbeddingArgs(),
    @action_embedding/EmbeddingArgs(),
]

NetworkArgs.item_embedding_dim = 128
NetworkArgs.contextual_embedding_dim = 256
NetworkArgs.num_layers = 8
NetworkArgs.num_attention_heads = 4
NetworkArgs.hidden_size = 1024
NetworkArgs.kv_channels = 256
NetworkArgs.hidden_dropout = 0
NetworkArgs.kernel_backend = 'cutlass'
NetworkArgs.recompute_input_layernorm = True

RankingArgs.prediction_head_arch = [
    512, 8,
]
RankingArgs.prediction_head_bias = True
RankingArgs.num_tasks = 8
RankingArgs.eval_metrics = ("AUC",)

OptimizerArgs.optimizer_str = 'adam'
OptimizerArgs.learning_rate = 1e-3
TensorModelParallelArgs.tensor_model_parallel_size = 2"""

# The file that the public pull request for FP8 training brought to recsys-examples.
PUBLIC_FP8_BINDINGS = """
TrainerArgs.train_batch_size = 128
TrainerArgs.eval_batch_size = 128
TrainerArgs.eval_interval = 100
TrainerArgs.log_interval = 100
TrainerArgs.seed = 1234
TrainerArgs.max_train_iters = 1000
TrainerArgs.profile = True

DatasetArgs.dataset_name = 'ml-20m'
DatasetArgs.max_sequence_length = 200
DatasetArgs.shuffle = True
DatasetArgs.max_num_candidates = 20

NetworkArgs.dtype_str = "bfloat16"
NetworkArgs.num_layers = 1
NetworkArgs.num_attention_heads = 4
NetworkArgs.hidden_size = 128
NetworkArgs.kv_channels = 128
NetworkArgs.target_group_size = 1

RankingArgs.prediction_head_arch = [512, 10]
RankingArgs.prediction_head_bias = True
RankingArgs.num_tasks = 1
RankingArgs.eval_metrics = ("AUC",)

OptimizerArgs.optimizer_str = 'adam'
OptimizerArgs.learning_rate = 1e-3
OptimizerArgs.adam_beta1 = 0.9
OptimizerArgs.adam_beta2 = 0.98

TensorModelParallelArgs.tensor_model_parallel_size = 1

MixedPrecisionArgs.mixed_precision_dtype = "fp8"
MixedPrecisionArgs.linear_recipe = "tensorwise"
MixedPrecisionArgs.linear_scaling_precision = "hybrid"
MixedPrecisionArgs.hstu_attn_quantization_mode = "bf16"
"""


def load_preset(name, *bindings):
    return load_experiment("ranking", gin_files=[name], gin_bindings=bindings)


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_loads_and_is_available(name):
    check_available(load_preset(name))


def test_movielens_100k_has_a_task_for_each_label_bit_on_every_event():
    config = load_preset("movielens_100k_ranking.gin")
    assert config.dataset.dataset_name == "ml-100k"
    assert config.dataset.max_num_candidates == 0
    assert (config.ranking.num_tasks, config.ranking.prediction_head_arch[-1]) == (4, 4)
    assert "user_id" not in config.dataset.contextual_features


def test_movielen_has_the_bindings_of_recsys_examples():
    config = load_preset("movielen_ranking.gin")
    trainer, dataset, network = config.trainer, config.dataset, config.network
    assert (trainer.train_batch_size, trainer.eval_batch_size, trainer.max_train_iters) == (128, 128, 1000)
    assert (trainer.pipeline_type, trainer.enable_balanced_shuffler, trainer.profile) == ("prefetch", True, True)
    assert (dataset.dataset_name, dataset.max_history_seqlen, dataset.max_num_candidates) == ("ml-20m", 200, 20)
    assert (network.num_layers, network.hidden_size) == (1, 128)
    assert (network.num_attention_heads, network.kv_channels) == (4, 128)
    assert (network.dtype_str, network.target_group_size) == ("bfloat16", 1)
    assert (config.ranking.prediction_head_arch, config.ranking.num_tasks) == ((512, 10), 1)
    assert (config.optimizer.adam_beta1, config.optimizer.adam_beta2) == (0.9, 0.98)


def test_movielens_fp8_is_what_the_public_bindings_say(load):
    """Accepted unchanged, and the preset adds nothing to them."""
    config = load(PUBLIC_FP8_BINDINGS)
    assert config.mixed_precision == MixedPrecisionArgs(
        mixed_precision_dtype="fp8",
        linear_recipe="tensorwise",
        linear_scaling_precision="hybrid",
        hstu_attn_quantization_mode="bf16",
    )
    assert config.mixed_precision.has_fp8_linears and not config.mixed_precision.has_fp8_attention
    assert config.dataset.max_history_seqlen == 200
    check_available(config)
    preset = load_preset("movielens_ranking_fp8.gin")
    assert preset.digest == config.digest
    plain = load_preset("movielens_ranking_fp8.gin", "MixedPrecisionArgs.mixed_precision_dtype = None")
    assert not plain.mixed_precision.has_fp8_linears


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("name", ["movielens_ranking_fp8.gin", "movielens_100k_ranking_fp8.gin"])
def test_fp8_presets_take_every_recipe_and_the_head(name, recipe):
    head = "MixedPrecisionArgs.enable_fp8_for_prediction_head = True"
    config = load_preset(name, f"MixedPrecisionArgs.linear_recipe = {recipe!r}", head)
    assert config.mixed_precision.linear_recipe == recipe


def test_movielens_100k_fp8_differs_from_its_base_in_precision_alone():
    base, config = load_preset("movielens_100k_ranking.gin"), load_preset("movielens_100k_ranking_fp8.gin")
    assert config.mixed_precision == MixedPrecisionArgs(mixed_precision_dtype="fp8")
    for part in ("dataset", "network", "optimizer", "ranking"):
        assert getattr(config, part) == getattr(base, part)
    assert dataclasses.replace(config.trainer, output_dir=base.trainer.output_dir) == base.trainer
    assert config.trainer.output_dir != base.trainer.output_dir


@pytest.mark.usefixtures("no_cutlass")
def test_a_recsys_examples_benchmark_file_parses_and_names_what_is_missing(load):
    config = load(RECSYS_EXAMPLES_STYLE)
    events = config.dataset.feature_args[0]
    assert events.seqlen_dist == RandomDistribution("zipf", low=1, high=4096, alpha=1.2)
    assert events.value_dists == {"item": RandomDistribution("zipf")}
    assert isinstance(config.dataset.embedding_args[0], DynamicEmbeddingArgs)
    assert config.dataset.embedding_args[0].sharding_type == "model_parallel"
    assert (config.trainer.log_interval, config.network.hidden_dropout) == (50, 0.0)
    with pytest.raises(UnavailableError) as caught:
        check_available(config)
    assert "'cutlass'" in str(caught.value)
