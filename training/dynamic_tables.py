"""Dynamic tables in training: before each step its ids get rows (model/row_map.py), the same ones on every rank.

Every rank holds the whole map, 40 bytes a row, and is told the ids that all ranks read (step_ids.py), so that maps stay
equal without ever being exchanged; the table itself may lie on the ranks in any way. A row that is taken from an id
starts as a new one does: weights as initialised, moments 0. A step that is left out is undone: map, weights and moments
are as before.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from genrec.configs.schema import BenchmarkDatasetArgs, DynamicEmbeddingArgs, ExperimentConfig
from genrec.data.batch import Batch
from genrec.model.ranking import RankingModel
from genrec.model.row_map import Admission, row_maps
from genrec.model.table_specs import TableSpec
from genrec.training.average import WeightAverage
from genrec.training.checkpoint_names import checkpoint_name, table_of
from genrec.training.optim import sharded_parameters
from genrec.training.ranks import Ranks
from genrec.training.step_ids import step_ids
from genrec.training.tables import ShardedTables

LOG = logging.getLogger(__name__)
PLACEMENT_FIELDS = ("global_hbm_for_values", "item_vocab_gpu_capacity", "item_vocab_gpu_capacity_ratio", "caching")


@dataclass(frozen=True)
class TablePart:
    """What this rank holds of a table's weights, of their average or of a moment, from ``row`` and ``column`` on.

    tensor: (rows, columns), or (rows,) of a moment that a row has one of. is_weight: a moment is not.
    """

    tensor: Tensor
    is_weight: bool
    row: int = 0
    column: int = 0


@dataclass(frozen=True)
class Overwritten:
    """Rows of a tensor that were reset, and what they held."""

    tensor: Tensor
    rows: Tensor
    values: Tensor


class DynamicTables:
    """The dynamic tables of a model in training. num_evicted: ids that have lost their row since the start."""

    def __init__(
        self,
        model: RankingModel,
        specs: Sequence[TableSpec],
        optimizers: Sequence[Optimizer],
        *,
        config: ExperimentConfig,
        ranks: Ranks,
        tables: ShardedTables | None = None,
        average: WeightAverage | None = None,
    ) -> None:
        """tables: the sharded ones, whose dynamic ones have no copies of rows elsewhere (table_types.py)."""
        self.maps = row_maps(model)
        self.num_evicted = 0
        self._specs = {spec.name: spec for spec in specs if spec.name in self.maps}
        self._model = model
        self._optimizers = optimizers
        self._ranks = ranks
        self._seed = config.trainer.seed
        self._init_std = config.network.embedding_init_std
        self._sharded_parts = {} if tables is None else sharded_parts(tables)
        self._average = average
        self._said: set[tuple[str, str]] = set()
        self._admissions: dict[str, Admission] = {}
        self._overwritten: list[Overwritten] = []
        say_without_effect(config)

    @torch.no_grad()
    def admit(self, batches: Sequence[Batch], *, step: int) -> None:
        """Give rows to the ids of step ``step``, of all ranks and micro-batches. Ranks call alike."""
        self._admissions, self._overwritten = {}, []
        features = {name: spec.feature_names for name, spec in self._specs.items()}
        for table, read in step_ids(batches, features, self._ranks).items():
            admission = self._admissions[table] = self.maps[table].admit(read.ids, read.counts, step=step)
            self.num_evicted += len(admission.evicted)
            self._say(table, admission, step=step)
            if len(admission.evicted):
                self._reset(table, admission.evicted, step=step)

    @torch.no_grad()
    def undo(self) -> None:
        """Be as before the last ``admit``, weights and moments too, where the step has not been trained on since."""
        for part in self._overwritten:
            part.tensor[part.rows] = part.values
        for table, admission in self._admissions.items():
            self.maps[table].undo(admission)
            self.num_evicted -= len(admission.evicted)
        self._admissions, self._overwritten = {}, []

    def _say(self, table: str, admission: Admission, *, step: int) -> None:
        """Log once that a table is full, and once that a step reads more ids than it has rows."""
        said = {
            "table %r is full at step %d: from here on new ids take the rows of others": len(admission.evicted),
            "table %r has fewer rows than step %d reads ids: those without one share the last": admission.num_refused,
        }
        for sentence, number in said.items():
            if number and (table, sentence) not in self._said:
                self._said.add((table, sentence))
                LOG.warning(sentence, table, step)

    def _reset(self, table: str, rows: Tensor, *, step: int) -> None:
        first = self._first_weights(self._specs[table], len(rows), step=step)
        for part in self._parts(table):
            inside = (rows >= part.row) & (rows < part.row + part.tensor.shape[0])
            local = (rows[inside] - part.row).to(part.tensor.device)  # which may be the host's
            self._overwritten.append(Overwritten(part.tensor, local, part.tensor[local]))
            if part.is_weight:
                part.tensor[local] = first[inside].narrow(1, part.column, part.tensor.shape[1]).to(part.tensor)
            else:
                part.tensor[local] = 0

    def _first_weights(self, spec: TableSpec, num_rows: int, *, step: int) -> Tensor:
        """(num_rows, dim) as tables are initialised, drawn by the seed, the table and the step alone."""
        digest = hashlib.sha256(f"{self._seed}/{spec.name}/{step}".encode()).digest()
        generator = torch.Generator(device=self._ranks.device)
        generator.manual_seed(int.from_bytes(digest[:7], "little"))
        weights = torch.empty(num_rows, spec.embedding_dim, device=self._ranks.device)
        if self._init_std is not None:
            return weights.normal_(std=self._init_std, generator=generator)
        limit = spec.num_embeddings**-0.5
        return weights.uniform_(-limit, limit, generator=generator)

    def _parts(self, table: str) -> Iterator[TablePart]:
        """All that this rank holds of ``table``. PyTorch's optimizers make their moments at their first step."""
        apart = sharded_parameters(self._model)
        for name, parameter in self._model.named_parameters():
            if name not in apart and table_of(checkpoint_name(name)) == table:
                yield TablePart(parameter.data, is_weight=True)
                if self._average is not None:
                    yield TablePart(self._average.tensors[name], is_weight=True)
                for optimizer in self._optimizers:
                    moments = optimizer.state.get(parameter, {}).values()
                    yield from (TablePart(m, is_weight=False) for m in moments if isinstance(m, Tensor) and m.dim())
        yield from self._sharded_parts.get(table, ())


def sharded_parts(tables: ShardedTables) -> dict[str, list[TablePart]]:
    """What this rank holds of sharded tables, by table: their own memory, which stays where it is."""
    parts: dict[str, list[TablePart]] = {}
    moments_of = tables.moments()
    for name, weight in tables.weights().items():
        table = table_of(checkpoint_name(name))
        assert table is not None, name
        for tensor in (weight, *moments_of.get(name, {}).values()):
            parts.setdefault(table, []).extend(
                TablePart(shard.tensor, tensor is weight, *shard.metadata.shard_offsets)
                for shard in tensor.local_shards()
            )
    return parts


def say_without_effect(config: ExperimentConfig) -> None:
    """Log once which settings of dynamic tables do nothing here."""
    listed = config.dataset.embedding_args if isinstance(config.dataset, BenchmarkDatasetArgs) else ()
    for table in listed:
        if isinstance(table, DynamicEmbeddingArgs):
            values = {name: getattr(table, name) for name in PLACEMENT_FIELDS}
            named = [name for name, value in values.items() if value is not None and value is not False]
            if table.dist_type != "roundrobin":
                named.append("dist_type")
            if named:
                names = ", ".join(f"DynamicEmbeddingArgs.{name}" for name in named)
                LOG.info("%s of table %r has no effect: it says where rows lie", names, table.table_name)
