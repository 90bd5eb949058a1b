"""TorchRec's collections of embedding tables: one for each dim, as it wants them, and those that ranks share apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from genrec.configs.schema import ConfigError
from genrec.model.table_init import BlockwiseInit, is_blockwise
from genrec.model.table_specs import TableSpec, module_name

META = torch.device("meta")


def table_collections(
    tables: Sequence[TableSpec],
    *,
    init_std: float | None,
    sharded: Collection[str],
    seed: int,
    device: torch.device | None,
) -> nn.ModuleDict:
    """By name: "dim64", of the tables that stay whole, and "dim64_sharded", of those named in ``sharded``.

    Large tables are initialised apart from the others (table_init.py), by ``seed``; shardable ones are left to what
    shards them.
    """
    collections = nn.ModuleDict()
    apart = {module_name(name) for name in sharded}
    for dim in sorted({table.embedding_dim for table in tables}):
        alike = [table for table in tables if table.embedding_dim == dim]
        configs = embedding_configs(alike, init_std=init_std)
        large = {
            module_name(t.name): BlockwiseInit(t.name, t.num_embeddings, dim, std=init_std, seed=seed)
            for t in alike
            if is_blockwise(t.num_embeddings, dim)
        }
        weights = _weights(configs, large, apart=apart, device=device)
        whole = [config for config in configs if config.name not in apart]
        if whole:
            collections[f"dim{dim}"] = _with(weights, EmbeddingCollection(whole, device=META))
        if len(whole) < len(configs):
            shardable = ShardableTables([config for config in configs if config.name in apart], large)
            collections[f"dim{dim}_sharded"] = _with(weights, shardable)
    return collections


def _weights(
    configs: Sequence[EmbeddingConfig],
    large: Mapping[str, BlockwiseInit],
    *,
    apart: Collection[str],
    device: torch.device | None,
) -> dict[str, nn.Module]:
    """The tables of one dim with their first weights; without the large ones that are ``apart``."""
    # All in one collection, and in this order, first weights are the same whatever is sharded.
    small = EmbeddingCollection([config for config in configs if config.name not in large], device=device)
    weights: dict[str, nn.Module] = dict(small.embeddings.items())
    if device != META:
        whole = {name: init.whole() for name, init in large.items() if name not in apart}
        weights |= {name: nn.Embedding.from_pretrained(weight, freeze=False) for name, weight in whole.items()}
    return weights


def _with(weights: Mapping[str, nn.Module], collection: EmbeddingCollection) -> EmbeddingCollection:
    """``collection`` with those of ``weights`` that are its tables'."""
    collection.embeddings.update({name: weights[name] for name in collection.embeddings if name in weights})
    return collection


def embedding_configs(tables: Sequence[TableSpec], *, init_std: float | None) -> list[EmbeddingConfig]:
    """TorchRec's description of the tables. ``init_std`` None: uniform within 1 / sqrt(rows), TorchRec's own.

    Raises ConfigError for a table with a dot in its name.
    """
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
        super().__init__(tables, device=META)
        self.inits = {table.name: inits[table.name] for table in tables if table.name in inits}


def _leave(weight: Tensor) -> None:
    """Initialises nothing."""
