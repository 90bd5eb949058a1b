"""Writes a rank's part of a checkpoint: its own file, and its tensors by torch.distributed.checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from genrec.data.files import write_synced
from genrec.training.checkpoint import CheckpointError, host_path
from genrec.training.ranks import Ranks

COPY_AHEAD_BYTES = 10_000_000  # PyTorch's own default

# A rank alone would be warned that it saves without a process group, which is what it asked for. For good, since
# filters that are set for a while are those of all threads.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Write ``tensors`` into ``path``, all ranks together."""
    ranks.progress.enter("planning the tensors of a checkpoint")
    dcp.save(
        dict(tensors),
        storage_writer=_Writer(path, ranks),
        process_group=ranks.group,
        no_dist=ranks.world_size == 1,  # also where it has a group of its own, for sharded tables
    )


def write_host(path: Path, rank: int, host: str) -> None:
    """Put what ``rank`` holds on the host on record, as JSON text."""
    write_synced(host_path(path, rank), host)


def on_disk(action: Callable[[], None]) -> None:
    """Run ``action``; raises CheckpointError where the disk refuses."""
    try:
        action()
    except OSError as error:
        raise CheckpointError(f"cannot write a checkpoint: {error}") from error
    except CheckpointException as error:  # what torch.distributed.checkpoint wraps any rank's exception in
        cause = next(iter(error.failures.values()))[0]
        if not isinstance(cause, (OSError, RuntimeError)):
            raise
        reason = str(cause).strip().splitlines()[0]
        if isinstance(cause, RuntimeError):  # of PyTorch's writer, which does not say why the system took less
            reason = f"a file took less than was written to it, is the disk full? (PyTorch: {reason})"
        raise CheckpointError(f"cannot write a checkpoint: {reason}") from error


class _Writer(FileSystemWriter):
    """Notes how far it is; in the background it leaves the GPU alone, which training uses."""

    def __init__(self, path: Path, ranks: Ranks) -> None:
        # Copies ahead of the writing are for tensors on a GPU, and wait for all that it does.
        super().__init__(path, per_thread_copy_ahead=0 if ranks.device.type == "cpu" else COPY_AHEAD_BYTES)
        self._folder = path
        self._ranks = ranks

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        progress = self._ranks.progress
        progress.enter("writing the tensors of a checkpoint")
        with progress.measuring(self._num_bytes):
            written = super().write_data(plan, planner)
        progress.enter("agreeing on the tensors of a checkpoint")
        return written

    def _num_bytes(self) -> int:
        """Of this rank's files so far."""
        try:
            return sum(file.stat().st_size for file in self._folder.glob(f"__{self._ranks.rank}_*"))
        except OSError:  # one is gone, which writing will meet too
            return 0
