"""Which embedding tables a run has, from its configuration and its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from genrec.configs.schema import (
    BenchmarkDatasetArgs,
    ConfigError,
    DatasetArgs,
    DynamicEmbeddingArgs,
    ExperimentConfig,
    NetworkArgs,
)
from genrec.data.format import DatasetMetadata, item_feature_key
from genrec.model.features import FeatureLayout, feature_layout

MODULE_PREFIX = "table_"


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

    @property
    def is_dynamic(self) -> bool:
        """Whether ids get rows as they come (row_map.py)."""
        return self.evict_strategy is not None


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
    """The name of a table among the modules of its collection, and of its map among those of dynamic tables."""
    return f"{MODULE_PREFIX}{table_name}"


def table_name(module_name: str) -> str:
    """The table whose ``module_name`` it is."""
    return module_name.removeprefix(MODULE_PREFIX)
