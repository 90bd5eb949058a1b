"""Ranks and what they do together: torchrun's process group, the device, agreement on errors and on the config.

Plain ``python`` is one rank without a process group; every collective here is then the identity.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from genrec.configs.schema import ConfigError, UnavailableError, UserError
from genrec.hstu.parallel import ALONE, TensorParallel
from genrec.training.progress import Progress

T = TypeVar("T")

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)
TELLING_TIMEOUT = datetime.timedelta(seconds=20)


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


@contextlib.contextmanager
def process_group(device: str) -> Iterator[Ranks]:
    """Join the ranks that torchrun started (gloo on the CPU, NCCL on GPUs), or be the only one.

    A group that the process has joined already is used as it is, and not left. ``device`` is TrainerArgs.device. Raises
    UnavailableError for "cuda" without a GPU.
    """
    chosen = choose_device(device)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        with _left_as_found():
            yield Ranks(rank=0, world_size=1, device=chosen)
        return
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    joins = not dist.is_initialized()
    if joins:
        _join("nccl" if chosen.type == "cuda" else "gloo")
    try:
        host_group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if chosen.type == "cuda" else None
        yield Ranks(dist.get_rank(), dist.get_world_size(), chosen, host_group=host_group)
    except BaseException as error:
        if joins:
            _tell_in_order(error)
            _let_go_of_frames(error)
        raise
    finally:
        if joins:
            gc.collect()  # a DDP module holds the group: freed after its end, it may wait for the other ranks for ever
            dist.destroy_process_group()


def ensure_process_group(ranks: Ranks) -> None:
    """Of plain ``python``'s one rank, a group of its own: TorchRec's sharded tables need one. No address, no port."""
    if dist.is_initialized():
        return
    assert ranks.world_size == 1
    backend = "gloo"
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
        backend = "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT)


@contextlib.contextmanager
def _left_as_found() -> Iterator[None]:
    """Afterwards, leave the group that ``ensure_process_group`` may have made."""
    had_group = dist.is_initialized()
    try:
        yield
    finally:
        if dist.is_initialized() and not had_group:
            dist.destroy_process_group()


def _join(backend: str) -> None:
    """Join the process group of this start of the ranks.

    torchrun gives a restart the store of the start before it, where ranks would find the addresses of ranks that have
    died: so each start has keys of its own.
    """
    store, rank, world_size = next(dist.rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = dist.PrefixStore(f"genrec_start_{restart}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)


def tell(error: UserError) -> None:
    """Print ``error`` as one sentence."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    error.told = True


def speaks(error: UserError) -> bool:
    """Whether this rank is the one that tells ``error``: what all ranks meet is told by rank 0 alone."""
    return not isinstance(error, PeerStopped) and (is_main_process() or isinstance(error, RankError))


def _tell_in_order(error: BaseException) -> None:
    """Let the rank that speaks do so before any other ends: torchrun stops all ranks when the first one ends."""
    if not isinstance(error, UserError):
        return
    store = dist.distributed_c10d._get_default_store()
    if speaks(error):
        tell(error)
        store.set("genrec_error_told", "")
        return
    with contextlib.suppress(RuntimeError):  # nobody told it in time, or the store's rank has ended
        store.wait(["genrec_error_told"], TELLING_TIMEOUT)
        error.told = True


def _let_go_of_frames(error: BaseException | None) -> None:
    """Free what the frames of an error hold, a DDP module among it, where an ended group would be waited for."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def choose_device(name: str) -> torch.device:
    """The device that TrainerArgs.device = ``name`` means here. Raises UnavailableError for "cuda" without a GPU."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UnavailableError('TrainerArgs.device = "cuda", but PyTorch sees no GPU here: use "cpu" or "auto"')
    if name == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def local_world_size(world_size: int) -> int:
    """How many of the ranks share this one's host: torchrun says it; else all do."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def is_main_process() -> bool:
    """Whether this is rank 0, known before (and without) a process group."""
    return int(os.environ.get("RANK", "0")) == 0


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
