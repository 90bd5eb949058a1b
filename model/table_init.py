"""First weights of large tables, block of rows by block of rows, so that no rank ever holds a whole copy.

A block's numbers come from a generator of its own, seeded with (seed, table, block). So the first weights are the same
whatever the sharding, the number of ranks and the device, and other draws don't depend on them::

    table of 5 rows, 2 a block     block 0: rows 0 1     block 1: rows 2 3     block 2: row 4
    rank 1 of 2 holds rows 3 4     draws blocks 1 and 2, and keeps the last row of block 1

Tables up to ``BLOCKWISE_NUMBERS`` numbers are initialised as TorchRec does it, whole and one after the other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BLOCKWISE_NUMBERS = 2**28  # 1 GiB of float32
BLOCK_NUMBERS = 2**20  # 4 MiB


def is_blockwise(num_rows: int, dim: int) -> bool:
    """Whether a table of this size is initialised block by block."""
    return num_rows * dim > BLOCKWISE_NUMBERS


@dataclass(frozen=True)
class BlockwiseInit:
    """The first weights of a table: normal with ``std``, or (None) uniform within 1 / sqrt(num_rows) as TorchRec's."""

    table: str
    num_rows: int
    dim: int
    std: float | None
    seed: int

    @property
    def rows_per_block(self) -> int:
        """The last block of a table may have fewer."""
        return max(1, BLOCK_NUMBERS // self.dim)

    def block(self, number: int) -> Tensor:
        """Block ``number``, (rows_per_block, dim) float32; all of its rows, also beyond the table's end."""
        table = int.from_bytes(hashlib.sha256(self.table.encode()).digest()[:8], "little")
        generator = np.random.Generator(np.random.SFC64(np.random.SeedSequence([self.seed, table, number])))
        shape = (self.rows_per_block, self.dim)
        if self.std is not None:
            values = generator.standard_normal(shape, dtype=np.float32)
            values *= np.float32(self.std)
        else:
            limit = 1 / math.sqrt(self.num_rows)
            values = generator.random(shape, dtype=np.float32)
            values *= np.float32(2 * limit)
            values -= np.float32(limit)
        return torch.from_numpy(values)

    def fill(self, part: Tensor, *, offsets: Sequence[int] = (0, 0)) -> None:
        """Fill ``part`` (rows, columns), which starts at ``offsets`` of the table; on any device."""
        part = part.detach()
        row, column = offsets
        num_rows, num_columns = part.shape
        if not num_rows:
            return
        size = self.rows_per_block

        def copy(number: int) -> None:
            first = max(number * size, row)
            end = min((number + 1) * size, row + num_rows)
            rows = self.block(number)[first - number * size : end - number * size]
            part[first - row : end - row].copy_(rows[:, column : column + num_columns])

        numbers = range(row // size, -(-(row + num_rows) // size))
        # NumPy and copies let go of Python's lock.
        with ThreadPoolExecutor(max_workers=max(1, torch.get_num_threads())) as pool:
            list(pool.map(copy, numbers))

    def whole(self) -> Tensor:
        """The whole table, (num_rows, dim)."""
        table = torch.empty(self.num_rows, self.dim)
        self.fill(table)
        return table
