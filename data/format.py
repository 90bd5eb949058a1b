"""The prepared dataset on disk: its metadata and the columns of its parquet files.

::

    DIR/metadata.json                    DatasetMetadata
    DIR/vocabulary/item.parquet          original_id: the original id of dense id = row number; and a list<int64>
                                         column an item feature (genres, ...): the item's ids, ascending, none repeated
    DIR/vocabulary/<context>.parquet     value: the original value of dense id = row number
    DIR/train/00000.parquet ...          one row a user, likewise valid/ and test/

Columns of a row, all int64:

=============  =========  ==========================================================================================
column         kind       meaning
=============  =========  ==========================================================================================
user_id        scalar     the user's original id
context_NAME   scalar     dense id of contextual feature NAME, one column a feature
item           list       dense item ids in time order (timestamp, then the tie rule that metadata.json states)
action         list       classes 0 .. num_actions - 1
timestamp      list       seconds
num_targets    scalar     how many of the last events are this split's targets
num_events     scalar     length of the lists
=============  =========  ==========================================================================================

A train row holds the events trained on (num_targets = num_events); a valid row holds train and valid events, a test row
all three, so that an evaluation row carries the whole earlier history.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from genrec.configs.schema import ConfigError, UserError

FORMAT_VERSION = 2
SPLIT_NAMES = ("train", "valid", "test")
PROTOCOLS = ("sequential", "frozen")  # of evaluation
LOADER_MODES = ("train", *PROTOCOLS)
EVENT_COLUMNS = ("item", "action", "timestamp")
NO_VALUE = "(none)"


class DataError(UserError):
    """Data that is missing, damaged or not what its metadata says; one sentence with the file and what to do."""


@dataclass(frozen=True)
class ItemFeature:
    """A feature of the items, of one value or several. Id 0 stands for no value and for padding, never in the data.

    num_values: rows of its table, id 0 included. max_per_item: the most ids that an item has, 1 at least.
    names: what each id means, NO_VALUE first.
    """

    num_values: int
    max_per_item: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class DatasetMetadata:
    """What a prepared dataset holds.

    source: where the rows came from ("grouplens", "recbole", or the path given). source_hash: sha256 of the source.
    split: the rule and its options. tie_rule: the order of events of equal timestamp.
    contextual_features: feature name to vocabulary rows, in the order of the context tokens.
    item_features: name to what its ids are. num_actions: action classes, 0 for data without actions.
    label_bits: (name, smallest class that sets the bit), bit 0 first. positive_class: that class of bit 0.
    num_events: events in the source; num_targets and num_rows: per split. dropped: reason to count of events
    in the source that no row holds, {} where every event is in one; notes: further counts (users too short to split,
    in one file only, without events). files: path to sha256.
    """

    name: str
    source: str
    source_hash: str
    split: dict[str, Any]
    tie_rule: str
    contextual_features: dict[str, int]
    num_items: int
    num_actions: int
    label_bits: tuple[tuple[str, int], ...]
    positive_class: int
    num_users: int
    num_events: int
    num_targets: dict[str, int]
    num_rows: dict[str, int]
    item_features: dict[str, ItemFeature] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        """The text of metadata.json."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def context_column(feature: str) -> str:
    """The parquet column of a contextual feature; prefixed, because a feature may itself be called user_id."""
    return f"context_{feature}"


def item_feature_key(feature: str) -> str:
    """What an item feature is called in a batch and as a table: a contextual feature may have its name."""
    return f"item_{feature}"


def read_metadata(directory: Path | str) -> DatasetMetadata:
    """Reads DIR/metadata.json.

    Raises:
        DataError: the directory or file is missing, is not JSON, lacks a field, or has another format version.
    """
    path = Path(directory) / "metadata.json"
    if not path.is_file():
        place = "" if Path(directory).is_absolute() else f" (in {Path.cwd()})"
        raise DataError(
            f"{directory}{place} is not a prepared dataset, it has no metadata.json: make it by "
            f"examples/prepare_data.py --output {directory}, or bind DatasetArgs.dataset_path to where it is"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format_version"] != FORMAT_VERSION:
            raise DataError(
                f"{path} has format version {values['format_version']}, this version reads {FORMAT_VERSION}:"
                " prepare the dataset again"
            )
        values["label_bits"] = tuple((str(name), int(least)) for name, least in values["label_bits"])
        features = values["item_features"].items()
        values["item_features"] = {name: ItemFeature(**{**v, "names": tuple(v["names"])}) for name, v in features}
        return _checked(DatasetMetadata(**values))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        what = f"it has no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise DataError(f"{path} is damaged ({what}): prepare the dataset again") from error


def _checked(metadata: DatasetMetadata) -> DatasetMetadata:
    """``metadata``; raises ValueError where a count is none."""
    counts: dict[str, Any] = {
        name: getattr(metadata, name)
        for name in ("num_items", "num_actions", "positive_class", "num_users", "num_events")
    }
    for name in ("contextual_features", "num_targets", "num_rows"):
        counts |= {f"{name}[{key!r}]": value for key, value in getattr(metadata, name).items()}
    for name, value in counts.items():
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} is {value!r}, not a count")
    if metadata.positive_class >= max(metadata.num_actions, 1):
        raise ValueError(f"positive_class is {metadata.positive_class}, of {metadata.num_actions} classes")
    return metadata


def check_dataset_name(metadata: DatasetMetadata, dataset_name: str, *, directory: Path | str) -> None:
    """Raises ConfigError, naming both, unless ``metadata``, read from ``directory``, is of dataset ``dataset_name``."""
    if metadata.name != dataset_name:
        raise ConfigError(
            f"DatasetArgs.dataset_name = {dataset_name!r}, but {directory} holds {metadata.name!r}: bind that, or the "
            f"folder of {dataset_name!r} as DatasetArgs.dataset_path",
            "DatasetArgs.dataset_name",
        )


def label_mask_table(metadata: DatasetMetadata) -> list[int]:
    """The label bit mask of each action class; bit i is set from label_bits[i]'s class on."""
    classes = range(metadata.num_actions)
    return [sum(1 << bit for bit, (_, least) in enumerate(metadata.label_bits) if c >= least) for c in classes]


def check_one_of(value: str, *, field_name: str, allowed: Sequence[str]) -> None:
    """Raises DataError, listing what is allowed, unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise DataError(f"{field_name} is {value!r}, allowed are {', '.join(map(repr, allowed)) or 'none'}")


def check_ids(values: np.ndarray, *, feature: str, table: str, num_rows: int | None) -> None:
    """Raises DataError naming feature, id and table unless all ``values`` are rows of a table of ``num_rows`` rows.

    num_rows: None for a dynamic table, which takes every id from 0 on.
    """
    for extreme in (values.min(), values.max()) if len(values) else ():
        if num_rows is None and extreme < 0:
            raise DataError(f"feature {feature!r} has id {extreme} but dynamic table {table!r} takes ids from 0 on")
        if num_rows is not None and not 0 <= extreme < num_rows:
            allowed = f"{num_rows} rows (ids 0 to {num_rows - 1})"
            raise DataError(f"feature {feature!r} has id {extreme} but table {table!r} has {allowed}")
