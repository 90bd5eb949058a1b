"""EventSource: what every public dataset is turned into before it is split and written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import polars as pl

SOURCE_ROW = "source_row"


@dataclass(frozen=True)
class EventSource:
    """Events and users of one dataset under their original ids.

    events: user_id, item_id, action (class), timestamp (seconds), source_row (position in the source), all Int64; lazy,
    so that a source larger than memory is streamed. users: user_id and one column a contextual feature, in the order of
    the context tokens; may lack users that have events. items: the catalogue, item_id (Int64) and one List(String)
    column an item feature, the names of the item's values, empty for none; may lack items that have events.
    origin: where it came from, for the reader. path: the folder or file that was read, for errors. hash: sha256 that
    changes when the prepared result would.
    """

    name: str
    origin: str
    path: Path
    hash: str
    events: pl.LazyFrame
    users: pl.DataFrame
    items: pl.DataFrame
    num_actions: int
    label_bits: tuple[tuple[str, int], ...]
    positive_class: int
    tie_rule: str = "events of a user with equal timestamps keep the order of rows in the source file"
