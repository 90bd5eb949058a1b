"""The names of tensors in a checkpoint, which don't depend on how ranks share what they are of.

``model.embeddings.collections.dim64.embeddings.table_item.weight`` is the whole table (rows, 64) to who reads it, and
``optimizer.`` and ``average.`` before the weight's name, with the moment's key after it, are what training has of it.
"""

from __future__ import annotations

import re

MODEL, OPTIMIZER, AVERAGE, PRECISION, VOCABULARY = "model.", "optimizer.", "average.", "precision.", "vocabulary."
ROW_MAP = "row_map."  # of dynamic tables: "row_map.item.ids"
SHARDED_COLLECTION = re.compile(r"(?<=\bcollections\.)dim(\d+)_sharded(?=\.)")
TABLE_WEIGHT = re.compile(r"embeddings\.collections\.dim\d+\.embeddings\.table_([^.]+)\.weight")


def checkpoint_name(name: str) -> str:
    """The name, in a checkpoint, of a weight with ``name`` in the model: without where its table lies."""
    return SHARDED_COLLECTION.sub(r"dim\1", name)


def table_of(name: str) -> str | None:
    """The table whose weight has ``name`` in a checkpoint; None for a dense weight."""
    match = TABLE_WEIGHT.fullmatch(name)
    return None if match is None else match.group(1)


def weight_of(name: str) -> str:
    """The name of the weight that a tensor of a checkpoint is, or is of."""
    prefix, _, rest = name.partition(".")
    return rest.rpartition(".")[0] if f"{prefix}." == OPTIMIZER else rest
