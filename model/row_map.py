"""RowMap: which id has which row of a table whose ids are not known beforehand (a dynamic table).

Ids are any numbers from 0 to 2**63 - 1; the table has ``capacity`` rows for them, and one more, the last, that all ids
without a row share. An id gets a row as it is first trained on, so no two ids share one; where no row is free, those of
the least used ids are taken ("lru": not read for the longest time; "lfu": read least often, and of those not for the
longest time)::

    capacity 3, lru    step 1 reads 7 9       7 -> row 0, 9 -> row 1
                       step 2 reads 9 4       4 -> row 2
                       step 3 reads 5 4       5 -> row 0, which was 7's; another 7 reads row 3, as every unknown id does

TorchRec's managed-collision modules do the same and could not be used (docs/LOG.md): what a map holds is to depend
on the global batches alone, so that every rank can hold it, and to be undone with a step that is left out. The same ids
in the same steps give the same map on any machine: nothing is hashed, drawn or left to the order of arrival.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from genrec.configs.schema import EVICT_STRATEGIES
from genrec.model.table_specs import table_name

NO_ID = -1
BYTES_OF_ROW = 40  # five numbers of 64 bits


@dataclass(frozen=True)
class Admission:
    """What ``RowMap.admit`` did. evicted: (E,) the rows that were taken from other ids, whose content is to be reset.

    num_refused: ids that got no row. The rest is the map as it was, of ``read_rows`` where it was written to.
    """

    evicted: Tensor
    num_refused: int
    ids: Tensor
    rows: Tensor
    read_rows: Tensor
    id_of_row: Tensor
    last_step: Tensor
    counts: Tensor


class RowMap(nn.Module):
    """Ids to rows. Lookups change nothing; ``admit`` does.

    ids, rows: (N,) the N <= capacity ids that have a row, ascending, and their rows, 0 to N - 1 in some order.
    id_of_row, last_step, counts: (capacity,) int64, of each row: its id, NO_ID where it has none, the last step that
    read it, and how often its id was read.
    Buffers move with the model, and are saved under ``state`` rather than with its weights.
    """

    ids: Tensor
    rows: Tensor
    id_of_row: Tensor
    last_step: Tensor
    counts: Tensor

    def __init__(self, capacity: int, *, strategy: str, device: torch.device | None = None) -> None:
        super().__init__()
        assert strategy in EVICT_STRATEGIES, strategy
        self.capacity = capacity
        self.strategy = strategy
        for name, size in (
            ("ids", 0),
            ("rows", 0),
            ("id_of_row", capacity),
            ("last_step", capacity),
            ("counts", capacity),
        ):
            first = torch.full((size,), NO_ID if name == "id_of_row" else 0, dtype=torch.int64, device=device)
            self.register_buffer(name, first, persistent=False)

    def __len__(self) -> int:
        return len(self.ids)

    def look_up(self, ids: Tensor) -> Tensor:
        """(T,) ids -> (T,) rows; row ``capacity``, the last, where an id has none."""
        if len(self) == 0:
            return torch.full_like(ids, self.capacity)
        place, known = self._find(ids)
        return torch.where(known, self.rows[place], self.capacity)

    def admit(self, ids: Tensor, counts: Tensor, *, step: int) -> Admission:
        """Give rows to all of ``ids``, which step ``step`` (1, 2, ...) reads.

        ids: (K,) ascending, none twice. counts: (K,) how often the step reads each. Rows that the step reads are never
        taken from their ids; where new ids are more than the other rows, the rarest of them (and of those the largest)
        get none.
        """
        before = (self.ids, self.rows)  # which are replaced, never written to
        if len(self):
            place, known = self._find(ids)
        else:
            place, known = ids, torch.zeros_like(ids, dtype=torch.bool)
        read = self.rows[place[known]]
        new, new_counts = ids[~known], counts[~known]
        num_free = self.capacity - len(self)
        evicted = self._least_used(len(new) - num_free, without=read)
        num_refused = max(0, len(new) - num_free - len(evicted))
        if num_refused:
            chosen = new_counts.argsort(descending=True, stable=True)[: len(new) - num_refused].sort().values
            new, new_counts = new[chosen], new_counts[chosen]
        fresh = torch.arange(len(self), min(self.capacity, len(self) + len(new)), device=ids.device)
        given = torch.cat([fresh, evicted])
        touched = torch.cat([read, given])
        of_touched = (self.id_of_row[touched], self.last_step[touched], self.counts[touched])
        admission = Admission(evicted, num_refused, *before, touched, *of_touched)
        self.counts[given] = 0
        self.counts[touched] += torch.cat([counts[known], new_counts])
        self.last_step[touched] = step
        if len(given):
            self._exchange(evicted, new, given)
        return admission

    def undo(self, admission: Admission) -> None:
        """Be as before the last ``admit``, which returned ``admission``."""
        self.ids, self.rows = admission.ids, admission.rows
        self.id_of_row[admission.read_rows] = admission.id_of_row
        self.last_step[admission.read_rows] = admission.last_step
        self.counts[admission.read_rows] = admission.counts

    @property
    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps: the id of each row and its use, each (capacity,) int64."""
        return {"ids": self.id_of_row, "last_step": self.last_step, "counts": self.counts}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Be as the map whose ``state`` it is, of the same capacity."""
        self.id_of_row.copy_(state["ids"])
        num_used = int((self.id_of_row != NO_ID).sum())
        self.ids, self.rows = self.id_of_row[:num_used].sort()
        self.last_step.copy_(state["last_step"])
        self.counts.copy_(state["counts"])

    def count_steps_anew(self) -> None:
        """Put all steps so far before step 1, keeping their order: what reads the map next counts from there."""
        self.last_step -= self.last_step.max()

    def _find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where in ``self.ids``, of which there are some, each id would be, and whether it is there."""
        place = torch.searchsorted(self.ids, ids).clamp_(max=len(self) - 1)
        return place, self.ids[place] == ids

    def _least_used(self, num: int, *, without: Tensor) -> Tensor:
        """The ``num`` rows, or as many as there are, to be taken from their ids, ascending."""
        num = min(num, len(self) - len(without))
        if num <= 0:
            return without[:0]
        uses = (self.last_step,) if self.strategy == "lru" else (self.counts, self.last_step)
        use = uses[0][: len(self)].clone()
        use[without] = torch.iinfo(torch.int64).max
        # Without a sort of all rows. topk may choose any of equal ones, so only its largest value is used.
        limit = _largest_of_least(use, num)
        taken, ties = (use < limit).nonzero().squeeze(1), (use == limit).nonzero().squeeze(1)
        for use in uses[1:]:
            limit = _largest_of_least(use[ties], num - len(taken))
            taken, ties = torch.cat([taken, ties[use[ties] < limit]]), ties[use[ties] == limit]
        return torch.cat([taken, ties[: num - len(taken)]]).sort().values

    def _exchange(self, evicted: Tensor, ids: Tensor, rows: Tensor) -> None:
        """Take out the ids of rows ``evicted`` and merge ``ids``, ascending and all new, with their ``rows``."""
        old_ids, old_rows = self.ids, self.rows
        if len(evicted):
            kept = torch.ones_like(old_ids, dtype=torch.bool)
            kept[torch.searchsorted(old_ids, self.id_of_row[evicted])] = False
            old_ids, old_rows = old_ids[kept], old_rows[kept]
        place = torch.searchsorted(old_ids, ids) + torch.arange(len(ids), device=ids.device)
        is_old = torch.ones(len(old_ids) + len(ids), dtype=torch.bool, device=ids.device)
        is_old[place] = False
        self.ids = torch.empty_like(is_old, dtype=torch.int64).masked_scatter_(is_old, old_ids)
        self.rows = torch.empty_like(self.ids).masked_scatter_(is_old, old_rows)
        self.ids[place], self.rows[place] = ids, rows
        self.id_of_row[rows] = ids


def row_maps(model: nn.Module) -> dict[str, RowMap]:
    """The maps of a model's dynamic tables, by table."""
    named = {name.rpartition(".")[2]: module for name, module in model.named_modules() if isinstance(module, RowMap)}
    return {table_name(name): row_map for name, row_map in named.items()}


def _largest_of_least(values: Tensor, num: int) -> Tensor:
    """() the largest of the ``num`` least of ``values``."""
    return values.topk(num, largest=False, sorted=False).values.max()
