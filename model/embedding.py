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
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from genrec.configs.schema import BenchmarkDatasetArgs, ConfigError, ExperimentConfig, NetworkArgs
from genrec.data.batch import Batch
from genrec.data.format import DatasetMetadata, item_feature_key
from genrec.hstu.preprocessor import HSTUInputs
from genrec.model.features import FeatureLayout, feature_layout
from genrec.model.gate import GradientGate


@dataclass(frozen=True)
class TableSpec:
    """One table: ``num_embeddings`` rows of ``embedding_dim`` numbers, read by the ids of ``feature_names``.

    sharding_type: as configured, one of configs.schema.SHARDING_TYPES.
    """

    name: str
    feature_names: tuple[str, ...]
    num_embeddings: int
    embedding_dim: int
    sharding_type: str = "data_parallel"


def embedding_tables(config: ExperimentConfig, metadata: DatasetMetadata | None) -> tuple[TableSpec, ...]:
    """The tables of a run: item, action, one a contextual and one an item feature of a prepared dataset, or those that
    BenchmarkDatasetArgs.embedding_args lists (``metadata`` None).

    Raises:
        ConfigError: a listed table that nothing reads, or that serves features of different embedding dims; a sharding
            type of a table that there isn't.
    """
    layout = feature_layout(config, metadata)
    if isinstance(config.dataset, BenchmarkDatasetArgs):
        return _listed_tables(config.dataset, layout, config.network)
    assert metadata is not None
    rows = {**metadata.contextual_features, layout.item: metadata.num_items}
    if layout.action is not None:
        rows[layout.action] = metadata.num_actions
    rows |= {item_feature_key(name): feature.num_values for name, feature in metadata.item_features.items()}
    sharding_types = config.dataset.sharding_types or {}
    unknown = sorted(set(sharding_types) - set(layout.names))
    if unknown:
        raise ConfigError(
            f"DatasetArgs.sharding_types names {unknown[0]!r}, which is no table of this run: it has"
            f" {', '.join(map(repr, layout.names))}"
        )
    return tuple(
        TableSpec(
            name=name,
            feature_names=(name,),
            num_embeddings=rows[name],
            embedding_dim=feature_dim(name, layout=layout, network=config.network),
            sharding_type=sharding_types.get(name, "data_parallel"),
        )
        for name in layout.names
    )


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
                num_embeddings=args.item_vocab_size_or_capacity,
                embedding_dim=dims.pop(),
                sharding_type=args.sharding_type,
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
    """The tables that several ranks share: what sharding replaces (training/tables.py). On one rank they are whole."""


class FeatureEmbeddings(nn.Module):
    """All tables of a model, float32, in an EmbeddingCollection for each embedding dim (TorchRec allows one in each).

    Tables that are to be sharded have collections of their own: "dim64" and "dim64_sharded". ``gate`` is there where
    they are sharded (gate.py).
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
        device: torch.device | None = None,
    ) -> None:
        """sharded: names of the tables that are to be sharded."""
        super().__init__()
        self.layout = layout
        self.item_feature_scale = item_feature_scale
        dims = sorted({table.embedding_dim for table in tables})
        # All in one collection, and in this order, first weights are the same whatever is sharded.
        whole = {
            dim: EmbeddingCollection(
                embedding_configs([table for table in tables if table.embedding_dim == dim], init_std=init_std),
                device=device,
            )
            for dim in dims
        }
        self.collections = nn.ModuleDict()
        for dim, collection in whole.items():
            names = {module_name(name) for name in sharded}
            replicated, shardable = _parted(collection, names)
            if replicated is not None:
                self.collections[f"dim{dim}"] = replicated
            if shardable is not None:
                self.collections[f"dim{dim}_sharded"] = shardable

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
        vectors: dict[str, Tensor] = {}
        for collection in self.collections.values():
            embedded: dict[str, JaggedTensor] = collection(features)
            looked_up = {name: jagged.values() for name, jagged in embedded.items()}
            if self.gate is not None and not isinstance(collection, EmbeddingCollection):
                looked_up = {name: self.gate.cut(values) for name, values in looked_up.items()}
            vectors.update(looked_up)
        return vectors

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


def _parted(
    collection: EmbeddingCollection, sharded: Collection[str]
) -> tuple[EmbeddingCollection | None, ShardableTables | None]:
    """``collection`` without the tables ``sharded``, and those; None instead of nothing. Weights are kept."""
    configs = collection.embedding_configs()
    if not any(config.name in sharded for config in configs):
        return collection, None
    apart = ShardableTables([c for c in configs if c.name in sharded], device=torch.device("meta"))
    rest = [c for c in configs if c.name not in sharded]
    replicated = EmbeddingCollection(rest, device=torch.device("meta")) if rest else None
    for part in (apart, replicated):
        if part is not None:
            part.embeddings.update({name: collection.embeddings[name] for name in part.embeddings})
    return replicated, apart


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
