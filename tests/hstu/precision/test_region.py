"""What the watch for values that are not finite remembers."""

from __future__ import annotations

import math

import pytest
import torch

from genrec.hstu.precision.region import FiniteWatch

CPU = torch.device("cpu")


def test_takes_the_largest_of_all_dtypes_once() -> None:
    watch = FiniteWatch()
    for x in (torch.tensor([1.0, -7.5]), torch.tensor([3.0], dtype=torch.bfloat16), torch.empty(0)):
        watch.watch(x)
    largest = watch.take(CPU)
    assert largest is not None and largest.dtype == torch.float32 and largest.shape == () and float(largest) == 7.5
    assert watch.take(CPU) is None


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [1, 1024])
def test_nothing_that_comes_later_hides_it(value, dtype, limit, monkeypatch) -> None:
    monkeypatch.setattr(FiniteWatch, "LIMIT", limit)
    watch = FiniteWatch()
    watch.watch(torch.tensor([1.0, value], dtype=dtype))
    for _ in range(5):
        watch.watch(torch.tensor([2.0]))
    assert not watch.take(CPU).isfinite()


def test_memory_is_bounded_where_nobody_looks(monkeypatch) -> None:
    monkeypatch.setattr(FiniteWatch, "LIMIT", 8)
    watch = FiniteWatch()
    for step in range(100):
        watch.watch(torch.tensor([float(step)]))
        assert len(watch._amaxes[CPU]) <= 9
    assert float(watch.take(CPU)) == 99.0
