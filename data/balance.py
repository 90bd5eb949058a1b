"""Shares a global batch among ranks so that their work is even, from lengths alone: no rank exchanges rows.

Ranks get equally many users (counts differ by one at most), and every rank computes the same partition by itself. Which
users are in a global batch does not change, so neither do its gradients.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SequenceCost:
    """The work of a sequence of T tokens, ``linear * T + T^2``: its linears, and its attention.

    linear: the length in tokens at which both are equal. L events are T = tokens_per_event * L + num_contexts tokens.
    """

    linear: float = 0.0
    tokens_per_event: int = 1
    num_contexts: int = 0

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        """Costs (N,), float64, of sequences of ``lengths (N,)`` events."""
        tokens = self.tokens_per_event * lengths.astype(np.float64) + self.num_contexts
        return tokens * (self.linear + tokens)


@dataclass(frozen=True)
class Imbalance:
    """The costliest rank's work over the mean of all ranks, 1.0 at best, averaged over ``num_batches`` global batches.

    sliced: where ranks take consecutive users. balanced: where they share them by ``partition``.
    """

    sliced: float
    balanced: float
    num_batches: int

    @staticmethod
    def of(batches: Iterable[np.ndarray], num_parts: int) -> Imbalance | None:
        """Of ``batches``, the costs (N,) of each one's sequences; None where there is no work."""
        ratios = []
        for costs in batches:
            if costs.sum() > 0:
                shares = [np.array_split(np.arange(len(costs)), num_parts), partition(costs, num_parts)]
                most = [max(costs[places].sum() for places in share) for share in shares]
                ratios.append(np.array(most) * num_parts / costs.sum())
        if not ratios:
            return None
        sliced, balanced = np.mean(ratios, axis=0).tolist()
        return Imbalance(sliced=sliced, balanced=balanced, num_batches=len(ratios))


def partition(costs: np.ndarray, num_parts: int) -> list[np.ndarray]:
    """Places 0 .. N-1 in ``num_parts`` sets of even size and even sum of ``costs (N,)``; each set ascending.

    Largest first to the lightest set that has room, then swaps between the heaviest and the lightest set while they
    help.
    Deterministic: ties go to the earlier place and the lower set.
    """
    num_places = len(costs)
    room = [num_places // num_parts + (part < num_places % num_parts) for part in range(num_parts)]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    lightest = [(0.0, part) for part in range(num_parts) if room[part]]
    for place in np.argsort(-costs, kind="stable"):
        cost, part = heapq.heappop(lightest)
        parts[part].append(int(place))
        if len(parts[part]) < room[part]:
            heapq.heappush(lightest, (cost + float(costs[place]), part))
    sets = [np.array(sorted(places), dtype=np.int64) for places in parts]
    _swap(sets, costs)
    return [np.sort(places) for places in sets]


def _swap(sets: list[np.ndarray], costs: np.ndarray, *, max_swaps_per_set: int = 8) -> None:
    """Exchanges one place of the heaviest set for one of the lightest, the pair that best halves their gap."""
    sums = np.array([costs[places].sum() for places in sets])
    for _ in range(max_swaps_per_set * len(sets)):
        heavy, light = int(sums.argmax()), int(sums.argmin())
        gap = sums[heavy] - sums[light]
        if gap == 0 or not len(sets[light]):
            return
        moved = costs[sets[heavy]][:, None] - costs[sets[light]][None, :]
        row, column = np.unravel_index(np.abs(gap - 2 * moved).argmin(), moved.shape)
        change = moved[row, column]
        # A swap must leave both sets below the heavy one's sum, or it only trades places.
        if not 0 < change < gap:
            return
        sets[heavy][row], sets[light][column] = sets[light][column], sets[heavy][row]
        sums[heavy] -= change
        sums[light] += change
