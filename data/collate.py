"""From window numbers to a Batch: slices of whole arrays, no loop over events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from genrec.data.batch import Batch, jagged_features
from genrec.data.dataset import SequenceDataset
from genrec.data.format import EVENT_COLUMNS, check_ids, item_feature_key, label_mask_table
from genrec.data.windows import WindowPlan

ITEM = "item"
ACTION = "action"


@dataclass(frozen=True)
class CollateOptions:
    """with_candidates: targets are candidates. protect_targets: event dropout keeps them. label: "mask" or "class".

    item_features: name to (num_items, width) ids of each item. dynamic_features: those whose ids need not be rows.
    """

    contextual_features: tuple[str, ...]
    item_features: Mapping[str, np.ndarray]
    label: str
    with_candidates: bool
    protect_targets: bool
    event_dropout: float
    seed: int
    dynamic_features: frozenset[str] = frozenset()


def collate(
    dataset: SequenceDataset, plan: WindowPlan, windows: np.ndarray, *, options: CollateOptions, epoch: int
) -> Batch:
    """The batch of ``windows (B,)``; B = 0 is legal. A function of its arguments alone.

    Raises:
        DataError: an id outside its table, or a damaged file.
    """
    rows = plan.row[windows]
    events, contexts = _gather(dataset, plan, windows, options.contextual_features)
    lengths = plan.lengths[windows]
    owner = np.repeat(np.arange(len(windows)), lengths)
    position = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    is_target = position >= (plan.history_stop - plan.history_start)[windows][owner]
    if options.event_dropout > 0:
        keep = _kept(uniform(options.seed, epoch, windows[owner], position), owner, rate=options.event_dropout)
        if options.protect_targets:
            keep |= is_target
        events = {name: values[keep] for name, values in events.items()}
        owner, is_target = owner[keep], is_target[keep]
        lengths = np.bincount(owner, minlength=len(windows))
    num_labelled = np.bincount(owner[is_target], minlength=len(windows))
    features = {name: contexts[name] for name in options.contextual_features} | {ITEM: events["item"]}
    num_actions = dataset.metadata.num_actions
    if num_actions:
        features[ACTION] = events["action"]
    _check_features(dataset, features, options)
    per_item = {item_feature_key(name): values for name, values in options.item_features.items()}
    features |= {name: values[events["item"]].ravel() for name, values in per_item.items()}
    widths = {name: values.shape[1] for name, values in per_item.items()}
    labels = events["action"][is_target]
    if options.label == "mask" and num_actions:
        labels = np.array(label_mask_table(dataset.metadata), dtype=np.int64)[labels]
    return Batch(
        features=jagged_features(features, lengths, num_contexts=len(options.contextual_features), widths=widths),
        timestamps=torch.from_numpy(events["timestamp"]),
        num_candidates=torch.from_numpy(num_labelled if options.with_candidates else np.zeros_like(num_labelled)),
        num_labelled=torch.from_numpy(num_labelled),
        labels=torch.from_numpy(labels),
        user_ids=torch.from_numpy(dataset.user_ids[rows]),
        batch_size=len(windows),
        max_num_events=int(lengths.max(initial=0)),
        item_feature_name=ITEM,
        action_feature_name=ACTION if num_actions else None,
        contextual_feature_names=options.contextual_features,
        item_feature_widths=widths,
    )


def _kept(drawn: np.ndarray, owner: np.ndarray, *, rate: float) -> np.ndarray:
    """(E,) bool: event dropout at ``rate`` leaves out the events that drew less, but keeps one of each sequence.

    drawn: (E,) uniform numbers. owner: (E,) the sequence of each event.
    """
    most = np.full(owner.max(initial=-1) + 1, -1.0)
    np.maximum.at(most, owner, drawn)
    kept: np.ndarray = (drawn >= rate) | (drawn == most[owner])
    return kept


def _gather(
    dataset: SequenceDataset, plan: WindowPlan, windows: np.ndarray, contextual_features: Sequence[str]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Event columns (E,) and contexts (B,) of the windows, in order; the loop is over users, events are sliced."""
    groups, local_rows = dataset.locate(plan.row[windows])
    slices: dict[str, list[np.ndarray]] = {name: [np.empty(0, dtype=np.int64)] for name in EVENT_COLUMNS}
    contexts = {name: np.empty(len(windows), dtype=np.int64) for name in contextual_features}
    for place, (window, group, row) in enumerate(zip(windows, groups, local_rows, strict=True)):
        rows = dataset.row_group(int(group))
        base = rows.offsets[row]
        history = slice(base + plan.history_start[window], base + plan.history_stop[window])
        targets = slice(base + plan.target_start[window], base + plan.target_stop[window])
        for name in EVENT_COLUMNS:
            slices[name] += [rows.events[name][history], rows.events[name][targets]]
        for name in contextual_features:
            contexts[name][place] = rows.contexts[name][row]
    return {name: np.concatenate(parts) for name, parts in slices.items()}, contexts


def _check_features(dataset: SequenceDataset, features: dict[str, np.ndarray], options: CollateOptions) -> None:
    metadata = dataset.metadata
    # Labels are found by the action's id, and the features of an item by the item's.
    any_ids = options.dynamic_features - {ACTION} - ({ITEM} if options.item_features else set())
    sizes = {**metadata.contextual_features, ITEM: metadata.num_items, ACTION: metadata.num_actions}
    for name, values in features.items():
        check_ids(values, feature=name, table=name, num_rows=None if name in any_ids else sizes[name])


def uniform(seed: int, epoch: int, sequence: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1), one for each (seed, epoch, sequence, position); arrays (N,).

    A counter-based generator (splitmix64's finaliser over the counters), so that a batch needs no generator state.
    """
    key = _mix(_mix(np.uint64(seed)) ^ np.uint64(epoch))
    bits = _mix(_mix(sequence.astype(np.uint64) ^ key) ^ position.astype(np.uint64))
    return (bits >> np.uint64(11)) * 2.0**-53


def _mix(counter: np.ndarray | np.uint64) -> np.ndarray:
    bits = np.array(counter, dtype=np.uint64)
    with np.errstate(over="ignore"):
        bits += np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(bits ^ (bits >> np.uint64(31)))
