"""What must hold between fields and between classes of the configuration, and the hash of all of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from genrec.configs.checks import refusal, require
from genrec.configs.errors import ConfigError

if TYPE_CHECKING:
    from genrec.configs.schema import BenchmarkDatasetArgs, ExperimentConfig

DIGEST_IGNORES = ("output_dir", "resume", "ckpt_save_dir", "ckpt_load_dir", "keep_checkpoints")


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
        _check_loss_on_history(config)
    heads, parallel_size = config.network.num_attention_heads, config.tensor_parallel.tensor_model_parallel_size
    allowed = f"must be a multiple of tensor_model_parallel_size = {parallel_size}"
    require(config.network, "num_attention_heads", heads % parallel_size == 0, allowed)


def _check_task(config: ExperimentConfig) -> None:
    wanted, other = ("ranking", "retrieval") if config.task == "ranking" else ("retrieval", "ranking")
    if getattr(config, wanted) is None or getattr(config, other) is not None:
        raise ConfigError(f"a {wanted} run needs {wanted.capitalize()}Args and takes no {other.capitalize()}Args")


def _check_loss_on_history(config: ExperimentConfig) -> None:
    """With the loss on history positions, nothing may let a position see what comes after it."""
    network, because = config.network, "when DatasetArgs.max_num_candidates = 0, since it shows the future to the loss"
    require(network, "is_causal", network.is_causal, f"must be True {because}")
    require(network, "contextual_mask", network.contextual_mask == "prefix", f"must be 'prefix' {because}")
    if network.use_time_encoding:
        previous = network.time_encoding_reference == "previous"
        require(network, "time_encoding_reference", previous, f"must be 'previous' {because}")


def digest(config: ExperimentConfig) -> str:
    """SHA-256 of the resolved values, without ``text`` and :data:`DIGEST_IGNORES`."""
    values: dict[str, Any] = dataclasses.asdict(config)
    del values["text"], values["digest"]
    for name in DIGEST_IGNORES:
        del values["trainer"][name]
    for name in ("dataset", "trainer"):
        values[name]["class"] = type(getattr(config, name)).__name__
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
