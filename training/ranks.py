"""Ranks and what they do together: sums, gathers, and the agreement on errors, on the config and on the data.

One rank alone needs no process group (process_group.py); every collective here is then the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from genrec.configs.schema import ConfigError, UserError
from genrec.hstu.parallel import ALONE, TensorParallel
from genrec.training.progress import Progress

T = TypeVar("T")


class PeerStopped(UserError):
    """Another rank met the error and says so; this one only stops."""


class RankError(UserError):
    """An error that rank 0 has not met, so this rank tells it."""


@dataclass(frozen=True)
class Attempt(Generic[T]):
    """What an action came to on this rank: its value, or the error that it raised."""

    value: T | None = None
    error: Exception | None = None

    @staticmethod
    def of(action: Callable[[], T]) -> Attempt[T]:
        """Run ``action`` and keep an error of any kind: the others must not wait for this rank in a collective."""
        try:
            return Attempt(value=action())
        except Exception as error:  # noqa: BLE001, see above
            return Attempt(error=error)


@dataclass(frozen=True)
class Ranks:
    """This rank's place among all of them, its device, and how far it is.

    group: by which a thread of its own meets those of the other ranks; None: the one that all have joined. host_group:
    the same ranks, for numbers that lie on the host; None where ``group`` takes them.

    With tensor parallelism the ranks are a grid, rank = data_rank * tensor.size + tensor.rank: those of one
    ``data_rank`` read the same batches and are peers in ``tensor``; those of one tensor.rank, the ``data_group``, hold
    the same weights and read different batches. Without, each is a row of its own.
    """

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    host_group: dist.ProcessGroup | None = None
    progress: Progress = field(default_factory=Progress, compare=False)
    tensor: TensorParallel = ALONE
    data_group: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that writes and prints."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Which part of the data this rank reads."""
        return self.rank // self.tensor.size

    @property
    def data_size(self) -> int:
        """Into how many parts the data goes."""
        return self.world_size // self.tensor.size

    @property
    def is_first_peer(self) -> bool:
        """Whether what this rank sees of its batches counts in sums over ranks: peers see the same once more."""
        return self.tensor.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """``tensor`` summed over ranks, in place."""
        if self.world_size > 1:
            with self.progress.collective("all-reduce"):
                dist.all_reduce(tensor, group=self.group)
        return tensor

    def average_gradient(self, gradient: Tensor) -> None:
        """What DDP does to a gradient, in place."""
        gradient.div_(self.data_size)
        if self.data_group is None:  # that of all ranks
            self.sum(gradient)
        else:
            dist.all_reduce(gradient, group=self.data_group)

    def sum_counts(self, counts: Sequence[int]) -> list[int]:
        """Whole numbers summed over ranks, on the host: no device is waited for."""
        return self.start_sum_counts(counts)()

    def start_sum_counts(self, counts: Sequence[int]) -> Callable[[], list[int]]:
        """``sum_counts`` that goes on beside what the host does next; call the result for the sums."""
        if self.world_size == 1:
            return lambda: list(counts)
        sums = torch.tensor(counts, dtype=torch.int64)
        work = dist.all_reduce(sums, group=self.host_group or self.group, async_op=True)

        def result() -> list[int]:
            with self.progress.collective("all-reduce"):
                work.wait()
            return [int(value) for value in sums]

        return result

    def gather(self, value: T) -> list[T]:
        """``value`` of every rank, by rank."""
        if self.world_size == 1:
            return [value]
        values: list[T | None] = [None] * self.world_size
        with self.progress.collective("all-gather"):
            dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]

    def together(self, action: Callable[[], T]) -> T:
        """Run ``action`` on every rank; where it fails on any, all stop, and only the first that failed says why.

        ``action`` itself must not contain collectives. Raises the error on the first failing rank (a UserError as
        RankError if that is not rank 0), PeerStopped on the others.
        """
        attempt = Attempt.of(action)
        (num_failed,) = self.sum_counts([int(attempt.error is not None)])
        return self.settle(attempt, num_failed=num_failed)

    def settle(self, attempt: Attempt[T], *, num_failed: int) -> T:
        """The second half of ``together``, where the ranks have counted failures in a collective of their own."""
        error = attempt.error
        if not num_failed:
            return attempt.value  # type: ignore[return-value]
        first = self.gather(error is not None).index(True)
        if error is None or self.rank != first:
            raise PeerStopped(f"rank {first} stopped with an error")
        if self.is_main or not isinstance(error, UserError) or isinstance(error, RankError):
            raise error
        raise RankError(f"rank {self.rank}: {error}") from error


def check_same_config(ranks: Ranks, digest: str) -> None:
    """Raises ConfigError where a rank was started with another configuration than rank 0."""
    _check_same(ranks, f"config hash {digest[:12]}", what="configuration", give="files and bindings")


def check_same_data(ranks: Ranks, identity: object) -> None:
    """Raises ConfigError where a rank reads another dataset than rank 0. identity: ``RunData.identity``."""
    _check_same(ranks, identity, what="dataset", give="prepared data")


def _check_same(ranks: Ranks, value: object, *, what: str, give: str) -> None:
    values = ranks.gather(value)
    different = [rank for rank, other in enumerate(values) if other != values[0]]
    if not different:
        return
    if not ranks.is_main:
        raise PeerStopped(f"ranks have another {what}")
    raise ConfigError(
        f"ranks {different} were started with another {what} than rank 0 ({values[different[0]]} against {values[0]}): "
        f"give every rank the same {give}"
    )
