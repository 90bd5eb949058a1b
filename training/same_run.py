"""Whether a checkpoint is of the run that continues it: the same configuration, optimizers and data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from genrec.configs.schema import ExperimentConfig
from genrec.training.checkpoint import CheckpointError

# Fields that may change between a checkpoint and the run that continues it. None of them changes what a step computes:
# a longer run needs a constant learning rate (check_same_run), "skip" differs from "stop" only where that would have
# ended the run, another device computes the same up to rounding and its own random numbers, evaluation leaves FP8
# state alone, and gradients are summed over ranks however these share the dense weights. How tables are sharded is left
# out too (_without_sharding): only with Adam does it change a step, whose rows, where a step doesn't read them, it
# leaves alone in a sharded table. How many ranks share the layers changes no more than rounding.
FREE_FIELDS = {
    "TensorModelParallelArgs": ("tensor_model_parallel_size",),
    "DatasetArgs": ("dataset_path", "num_workers"),
    "MixedPrecisionArgs": ("fp8_during_eval",),
    "RankingArgs": ("eval_metrics",),
    "TrainerArgs": (
        *("output_dir", "resume", "ckpt_save_interval", "ckpt_save_dir", "ckpt_load_dir", "ckpt_load_parts"),
        *("keep_checkpoints", "best_metric", "async_save", "hang_timeout_s"),
        *("max_train_iters", "eval_batch_size", "eval_interval", "max_eval_iters", "log_interval"),
        *("embedding_hbm_gib", "embedding_host_gib", "embedding_cache_load_factor"),
        *("profile", "profile_step_start", "profile_step_end", "pipeline_type", "nonfinite", "device"),
        "dense_parallel",
    ),
}

WHERE_TABLES_LIE = ("sharding_type", "sharding_types", "placement", "table_placements")


def config_values(config: ExperimentConfig) -> dict[str, Any]:
    """The resolved configuration as JSON values by class, for ``config.json``."""
    parts = [getattr(config, part.name) for part in dataclasses.fields(config)]
    arguments = [p for p in parts if dataclasses.is_dataclass(p) and not isinstance(p, type)]
    values = {type(part).__name__: dataclasses.asdict(part) for part in arguments}
    plain: dict[str, Any] = json.loads(json.dumps({"task": config.task, **values}))
    return plain


def check_same_run(path: Path, config: ExperimentConfig, *, data_sizes: tuple[int, int]) -> None:
    """Raises CheckpointError naming the fields in which ``config`` is another run than the checkpoint's.

    data_sizes: into how many parts the data went there, and goes here (``Ranks.data_size``).
    """
    saved = _flat(_without_sharding(json.loads((path / "config.json").read_text())))
    current = _flat(_without_sharding(config_values(config)))
    free = {f"{name}.{field}" for name, fields in FREE_FIELDS.items() for field in fields}
    if config.trainer.lr_schedule != "constant":  # the others are laid out over the whole run
        free.remove("TrainerArgs.max_train_iters")
    if same_global_batches(path, config, data_sizes=data_sizes):
        free.add("TrainerArgs.train_batch_size")
    names = sorted((saved.keys() | current.keys()) - free)
    changes = [
        f"{name} was {saved.get(name)!r} and is {current.get(name)!r}"
        for name in names
        if saved.get(name) != current.get(name)
    ]
    if changes:
        raise CheckpointError(
            f"cannot continue from {path}, which has another configuration ({', '.join(changes)}): choose another "
            "TrainerArgs.output_dir or undo the change"
        )


def same_global_batches(path: Path, config: ExperimentConfig, *, data_sizes: tuple[int, int]) -> bool:
    """Whether a step reads as many users as in the checkpoint's run, on however many ranks."""
    saved = json.loads((path / "config.json").read_text())["TrainerArgs"]["train_batch_size"]
    return bool(saved * data_sizes[0] == config.trainer.train_batch_size * data_sizes[1])


def same_optimizers(path: Path, config: ExperimentConfig) -> bool:
    """Whether the checkpoint's optimizers are those of ``config``, so that their state means the same."""
    saved = json.loads((path / "config.json").read_text())["OptimizerArgs"]
    current = dataclasses.asdict(config.optimizer)

    def kinds(values: Mapping[str, Any]) -> tuple[str, str]:
        return values["optimizer_str"], values["embedding_optimizer_str"] or values["optimizer_str"]

    return kinds(saved) == kinds(current)


def check_same_data(path: Path, *, saved: Mapping[str, Any] | None, current: Mapping[str, Any] | None) -> None:
    """Raises CheckpointError where a checkpoint's dataset (``RunData.identity``) is not the one at hand."""
    if saved == current:
        return
    was, now = saved or {}, current or {}
    names = [name for name in sorted(was.keys() | now.keys()) if was.get(name) != now.get(name)]
    changes = ", ".join(f"{name} was {was.get(name)!r} and is {now.get(name)!r}" for name in names)
    raise CheckpointError(f"cannot continue from {path}, which was trained on other data ({changes})")


def _without_sharding(values: Any) -> Any:
    """``values`` without where tables lie."""
    if isinstance(values, dict):
        return {n: _without_sharding(value) for n, value in values.items() if n not in WHERE_TABLES_LIE}
    return [_without_sharding(value) for value in values] if isinstance(values, list) else values


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
