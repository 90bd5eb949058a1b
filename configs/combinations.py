"""What must hold between fields and between classes of the configuration, and the hash of all of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from genrec.configs.checks import refusal, require
from genrec.configs.errors import ConfigError
from genrec.configs.fp8_widths import check_fp8

if TYPE_CHECKING:
    from genrec.configs.schema import BenchmarkDatasetArgs, ExperimentConfig, NetworkArgs

DIGEST_IGNORES = (
    "output_dir",
    "resume",
    "ckpt_save_dir",
    "ckpt_load_dir",
    "ckpt_load_parts",
    "keep_checkpoints",
    "attention_tiles",
)


def check_synthetic_features(args: BenchmarkDatasetArgs) -> None:
    """Every feature in use has one FeatureArgs and one table, and item and action share their lengths."""
    used = [args.item_feature_name, *args.contextual_feature_names]
    if args.action_feature_name is not None:
        used.append(args.action_feature_name)
    for name, owners in (("feature_args", args.feature_args), ("embedding_args", args.embedding_args)):
        counts = Counter(feature for owner in owners for feature in owner.feature_names)
        missing = [feature for feature in used if counts[feature] == 0]
        require(args, name, not missing, f"must cover every feature in use and lacks {missing}")
        repeated = [feature for feature, count in counts.items() if count > 1]
        require(args, name, not repeated, f"must name each feature once and repeats {repeated}")
    tables = Counter(table.table_name for table in args.embedding_args)
    repeated = [table for table, count in tables.items() if count > 1]
    require(args, "embedding_args", not repeated, f"must name each table once and repeats {repeated}")
    _check_event_features(args)


def _check_event_features(args: BenchmarkDatasetArgs) -> None:
    names = [args.item_feature_name, *args.contextual_feature_names, args.action_feature_name]
    require(args, "item_feature_name", len(set(names)) == len(names), "must differ from the other features' names")
    for group in args.feature_args:
        action = args.action_feature_name
        if args.item_feature_name in group.feature_names and action not in (None, *group.feature_names):
            raise refusal(args, "action_feature_name", "must share a FeatureArgs with the item, one action an event")


def check_experiment(config: ExperimentConfig) -> None:
    """Refuse what the classes allow one by one but not together. Raises ConfigError."""
    _check_task(config)
    if config.dataset.max_num_candidates == 0:
        _check_loss_on_history(config.network)
    # Prepared datasets have actions.
    if getattr(config.dataset, "action_feature_name", "action") is not None:
        _check_target_groups(config.network)
    heads, parallel_size = config.network.num_attention_heads, config.tensor_parallel.tensor_model_parallel_size
    allowed = f"must be a multiple of tensor_model_parallel_size = {parallel_size}"
    require(config.network, "num_attention_heads", heads % parallel_size == 0, allowed)
    if config.mixed_precision.mixed_precision_dtype is not None:
        check_fp8(config)
    _check_best_metric(config)


def _check_task(config: ExperimentConfig) -> None:
    wanted, other = ("ranking", "retrieval") if config.task == "ranking" else ("retrieval", "ranking")
    if getattr(config, wanted) is None or getattr(config, other) is not None:
        raise ConfigError(f"a {wanted} run needs {wanted.capitalize()}Args and takes no {other.capitalize()}Args")


def _check_best_metric(config: ExperimentConfig) -> None:
    """The metric must be computed, and in a protocol that the run evaluates."""
    metric = config.trainer.best_metric
    if metric is None:
        return
    protocol, _, name = metric.rpartition("/")
    computed = config.ranking is not None and (name != "Accuracy" or name in config.ranking.eval_metrics)
    require(config.trainer, "best_metric", computed, "must be in eval_metrics, or nothing computes it")
    causal = protocol != "sequential" or config.network.history_is_causal
    require(config.trainer, "best_metric", causal, "needs a causal history, or it would see the future")


def fields_that_look_ahead(network: NetworkArgs) -> Iterator[tuple[str, str]]:
    """Fields through which a history position sees what comes after it, and what each would have to be."""
    if not network.is_causal:
        yield "is_causal", "True"
    if network.contextual_mask == "history" and not network.disable_contextual_mask:
        yield "contextual_mask", "'prefix'"
    if network.use_time_encoding and network.time_encoding_reference == "last":
        yield "time_encoding_reference", "'previous'"


def _check_loss_on_history(network: NetworkArgs) -> None:
    """With the loss on history positions, nothing may let a position see what comes after it."""
    for name, wanted in fields_that_look_ahead(network):
        because = "when DatasetArgs.max_num_candidates = 0, since it shows the future to the loss"
        raise refusal(network, name, f"must be {wanted} {because}")


def _check_target_groups(network: NetworkArgs) -> None:
    """A candidate's item may see neither its own action nor another candidate's, which tell the labels.

    Without actions groups may have any size: no token of a candidate then tells a label.
    """
    size = network.target_group_size
    others = "must be 1 or 2 with actions, since a larger group shows a candidate the labels of those before it"
    require(network, "target_group_size", size <= 2, others)
    own = f"must be True with actions and target_group_size = {size}, since a candidate would see its own label"
    require(network, "is_causal", network.is_causal or size == 1, own)


def digest(config: ExperimentConfig) -> str:
    """SHA-256 of the resolved values, without ``text`` and :data:`DIGEST_IGNORES`."""
    values: dict[str, Any] = dataclasses.asdict(config)
    del values["text"], values["digest"]
    for name in DIGEST_IGNORES:
        del values["trainer"][name]
    for name in ("dataset", "trainer"):
        values[name]["class"] = type(getattr(config, name)).__name__
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
