"""TorchRec's pipeline of steps in flight, moved on by a training step of ours.

Streams, contexts, the exchange of ids and the lookups that find it done are TorchRec's TrainPipelineSparseDist; its
``progress``, which owns loss and optimizer, is not used. overlap.py says what happens when.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec.distributed.train_pipeline.pipeline_context import PrefetchTrainPipelineContext, TrainPipelineContext
from torchrec.distributed.train_pipeline.runtime_forwards import PipelinedForward, PrefetchPipelinedForward
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.utils import _prefetch_embeddings, _wait_for_batch
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from genrec.data.batch import Batch
from genrec.model.embedding import FeatureEmbeddings, at_least_one_user
from genrec.training.feed import StepCounts
from genrec.training.ranks import Attempt
from genrec.training.table_plan import quiet_torchrec
from genrec.training.tables import table_kernels


def cached_tables(model: nn.Module) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    """The kernels of tables in host memory with a cache on the device."""
    return [kernel for kernel in table_kernels(model) if kernel.lxu_cache_weights.numel()]


@dataclass(frozen=True)
class InFlight(Pipelineable):
    """A step's micro-batches on their way. counts: gives the sums over ranks. cursor: the loader's after them."""

    batches: Attempt[Sequence[Batch]]
    counts: Callable[[], StepCounts]
    cursor: dict[str, int]

    @property
    def features(self) -> KeyedJaggedTensor:
        """What the sharded tables read: of the only micro-batch, since accumulation is refused with them."""
        assert self.batches.value is not None
        return at_least_one_user(self.batches.value[0])

    @property
    def is_whole(self) -> bool:
        """Whether every rank could read its batches; otherwise none of them trains on it."""
        return self.counts().num_failed == 0

    def to(self, device: torch.device, non_blocking: bool) -> InFlight:
        """A copy on ``device``."""
        if self.batches.value is None:
            return self
        copies = [batch.to(device, non_blocking=non_blocking) for batch in self.batches.value]
        return dataclasses.replace(self, batches=Attempt(value=copies))

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory alive until ``stream`` has used it."""
        for batch in self.batches.value or ():
            batch.record_stream(stream)


class Lookups(nn.Module):
    """The sharded tables alone, in a form that TorchRec can trace: it looks for what each of them reads of a batch."""

    def __init__(self, embeddings: FeatureEmbeddings) -> None:
        super().__init__()
        sharded = [m for m in embeddings.collections.values() if isinstance(m, ShardedModule)]
        self.collections = nn.ModuleList(sharded)

    def forward(self, step: InFlight) -> list[Any]:
        """What the tables hold for ``step``, still awaitable."""
        return [collection(step.features) for collection in self.collections]


class StepPipeline(TrainPipelineSparseDist[InFlight, Any]):
    """TorchRec's pipeline, moved on by a training step that is not its own. ``batches``: in flight, the present first.

    prefetches: also bring the rows of the next step's ids into the cache of tables in host memory. It happens between
    a step's lookup and its update, and for one step only, by which FBGEMM keeps cache and table the same.
    """

    def __init__(self, lookups: Lookups, device: torch.device, *, prefetches: bool) -> None:
        super().__init__(
            model=lookups,
            optimizer=None,
            device=device,
            context_type=PrefetchTrainPipelineContext if prefetches else TrainPipelineContext,
            dmp_collection_sync_interval_batches=None,
        )
        self._pipelined_forward_type = PrefetchPipelinedForward if prefetches else PipelinedForward
        self._lookups = lookups
        self._prefetches = prefetches
        self._prefetch_stream = torch.cuda.Stream(device) if prefetches and device.type == "cuda" else None

    def first(self, source: Iterator[InFlight]) -> None:
        """Fill the pipeline, which is empty."""
        assert not self.batches, f"{len(self.batches)} steps are still in flight"
        self._unlock_cache()
        if self.enqueue_batch(source) and self.batches[0].is_whole:
            with quiet_torchrec():
                self._init_pipelined_modules(self.batches[0], self.contexts[0], self._pipelined_forward_type)
            self._model_attached = True
            self._arrive(0)
            self._set_out(source)

    def present(self) -> InFlight:
        """The step to be computed now, on the device's present stream."""
        step = self.batches[0]
        if step.is_whole:
            self._set_module_context(self.contexts[0])
            for stream in (self._memcpy_stream, self._data_dist_stream, self._prefetch_stream):
                _wait_for_batch(step, stream)
        return step

    def ahead(self, source: Iterator[InFlight]) -> None:
        """Move on what is behind the present step, whose lookup has been queued."""
        if len(self.batches) > 1 and self.batches[1].is_whole:
            self._arrive(1)
            self._set_out(source)

    def pass_over(self) -> None:
        """Take the present step's lookup out of the tables, unused."""
        with torch.no_grad():
            for found in self._lookups.forward(self.batches[0]):
                for awaitable in found if isinstance(found, tuple) else (found,):
                    awaitable.wait()

    def dequeue_batch(self) -> None:
        """Leave the present step behind. Each of its lookups has been used: FBGEMM's caches count on it."""
        context = self.contexts[0]
        unused = [*context.input_dist_tensors_requests, *getattr(context, "module_input_post_prefetch", ())]
        assert not unused, f"{unused} have set out and were not looked up"
        super().dequeue_batch()

    def let_go(self) -> None:
        """Forget what is in flight, and let the tables be called by anyone."""
        for table in cached_tables(self._lookups):
            table.timesteps_prefetched.clear()
            table.lxu_cache_locations_list.clear()
        self.reset()
        if self._model_attached:
            self.detach()
            self._pipelined_modules: list[ShardedModule[Any, Any, Any, Any]] = []

    def settle(self) -> None:
        """Wait for the exchanges of ids that have been started; ranks call alike."""
        for context in self.contexts:
            self.wait_sparse_data_dist(context)
            for request in context.input_dist_tensors_requests.values():
                request.wait()

    def _set_out(self, source: Iterator[InFlight]) -> None:
        """Read a step, and start its copy and the exchange of its ids."""
        if self.enqueue_batch(source) and self.batches[-1].is_whole:
            self.start_sparse_data_dist(self.batches[-1], self.contexts[-1])

    def _arrive(self, place: int) -> None:
        """The ids of the step at ``place`` reach their tables."""
        context = self.contexts[place]
        self.wait_sparse_data_dist(context)
        if not self._prefetches:
            return
        with self._stream_context(self._prefetch_stream):
            inputs = _prefetch_embeddings(
                self.batches[place],
                context,
                self._pipelined_modules,
                self._device,
                self._stream_context,
                self._data_dist_stream,
                torch.cuda.default_stream(self._device) if self._device.type == "cuda" else None,
            )
        for name, value in inputs.items():
            context.module_input_post_prefetch[name] = value
            context.module_contexts_post_prefetch[name] = context.module_contexts.pop(name)

    def _unlock_cache(self) -> None:
        """FBGEMM locks what it caches until it is updated, which evaluations and steps left out never do."""
        for table in cached_tables(self._lookups):
            if table.prefetch_pipeline:
                table.lxu_cache_locking_counter.zero_()
        if self._prefetch_stream is not None:
            self._prefetch_stream.wait_stream(torch.cuda.current_stream(self._device))
