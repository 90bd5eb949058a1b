"""Feeds: what is read when, and where the loader's cursor is left."""

from __future__ import annotations

import logging

import pytest
import torch

from genrec.configs.schema import TrainerArgs
from genrec.model.ranking import RankingModel
from genrec.training import overlap
from genrec.training.datasets import read_run_metadata
from genrec.training.feed import Feed
from genrec.training.overlap import OverlappedFeed, make_feed
from genrec.training.ranks import Ranks

ALONE = Ranks(rank=0, world_size=1, device=torch.device("cpu"))


class Loader:
    """Its cursor counts what was read."""

    def __init__(self, batch):
        self.batch, self.num_read, self.events = batch, 0, []

    def read(self):
        self.num_read += 1
        self.events.append(f"read {self.num_read}")
        return [self.batch]

    def state_dict(self):
        return {"num_read": self.num_read}

    def load_state_dict(self, state):
        self.num_read = state["num_read"]


@pytest.fixture
def embeddings(tmp_path, tiny_config):
    config = tiny_config(tmp_path / "unused")
    return RankingModel(config, metadata=read_run_metadata(config)).embeddings


@pytest.fixture
def loader(make_batch):
    return Loader(make_batch([3, 1]))


def run_steps(feed, loader, num_steps):
    for _ in range(num_steps):
        step_input = feed.next()
        assert step_input.counts.num_targets == 4
        loader.events.append("forward")
        feed.backward_is_queued()
        loader.events.append("backward")
        feed.done()


def test_a_feed_that_overlaps_nothing_reads_a_step_as_it_begins(loader):
    feed = Feed(ALONE)
    feed.begin(loader.read, 2)
    run_steps(feed, loader, 2)
    assert loader.events == ["read 1", "forward", "backward", "read 2", "forward", "backward"]
    assert feed.num_left == 0


@pytest.mark.parametrize("prefetches", [False, True])
def test_steps_are_read_ahead_between_forward_and_backward_and_never_across_a_pause(embeddings, loader, prefetches):
    feed = OverlappedFeed(embeddings, prefetches=prefetches, loader=loader, ranks=ALONE)
    feed.begin(loader.read, 4)
    run_steps(feed, loader, 4)
    computed = ["forward", "backward"]
    assert loader.events == [
        *("read 1", "read 2"),
        *("forward", "read 3", "backward"),
        *("forward", "read 4", "backward"),
        *computed,
        *computed,
    ]
    feed.begin(loader.read, 1)
    run_steps(feed, loader, 1)
    assert loader.events[-3:] == ["read 5", *computed]
    assert loader.num_read == 5


def test_what_was_read_ahead_is_given_back(embeddings, loader):
    feed = OverlappedFeed(embeddings, prefetches=False, loader=loader, ranks=ALONE)
    feed.begin(loader.read, 6)
    run_steps(feed, loader, 2)
    assert loader.num_read == 4
    feed.give_back()
    assert (loader.num_read, feed.num_left) == (2, 0)
    feed.begin(loader.read, 1)
    run_steps(feed, loader, 1)
    assert loader.num_read == 3


def test_an_error_in_reading_ahead_comes_with_its_step(embeddings, loader):
    def read():
        batches = loader.read()
        if loader.num_read == 2:
            raise ValueError("damaged")
        return batches

    feed = OverlappedFeed(embeddings, prefetches=False, loader=loader, ranks=ALONE)
    feed.begin(read, 3)
    run_steps(feed, loader, 1)
    step_input = feed.next()
    assert step_input.counts.num_failed == 1 and str(step_input.batches.error) == "damaged"
    assert loader.num_read == 2


ON_A_CPU = "pipeline_type 'native' has no effect on a CPU, where there is nothing to overlap"
DYNAMIC = "pipeline_type {!r} is 'none' here: the ids of dynamic tables get their rows step by step"
WITHOUT_CACHES = "pipeline_type 'prefetch' is 'native' here: no embedding table is cached on the device"


@pytest.mark.parametrize(
    ("kind", "device", "overlaps", "said"),
    [
        ("none", "cuda", False, []),
        ("none", "cpu", False, []),
        ("native", "cpu", False, [ON_A_CPU]),
        ("native", "cuda", True, []),
        ("prefetch", "cuda", True, [WITHOUT_CACHES]),
    ],
)
def test_what_a_pipeline_type_is_here(embeddings, loader, caplog, monkeypatch, kind, device, overlaps, said):
    """As on a GPU, where the streams are a CPU's: none."""
    monkeypatch.setattr(overlap, "OVERLAPPING_DEVICES", ("cpu",) if device == "cuda" else ())
    trainer = TrainerArgs(train_batch_size=1, eval_batch_size=1, pipeline_type=kind)
    with caplog.at_level(logging.INFO, logger="genrec"):
        feed = make_feed(trainer, embeddings, loader=loader, ranks=ALONE)
    assert isinstance(feed, OverlappedFeed) == overlaps
    assert [r.message for r in caplog.records if r.name.startswith("genrec")] == said


@pytest.mark.parametrize("kind", ["none", "native", "prefetch"])
def test_dynamic_tables_have_nothing_read_ahead(tmp_path, tiny_config, loader, caplog, monkeypatch, kind):
    monkeypatch.setattr(overlap, "OVERLAPPING_DEVICES", ("cpu",))
    config = tiny_config(tmp_path / "unused", "DatasetArgs.dynamic_tables = {'item': 7}")
    dynamic = RankingModel(config, metadata=read_run_metadata(config)).embeddings
    trainer = TrainerArgs(train_batch_size=1, eval_batch_size=1, pipeline_type=kind)
    with caplog.at_level(logging.INFO, logger="genrec"):
        feed = make_feed(trainer, dynamic, loader=loader, ranks=ALONE)
    assert type(feed) is Feed
    said = [r.message for r in caplog.records if r.name.startswith("genrec")]
    assert said == ([] if kind == "none" else [DYNAMIC.format(kind)])
