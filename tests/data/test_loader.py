"""The loader: nothing lost or repeated at any world size, workers or restart; no evaluation target is trained on."""

from __future__ import annotations

import itertools
import os
import pickle
import signal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genrec.data.balance import SequenceCost
from genrec.data.collate import uniform
from genrec.data.dataset import SequenceDataset
from genrec.data.format import DataError
from genrec.data.loader import SequenceLoader
from genrec.data.worker_signals import outlive_sigterm

LENGTHS = [3, 0, 17, 1, 12, 5, 8, 9, 2, 26, 4, 7]
TRAIN = {"mode": "train", "label": "class", "max_history_seqlen": 5, "batch_size": 3}


def loader(directory, *, split="train", **options):
    return SequenceLoader(SequenceDataset.open(directory, split=split), **{**TRAIN, **options})


def parts(batch):
    """Everything in a batch, as lists."""
    features = {
        key: (batch.features[key].values().tolist(), batch.features[key].lengths().tolist())
        for key in batch.features.to_dict()
    }
    names = ("timestamps", "num_candidates", "num_labelled", "labels", "user_ids")
    return {**features, **{name: getattr(batch, name).tolist() for name in names}}


def sequences(batch):
    """Per user: items, user id, items that carry a label."""
    items = torch.split(batch.features["item"].values(), batch.features["item"].lengths().tolist())
    out = []
    for user, part, labelled in zip(batch.user_ids.tolist(), items, batch.num_labelled.tolist(), strict=True):
        out.append((user, part.tolist(), part[len(part) - labelled :].tolist()))
    return out


def all_sequences(loaders):
    """The sequences of an epoch, global step by global step."""
    return [s for step in zip(*loaders, strict=True) for batch in step for s in sequences(batch)]


@pytest.fixture
def directory(make_dataset):
    return make_dataset(LENGTHS)


def targets_of(directory, split, mode, **options):
    return [
        item
        for _, _, labelled in all_sequences([loader(directory, split=split, mode=mode, **options)])
        for item in labelled
    ]


@pytest.mark.parametrize("rule", ["leave_last", "user", "global_time"])
def test_no_evaluation_target_is_a_training_target_or_seen_in_training(make_dataset, rule):
    directory = make_dataset(LENGTHS, rule=rule)
    seen = {
        split: targets_of(directory, split, mode)
        for split, mode in (("train", "train"), ("valid", "sequential"), ("test", "sequential"))
    }
    frozen = targets_of(directory, "test", "frozen")
    assert sorted(frozen) == sorted(seen["test"])
    for one, other in itertools.combinations(seen, 2):
        assert not set(seen[one]) & set(seen[other])
    assert all(len(items) == len(set(items)) > 0 for items in seen.values())
    inputs = {item for _, items, _ in all_sequences([loader(directory)]) for item in items}
    assert not inputs & (set(seen["valid"]) | set(seen["test"]))


def test_evaluation_is_refused_as_training(directory):
    with pytest.raises(DataError, match="mode is 'train' but the split is 'test'"):
        loader(directory, split="test")


@settings(max_examples=20, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch_size=st.integers(1, 7),
    world_size=st.integers(1, 4),
    shuffle=st.booleans(),
    balanced=st.booleans(),
    candidates=st.sampled_from([0, 2]),
)
def test_an_epoch_holds_every_event_once_at_any_world_size(
    directory_once, batch_size, world_size, shuffle, balanced, candidates
):
    options = {"batch_size": batch_size, "shuffle": shuffle, "max_num_candidates": candidates, "seed": 5}
    ranks = [
        loader(directory_once, rank=rank, world_size=world_size, balanced=balanced, **options)
        for rank in range(world_size)
    ]
    one = loader(directory_once, **{**options, "batch_size": batch_size * world_size})
    assert {len(rank) for rank in ranks} == {len(one)}
    for step in zip(one, *ranks, strict=True):
        whole, shares = sequences(step[0]), [sequences(batch) for batch in step[1:]]
        together = [s for share in shares for s in share]
        assert (sorted(together) if balanced else together) == (sorted(whole) if balanced else whole)
        counts = [batch.batch_size for batch in step[1:]]
        assert max(counts) - min(counts) <= 1 and max(counts) <= batch_size


@pytest.fixture(scope="module")
def directory_once(tmp_path_factory, make_source):
    from genrec.data.writer import write_dataset

    directory = tmp_path_factory.mktemp("toy")
    write_dataset(make_source(LENGTHS), directory, rule="leave_last", holdout=2, seed=1)
    return directory


def test_training_covers_all_train_events_once(directory):
    trained = targets_of(directory, "train", "train", shuffle=True)
    expected = SequenceDataset.open(directory, split="train").num_events.sum()
    assert len(trained) == len(set(trained)) == expected


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("stop", [0, 1, 4, 100])
def test_resume_continues_exactly(directory, num_workers, stop):
    options = {"shuffle": True, "seed": 3, "event_dropout": 0.3, "num_workers": num_workers, "batch_size": 2}
    straight = loader(directory, **{**options, "num_workers": 0})
    expected = [parts(batch) for _ in range(2) for batch in straight]
    first = loader(directory, **options)
    got, state = [], first.state_dict()
    for batch in itertools.islice(first, stop):
        got.append(parts(batch))
        state = first.state_dict()
    assert all(type(value) is int for value in state.values())
    second = loader(directory, **options)
    second.load_state_dict(state)
    while len(got) < len(expected):
        got += [parts(batch) for batch in second]
    assert got == expected


def test_resume_with_other_ranks_and_batch_size_loses_nothing(directory):
    before = [loader(directory, shuffle=True, batch_size=3, rank=rank, world_size=2) for rank in range(2)]
    seen = [s for step in itertools.islice(zip(*before, strict=True), 2) for batch in step for s in sequences(batch)]
    after = [loader(directory, shuffle=True, batch_size=1, rank=rank, world_size=3) for rank in range(3)]
    for rank in after:
        rank.load_state_dict(before[0].state_dict())
    seen += all_sequences(after)
    assert seen == all_sequences([loader(directory, shuffle=True)])


def test_resume_of_other_data_or_seed_is_refused(directory):
    state = loader(directory, seed=1).state_dict()
    with pytest.raises(DataError, match="data position is of seed 1, this run has 2"):
        loader(directory, seed=2).load_state_dict(state)
    with pytest.raises(DataError, match="data position is of num_sequences"):
        loader(directory, seed=1, max_history_seqlen=4).load_state_dict(state)


def test_epochs_differ_when_shuffled_and_repeat_by_seed(directory):
    one, same, other = (loader(directory, shuffle=True, seed=seed) for seed in (1, 1, 2))
    first, second = all_sequences([one]), all_sequences([one])
    assert first != second and sorted(first) == sorted(second)
    assert [all_sequences([same]), all_sequences([same])] == [first, second]
    assert all_sequences([other]) != first
    assert one.state_dict()["epoch"] == 1


def test_iterating_leaves_the_global_generator_alone(directory):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    list(loader(directory, shuffle=True, event_dropout=0.5))
    assert torch.rand(1) == expected


def test_a_worker_outlives_a_sigterm_that_comes_as_it_starts(directory, monkeypatch):
    """A scheduler sends it to all processes of the group, whatever they are at."""

    def told_to_end(worker):
        os.kill(os.getpid(), signal.SIGTERM)
        outlive_sigterm(worker)

    straight = [parts(batch) for batch in loader(directory)]
    monkeypatch.setattr("genrec.data.loader.outlive_sigterm", told_to_end)
    assert [parts(batch) for batch in loader(directory, num_workers=1)] == straight


def test_a_dataset_travels_to_a_worker(directory):
    dataset = SequenceDataset.open(directory, split="train")
    dataset.row_group(0)
    assert (
        pickle.loads(pickle.dumps(dataset)).row_group(0).events["item"].tolist()
        == dataset.row_group(0).events["item"].tolist()
    )


def test_short_ranks_get_empty_batches(make_dataset):
    directory = make_dataset([4, 5, 6])  # the first has no train event
    last = [list(loader(directory, batch_size=1, world_size=4, rank=rank))[-1] for rank in range(4)]
    assert [batch.batch_size for batch in last] == [1, 1, 0, 0]
    empty = last[-1]
    assert (empty.batch_size, empty.max_num_events, empty.features.stride()) == (0, 0, 0)
    assert empty.features.keys() == ["user_id", "parity", "item", "action"]
    tensors = [empty.features.values(), empty.features.lengths(), empty.timestamps, empty.labels, empty.num_labelled]
    assert all(t.numel() == 0 and t.dtype == torch.int64 for t in tensors)


def test_modes_and_labels(directory):
    def only(mode, label, **options):
        options = {"split": "test", "max_history_seqlen": 50, "batch_size": 99, **options}
        return next(iter(loader(directory, mode=mode, label=label, **options)))

    for mode, has_candidates in (("sequential", False), ("frozen", True)):
        batch = only(mode, "class")
        assert set(batch.num_labelled.tolist()) == {2}  # the holdout
        assert (
            batch.num_candidates.tolist() == (batch.num_labelled if has_candidates else 0 * batch.num_labelled).tolist()
        )
    classes, masks = only("frozen", "class").labels, only("frozen", "mask").labels
    assert masks.tolist() == [{3: 0b01, 4: 0b11}.get(c, 0) for c in classes.tolist()]
    batch = only("train", "class", split="train", max_num_candidates=3)
    lengths = batch.features["item"].lengths()
    assert batch.num_candidates.tolist() == lengths.clamp(max=3).tolist() == batch.num_labelled.tolist()
    assert batch.max_num_events == lengths.max() and batch.timestamps.dtype == torch.int64


@pytest.mark.parametrize("candidates", [0, 2])
def test_event_dropout(make_dataset, candidates):
    directory = make_dataset([400, 300], holdout=1)
    options = {"max_history_seqlen": 400, "max_num_candidates": candidates, "batch_size": 2}
    full = next(iter(loader(directory, **options)))
    dropping = loader(directory, event_dropout=0.25, **options)
    first, second = next(iter(dropping)), next(iter(dropping))
    kept = first.timestamps.numel() / full.timestamps.numel()
    assert 0.68 < kept < 0.82
    assert first.timestamps.tolist() != second.timestamps.tolist()[: first.timestamps.numel()]
    for (user, items, labelled), (user_full, items_full, labelled_full) in zip(
        sequences(first), sequences(full), strict=True
    ):
        assert user == user_full and set(items) < set(items_full) and items == sorted(items)
        assert labelled == (labelled_full if candidates else items)
    assert first.labels.tolist() == [item % 5 for _, _, labelled in sequences(first) for item in labelled]
    with pytest.raises(DataError, match=r"event_dropout is 0.1, .* only 0 in evaluation"):
        loader(directory, split="test", mode="frozen", event_dropout=0.1)


def test_dropout_numbers_are_uniform_and_independent():
    sequence, position = np.repeat(np.arange(200), 100), np.tile(np.arange(100), 200)
    drawn = [uniform(seed, epoch, sequence, position) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for numbers in drawn:
        assert numbers.min() >= 0 and numbers.max() < 1
        assert abs(numbers.mean() - 0.5) < 0.01 and abs(numbers.var() - 1 / 12) < 0.005
        by_sequence = numbers.reshape(200, 100)
        assert abs(np.corrcoef(by_sequence[:-1].ravel(), by_sequence[1:].ravel())[0, 1]) < 0.03
        assert abs(np.corrcoef(by_sequence[:, :-1].ravel(), by_sequence[:, 1:].ravel())[0, 1]) < 0.03
    assert np.abs(np.corrcoef(drawn) - np.eye(3)).max() < 0.03
    assert np.array_equal(uniform(0, 1, sequence[50:60], position[50:60]), drawn[1][50:60])


def test_contextual_features(directory):
    assert next(iter(loader(directory))).contextual_feature_names == ("user_id", "parity")
    batch = next(iter(loader(directory, contextual_features=())))
    assert batch.features.keys() == ["item", "action"] and batch.contextual_feature_names == ()
    batch = next(iter(loader(directory, contextual_features=["parity"])))
    assert batch.features["parity"].values().tolist() == [(user - 100) % 2 for user in batch.user_ids.tolist()]
    with pytest.raises(DataError, match=r"contextual_features is 'age', allowed are .*'parity'"):
        loader(directory, contextual_features=["age"])


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("event_dropout", [0.0, 0.5])
def test_item_features(directory, num_workers, event_dropout):
    options = {"item_features": ["size", "tags"], "num_workers": num_workers, "event_dropout": event_dropout}
    for batch in loader(directory, **options):
        assert batch.features.keys() == ["user_id", "parity", "item", "action", "item_size", "item_tags"]
        assert batch.item_feature_widths == {"item_size": 1, "item_tags": 3}
        items = batch.features["item"]
        for name, width in batch.item_feature_widths.items():
            assert batch.features[name].lengths().tolist() == (width * items.lengths()).tolist()
        tags = batch.features["item_tags"].values().view(-1, 3).tolist()
        # Named a, b, d; see the source: ids 1 to 3.
        assert tags == [[[0, 0, 0], [3, 0, 0], [2, 3, 0], [1, 2, 3]][item % 4] for item in items.values().tolist()]
        sizes = batch.features["item_size"].values().tolist()
        assert sizes == [0 if item % 5 == 0 else 1 + item % 2 for item in items.values().tolist()]
        contexts = len(batch.features["parity"].values()) * 2
        assert batch.num_tokens == contexts + 2 * len(items.values())


def test_item_features_of_an_empty_rank_and_none_and_unknown(make_dataset, directory):
    small = make_dataset([4, 5, 6], name="small")
    empty = list(loader(small, batch_size=1, world_size=4, rank=3, item_features=["tags"]))[-1]
    assert empty.features.stride() == 0 and empty.item_feature_widths == {"item_tags": 3} and empty.num_tokens == 0
    plain = next(iter(loader(directory)))
    assert plain.item_feature_widths == {} and "item_tags" not in plain.features.keys()  # noqa: SIM118
    with pytest.raises(DataError, match="item_features is 'genre', allowed are 'tags', 'size'"):
        loader(directory, item_features=["genre"])


@pytest.mark.parametrize("candidates", [0, 1])
def test_event_dropout_leaves_every_sequence_an_event(make_dataset, candidates):
    """Also where nearly all is dropped; and what goes is the whole event: item, action, time and features."""
    directory = make_dataset([2 + length for length in (1, 1, 2, 3, 5, 0)] * 8, holdout=1)
    options = {"max_history_seqlen": 4, "max_num_candidates": candidates, "batch_size": 16, "item_features": ["tags"]}
    seen = set()
    for batch in loader(directory, event_dropout=0.99, **options):
        lengths = batch.features["item"].lengths()
        assert lengths.min() >= 1
        assert batch.num_labelled.tolist() == (lengths if not candidates else lengths.clamp(max=1)).tolist()
        items = batch.features["item"].values()
        assert batch.features["action"].values().tolist() == (items % 5).tolist() and batch.labels.numel() > 0
        assert batch.timestamps.tolist() == (10 * items).tolist()
        assert len(batch.features["item_tags"].values()) == 3 * len(items)
        seen |= set(items.tolist())
    assert len(seen) < sum(batch.timestamps.numel() for batch in loader(directory, **options))


def test_event_dropout_keeps_any_event_of_a_sequence_alike(make_dataset):
    directory = make_dataset([4 + 2] * 300, holdout=1)
    dropping = loader(directory, event_dropout=0.999, max_history_seqlen=4, batch_size=300)
    places = [items[0] % 6 for _, items, _ in all_sequences([dropping])]
    assert np.bincount(places).min() > 40


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("batch_size", 0),
        ("max_history_seqlen", 0),
        ("mode", "eval"),
        ("label", "rating"),
        ("event_dropout", 1.0),
        ("seed", -1),
    ],
)
def test_bad_arguments_name_the_argument(directory, option, value):
    with pytest.raises(DataError, match=f"{option} is .*allowed are"):
        loader(directory, **{option: value})


def test_a_users_batch_does_not_depend_on_the_cache(directory):
    small = SequenceLoader(SequenceDataset.open(directory, split="train", cache_bytes=1), **TRAIN, shuffle=True)
    large = loader(directory, shuffle=True)
    assert [parts(a) for a in small] == [parts(b) for b in large]


def test_balanced_ranks_have_even_work(make_dataset):
    lengths = np.minimum(np.random.default_rng(0).zipf(1.3, size=64), 60).tolist()
    directory = make_dataset(lengths, rule="user")
    work = {}
    for balanced in (False, True):
        ranks = [
            loader(directory, max_history_seqlen=60, batch_size=16, world_size=2, rank=rank, balanced=balanced)
            for rank in range(2)
        ]
        work[balanced] = max((next(iter(rank)).features["item"].lengths() ** 2).sum().item() for rank in ranks)
    assert work[True] <= work[False]


@pytest.mark.parametrize("linear", [0.0, 1000.0])
def test_imbalance_is_what_the_ranks_get(make_dataset, linear):
    lengths = np.minimum(np.random.default_rng(1).zipf(1.3, size=64), 60).tolist()
    directory, cost = make_dataset(lengths, rule="user"), SequenceCost(linear=linear, tokens_per_event=2)
    options = {"max_history_seqlen": 60, "batch_size": 8, "world_size": 2, "shuffle": True, "cost": cost}
    said = loader(directory, **options).imbalance(num_batches=100)
    measured = {}
    for balanced in (False, True):
        ranks = [loader(directory, rank=rank, balanced=balanced, **options) for rank in range(2)]
        work = np.array([[cost(b.features["item"].lengths().numpy()).sum() for b in rank] for rank in ranks])
        measured[balanced] = float(np.mean(2 * work.max(axis=0) / work.sum(axis=0)))
    assert (said.sliced, said.balanced) == pytest.approx((measured[False], measured[True]))
    assert 1 <= said.balanced < said.sliced
    assert said.num_batches == len(loader(directory, **options))


@pytest.mark.parametrize("stop", [1, 3])
def test_balanced_resume_continues_exactly(directory, stop):
    """Also on another number of ranks: the cursor counts global batches, whose users balancing doesn't change."""
    options = {"shuffle": True, "seed": 3, "balanced": True, "batch_size": 1, "world_size": 2}
    straight = [sequences(batch) for batch in loader(directory, rank=1, **options)]
    first = loader(directory, rank=1, **options)
    got = [sequences(batch) for batch in itertools.islice(first, stop)]
    second = loader(directory, rank=1, **options)
    second.load_state_dict(first.state_dict())
    assert got + [sequences(batch) for batch in second] == straight

    alone = loader(directory, **{**options, "world_size": 1, "batch_size": 2})
    alone.load_state_dict(first.state_dict())
    rest = [loader(directory, rank=rank, **options) for rank in range(2)]
    for rank in rest:
        rank.load_state_dict(first.state_dict())
    for step in zip(alone, *rest, strict=True):
        assert sorted(sequences(step[0])) == sorted(s for batch in step[1:] for s in sequences(batch))
