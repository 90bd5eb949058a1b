"""Every knob of genrec: the frozen ``*Args`` dataclasses that gin binds by class name.

The names follow NVIDIA recsys-examples' HSTU training (``gin_config_args.py``), so that a gin file written for it runs
unchanged; fields and values marked "(genrec)" or below "genrec's own" are not in it. Each class checks itself when
built and raises :class:`ConfigError` with the field, its value and what is allowed; :class:`ExperimentConfig` checks
what spans classes. Named values are taken in any case and stored as spelt here. Every package may import this file, and
only the training package the others of configs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Literal

from genrec.configs import combinations
from genrec.configs.checks import (
    convert_fields,
    refusal,
    require,
    require_at_least,
    require_choice,
    require_choice_values,
    require_choices,
    require_fraction,
    require_minus_one_or_positive,
    require_positive,
    require_unique,
    set_field,
)
from genrec.configs.errors import ConfigError as ConfigError
from genrec.configs.errors import UnavailableError as UnavailableError
from genrec.configs.errors import UserError as UserError
from genrec.configs.packages import find_cutlass_module as find_cutlass_module
from genrec.configs.precision import ATTENTION_QUANTIZATIONS as ATTENTION_QUANTIZATIONS
from genrec.configs.precision import FP8_DIM_MULTIPLES as FP8_DIM_MULTIPLES
from genrec.configs.precision import FP8_ROW_MULTIPLES as FP8_ROW_MULTIPLES
from genrec.configs.precision import LINEAR_RECIPES as LINEAR_RECIPES
from genrec.configs.precision import MixedPrecisionArgs as MixedPrecisionArgs

MOVIELENS_NAMES = ("ml-100k", "ml-1m", "ml-20m", "ml-25m")
LATER_DATASET_NAMES = ("kuairand-pure", "kuairand-1k", "kuairand-27k", "custom")  # this version doesn't have them yet
DATASET_NAMES = (*MOVIELENS_NAMES, *LATER_DATASET_NAMES)
SPLIT_RULES = ("leave_last", "user", "global_time")
KERNEL_BACKENDS = ("auto", "cutlass", "triton", "pytorch")
CONTEXTUAL_MASKS = ("prefix", "history")
TABLE_PLACEMENTS = ("auto", "hbm", "uvm", "uvm_caching")
SHARDING_TYPES = ("data_parallel", "model_parallel", "row_wise", "table_wise", "column_wise", "auto")
EVICT_STRATEGIES = ("lru", "lfu")  # least recently, least frequently used
RANKING_METRICS = ("AUC", "GAUC", "NE", "LogLoss", "Accuracy")
LOWER_IS_BETTER = ("NE", "LogLoss")
BEST_METRICS = tuple(f"{protocol}{name}" for protocol in ("", "sequential/", "frozen/") for name in RANKING_METRICS)
RETRIEVAL_METRIC = re.compile(r"(HR|NDCG|MRR)@[1-9][0-9]*")
KV_CHANNELS_MULTIPLE = 8
MAX_HANG_TIMEOUT_S = 1500.0


@dataclass(frozen=True)
class TrainerArgs:
    """The training loop. Batch sizes are users per rank.

    ``eval_interval=0`` evaluates only at the end; ``ckpt_save_interval=-1`` saves only at the end, 0 never.
    """

    train_batch_size: int
    eval_batch_size: int
    eval_interval: int = 100
    log_interval: int = 100
    max_train_iters: int | None = None  # None: one epoch
    max_eval_iters: int | None = None
    seed: int = 1234
    profile: bool = False
    profile_step_start: int = 100
    profile_step_end: int = 200
    ckpt_save_interval: int = -1
    ckpt_save_dir: str = ""  # "": output_dir/checkpoints
    ckpt_load_dir: str = ""  # a checkpoint to start from: weights and optimizer state; steps and data begin anew
    pipeline_type: str = "native"  # "none", "native", "prefetch": what overlaps on a GPU; a CPU has nothing to overlap
    enable_balanced_shuffler: bool = False  # ranks share each global batch so that their work is even (data/balance.py)
    # genrec's own
    output_dir: str = "outputs"
    resume: str = "auto"  # "auto": continue from the newest whole checkpoint of the run; "never"
    keep_checkpoints: int = 3  # the newest so many, and the best beside them
    ckpt_load_parts: str = "all"  # of ckpt_load_dir's: "all", "embedding" (tables alone), "dense" (all but tables)
    best_metric: str | None = None  # "AUC", "frozen/GAUC", ...: of the validation split, saves and keeps the best step
    grad_clip_norm: float | None = None
    lr_schedule: str = "constant"  # after warm-up: "constant", "linear" or "cosine" down to min_lr_ratio
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    accumulate_steps: int = 1
    nonfinite: str = "stop"  # "stop", "skip", "locate"
    deterministic: bool = False
    device: str = "auto"  # "auto", "cpu", "cuda"
    attention_tiles: str = ""  # a file that benchmarks/attention_tiles.py wrote on such a GPU; "": the built-in tiles
    ema_decay: float | None = None  # evaluate an exponential moving average of the weights
    async_save: bool = False  # write checkpoints in the background, from a copy in host memory
    hang_timeout_s: float | None = 600.0  # end where no rank gets on for so long, naming who hangs; None: never
    dense_parallel: str = "ddp"  # "ddp": every rank holds the dense weights whole; "fsdp2": each a part of them
    embedding_hbm_gib: float | None = None  # of each GPU, for shared tables; None: what is free, less a reserve
    embedding_host_gib: float | None = None  # of host memory, for a rank's shared tables; None: not limited
    embedding_cache_load_factor: float = 0.2  # share of the rows of a "uvm_caching" table that the GPU's cache holds

    def __post_init__(self) -> None:
        convert_fields(self)
        require_at_least(self, 1, "train_batch_size", "eval_batch_size", "log_interval", "max_train_iters")
        require_at_least(self, 1, "max_eval_iters", "keep_checkpoints", "accumulate_steps")
        require_at_least(self, 0, "eval_interval", "seed", "profile_step_start", "warmup_steps")
        require_at_least(self, -1, "ckpt_save_interval")
        require_positive(self, "grad_clip_norm", "hang_timeout_s")
        sooner = self.hang_timeout_s is None or self.hang_timeout_s <= MAX_HANG_TIMEOUT_S
        most = f"must be at most {MAX_HANG_TIMEOUT_S:.0f}: after half an hour PyTorch ends a collective, without a name"
        require(self, "hang_timeout_s", sooner, most)
        require_fraction(self, "min_lr_ratio", below_one=False)
        require_fraction(self, "ema_decay")
        require_positive(self, "embedding_hbm_gib", "embedding_host_gib", "embedding_cache_load_factor")
        require_fraction(self, "embedding_cache_load_factor")
        require_choice(self, "pipeline_type", ("none", "native", "prefetch"))
        require_choice(self, "resume", ("auto", "never"))
        require_choice(self, "ckpt_load_parts", ("all", "embedding", "dense"))
        loads = self.ckpt_load_parts == "all" or bool(self.ckpt_load_dir)
        require(self, "ckpt_load_parts", loads, "needs ckpt_load_dir, of which it says what is read")
        require_choice(self, "best_metric", BEST_METRICS)
        evaluates = self.best_metric is None or self.eval_interval > 0
        require(self, "best_metric", evaluates, "needs evaluations to choose from, with eval_interval above 0")
        saves = self.best_metric is None or self.ckpt_save_interval != 0
        require(self, "best_metric", saves, "needs checkpoints to keep, and ckpt_save_interval = 0 makes none")
        require_choice(self, "lr_schedule", ("constant", "linear", "cosine"))
        require_choice(self, "nonfinite", ("stop", "skip", "locate"))
        require_choice(self, "device", ("auto", "cpu", "cuda"))
        require_choice(self, "dense_parallel", ("ddp", "fsdp2"))
        require(self, "output_dir", bool(self.output_dir), "must name a folder")
        iters = self.max_train_iters
        if iters is not None:
            ends = self.warmup_steps < iters
            require(self, "warmup_steps", ends, f"must be below max_train_iters = {iters}, or warm-up never ends")
        if self.profile:
            start = self.profile_step_start
            later = self.profile_step_end > start
            require(self, "profile_step_end", later, f"must be above profile_step_start = {start}")


@dataclass(frozen=True)
class DatasetArgs:
    """A prepared dataset (``examples/prepare_data.py``) and how sequences are cut from it. Lengths are in events.

    ``max_history_seqlen`` is required; ``max_sequence_length`` is another name for it that is empty (-1) once built.
    """

    dataset_name: str
    max_history_seqlen: int = -1
    dataset_path: str | None = None  # None: prepared/<dataset_name> below the working directory
    max_num_candidates: int = 0  # 0: every event of a sequence is a target; K > 0: the last K events are
    shuffle: bool = False
    # genrec's own
    max_sequence_length: int = -1  # alias of max_history_seqlen
    split: str = "leave_last"  # "leave_last", "user", "global_time": must be what the data was prepared with
    num_workers: int = 0
    contextual_features: tuple[str, ...] | None = None  # None: all that the dataset has
    item_features: tuple[str, ...] = ()  # added to the items' embeddings, such as ["genres", "year"] of MovieLens
    sharding_types: dict[str, str] | None = None  # of tables, which have their features' names: {"item": "row_wise"}
    table_placements: dict[str, str] | None = None  # of shared tables: {"item": "uvm_caching"}, see EmbeddingArgs
    dynamic_tables: dict[str, int] | None = None  # tables that give rows to ids as they come: {"item": number of rows}
    evict_strategy: str = "lru"  # where such a table is full, whose row a new id gets: "lru", "lfu"
    event_dropout: float = 0.0  # share of events left out of a training sequence (one stays), drawn anew each epoch

    def __post_init__(self) -> None:
        convert_fields(self)
        require_choice(self, "dataset_name", DATASET_NAMES)
        self._resolve_alias()
        require_at_least(self, 0, "max_num_candidates", "num_workers")
        require_choice(self, "split", SPLIT_RULES)
        require_unique(self, "contextual_features")
        require_unique(self, "item_features")
        require_choice_values(self, "sharding_types", SHARDING_TYPES)
        require_choice_values(self, "table_placements", TABLE_PLACEMENTS)
        least = min((self.dynamic_tables or {}).values(), default=1)
        require(self, "dynamic_tables", least >= 1, "must give every table at least 1 row")
        require_choice(self, "evict_strategy", EVICT_STRATEGIES)
        read = self.evict_strategy == "lru" or bool(self.dynamic_tables)
        require(self, "evict_strategy", read, "needs dynamic_tables, which it is about")
        require_fraction(self, "event_dropout")

    def _resolve_alias(self) -> None:
        length, alias = self.max_history_seqlen, self.max_sequence_length
        if length == -1 and alias == -1:
            raise ConfigError("DatasetArgs.max_history_seqlen is required", "DatasetArgs.max_history_seqlen")
        if -1 not in (length, alias) and length != alias:
            raise refusal(self, "max_sequence_length", f"must equal max_history_seqlen = {length}, being its alias")
        name = "max_history_seqlen" if alias == -1 else "max_sequence_length"
        require_at_least(self, 1, name)
        set_field(self, "max_history_seqlen", max(length, alias))
        set_field(self, "max_sequence_length", -1)


@dataclass(frozen=True)
class RandomDistribution:
    """A distribution over natural numbers for synthetic data, values in [low, high].

    "uniform" excludes ``high``, which it needs (FeatureArgs fills it in for lengths); the others are clamped to it.
    "normal" needs mean and std. "lognormal" takes the mean and std (default: mean / 2) of the values themselves.
    "zipf": P(low - 1 + k) is proportional to k^-alpha, k >= 1; alpha > 1, default 1.5.
    """

    dist_type: str  # "uniform", "normal", "zipf", "lognormal"
    low: int = 0
    high: int | None = None
    mean: float | None = None
    std: float | None = None
    alpha: float | None = None

    def __post_init__(self) -> None:
        convert_fields(self)
        require_choice(self, "dist_type", ("uniform", "normal", "zipf", "lognormal"))
        require_at_least(self, 0, "low")
        high = self.high
        require(self, "high", high is None or high >= self.low, f"must be at least low = {self.low}")
        if self.dist_type == "uniform":
            require(self, "high", high != self.low, f"must be above low = {self.low}, since uniform leaves it out")
        if self.dist_type == "normal":
            require(self, "std", self.std is not None, "must be given for 'normal'")
        if self.dist_type in ("normal", "lognormal"):
            require(self, "mean", self.mean is not None, f"must be given for {self.dist_type!r}")
            require_positive(self, "std")
        if self.dist_type == "lognormal":
            require_positive(self, "mean")
        require(self, "alpha", self.alpha is None or 1 < self.alpha < float("inf"), "must be above 1")


@dataclass(frozen=True)
class FeatureArgs:
    """Synthetic features that share their lengths: all of ``feature_names`` have the same number of values a user."""

    feature_names: tuple[str, ...]
    max_sequence_length: int
    is_jagged: bool = False
    seqlen_dist: RandomDistribution | None = None
    value_dists: dict[str, RandomDistribution] | None = None

    def __post_init__(self) -> None:
        convert_fields(self)
        require(self, "feature_names", bool(self.feature_names), "must name at least one feature")
        require_unique(self, "feature_names")
        require_at_least(self, 1, "max_sequence_length")
        self._limit_lengths()
        unknown = sorted(set(self.value_dists or ()) - set(self.feature_names))
        require(self, "value_dists", not unknown, f"must be keyed by feature_names, which lack {unknown}")

    def _limit_lengths(self) -> None:
        """Fill in and check the upper end of ``seqlen_dist``."""
        if self.seqlen_dist is None:
            return
        limit = self.max_sequence_length
        if self.seqlen_dist.high is None:
            set_field(self, "seqlen_dist", replace(self.seqlen_dist, high=limit))
        elif self.seqlen_dist.high > limit:
            raise refusal(self, "seqlen_dist", f"must have high at most max_sequence_length = {limit}")


@dataclass(frozen=True)
class EmbeddingArgs:
    """One embedding table. ``item_vocab_size_or_capacity`` is its number of rows.

    placement: the memory of a shared table. "hbm": the device's own. "uvm": the host's, which a GPU reads row by row.
    "uvm_caching": the host's, with a cache of rows on the GPU. "auto": as TorchRec's planner finds best within
    TrainerArgs.embedding_hbm_gib.
    """

    feature_names: tuple[str, ...]
    table_name: str
    item_vocab_size_or_capacity: int
    sharding_type: str = "data_parallel"  # "model_parallel", (genrec) "row_wise", "table_wise", "column_wise", "auto"
    placement: str = "auto"  # (genrec) "auto", "hbm", "uvm", "uvm_caching"

    def __post_init__(self) -> None:
        convert_fields(self)
        require(self, "feature_names", bool(self.feature_names), "must name at least one feature")
        require_unique(self, "feature_names")
        require(self, "table_name", bool(self.table_name), "must not be empty")
        require_at_least(self, 1, "item_vocab_size_or_capacity")
        require_choice(self, "sharding_type", SHARDING_TYPES)
        require_choice(self, "placement", TABLE_PLACEMENTS)


@dataclass(frozen=True)
class DynamicEmbeddingArgs(EmbeddingArgs):
    """A table whose ids are any numbers: they get rows as they come, and lose them to others (docs/ranks.md).

    ``item_vocab_size_or_capacity`` is its number of rows for ids. What says where rows lie has no effect:
    global_hbm_for_values, item_vocab_gpu_capacity, item_vocab_gpu_capacity_ratio, caching and dist_type.
    """

    sharding_type: str = "model_parallel"  # (genrec) as of EmbeddingArgs
    global_hbm_for_values: int | None = None
    item_vocab_gpu_capacity: float | None = None
    item_vocab_gpu_capacity_ratio: float | None = None
    evict_strategy: str = "lru"
    caching: bool = False
    dist_type: str = "roundrobin"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice(self, "evict_strategy", EVICT_STRATEGIES)
        require_choice(self, "dist_type", ("continuous", "roundrobin", "hash_roundrobin"))
        require_at_least(self, 0, "global_hbm_for_values", "item_vocab_gpu_capacity", "item_vocab_gpu_capacity_ratio")


@dataclass(frozen=True)
class BenchmarkDatasetArgs:
    """Synthetic data; bound instead of DatasetArgs."""

    feature_args: tuple[FeatureArgs, ...]
    embedding_args: tuple[EmbeddingArgs, ...]
    item_feature_name: str
    contextual_feature_names: tuple[str, ...]
    action_feature_name: str | None = None
    max_num_candidates: int = 0
    num_generated_batches: int = 100

    def __post_init__(self) -> None:
        convert_fields(self)
        require_at_least(self, 0, "max_num_candidates")
        require_at_least(self, 1, "num_generated_batches")
        require_unique(self, "contextual_feature_names")
        combinations.check_synthetic_features(self)


@dataclass(frozen=True)
class NetworkArgs:
    """The HSTU encoder. ``kv_channels`` is the width of one head; lengths are in tokens.

    ``kv_channels`` must be a multiple of 8: attention kernels load the rows of a head 16 bytes at a time, 8 numbers of
    16 bits, and a file that trains on a CPU should train on a GPU too. ``hidden_size`` is free: projections lead from
    it to ``num_attention_heads * kv_channels`` and back, so neither needs to divide the other.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    kv_channels: int
    hidden_dropout: float = 0.2
    norm_epsilon: float | None = None  # None: as the layer style is defined, 1e-5 (dlrm_v3, research: 1e-6)
    is_causal: bool = True
    dtype_str: str = "bfloat16"  # "bfloat16", "float16", (genrec) "float32"
    kernel_backend: str = "auto"  # (genrec) "auto", "cutlass", "triton", "pytorch"
    target_group_size: int = 1  # candidate tokens that see each other; with actions 1 or 2, an item and its action
    num_position_buckets: int = 8192  # (genrec) 0: no position encoding
    recompute_input_layernorm: bool = False
    recompute_input_silu: bool = False
    item_embedding_dim: int = -1
    contextual_embedding_dim: int = -1
    scaling_seqlen: int = -1  # the divisor N of the attention; -1: the configured maximum length in tokens
    embedding_backend: str | None = None
    disable_contextual_mask: bool = False
    # genrec's own
    layer_style: str = "recsys_examples"  # "recsys_examples", "dlrm_v3", "research"
    relative_bias: str = "auto"  # on the scores: "none", "table", "smooth"; "auto": "table" for "research", else none
    output_norm: str = "layer"  # layer_style "dlrm_v3" only: "layer" or "group" (over heads)
    use_time_encoding: bool = False
    time_encoding_reference: str = "last"  # "last": time to the last event; "previous": since the event before
    contextual_mask: str = "prefix"  # "prefix", "history"
    max_attn_len: int = 0
    attn_alpha: float | None = None  # None: 1 / sqrt(kv_channels)
    qk_bias_init: float = 0.0  # initialization of the query and key biases; positive: attention starts as an average
    action_fusion: str = "none"  # "none": the action token is the action's embedding; "add": plus its item's
    embedding_init_std: float | None = None  # None: 1 / sqrt(rows) uniform, as TorchRec
    item_feature_scale: float = 1.0  # of what DatasetArgs.item_features add to the items' embeddings
    embedding_dropout: float | None = None  # of the tokens at the encoder's entry; None: as hidden_dropout

    def __post_init__(self) -> None:
        convert_fields(self)
        require_at_least(self, 1, "num_layers", "hidden_size", "num_attention_heads", "kv_channels")
        require_at_least(self, 1, "target_group_size")
        require_at_least(self, 0, "num_position_buckets")
        multiple = KV_CHANNELS_MULTIPLE
        require(self, "kv_channels", self.kv_channels % multiple == 0, f"must be a multiple of {multiple}")
        require_fraction(self, "hidden_dropout", "embedding_dropout")
        require_positive(self, "norm_epsilon", "attn_alpha", "embedding_init_std")
        require_minus_one_or_positive(self, "item_embedding_dim", "contextual_embedding_dim", "scaling_seqlen")
        require_at_least(self, 0, "max_attn_len")
        require_choice(self, "dtype_str", ("bfloat16", "float16", "float32"))
        require_choice(self, "kernel_backend", KERNEL_BACKENDS)
        require_choice(self, "relative_bias", ("auto", "none", "table", "smooth"))
        require_choice(self, "layer_style", ("recsys_examples", "dlrm_v3", "research"))
        require_choice(self, "output_norm", ("layer", "group"))
        require_choice(self, "time_encoding_reference", ("last", "previous"))
        require_choice(self, "contextual_mask", CONTEXTUAL_MASKS)
        require_choice(self, "action_fusion", ("none", "add"))
        for name in ("qk_bias_init", "item_feature_scale"):
            require(self, name, abs(getattr(self, name)) < float("inf"), "must be finite")
        self._check_layer_style()

    def _check_layer_style(self) -> None:
        """Refuse options that the chosen layer does not have."""
        style = self.layer_style
        if style != "dlrm_v3":
            require(self, "output_norm", self.output_norm == "layer", f"must be 'layer' with layer_style = {style!r}")
        if style == "research":
            require(self, "qk_bias_init", self.qk_bias_init == 0, "must be 0: layer_style 'research' has no biases")

    @property
    def history_is_causal(self) -> bool:
        """Whether a history position knows nothing of later events, so that a loss or a score on it is honest.

        Training without candidates and evaluation in the "sequential" protocol look at such positions.
        """
        return not any(combinations.fields_that_look_ahead(self))


@dataclass(frozen=True)
class OptimizerArgs:
    """Dense and embedding optimizers."""

    optimizer_str: str  # "adam", "sgd", (genrec) "adamw", "rowwise_adagrad" (embeddings only)
    learning_rate: float
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    # genrec's own
    embedding_optimizer_str: str | None = None  # None: as the dense one
    embedding_learning_rate: float | None = None  # None: as the dense one
    weight_decay: float = 0.0  # decoupled with adamw; matrices only, never biases and norms
    embedding_weight_decay: float = 0.0

    def __post_init__(self) -> None:
        convert_fields(self)
        require_choice(self, "optimizer_str", ("adam", "adamw", "sgd", "rowwise_adagrad"))
        only_tables = "is for embedding tables (embedding_optimizer_str), must be 'adam', 'adamw' or 'sgd' here"
        require(self, "optimizer_str", self.optimizer_str != "rowwise_adagrad", only_tables)
        require_choice(self, "embedding_optimizer_str", ("adam", "adamw", "sgd", "rowwise_adagrad"))
        require_positive(self, "learning_rate", "embedding_learning_rate", "adam_eps")
        require_fraction(self, "adam_beta1", "adam_beta2")
        for name in ("weight_decay", "embedding_weight_decay"):
            require(self, name, 0 <= getattr(self, name) < float("inf"), "must be at least 0 and finite")


@dataclass(frozen=True)
class RankingArgs:
    """Ranking heads.

    ``num_tasks=1`` with a last layer of k > 1 is k-class cross entropy; else one BCE a task, on bit i of the label.
    """

    prediction_head_arch: tuple[int, ...]
    prediction_head_act_type: str = "relu"  # "relu", "gelu", (genrec) "silu"
    prediction_head_bias: bool = True
    num_tasks: int = 1
    eval_metrics: tuple[str, ...] = ("AUC",)
    # genrec's own
    l2_norm: bool = False  # L2-normalise the user state before the head
    task_weights: tuple[float, ...] | None = None  # None: all 1
    head_layernorm: bool = False  # LayerNorm on the user state before the head
    head_dropout: float = 0.0  # of the user state before the head, after its LayerNorm
    head_zero_init: bool = False  # the last layer's weight starts at zero, like its bias: the first logits are 0

    def __post_init__(self) -> None:
        convert_fields(self)
        arch = self.prediction_head_arch
        require(self, "prediction_head_arch", bool(arch) and min(arch) >= 1, "must list layer widths of at least 1")
        require_choice(self, "prediction_head_act_type", ("relu", "gelu", "silu"))
        require_fraction(self, "head_dropout")
        undone = self.head_layernorm and self.l2_norm
        require(self, "head_layernorm", not undone, "must be False with l2_norm = True, which it would undo")
        require_at_least(self, 1, "num_tasks")
        one_output_a_task = self.num_tasks == 1 or arch[-1] == self.num_tasks
        require(self, "num_tasks", one_output_a_task, f"must be 1 or the head's last width, {arch[-1]}")
        require_choices(self, "eval_metrics", RANKING_METRICS)
        self._check_task_weights()

    def _check_task_weights(self) -> None:
        weights = self.task_weights
        if weights is not None:
            matching = len(weights) == self.num_tasks
            require(self, "task_weights", matching, f"must have num_tasks = {self.num_tasks} numbers")
            valid = all(0 <= weight < float("inf") for weight in weights) and sum(weights) > 0
            require(self, "task_weights", valid, "must be finite, at least 0, and not all 0")

    @property
    def is_k_class(self) -> bool:
        """Whether the label is one of k classes; else it is a mask with a bit a task."""
        return self.num_tasks == 1 and self.prediction_head_arch[-1] > 1


@dataclass(frozen=True)
class RetrievalArgs:
    """Retrieval by sampled softmax. ``num_negatives=-1``: the other targets of the batch."""

    num_negatives: int = -1
    temperature: float = 0.05
    l2_norm_eps: float = 1e-6
    eval_metrics: tuple[str, ...] = ("HR@10", "NDCG@10")

    def __post_init__(self) -> None:
        convert_fields(self)
        require_minus_one_or_positive(self, "num_negatives")
        require_positive(self, "temperature", "l2_norm_eps")
        set_field(self, "eval_metrics", tuple(metric.upper() for metric in self.eval_metrics))
        known = all(RETRIEVAL_METRIC.fullmatch(metric) for metric in self.eval_metrics)
        require(self, "eval_metrics", known, "must hold only HR@k, NDCG@k and MRR@k, such as 'HR@10'")
        require_unique(self, "eval_metrics")


@dataclass(frozen=True)
class TensorModelParallelArgs:
    """Tensor parallelism of the dense layers."""

    tensor_model_parallel_size: int = 1

    def __post_init__(self) -> None:
        convert_fields(self)
        require_at_least(self, 1, "tensor_model_parallel_size")


Task = Literal["ranking", "retrieval"]


@dataclass(frozen=True)
class ExperimentConfig:
    """One run's whole configuration, checked across classes.

    text: the gin config as parsed. digest: a hash of the resolved values, the same in every process that resolved the
    same; where a run keeps its files, its tiles (:data:`combinations.DIGEST_IGNORES`) and ``text`` do not count.
    """

    task: Task
    trainer: TrainerArgs
    dataset: DatasetArgs | BenchmarkDatasetArgs
    network: NetworkArgs
    optimizer: OptimizerArgs
    ranking: RankingArgs | None = None
    retrieval: RetrievalArgs | None = None
    tensor_parallel: TensorModelParallelArgs = field(default_factory=TensorModelParallelArgs)
    mixed_precision: MixedPrecisionArgs = field(default_factory=MixedPrecisionArgs)
    text: str = ""
    digest: str = field(init=False, default="")

    def __post_init__(self) -> None:
        convert_fields(self)
        combinations.check_experiment(self)
        set_field(self, "digest", combinations.digest(self))
