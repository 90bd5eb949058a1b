"""Ids get rows, lose them to others where there are no more, and nothing else happens to a map."""

from __future__ import annotations

import collections
import random

import pytest
import torch

from genrec.model.row_map import RowMap

LARGEST = 2**63 - 1


def admit(row_map, ids, *, step):
    ids = torch.tensor(ids, dtype=torch.int64, device=row_map.ids.device)
    return row_map.admit(*ids.unique(return_counts=True), step=step)


def look_up(row_map, ids):
    return row_map.look_up(torch.tensor(ids, device=row_map.ids.device)).tolist()


class PlainMap:
    """What RowMap computes, id by id."""

    def __init__(self, capacity, strategy):
        self.capacity, self.strategy = capacity, strategy
        self.rows, self.last, self.counts = {}, {}, collections.Counter()

    def use(self, i):
        use = (self.last[i], self.rows[i])
        return use if self.strategy == "lru" else (self.counts[i], *use)

    def admit(self, batch, *, step):
        read = collections.Counter(batch)
        new = [i for i in sorted(read) if i not in self.rows]
        free = list(range(len(self.rows), self.capacity))
        others = sorted((i for i in self.rows if i not in read), key=self.use)
        gone = others[: max(0, len(new) - len(free))]
        rows = free + sorted(self.rows.pop(i) for i in gone)
        for i in gone:
            del self.counts[i]
        new = sorted(sorted(new, key=lambda i: (-read[i], i))[: len(rows)])
        self.rows |= dict(zip(new, rows, strict=False))
        for i in read:
            if i in self.rows:
                self.last[i] = step
                self.counts[i] += read[i]
        return [row for row in rows if row not in free]


def run_against_plain(device, trial):
    draw = random.Random(trial)
    capacity, strategy = draw.choice([1, 2, 5, 13]), draw.choice(["lru", "lfu"])
    ids = [0, LARGEST, *(draw.randrange(2**63) for _ in range(draw.choice([3, 20])))]
    row_map, plain = RowMap(capacity, strategy=strategy, device=device), PlainMap(capacity, strategy)
    for step in range(1, 15):
        batch = [draw.choice(ids) for _ in range(draw.randrange(12))]
        before = {key: value.clone() for key, value in row_map.state.items()}
        row_map.undo(admit(row_map, batch, step=step))
        torch.testing.assert_close(row_map.state, before, rtol=0, atol=0)
        assert admit(row_map, batch, step=step).evicted.tolist() == plain.admit(batch, step=step)
        assert look_up(row_map, ids) == [plain.rows.get(i, capacity) for i in ids]
        copy = RowMap(capacity, strategy=strategy, device=device)
        copy.load_state({key: value.cpu() for key, value in row_map.state.items()})
        row_map = copy


@pytest.mark.parametrize("trial", range(60))
def test_equals_a_map_that_takes_id_by_id(trial):
    run_against_plain("cpu", trial)


@pytest.mark.gpu
def test_equals_it_on_a_gpu_with_deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    try:
        for trial in range(20):
            run_against_plain("cuda", trial)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_a_large_map_on_a_gpu_is_that_of_the_cpu():
    maps = [RowMap(100_000, strategy="lfu", device=device) for device in ("cpu", "cuda")]
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 20):
        ids = torch.randint(2**63 - 1, (10_000,), generator=generator) >> torch.randint(62, (10_000,))
        for row_map in maps:
            row_map.admit(*ids.to(row_map.ids.device).unique(return_counts=True), step=step)
    cpu, gpu = maps
    assert len(cpu) == 100_000
    torch.testing.assert_close({key: value.cpu() for key, value in gpu.state.items()}, cpu.state, rtol=0, atol=0)


def test_the_drawn_example():
    row_map = RowMap(3, strategy="lru")
    for step, ids in enumerate([[7, 9], [9, 4]], start=1):
        assert not len(admit(row_map, ids, step=step).evicted)
    assert look_up(row_map, [7, 9, 4, 5]) == [0, 1, 2, 3]
    assert admit(row_map, [5, 4], step=3).evicted.tolist() == [0]
    assert look_up(row_map, [7, 9, 4, 5]) == [3, 1, 2, 0]


def test_the_least_frequent_id_goes_and_a_frequent_one_stays():
    row_map = RowMap(2, strategy="lfu")
    admit(row_map, [1, 1, 1, 2], step=1)
    admit(row_map, [2], step=2)
    admit(row_map, [3], step=3)
    assert look_up(row_map, [1, 2, 3]) == [0, 2, 1]  # 1 is the longer unread, 2 the less read


def test_more_ids_than_rows_in_a_step():
    """The most frequent get rows, and nobody's row is taken within the step that reads it."""
    row_map = RowMap(2, strategy="lru")
    admit(row_map, [8], step=1)
    admission = admit(row_map, [8, 3, 5, 5, 4], step=2)
    assert admission.num_refused == 2 and not len(admission.evicted)
    assert look_up(row_map, [8, 5, 3, 4]) == [0, 1, 2, 2]


def test_looking_up_changes_nothing():
    row_map = RowMap(4, strategy="lfu")
    assert look_up(row_map, [0, LARGEST]) == [4, 4]  # of an empty map
    admit(row_map, [LARGEST, 0], step=1)
    before = {key: value.clone() for key, value in row_map.state.items()}
    assert look_up(row_map, [LARGEST, 0, 1, LARGEST - 1]) == [1, 0, 4, 4]
    torch.testing.assert_close(row_map.state, before, rtol=0, atol=0)


def test_steps_count_anew_in_the_same_order():
    row_map = RowMap(2, strategy="lru")
    for step, ids in enumerate([[1], [2]], start=1000):
        admit(row_map, ids, step=step)
    row_map.count_steps_anew()
    admit(row_map, [3], step=1)
    admit(row_map, [4], step=2)  # 3 was read at step 1, 2 before
    assert look_up(row_map, [1, 2, 3, 4]) == [2, 2, 0, 1]
