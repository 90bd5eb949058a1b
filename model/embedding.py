"""Embedding tables: which there are, TorchRec's collections of them, and the lookup of a batch.

Two users, contextual features age and gender, events without actions shown for brevity::

    batch.features   age: [33 | 51]  gender: [0 | 1]  item: [i0 i1 i2 | i3]     feature after feature
    HSTUInputs       item     [i0 i1 i2 | i3]              event_offsets   [0, 3, 4]
                     context  [33 0 | 51 1] as vectors     context_offsets [0, 2, 4]     user after user

Features of the items, such as genres, have a fixed number of values an event, padded with id 0. The embedding of an
event's item is the item's row plus, for each such feature, the sum of the rows of its n ids above 0 divided by sqrt(n),
so that its size does not grow with n; nothing where there is none.

Ids are checked where they enter: the data loader refuses, on the CPU and by name, every id outside its table. Lookups
rely on it, since sharded tables may answer a wrong id with some row; PyTorch's own lookup, used here, raises too.
The ids of dynamic tables are any numbers, and lookups put their rows in their place (row_map.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from genrec.configs.schema import (
    BenchmarkDatasetArgs,
    ConfigError,
    DatasetArgs,
    DynamicEmbeddingArgs,
    ExperimentConfig,
    NetworkArgs,
)
from genrec.data.batch import Batch
from genrec.data.format import DatasetMetadata, item_feature_key
from genrec.hstu.preprocessor import HSTUInputs
from genrec.model.features import FeatureLayout, feature_layout
from genrec.model.gate import GradientGate
from genrec.model.row_map import RowMap
from genrec.model.table_init import BlockwiseInit, is_blockwise


@dataclass(frozen=True)
class TableSpec:
    """One table: ``num_embeddings`` rows of ``embedding_dim`` numbers, read by the ids of ``feature_names``.

    sharding_type, placement: as configured, of configs.schema.SHARDING_TYPES and TABLE_PLACEMENTS. evict_strategy: of a
    dynamic table, whose last row is that of ids without a row of their own; None: ids are rows.
    """

    name: str
    feature_names: tuple[str, ...]
    num_embeddings: int
    embedding_dim: int
    sharding_type: str = "data_parallel"
    placement: str = "auto"
    evict_strategy: str | None = None


def embedding_tables(config: ExperimentConfig, metadata: DatasetMetadata | None) -> tuple[TableSpec, ...]:
    """The tables of a run: item, action, one a contextual and one an item feature of a prepared dataset, or those that
    BenchmarkDatasetArgs.embedding_args lists (``metadata`` None).

    Raises:
        ConfigError: a listed table that nothing reads, or that serves features of different embedding dims; a sharding
            type or capacity of a table that there isn't.
    """
    layout = feature_layout(config, metadata)
    if isinstance(config.dataset, BenchmarkDatasetArgs):
        return _listed_tables(config.dataset, layout, config.network)
    assert metadata is not None
    rows = {**metadata.contextual_features, layout.item: metadata.num_items}
    if layout.action is not None:
        rows[layout.action] = metadata.num_actions
    rows |= {item_feature_key(name): feature.num_values for name, feature in metadata.item_features.items()}
    sharding_types: dict[str, str] = _by_table(config.dataset, "sharding_types", layout)
    table_placements: dict[str, str] = _by_table(config.dataset, "table_placements", layout)
    capacities: dict[str, int] = _by_table(config.dataset, "dynamic_tables", layout)
    return tuple(
        TableSpec(
            name=name,
            feature_names=(name,),
            num_embeddings=capacities[name] + 1 if name in capacities else rows[name],
            embedding_dim=feature_dim(name, layout=layout, network=config.network),
            sharding_type=sharding_types.get(name, "data_parallel"),
            placement=table_placements.get(name, "auto"),
            evict_strategy=config.dataset.evict_strategy if name in capacities else None,
        )
        for name in layout.names
    )


def _by_table(dataset: DatasetArgs, field: str, layout: FeatureLayout) -> dict[str, Any]:
    """A field of values by table. Raises ConfigError for a table that there isn't."""
    values: dict[str, Any] = getattr(dataset, field) or {}
    unknown = sorted(set(values) - set(layout.names))
    if unknown:
        raise ConfigError(
            f"DatasetArgs.{field} names {unknown[0]!r}, which is no table of this run: it has"
            f" {', '.join(map(repr, layout.names))}"
        )
    return values


def feature_dim(name: str, *, layout: FeatureLayout, network: NetworkArgs) -> int:
    """contextual_embedding_dim of contexts, item_embedding_dim of all that events have; hidden_size where it is -1."""
    dim = network.contextual_embedding_dim if name in layout.contextual else network.item_embedding_dim
    return dim if dim > 0 else network.hidden_size


def _listed_tables(dataset: BenchmarkDatasetArgs, layout: FeatureLayout, network: NetworkArgs) -> tuple[TableSpec, ...]:
    tables: list[TableSpec] = []
    for args in dataset.embedding_args:
        names = tuple(name for name in args.feature_names if name in layout.names)
        dims = {feature_dim(name, layout=layout, network=network) for name in names}
        if len(dims) != 1:
            problem = f"needs embedding dims {sorted(dims)} at once" if dims else "is read by no feature in use"
            raise ConfigError(
                f"BenchmarkDatasetArgs.embedding_args: table {args.table_name!r} (features {list(args.feature_names)})"
                f" {problem}; allowed are tables read by events alone or by contextual features alone"
            )
        tables.append(
            TableSpec(
                name=args.table_name,
                feature_names=names,
                num_embeddings=args.item_vocab_size_or_capacity + isinstance(args, DynamicEmbeddingArgs),
                embedding_dim=dims.pop(),
                sharding_type=args.sharding_type,
                placement=args.placement,
                evict_strategy=args.evict_strategy if isinstance(args, DynamicEmbeddingArgs) else None,
            )
        )
    return tuple(tables)


def module_name(table_name: str) -> str:
    """The name of a table among the modules of its collection."""
    return f"table_{table_name}"


def embedding_configs(tables: Sequence[TableSpec], *, init_std: float | None) -> list[EmbeddingConfig]:
    """TorchRec's description of the tables. ``init_std`` None: uniform within 1 / sqrt(rows), TorchRec's own."""
    dotted = [table.name for table in tables if "." in table.name]
    if dotted:
        raise ConfigError(f"embedding table {dotted[0]!r} has a dot in its name, which weights' names are split at")
    init = None if init_std is None else partial(nn.init.normal_, mean=0.0, std=init_std)
    return [
        EmbeddingConfig(
            name=module_name(table.name),  # a module's name: "items" or "values" alone are taken by nn.ModuleDict
            embedding_dim=table.embedding_dim,
            num_embeddings=table.num_embeddings,
            feature_names=list(table.feature_names),
            init_fn=init,
        )
        for table in tables
    ]


class ShardableTables(EmbeddingCollection):
    """The tables that are to be shared by ranks: what sharding replaces (training/tables.py).

    inits: by table's ``module_name``, of those whose weights are on the meta device, being too large for a whole copy.
    """

    def __init__(self, tables: list[EmbeddingConfig], inits: Mapping[str, BlockwiseInit]) -> None:
        # TorchRec initialises what it shards too: large tables need that only once.
        tables = [dataclasses.replace(t, init_fn=_leave) if t.name in inits else t for t in tables]
        super().__init__(tables, device=torch.device("meta"))
        self.inits = {table.name: inits[table.name] for table in tables if table.name in inits}


class FeatureEmbeddings(nn.Module):
    """All tables of a model, float32, in an EmbeddingCollection for each embedding dim (TorchRec allows one in each).

    Tables that are to be sharded have collections of their own: "dim64" and "dim64_sharded". ``gate`` is there where
    they are sharded (gate.py). Large tables are initialised apart from the others (table_init.py). row_maps: of dynamic
    tables, by "table_" and the table's name.
    """

    gate: GradientGate | None = None

    def __init__(
        self,
        tables: Sequence[TableSpec],
        *,
        layout: FeatureLayout,
        init_std: float | None = None,
        item_feature_scale: float = 1.0,
        sharded: Collection[str] = (),
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """sharded: names of the tables that are to be sharded. seed: of large tables' first weights."""
        super().__init__()
        self.layout = layout
        self.item_feature_scale = item_feature_scale
        dynamic = [(table, table.evict_strategy) for table in tables if table.evict_strategy is not None]
        self.row_maps = nn.ModuleDict(
            {
                module_name(table.name): RowMap(table.num_embeddings - 1, strategy=strategy, device=device)
                for table, strategy in dynamic
            }
        )
        self.dynamic_features = {name: module_name(table.name) for table, _ in dynamic for name in table.feature_names}
        by_dim = {
            dim: [t for t in tables if t.embedding_dim == dim] for dim in sorted({t.embedding_dim for t in tables})
        }
        # All in one collection, and in this order, first weights are the same whatever is sharded.
        small = {
            dim: EmbeddingCollection(embedding_configs(small_tables, init_std=init_std), device=device)
            for dim, alike in by_dim.items()
            if (small_tables := [t for t in alike if not is_blockwise(t.num_embeddings, dim)])
        }
        self.collections = nn.ModuleDict()
        for dim, alike in by_dim.items():
            if dim in small and len(small[dim].embedding_configs()) == len(alike) and not _any_of(alike, sharded):
                self.collections[f"dim{dim}"] = small[dim]
                continue
            inits = {
                module_name(t.name): BlockwiseInit(t.name, t.num_embeddings, dim, std=init_std, seed=seed)
                for t in alike
                if is_blockwise(t.num_embeddings, dim)
            }
            weights = dict(small[dim].embeddings.items()) if dim in small else {}
            self._add_parted(f"dim{dim}", alike, weights, inits, init_std=init_std, sharded=sharded, device=device)

    def _add_parted(
        self,
        name: str,
        tables: Sequence[TableSpec],
        weights: Mapping[str, nn.Module],
        inits: Mapping[str, BlockwiseInit],
        *,
        init_std: float | None,
        sharded: Collection[str],
        device: torch.device | None,
    ) -> None:
        """Collections of the tables of one dim, those that are to be sharded apart; ``weights`` of the small ones."""
        configs = embedding_configs(tables, init_std=init_std)
        apart = {module_name(table) for table in sharded}
        replicated = [config for config in configs if config.name not in apart]
        if replicated:
            part = self.collections[name] = EmbeddingCollection(replicated, device=torch.device("meta"))
            part.embeddings.update({key: weights[key] for key in part.embeddings if key in weights})
            if device is None or device.type != "meta":
                part.embeddings.update({key: _embedding(inits[key]) for key in part.embeddings if key in inits})
        if len(replicated) < len(configs):
            shardable = ShardableTables([config for config in configs if config.name in apart], inits)
            shardable.embeddings.update({key: weights[key] for key in shardable.embeddings if key in weights})
            self.collections[f"{name}_sharded"] = shardable

    def forward(self, batch: Batch) -> HSTUInputs:
        """Looks up every feature of ``batch`` and puts contexts user after user."""
        layout = self.layout
        assert batch.contextual_feature_names == layout.contextual and batch.action_feature_name == layout.action
        assert tuple(batch.item_feature_widths) == layout.item_features
        vectors = self._lookup(at_least_one_user(batch))
        names = batch.features.keys()
        lengths = dict(zip(names, batch.features.lengths().view(len(names), batch.batch_size), strict=True))
        context, context_offsets = self._contexts(vectors, lengths)
        return HSTUInputs(
            item=self._items(vectors, batch),
            action=None if layout.action is None else vectors[layout.action],
            event_offsets=_offsets(lengths[layout.item]),
            timestamps=batch.timestamps,
            num_candidates=batch.num_candidates,
            context=context,
            context_offsets=context_offsets,
            max_num_events=batch.max_num_events,
            max_num_contexts=layout.max_num_contexts,
        )

    def _lookup(self, features: KeyedJaggedTensor) -> dict[str, Tensor]:
        features = self._rows(features)
        vectors: dict[str, Tensor] = {}
        for collection in self.collections.values():
            embedded: dict[str, JaggedTensor] = collection(features)
            looked_up = {name: jagged.values() for name, jagged in embedded.items()}
            if self.gate is not None and not isinstance(collection, EmbeddingCollection):
                looked_up = {name: self.gate.cut(values) for name, values in looked_up.items()}
            vectors.update(looked_up)
        return vectors

    def _rows(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """``features`` with rows in the place of dynamic tables' ids."""
        if not self.row_maps:
            return features
        keys = features.keys()
        values = {name: features[name].values() for name in keys}
        for name, table in self.dynamic_features.items():
            row_map = self.row_maps[table]
            assert isinstance(row_map, RowMap)
            values[name] = row_map.look_up(values[name])
        return KeyedJaggedTensor(
            keys=keys,
            values=torch.cat([values[name] for name in keys]),
            lengths=features.lengths(),
            stride=features.stride(),
            length_per_key=features.length_per_key(),  # known by the host, which else would ask the device
        )

    def _items(self, vectors: dict[str, Tensor], batch: Batch) -> Tensor:
        """(E, D_item): the items' rows plus their features'."""
        items = vectors[self.layout.item]
        for name, width in batch.item_feature_widths.items():
            ids = batch.features[name].values().view(items.shape[0], width)
            pooled = pool_values(vectors[name].view(*ids.shape, items.shape[1]), ids)
            items = torch.add(items, pooled, alpha=self.item_feature_scale)
        return items

    def _contexts(self, vectors: dict[str, Tensor], lengths: dict[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """(C_total, D_ctx) contexts ordered by user, then feature, and their (B + 1,) offsets."""
        names = self.layout.contextual
        if not names:
            return None, None
        values = torch.cat([vectors[name] for name in names])
        per_user = torch.stack([lengths[name] for name in names])  # (F, B)
        users = torch.arange(per_user.shape[1], device=values.device).repeat(len(names))
        owner = users.repeat_interleave(per_user.flatten(), output_size=values.shape[0])
        return values[owner.argsort(stable=True)], _offsets(per_user.sum(dim=0))


def _any_of(tables: Sequence[TableSpec], names: Collection[str]) -> bool:
    return any(table.name in names for table in tables)


def _leave(weight: Tensor) -> None:
    """Initialises nothing."""


def _embedding(init: BlockwiseInit) -> nn.Embedding:
    return nn.Embedding(init.num_rows, init.dim, _weight=init.whole())


def pool_values(vectors: Tensor, ids: Tensor) -> Tensor:
    """vectors (E, W, D) of ids (E, W) -> (E, D): the sum over the n ids above 0, divided by sqrt(n); 0 where n = 0."""
    is_value = (ids > 0).to(vectors.dtype)
    weights = is_value * is_value.sum(dim=1, keepdim=True).clamp(min=1).rsqrt()
    return torch.bmm(weights.unsqueeze(1), vectors).squeeze(1)


def at_least_one_user(batch: Batch) -> KeyedJaggedTensor:
    """The batch's features; of one user without values where there is no user, since TorchRec can't split zero."""
    if batch.batch_size > 0:
        return batch.features
    keys = batch.features.keys()
    lengths = torch.zeros(len(keys), dtype=torch.int64, device=batch.features.device())
    values = batch.features.values()
    return KeyedJaggedTensor(keys=keys, values=values, lengths=lengths, length_per_key=[0] * len(keys))


def _offsets(lengths: Tensor) -> Tensor:
    """(B + 1,) int64 offsets of (B,) lengths."""
    return nn.functional.pad(lengths.cumsum(0, dtype=torch.int64), (1, 0))
