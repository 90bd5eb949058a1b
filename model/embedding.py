"""The lookup of a batch in the embedding tables (table_specs.py says which there are, table_collections.py makes them).

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

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from genrec.data.batch import Batch
from genrec.hstu.preprocessor import HSTUInputs
from genrec.model.features import FeatureLayout
from genrec.model.gate import GradientGate
from genrec.model.row_map import RowMap
from genrec.model.table_collections import table_collections
from genrec.model.table_specs import TableSpec, module_name


class FeatureEmbeddings(nn.Module):
    """All tables of a model, float32.

    collections: of ``table_collections``; what sharding replaces is in "dim64_sharded". gate: there where tables are
    sharded (gate.py). row_maps: of dynamic tables, by ``module_name``. dynamic_features: feature to its key in them.
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
        self.row_maps = nn.ModuleDict(
            {
                module_name(table.name): RowMap(table.num_embeddings - 1, strategy=table.evict_strategy, device=device)
                for table in tables
                if table.evict_strategy is not None
            }
        )
        self.dynamic_features = {
            name: module_name(table.name) for table in tables if table.is_dynamic for name in table.feature_names
        }
        self.collections = table_collections(tables, init_std=init_std, sharded=sharded, seed=seed, device=device)

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
