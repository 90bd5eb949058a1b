"""What tells a later reader how a run was made: the texts in its output folder and in each of its checkpoints."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform

from genrec.configs.loading import operative_text
from genrec.configs.schema import ExperimentConfig
from genrec.training.same_run import config_values

PACKAGES = ("genrec", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "transformer-engine", "triton")


def run_texts(config: ExperimentConfig) -> dict[str, str]:
    """File name to content, for checkpoints. ``config`` is the configuration that was loaded last."""
    return {
        "config.gin": config.text,
        "operative_config.gin": operative_text(),
        "config.json": json.dumps(config_values(config), indent=1),
        "versions.json": json.dumps(versions(), indent=1),
    }


def versions() -> dict[str, str]:
    """What wrote a checkpoint, for who reads it later."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
