"""How a process becomes one of the ranks: torchrun's process group, the device, and who of them tells an error.

Plain ``python`` is one rank without a process group.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import sys
import time
import traceback
from collections.abc import Iterator

import torch
import torch.distributed as dist

from genrec.configs.schema import UnavailableError, UserError
from genrec.training.ranks import PeerStopped, RankError, Ranks

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)
TELLING_TIMEOUT = datetime.timedelta(seconds=20)
TRACEBACK = "traceback"  # is what Python shows of the error, as it ends


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
    store = dist.distributed_c10d._get_default_store()
    if not isinstance(error, UserError):
        with contextlib.suppress(RuntimeError):  # the store's rank has ended
            store.set("genrec_error_told", TRACEBACK)
        return
    if speaks(error):
        tell(error)
        store.set("genrec_error_told", "")
        return
    with contextlib.suppress(RuntimeError):  # nobody told it in time, or the store's rank has ended
        store.wait(["genrec_error_told"], TELLING_TIMEOUT)
        error.told = True
        if store.get("genrec_error_told").decode() == TRACEBACK:
            time.sleep(1.0)


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
