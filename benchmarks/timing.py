"""Time on a GPU, by CUDA events: what the device needs, with the host's launches where these are slower."""

from __future__ import annotations

from collections.abc import Callable

import torch


def time_ms(function: Callable[[], object], *, calls: int) -> float:
    """Mean milliseconds a call, over ``calls`` of them in a row."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        function()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / calls
