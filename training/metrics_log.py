"""``metrics.jsonl``: one JSON object a line, what a run measured.

::

    {"event": "train", "step": 100, "loss": 0.61, "learning_rate": 0.001, "tokens_per_s": 30211.5, "users_per_s": 151.2}
    {"event": "valid", "step": 100, "protocol": "sequential", "metrics": {"auc": 0.77, "ne": 0.9, ...}}

NaN and infinity are not JSON and become null.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from genrec.configs.schema import UserError
from genrec.data.files import write_atomically

Line = dict[str, Any]


def append_lines(path: Path, lines: Iterable[Line]) -> None:
    """Append ``lines`` with one write, so that a crash leaves at most one torn line, at the end.

    Raises UserError where the disk refuses.
    """
    text = "".join(json.dumps(_finite(line), allow_nan=False) + "\n" for line in lines)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error


def read_lines(path: Path) -> list[Line]:
    """The whole lines of ``path``, none where there is no such file; torn ones are left out."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines


def keep_lines(path: Path, keep: Callable[[Line], bool]) -> None:
    """Drop torn lines and those that ``keep`` refuses; a no-op where there is no such file."""
    if path.exists():
        kept = [line for line in read_lines(path) if keep(line)]
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
