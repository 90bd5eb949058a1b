"""What tells a later reader how a run was made: the texts in its output folder and in each of its checkpoints."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from pathlib import Path

from genrec.configs.loading import operative_text
from genrec.configs.schema import ExperimentConfig, UserError
from genrec.data.files import write_atomically
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


def write_config(texts: Mapping[str, str], output_dir: Path) -> None:
    """Put the gin files of ``texts`` into ``output_dir``. Raises UserError where that cannot be written."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        for name in ("config.gin", "operative_config.gin"):
            write_atomically(output_dir / name, texts[name])
    except OSError as error:
        reason = f"{error.strerror} ({error.filename})"
        raise UserError(f"TrainerArgs.output_dir = {str(output_dir)!r} cannot be written: {reason}") from error


def versions() -> dict[str, str]:
    """What wrote a checkpoint, for who reads it later."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
