"""Which features of a batch the model reads, in which role, and how many tokens they can become."""

from __future__ import annotations

from dataclasses import dataclass

from genrec.configs.schema import BenchmarkDatasetArgs, ConfigError, DatasetArgs, ExperimentConfig
from genrec.data.format import DatasetMetadata, item_feature_key


@dataclass(frozen=True)
class FeatureLayout:
    """The model's features by role.

    item, action: the event features (action None: events are items alone). contextual: one token or more a user each,
    in token order. item_features: features of the items, several values an event, which are added to the item's
    embedding. max_num_events, max_num_contexts: the most that one user can have.
    """

    item: str
    action: str | None
    contextual: tuple[str, ...]
    max_num_events: int
    max_num_contexts: int
    item_features: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Every feature that is looked up."""
        return (*self.contextual, self.item, *(() if self.action is None else (self.action,)), *self.item_features)

    @property
    def max_num_tokens(self) -> int:
        """The longest sequence in tokens: contexts, and one or two tokens an event."""
        return self.max_num_contexts + self.max_num_events * (1 if self.action is None else 2)


def feature_layout(config: ExperimentConfig, metadata: DatasetMetadata | None) -> FeatureLayout:
    """The layout of a run on a prepared dataset, or (``metadata`` None) on synthetic data.

    Raises:
        ConfigError: a contextual or item feature that the dataset lacks.
    """
    if isinstance(config.dataset, BenchmarkDatasetArgs):
        return _synthetic_layout(config.dataset)
    assert metadata is not None, "a prepared dataset has metadata"
    return _prepared_layout(config.dataset, metadata)


def _prepared_layout(dataset: DatasetArgs, metadata: DatasetMetadata) -> FeatureLayout:
    known = metadata.contextual_features
    contextual = tuple(known) if dataset.contextual_features is None else dataset.contextual_features
    _check_known("contextual_features", contextual, known=tuple(known), name=metadata.name)
    _check_known("item_features", dataset.item_features, known=tuple(metadata.item_features), name=metadata.name)
    return FeatureLayout(
        item="item",
        action="action" if metadata.num_actions > 0 else None,
        contextual=contextual,
        max_num_events=dataset.max_history_seqlen + dataset.max_num_candidates,
        max_num_contexts=len(contextual),
        item_features=tuple(item_feature_key(name) for name in dataset.item_features),
    )


def _check_known(field: str, names: tuple[str, ...], *, known: tuple[str, ...], name: str) -> None:
    unknown = [feature for feature in names if feature not in known]
    if unknown:
        raise ConfigError(
            f"DatasetArgs.{field} names {', '.join(map(repr, unknown))}, which dataset {name!r} lacks: it has"
            f" {', '.join(map(repr, known)) or 'none'}"
        )


def _synthetic_layout(dataset: BenchmarkDatasetArgs) -> FeatureLayout:
    lengths = {name: group.max_sequence_length for group in dataset.feature_args for name in group.feature_names}
    contextual = tuple(dataset.contextual_feature_names)
    return FeatureLayout(
        item=dataset.item_feature_name,
        action=dataset.action_feature_name,
        contextual=contextual,
        max_num_events=lengths[dataset.item_feature_name],
        max_num_contexts=sum(lengths[name] for name in contextual),
    )
