import dataclasses

import gin
import pytest

from genrec.configs import schema
from genrec.configs.schema import ConfigError
from genrec.configs.statements import ARGS_CLASSES

REQUIRED = {
    "TrainerArgs": {"train_batch_size": 1, "eval_batch_size": 1},
    "DatasetArgs": {"dataset_name": "ml-1m", "max_history_seqlen": 5},
    "BenchmarkDatasetArgs": None,
    "RandomDistribution": {"dist_type": "zipf"},
    "FeatureArgs": {"feature_names": ("item",), "max_sequence_length": 4},
    "EmbeddingArgs": {"feature_names": ("item",), "table_name": "item", "item_vocab_size_or_capacity": 9},
    "DynamicEmbeddingArgs": {"feature_names": ("item",), "table_name": "item", "item_vocab_size_or_capacity": 9},
    "NetworkArgs": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "kv_channels": 8},
    "OptimizerArgs": {"optimizer_str": "adam", "learning_rate": 1e-3},
    "RankingArgs": {"prediction_head_arch": (4, 1)},
    "RetrievalArgs": {},
    "TensorModelParallelArgs": {},
    "MixedPrecisionArgs": {},
}

REFUSED = [
    ("TrainerArgs", {"dense_parallel": "fsdp"}, "must be one of 'ddp', 'fsdp2'"),
    ("TrainerArgs", {"train_batch_size": 0}, "train_batch_size = 0 must be at least 1"),
    ("TrainerArgs", {"train_batch_size": 1.0}, "train_batch_size = 1.0 must be an integer"),
    ("TrainerArgs", {"train_batch_size": True}, "train_batch_size = True must be an integer"),
    ("TrainerArgs", {"train_batch_size": None}, "train_batch_size = None must be an integer"),
    ("TrainerArgs", {"profile": 1}, "profile = 1 must be True or False"),
    ("TrainerArgs", {"max_train_iters": "10"}, "max_train_iters = '10' must be an integer or None"),
    ("TrainerArgs", {"max_train_iters": 0}, "max_train_iters = 0 must be at least 1"),
    ("TrainerArgs", {"eval_interval": -1}, "eval_interval = -1 must be at least 0"),
    ("TrainerArgs", {"seed": -1}, "seed = -1 must be at least 0"),
    ("TrainerArgs", {"seed": 2**63}, "seed = 9223372036854775808 must be below 2**63"),
    ("TrainerArgs", {"train_batch_size": 2**63}, "train_batch_size = 9223372036854775808 must be below 2**63"),
    ("TrainerArgs", {"ckpt_load_dir": "a\0b"}, "must not hold a NUL"),
    ("TrainerArgs", {"ckpt_load_parts": "dense"}, "ckpt_load_parts = 'dense' needs ckpt_load_dir"),
    ("TrainerArgs", {"warmup_steps": 5, "max_train_iters": 5}, "warmup_steps = 5 must be below max_train_iters = 5"),
    ("TrainerArgs", {"log_interval": 0}, "log_interval = 0 must be at least 1"),
    ("TrainerArgs", {"ckpt_save_interval": -2}, "ckpt_save_interval = -2 must be at least -1"),
    ("TrainerArgs", {"ckpt_save_interval": 0, "best_metric": "AUC"}, "needs checkpoints to keep, and ckpt_save_inter"),
    ("TrainerArgs", {"embedding_hbm_gib": 0}, "embedding_hbm_gib = 0.0 must be positive"),
    ("TrainerArgs", {"embedding_host_gib": -1}, "embedding_host_gib = -1.0 must be positive"),
    ("TrainerArgs", {"embedding_cache_load_factor": 0}, "must be positive"),
    ("TrainerArgs", {"embedding_cache_load_factor": 1.0}, "must be at least 0 and below 1"),
    ("TrainerArgs", {"pipeline_type": "fast"}, "must be one of 'none', 'native', 'prefetch'"),
    ("TrainerArgs", {"resume": "always"}, "must be one of 'auto', 'never'"),
    ("TrainerArgs", {"lr_schedule": "step"}, "must be one of 'constant', 'linear', 'cosine'"),
    ("TrainerArgs", {"nonfinite": "ignore"}, "must be one of 'stop', 'skip', 'locate'"),
    ("TrainerArgs", {"device": "tpu"}, "must be one of 'auto', 'cpu', 'cuda'"),
    ("TrainerArgs", {"output_dir": ""}, "must name a folder"),
    ("TrainerArgs", {"grad_clip_norm": 0}, "grad_clip_norm = 0.0 must be positive"),
    ("TrainerArgs", {"hang_timeout_s": 0}, "hang_timeout_s = 0.0 must be positive"),
    ("TrainerArgs", {"hang_timeout_s": 3600}, "hang_timeout_s = 3600.0 must be at most 1500: after half an hour"),
    ("TrainerArgs", {"async_save": 1}, "async_save = 1 must be"),
    ("TrainerArgs", {"grad_clip_norm": float("nan")}, "must be positive and finite"),
    ("TrainerArgs", {"min_lr_ratio": 1.5}, "must be at least 0 and at most 1"),
    ("TrainerArgs", {"ema_decay": 1.0}, "must be at least 0 and below 1"),
    ("TrainerArgs", {"profile": True, "profile_step_end": 100}, "must be above profile_step_start = 100"),
    ("DatasetArgs", {"dataset_name": "ml-2m"}, "must be one of 'ml-100k', 'ml-1m', 'ml-20m', 'ml-25m', 'kuairand-"),
    ("DatasetArgs", {"max_history_seqlen": 0}, "max_history_seqlen = 0 must be at least 1"),
    ("DatasetArgs", {"max_history_seqlen": -1}, "max_history_seqlen is required"),
    ("DatasetArgs", {"max_sequence_length": 6}, "must equal max_history_seqlen = 5"),
    ("DatasetArgs", {"max_history_seqlen": -1, "max_sequence_length": 0}, "max_sequence_length = 0 must be at least"),
    ("DatasetArgs", {"max_num_candidates": -1}, "max_num_candidates = -1 must be at least 0"),
    ("DatasetArgs", {"split": "random"}, "must be one of 'leave_last', 'user', 'global_time'"),
    ("DatasetArgs", {"contextual_features": "age"}, "= 'age' must be a list of quoted strings or None"),
    ("DatasetArgs", {"contextual_features": ["age", "age"]}, "must not name anything twice"),
    ("DatasetArgs", {"item_features": "genres"}, "= 'genres' must be a list of quoted strings"),
    ("DatasetArgs", {"item_features": ["genres", "genres"]}, "must not name anything twice"),
    ("DatasetArgs", {"dynamic_tables": {"item": 0}}, "must give every table at least 1 row"),
    ("DatasetArgs", {"dynamic_tables": {"item": 2**63}}, "must be below 2**63"),
    ("DatasetArgs", {"dynamic_tables": {"item": True}}, "must be a dict from str to an integer"),
    ("DatasetArgs", {"evict_strategy": "lfu"}, "evict_strategy = 'lfu' needs dynamic_tables"),
    ("DatasetArgs", {"event_dropout": 1.0}, "must be at least 0 and below 1"),
    ("RandomDistribution", {"dist_type": "poisson"}, "must be one of 'uniform', 'normal', 'zipf', 'lognormal'"),
    ("RandomDistribution", {"low": -1}, "low = -1 must be at least 0"),
    ("RandomDistribution", {"low": 4, "high": 3}, "high = 3 must be at least low = 4"),
    ("RandomDistribution", {"dist_type": "uniform", "low": 4, "high": 4}, "must be above low = 4"),
    ("RandomDistribution", {"dist_type": "normal", "mean": 3}, "std = None must be given for 'normal'"),
    ("RandomDistribution", {"dist_type": "normal", "std": 3}, "mean = None must be given for 'normal'"),
    ("RandomDistribution", {"dist_type": "lognormal"}, "mean = None must be given for 'lognormal'"),
    ("RandomDistribution", {"dist_type": "lognormal", "mean": 0}, "mean = 0.0 must be positive"),
    ("RandomDistribution", {"alpha": 1}, "alpha = 1.0 must be above 1"),
    ("FeatureArgs", {"feature_names": ()}, "must name at least one feature"),
    ("FeatureArgs", {"max_sequence_length": 0}, "max_sequence_length = 0 must be at least 1"),
    ("FeatureArgs", {"value_dists": {"movie": schema.RandomDistribution("zipf")}}, "which lack ['movie']"),
    ("FeatureArgs", {"seqlen_dist": schema.RandomDistribution("zipf", high=5)}, "at most max_sequence_length = 4"),
    ("FeatureArgs", {"seqlen_dist": 3}, "seqlen_dist = 3 must be a RandomDistribution or None"),
    ("EmbeddingArgs", {"item_vocab_size_or_capacity": 0}, "must be at least 1"),
    ("EmbeddingArgs", {"sharding_type": "None"}, "must be one of 'data_parallel', 'model_parallel', 'row_wise'"),
    ("EmbeddingArgs", {"placement": "gpu"}, "placement = 'gpu' must be one of 'auto', 'hbm', 'uvm', 'uvm_caching'"),
    ("DatasetArgs", {"table_placements": {"item": "ram"}}, "must be one of 'auto', 'hbm', 'uvm', 'uvm_caching'"),
    ("EmbeddingArgs", {"table_name": ""}, "must not be empty"),
    ("DynamicEmbeddingArgs", {"sharding_type": "hashed"}, "must be one of 'data_parallel', 'model_parallel', "),
    ("DynamicEmbeddingArgs", {"evict_strategy": "fifo"}, "must be one of 'lru', 'lfu'"),
    ("DynamicEmbeddingArgs", {"item_vocab_gpu_capacity_ratio": -0.1}, "must be at least 0"),
    ("NetworkArgs", {"kv_channels": 12}, "kv_channels = 12 must be a multiple of 8"),
    ("NetworkArgs", {"num_layers": 0}, "num_layers = 0 must be at least 1"),
    ("NetworkArgs", {"hidden_dropout": 1}, "must be at least 0 and below 1"),
    ("NetworkArgs", {"embedding_dropout": 1.0}, "embedding_dropout = 1.0 must be at least 0 and below 1"),
    ("NetworkArgs", {"dtype_str": "fp32"}, "must be one of 'bfloat16', 'float16', 'float32'"),
    ("NetworkArgs", {"kernel_backend": "cuda"}, "must be one of 'auto', 'cutlass', 'triton', 'pytorch'"),
    ("NetworkArgs", {"scaling_seqlen": 0}, "scaling_seqlen = 0 must be -1 or positive"),
    ("NetworkArgs", {"item_embedding_dim": 0}, "item_embedding_dim = 0 must be -1 or positive"),
    ("NetworkArgs", {"layer_style": "paper"}, "must be one of 'recsys_examples', 'dlrm_v3', 'research'"),
    ("NetworkArgs", {"output_norm": "group"}, "must be 'layer' with layer_style = 'recsys_examples'"),
    ("NetworkArgs", {"layer_style": "research", "qk_bias_init": 1}, "qk_bias_init = 1.0 must be 0"),
    ("NetworkArgs", {"qk_bias_init": float("inf")}, "must be finite"),
    ("NetworkArgs", {"item_feature_scale": float("inf")}, "item_feature_scale = inf must be finite"),
    ("NetworkArgs", {"max_attn_len": -1}, "max_attn_len = -1 must be at least 0"),
    ("NetworkArgs", {"attn_alpha": 0.0}, "attn_alpha = 0.0 must be positive"),
    ("OptimizerArgs", {"optimizer_str": "lamb"}, "must be one of 'adam', 'adamw', 'sgd', 'rowwise_adagrad'"),
    ("OptimizerArgs", {"optimizer_str": "rowwise_adagrad"}, "is for embedding tables (embedding_optimizer_str)"),
    ("OptimizerArgs", {"learning_rate": "1e-3"}, "learning_rate = '1e-3' must be a number"),
    ("OptimizerArgs", {"learning_rate": 0}, "learning_rate = 0.0 must be positive"),
    ("OptimizerArgs", {"adam_beta2": 1.0}, "must be at least 0 and below 1"),
    ("OptimizerArgs", {"weight_decay": -0.1}, "must be at least 0 and finite"),
    ("RankingArgs", {"prediction_head_arch": ()}, "must list layer widths of at least 1"),
    ("RankingArgs", {"prediction_head_arch": (4, 0)}, "must list layer widths of at least 1"),
    ("RankingArgs", {"prediction_head_arch": 4}, "must be a list of integers"),
    ("RankingArgs", {"num_tasks": 3, "prediction_head_arch": (4, 2)}, "must be 1 or the head's last width, 2"),
    ("RankingArgs", {"prediction_head_act_type": "tanh"}, "must be one of 'relu', 'gelu', 'silu'"),
    ("RankingArgs", {"head_dropout": 1}, "head_dropout = 1.0 must be at least 0 and below 1"),
    ("RankingArgs", {"head_layernorm": 1}, "head_layernorm = 1 must be True or False"),
    ("RankingArgs", {"head_layernorm": True, "l2_norm": True}, "must be False with l2_norm = True"),
    ("RankingArgs", {"head_zero_init": "yes"}, "head_zero_init = 'yes' must be True or False"),
    ("RankingArgs", {"eval_metrics": ("RMSE",)}, "must be one of 'AUC', 'GAUC', 'NE', 'LogLoss', 'Accuracy'"),
    ("RankingArgs", {"eval_metrics": ("auc", "AUC")}, "must not name anything twice"),
    ("RankingArgs", {"task_weights": (1, 1)}, "must have num_tasks = 1 numbers"),
    ("RankingArgs", {"task_weights": (0,)}, "must be finite, at least 0, and not all 0"),
    ("RetrievalArgs", {"num_negatives": 0}, "must be -1 or positive"),
    ("RetrievalArgs", {"temperature": 0}, "temperature = 0.0 must be positive"),
    ("RetrievalArgs", {"eval_metrics": ("HR@0",)}, "must hold only HR@k, NDCG@k and MRR@k"),
    ("TensorModelParallelArgs", {"tensor_model_parallel_size": 0}, "must be at least 1"),
    ("MixedPrecisionArgs", {"mixed_precision_dtype": "fp4"}, "must be one of 'fp8'"),
    ("MixedPrecisionArgs", {"linear_recipe": "rowwise"}, "one of 'delayed', 'tensorwise', 'blockwise', 'mxfp8'"),
    ("MixedPrecisionArgs", {"linear_scaling_precision": "fp8"}, "must be one of 'hybrid', 'e4m3'"),
    ("MixedPrecisionArgs", {"mixed_precision_dtype": "fp8", "linear_recipe": None}, "must come with a linear_recipe"),
    ("MixedPrecisionArgs", {"backend": "native"}, "must be one of 'te', 'emulated'"),
    ("MixedPrecisionArgs", {"pad_multiple": 0}, "must be at least 1"),
    ("MixedPrecisionArgs", {"margin": 17}, "margin = 17 must be at most 16"),
    ("MixedPrecisionArgs", {"margin": -1}, "margin = -1 must be at least 0"),
    ("MixedPrecisionArgs", {"amax_history_len": 0}, "amax_history_len = 0 must be at least 1"),
    ("MixedPrecisionArgs", {"amax_compute_algo": "mean"}, "must be one of 'max', 'most_recent'"),
]  # fmt: skip


def build(name, **changes):
    return getattr(schema, name)(**{**REQUIRED[name], **changes})


@pytest.mark.parametrize(("name", "changes", "part"), REFUSED)
def test_refused_with_field_value_and_what_is_allowed(name, changes, part):
    with pytest.raises(ConfigError) as caught:
        build(name, **changes)
    assert str(caught.value).startswith(f"{name}.")
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numbers_lists_and_names_take_their_canonical_form():
    optimizer = build("OptimizerArgs", learning_rate=1, optimizer_str="AdamW")
    assert (optimizer.learning_rate, type(optimizer.learning_rate)) == (1.0, float)
    assert optimizer.optimizer_str == "adamw"
    ranking = build("RankingArgs", prediction_head_arch=[4, 1], eval_metrics=["auc", "LOGLOSS"])
    assert ranking.prediction_head_arch == (4, 1)
    assert ranking.eval_metrics == ("AUC", "LogLoss")
    assert build("MixedPrecisionArgs", hstu_attn_quantization_mode="128X1").hstu_attn_quantization_mode == "1xdim"


def test_the_largest_seed_and_warm_up_without_a_known_end_are_allowed():
    assert build("TrainerArgs", seed=2**63 - 1, warmup_steps=5).max_train_iters is None
    assert build("TrainerArgs", warmup_steps=4, max_train_iters=5).warmup_steps == 4


@pytest.mark.parametrize(
    ("arch", "num_tasks", "is_k_class"), [((4, 1), 1, False), ((4, 5), 1, True), ((4, 2), 2, False)]
)
def test_one_task_and_several_outputs_are_classes(arch, num_tasks, is_k_class):
    assert build("RankingArgs", prediction_head_arch=arch, num_tasks=num_tasks).is_k_class == is_k_class


def test_sequence_length_alias_means_history_length():
    by_alias = build("DatasetArgs", max_history_seqlen=-1, max_sequence_length=7)
    assert by_alias == build("DatasetArgs", max_history_seqlen=7)
    assert dataclasses.replace(by_alias, max_history_seqlen=9).max_history_seqlen == 9


def test_length_distribution_ends_at_the_longest_sequence():
    feature = build("FeatureArgs", seqlen_dist=schema.RandomDistribution("zipf", low=1))
    assert feature.seqlen_dist.high == 4


def test_an_object_is_not_shared_with_its_configuration():
    names = ["item"]
    feature = build("FeatureArgs", feature_names=names)
    names.append("action")
    assert feature.feature_names == ("item",)


@pytest.mark.parametrize("cls", ARGS_CLASSES, ids=lambda cls: cls.__name__)
def test_every_attribute_is_an_annotated_field_that_gin_can_bind(cls):
    fields = {item.name for item in dataclasses.fields(cls)}
    derived = (property,)  # read only, of the fields
    values = {name: value for name, value in vars(cls).items() if not isinstance(value, derived)}
    attributes = {name for name, value in values.items() if not name.startswith("_") and not callable(value)}
    assert attributes <= fields
    gin.clear_config()
    for name in fields:
        gin.bind_parameter(f"{cls.__name__}.{name}", None)
    gin.clear_config()


@pytest.mark.parametrize("name", [name for name, values in REQUIRED.items() if values is not None])
def test_defaults_are_valid_and_frozen(name):
    args = build(name)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(args, dataclasses.fields(args)[0].name, 1)
    assert dataclasses.replace(args) == args
